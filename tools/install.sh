#!/usr/bin/env bash
# Sets rtcached up as a service of systemd on this host, or takes it away again: user, directories,
# a virtual environment, units. Without --apply it only says what it would do.
set -Eeuo pipefail

SOURCE_DIR="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
readonly SOURCE_DIR
readonly UNITS=(rtcached.service rtcached@.service)
readonly NPU_GROUP=HwHiAiUser
#: What systemd the units are written for: 249, as openEuler 22.03 and Ubuntu 22.04 have it.
readonly LEAST_SYSTEMD=249
#: In what was made here, so that nothing else is ever removed.
readonly MARK=.made-by-rtcached-install

apply=no uninstall=no purge=no root='' prefix=/opt/runtime-cache python=python3 program='' extras=''

usage() {
    cat <<'TEXT'
usage: tools/install.sh [options]             say what would be done
       tools/install.sh --apply [options]     do it (as root)
       tools/install.sh --uninstall [--purge] [--apply] [options]

  --apply            do it; without this nothing is changed
  --uninstall        remove units, drop-ins and environment that were made here
  --purge            with --uninstall: also /etc/rtcached, /var/lib/rtcached
                     with the bundles in it, logs and the user
  --prefix DIR       for the virtual environment (/opt/runtime-cache)
  --python PROGRAM   makes it; 3.10 or newer, that which pyACL is for (python3)
  --extras LIST      of the package: sim for the software device
  --program FILE     use this rtcached, which is there already: no environment
  --root DIR         stage files below DIR: no user, environment or systemctl
  --help             this text

The paths of --prefix, --program and --root are absolute, of letters, digits
and _ . + - without "..": the first two stand in units, where a space or %
would need quoting; what is below the first and the last is removed again by
--uninstall, wherever that is called.

It never starts anything, and leaves an /etc/rtcached/rtcached.toml as it is.

examples:
  tools/install.sh                              look first
  sudo tools/install.sh --apply
  sudo tools/install.sh --apply --program /usr/local/bin/rtcached
  sudo tools/install.sh --uninstall --purge --apply

exit codes:
  0 done, or would be done   1 a step failed; it is named
  2 wrong command line, or this host does not suit
TEXT
}

say() { printf '%s\n' "$*"; }

die() {
    printf 'install.sh: %s\n' "$*" >&2
    exit 2
}

#: Do it, or say what would be done.
run() {
    printf '+'
    printf ' %q' "$@"
    printf '\n'
    [[ $apply == no ]] || "$@"
}

#: A file for systemd, made from a text.
run_write() {
    printf '+ write %s\n' "$1"
    [[ $apply == no ]] || printf '%s\n' "$2" | install -D -m 0644 /dev/stdin "$1"
}

is_staged() { [[ -n $root ]]; }

parse() {
    while (($#)); do
        case $1 in
            --apply) apply=yes ;;
            --uninstall) uninstall=yes ;;
            --purge) purge=yes ;;
            --help | -h)
                usage
                exit 0
                ;;
            --prefix | --python | --extras | --program | --root)
                (($# > 1)) || die "$1 needs a value; see --help"
                set_option "$1" "$2"
                shift
                ;;
            *) die "unknown option: $1; see --help" ;;
        esac
        shift
    done
    [[ $purge == no || $uninstall == yes ]] || die '--purge goes with --uninstall'
}

set_option() {
    case $1 in
        --python) python=$2 ;;
        --extras)
            [[ $2 =~ ^[a-z,]+$ ]] || die "--extras is a list such as sim, not: $2"
            extras="[$2]"
            ;;
        --prefix) prefix=$(absolute "$1" "$2") ;;
        --program) program=$(absolute "$1" "$2") ;;
        --root) root=$(absolute "$1" "$2") ;;
    esac
}

#: A path that may stand in a unit, and be removed again.
absolute() {
    [[ $2 =~ ^/[[:alnum:]_./+-]*[[:alnum:]_+-]$ && $2 != *..* ]] ||
        die "$1 is an absolute path of letters, digits and _ . + -, not: $2"
    printf '%s' "$2"
}

check_host() {
    if [[ $apply == yes ]] && ! is_staged && ((EUID != 0)); then
        die '--apply needs root: try again with sudo'
    fi
    if [[ -n $program ]] && ! is_staged && [[ ! -x $program ]]; then
        die "--program $program is no program"
    fi
    is_staged || check_systemd
    [[ -n $program ]] || is_staged || check_python
}

check_systemd() {
    local version
    version=$(systemctl --version 2>/dev/null | awk 'NR == 1 { print $2 }') || true
    [[ $version =~ ^[0-9]+$ ]] ||
        die 'there is no systemd here: run rtcached by hand, or stage with --root'
    ((version >= LEAST_SYSTEMD)) ||
        die "systemd $version is too old: the units need $LEAST_SYSTEMD"
}

check_python() {
    # Debian has venv everywhere, and what it needs, ensurepip, in a package of its own.
    "$python" -c 'import ensurepip, sys, venv; sys.exit(sys.version_info < (3, 10))' 2>/dev/null ||
        die "$python is no Python 3.10 or newer with venv (Debian: python3-venv); see --python"
}

make_environment() {
    [[ -z $program ]] || return 0
    if is_staged; then
        say "# staged: make the environment on the host, at $prefix"
        return 0
    fi
    [[ ! -e $prefix || -e $prefix/$MARK ]] ||
        die "$prefix is there already and was not made by this script: choose another --prefix"
    # Marked first: what is made in part can be made again, or taken away.
    run mkdir -p "$prefix"
    run touch "$prefix/$MARK"
    run "$python" -m venv "$prefix"
    run "$prefix/bin/python" -m pip install --quiet --upgrade "$SOURCE_DIR$extras"
}

make_user() {
    run install -D -m 0644 "$units/rtcached.sysusers" "$root/etc/sysusers.d/rtcached.conf"
    is_staged || run systemd-sysusers rtcached.conf
}

make_directories() {
    run install -D -m 0644 "$units/rtcached.tmpfiles" "$root/etc/tmpfiles.d/rtcached.conf"
    is_staged || run systemd-tmpfiles --create rtcached.conf
}

make_units() {
    local unit
    for unit in "${UNITS[@]}"; do
        run_write "$system/$unit" "$(unit_text "$unit")"
    done
    if [[ -e $root/dev/svm0 ]]; then
        say '# a board with a 310B: its driver has more nodes'
        make_drop_in board-nodes.conf "$(<"$units/board-nodes.conf")"
    fi
    if ! grep -q "^$NPU_GROUP:" "$root/etc/group" 2>/dev/null; then
        say "# there is no group $NPU_GROUP here: the driver makes it; install again behind it"
        make_drop_in no-npu-group.conf $'[Service]\nSupplementaryGroups='
    else
        remove_drop_in no-npu-group.conf
    fi
}

#: Its own path to the program; the rest is as it is in the repository.
unit_text() {
    local text
    text=$(<"$units/$1")
    printf '%s' "${text//\/opt\/runtime-cache\/bin\/rtcached/$(program_path)}"
}

program_path() { printf '%s' "${program:-$prefix/bin/rtcached}"; }

make_drop_in() {
    local unit
    for unit in "${UNITS[@]}"; do
        run_write "$system/$unit.d/$1" "$2"
    done
}

remove_drop_in() {
    local unit
    for unit in "${UNITS[@]}"; do
        remove_file "$system/$unit.d/$1"
    done
}

make_configuration() {
    local owner=(-o root -g rtcached)
    ! is_staged || owner=()
    if [[ -e $root/etc/rtcached/rtcached.toml ]]; then
        say '# /etc/rtcached/rtcached.toml is there already, and stays'
    else
        run install -d -m 0750 "${owner[@]}" "$root/etc/rtcached"
        run install -m 0640 "${owner[@]}" "$SOURCE_DIR/rtcached.toml" \
            "$root/etc/rtcached/rtcached.toml"
    fi
    is_staged || make_cann_environment
}

make_cann_environment() {
    local doctor
    doctor="$(dirname "$(program_path)")/rtcache-doctor"
    printf '+ %q env --output /etc/rtcached/cann.env\n' "$doctor"
    [[ $apply == yes ]] || return 0
    "$doctor" env --output /etc/rtcached/cann.env ||
        say '# without CANN there is only the software device; do this again when it is there'
}

install_all() {
    make_environment
    make_user
    make_directories
    make_units
    make_configuration
    is_staged || run systemctl daemon-reload
    next_steps
}

next_steps() {
    cat <<TEXT

Next: name bundle and device in /etc/rtcached/rtcached.toml, then
  systemctl enable --now rtcached.service       one daemon, or
  systemctl enable --now rtcached@0.service     one for each NPU
Clients belong into the group rtcached. More in docs/systemd.md.
TEXT
}

remove_file() { [[ ! -e $1 ]] || run rm -f "$1"; }

remove_empty() {
    # What others have put there stays.
    [[ ! -d $1 ]] || run rmdir --ignore-fail-on-non-empty "$1"
}

remove_tree() { [[ ! -d $1 ]] || run rm -rf --one-file-system "$1"; }

#: Both fail where there is nothing of the kind. A pattern stops instances and cannot disable them;
#: the template disables all of its instances and cannot stop them.
disable_units() {
    run systemctl stop rtcached.service 'rtcached@*.service' || true
    run systemctl disable "${UNITS[@]}" || true
}

uninstall_all() {
    local unit
    is_staged || disable_units
    remove_drop_in board-nodes.conf
    remove_drop_in no-npu-group.conf
    for unit in "${UNITS[@]}"; do
        remove_file "$system/$unit"
        remove_empty "$system/$unit.d"
    done
    remove_file "$root/etc/tmpfiles.d/rtcached.conf"
    remove_file "$root/etc/sysusers.d/rtcached.conf"
    [[ ! -e $root$prefix/$MARK ]] || remove_tree "$root$prefix"
    is_staged || run systemctl daemon-reload
    if [[ $purge == yes ]]; then
        purge_all
    else
        say '# configuration, state, bundles, logs and the user stay; --purge removes them'
    fi
}

purge_all() {
    local path
    for path in "$root"/etc/rtcached "$root"/var/lib/rtcached{,-*} "$root"/var/log/rtcached{,-*}; do
        remove_tree "$path"
    done
    if ! is_staged && getent passwd rtcached >/dev/null; then
        run userdel rtcached
    fi
}

parse "$@"
readonly system=$root/etc/systemd/system units=$SOURCE_DIR/tools/systemd
check_host
trap 'printf "install.sh: failed at: %s\n" "$BASH_COMMAND" >&2; exit 1' ERR
if [[ $uninstall == yes ]]; then uninstall_all; else install_all; fi
[[ $apply == yes ]] || say '# nothing was changed: say --apply to do it'
