#!/usr/bin/env bash
# Starts rtcached in a container, with an NPU: every node and every file of the driver that it needs
# is named here. Without --apply it only prints the command.
set -euo pipefail

#: Beside the device's own node, on every card.
readonly NODES=(davinci_manager devmm_svm hisi_hdc)
#: On boards with a 310B, as far as they are there.
readonly BOARD_NODES=(svm0 ts_aisle upgrade sys vdec vpc pngd venc dvpp_cmdlist log_drv)
#: The driver's user-space part, its version, its installation record, and npu-smi for people.
readonly FILES=(
    /usr/local/Ascend/driver/lib64
    /usr/local/Ascend/driver/version.info
    /etc/ascend_install.info
    /usr/local/dcmi
    /usr/local/bin/npu-smi
)
readonly BOARD_FILES=(/etc/sys_version.conf /etc/hdcBasic.cfg)

apply=no engine='' image=rtcached npu='' bundle='' runtime_dir=/run/rtcached name='' root=''
words=()

usage() {
    cat <<'TEXT'
usage: tools/container/run.sh --npu N --bundle DIR [options] [-- OPTION...]

What stands behind -- are options of rtcached.

  --apply           start it; without this the command is only printed
  --npu N           the device, /dev/davinciN; npu:0 inside
  --bundle DIR      made by rtcache-convert; mounted read-only
  --image NAME      the image (rtcached)
  --runtime-dir DIR where the sockets appear on the host (/run/rtcached); the
                    user 10001 of the image must be able to write there
  --name NAME       of the container (rtcached-N)
  --engine PROGRAM  podman or docker; else whichever is there, podman first
  --root DIR        look for nodes and files below DIR, for tests

example:
  tools/container/run.sh --npu 0 --bundle /srv/bundles/llama --apply

exit codes:
  0 done, or printed   2 wrong command line, or this host does not suit
TEXT
}

die() {
    printf 'run.sh: %s\n' "$*" >&2
    exit 2
}

parse() {
    while (($#)); do
        case $1 in
            --apply) apply=yes ;;
            --help | -h)
                usage
                exit 0
                ;;
            --)
                shift
                words=("$@")
                return
                ;;
            --npu | --bundle | --image | --runtime-dir | --name | --engine | --root)
                (($# > 1)) || die "$1 needs a value; see --help"
                set_option "$1" "$2"
                shift
                ;;
            *) die "unknown option: $1; see --help" ;;
        esac
        shift
    done
}

set_option() {
    case $1 in
        --npu) npu=$2 ;;
        --bundle) bundle=$2 ;;
        --image) image=$2 ;;
        --runtime-dir) runtime_dir=$2 ;;
        --name) name=$2 ;;
        --engine) engine=$2 ;;
        --root) root=$2 ;;
    esac
}

check() {
    [[ $npu =~ ^[0-9]+$ ]] || die "--npu is the number of a device, such as 0; see --help"
    [[ $bundle == /* ]] || die "--bundle is the absolute path of a bundle; see --help"
    [[ $runtime_dir == /* ]] || die "--runtime-dir is an absolute path; see --help"
    local node
    for node in "davinci$npu" davinci_manager; do
        [[ -e $root/dev/$node ]] || die "there is no /dev/$node: see rtcache-doctor"
    done
    [[ -n $engine ]] || engine=$(command -v podman || command -v docker) ||
        die "neither podman nor docker is on PATH: name one by --engine"
}

#: The group that may use the node, by number: the image knows no HwHiAiUser.
group_of() { stat --format=%g "$root/dev/$1"; }

make_command() {
    local node path
    command=(
        "$engine" run --detach --name "${name:-rtcached-$npu}" --restart on-failure:5
        --read-only --tmpfs /tmp --tmpfs /var/log/rtcached:mode=0777 --cap-drop ALL
        --security-opt no-new-privileges --ulimit nofile=65536:65536 --ulimit core=0
        --group-add "$(group_of "davinci$npu")" --device "/dev/davinci$npu"
    )
    for node in "${NODES[@]}" "${BOARD_NODES[@]}"; do
        [[ ! -e $root/dev/$node ]] || command+=(--device "/dev/$node")
    done
    for path in "${FILES[@]}" "${BOARD_FILES[@]}"; do
        [[ ! -e $root$path ]] || command+=(--volume "$path:$path:ro")
    done
    command+=(
        --volume "$bundle:/bundles/served:ro" --volume "$runtime_dir:/run/rtcached"
        "$image" rtcached --config /etc/rtcached/rtcached.toml
        --model-bundle /bundles/served --device npu:0 "${words[@]}"
    )
}

parse "$@"
check
make_command
printf '%q ' "${command[@]}"
printf '\n'
[[ $apply == no ]] || exec "${command[@]}"
