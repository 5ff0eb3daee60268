"""tools/install.sh and tools/container: what they would do, do and take away again."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.support.needed import need
from tools.doctor.checks_devices import COMMON_NODES

TOOLS = Path(__file__).parents[2] / "tools"
INSTALL = TOOLS / "install.sh"
RUN = TOOLS / "container" / "run.sh"
SCRIPTS = (INSTALL, RUN, TOOLS / "container" / "entrypoint.sh")
CONTAINERFILE = TOOLS / "container" / "Containerfile"
UNITS = ("rtcached.service", "rtcached@.service")
SYSTEM = "etc/systemd/system"
#: Stands for `rtcached`; on every host, and in no directory with a space in its name.
PROGRAM = "/bin/true"


def call(script: Path, *words: str | Path, **env: str) -> tuple[int, str, str]:
    """Exit code, standard output, standard error."""
    ended = subprocess.run(
        [str(script), *map(str, words)],
        env=os.environ | env,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    return ended.returncode, ended.stdout, ended.stderr


def staged(root: Path, *words: str, apply: Sequence[str] = ("--apply",)) -> str:
    """What a successful run below a directory printed."""
    code, out, err = call(INSTALL, "--root", root, "--program", PROGRAM, *apply, *words)
    assert (code, err) == (0, "")
    return out


def files_in(root: Path) -> set[str]:
    return {str(path.relative_to(root)) for path in root.rglob("*") if path.is_file()}


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_shellcheck_finds_nothing_to_say(script: Path) -> None:
    need("shellcheck")
    assert call(Path("shellcheck"), script) == (0, "", "")


def test_hadolint_finds_nothing_to_say() -> None:
    need("hadolint")
    assert call(Path("hadolint"), CONTAINERFILE) == (0, "", "")


@pytest.mark.parametrize("script", [INSTALL, RUN], ids=lambda path: path.name)
def test_help_fits_a_terminal(script: Path) -> None:
    code, out, err = call(script, "--help")
    assert (code, err) == (0, "")
    assert max(map(len, out.splitlines())) <= 80


def test_which_paths_it_takes_is_said_before_it_is_refused() -> None:
    documented = (TOOLS.parent / "docs" / "systemd.md").read_text("utf-8").replace("`", "")
    for text in (call(INSTALL, "--help")[1], documented):
        words = " ".join(text.split())
        assert "of --prefix, --program and --root are absolute, of letters, digits and _" in words
        assert "stand in units, where a space or % would need quoting; what is below" in words


# --- install.sh ----------------------------------------------------------------------------------


def test_without_apply_nothing_changes(tmp_path: Path) -> None:
    out = staged(tmp_path, apply=())
    assert list(tmp_path.iterdir()) == []
    assert f"+ write {tmp_path}/{SYSTEM}/rtcached.service\n" in out
    assert out.splitlines()[-1] == "# nothing was changed: say --apply to do it"


def test_what_is_put_where(tmp_path: Path) -> None:
    (tmp_path / "etc").mkdir()
    (tmp_path / "etc/group").write_text("HwHiAiUser:x:1000:\n")
    staged(tmp_path)
    assert files_in(tmp_path) == {
        "etc/group",
        "etc/rtcached/rtcached.toml",
        "etc/sysusers.d/rtcached.conf",
        "etc/tmpfiles.d/rtcached.conf",
        *(f"{SYSTEM}/{unit}" for unit in UNITS),
    }
    for unit in UNITS:
        text = (tmp_path / SYSTEM / unit).read_text()
        assert f"\nExecStart={PROGRAM} --config ${{RTCACHED_CONFIG}}\n" in text
        expected = (TOOLS / "systemd" / unit).read_text()
        assert text == expected.replace("/opt/runtime-cache/bin/rtcached", PROGRAM)


def test_what_it_wrote_is_what_systemd_wants(tmp_path: Path) -> None:
    need("systemd-analyze")
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev/svm0").touch()
    staged(tmp_path)
    system = tmp_path / SYSTEM
    units = [str(system / unit) for unit in UNITS]
    words = ("verify", *units)
    assert call(Path("systemd-analyze"), *words, SYSTEMD_UNIT_PATH=f"{system}:") == (0, "", "")


def test_drop_ins_follow_the_host(tmp_path: Path) -> None:
    """A board's nodes; no group of the driver, until there is one."""
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev/svm0").touch()
    out = staged(tmp_path)
    drop_ins = {name for name in files_in(tmp_path) if name.endswith("d/no-npu-group.conf")}
    assert len(drop_ins) == 2
    assert "there is no group HwHiAiUser" in out
    board = (tmp_path / SYSTEM / "rtcached@.service.d/board-nodes.conf").read_text()
    assert "DeviceAllow=/dev/svm0 rw" in board
    (tmp_path / "etc/group").write_text("HwHiAiUser:x:1000:\n")
    staged(tmp_path)
    assert not drop_ins & files_in(tmp_path)
    assert f"{SYSTEM}/rtcached.service.d/board-nodes.conf" in files_in(tmp_path)


def test_a_configuration_that_is_there_stays(tmp_path: Path) -> None:
    staged(tmp_path)
    config = tmp_path / "etc/rtcached/rtcached.toml"
    config.write_text("# mine\n")
    assert "is there already, and stays" in staged(tmp_path)
    assert config.read_text() == "# mine\n"


def test_uninstall_takes_away_what_was_put_there_and_nothing_else(tmp_path: Path) -> None:
    staged(tmp_path)
    mine = tmp_path / SYSTEM / "rtcached.service.d/mine.conf"
    mine.write_text("[Service]\n")
    kept = {f"{SYSTEM}/rtcached.service.d/mine.conf", "etc/rtcached/rtcached.toml"}
    before = files_in(tmp_path)
    staged(tmp_path, "--uninstall", apply=())
    assert files_in(tmp_path) == before
    staged(tmp_path, "--uninstall")
    assert files_in(tmp_path) == kept
    assert not (tmp_path / SYSTEM / "rtcached@.service.d").exists()
    for name in ("lib/rtcached", "lib/rtcached-0", "log/rtcached", "lib/other"):
        (tmp_path / "var" / name).mkdir(parents=True)
    staged(tmp_path, "--uninstall", "--purge")
    assert files_in(tmp_path) == {f"{SYSTEM}/rtcached.service.d/mine.conf"}
    assert [path.name for path in (tmp_path / "var/lib").iterdir()] == ["other"]
    staged(tmp_path, "--uninstall", "--purge")  # nothing is left to do


def test_an_environment_of_somebody_else_is_never_removed(tmp_path: Path) -> None:
    (tmp_path / "opt/theirs").mkdir(parents=True)
    (tmp_path / "opt/ours").mkdir()
    (tmp_path / "opt/ours/.made-by-rtcached-install").touch()
    for name in ("theirs", "ours"):
        staged(tmp_path, "--uninstall", "--purge", "--prefix", f"/opt/{name}")
    assert [path.name for path in (tmp_path / "opt").iterdir()] == ["theirs"]


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--bogus"], "unknown option: --bogus"),
        (["--prefix"], "--prefix needs a value"),
        (["--prefix", "opt"], "--prefix is an absolute path"),
        (["--prefix", "/"], "--prefix is an absolute path"),
        (["--prefix", "/opt/../etc"], "--prefix is an absolute path"),
        (["--prefix", "/opt/a b"], "--prefix is an absolute path"),
        (["--root", "image"], "--root is an absolute path of letters, digits and _ . + -"),
        (["--root", "/srv/my image"], "--root is an absolute path"),
        (["--root", "/srv/a%b"], "--root is an absolute path"),
        (["--program", "bin/rtcached"], "--program is an absolute path"),
        (["--purge"], "--purge goes with --uninstall"),
        (["--extras", "sim;id"], "--extras is a list such as sim"),
        (["--program", "/no/such/program"], "--program /no/such/program is no program"),
    ],
)
def test_a_wrong_command_line(words: Sequence[str], sentence: str) -> None:
    code, out, err = call(INSTALL, *words)
    assert (code, out) == (2, "")
    assert err.startswith(f"install.sh: {sentence}")


def test_a_step_that_fails_is_named(tmp_path: Path) -> None:
    (tmp_path / "etc").touch()
    code, _, err = call(INSTALL, "--apply", "--root", tmp_path, "--program", "/bin/true")
    assert code == 1
    assert "install.sh: failed at: " in err


def fake_host(directory: Path, version: str) -> str:
    """A PATH on which systemctl is of that version, and does nothing."""
    program = directory / "systemctl"
    program.write_text(f"#!/bin/sh\necho systemd {version} '({version}.1)'\n")
    program.chmod(0o755)
    return f"{directory}:{os.environ['PATH']}"


def test_a_host_that_is_too_old(tmp_path: Path) -> None:
    code, _, err = call(INSTALL, PATH=fake_host(tmp_path, "245"))
    assert (code, err) == (2, "install.sh: systemd 245 is too old: the units need 249\n")


def test_the_plan_for_a_whole_host(tmp_path: Path) -> None:
    prefix = tmp_path / "prefix"
    words = ("--python", sys.executable, "--prefix", prefix, "--extras", "sim")
    code, out, err = call(INSTALL, *words, PATH=fake_host(tmp_path, "249"))
    assert (code, err) == (0, "")
    plan = [line[2:] for line in out.splitlines() if line.startswith("+ ")]
    programs = [shlex.split(step)[0] for step in plan]
    assert programs[:3] == ["mkdir", "touch", sys.executable]
    assert programs[3] == f"{prefix}/bin/python"
    assert shlex.split(plan[3])[-1] == f"{TOOLS.parent}[sim]"
    assert "systemd-sysusers" in programs
    assert "systemd-tmpfiles" in programs
    assert f"{prefix}/bin/rtcache-doctor env --output /etc/rtcached/cann.env" in plan
    assert plan[-1] == "systemctl daemon-reload"
    assert not prefix.exists()


def test_uninstall_ends_the_daemons_of_all_devices(tmp_path: Path) -> None:
    need("systemctl")
    staged(tmp_path)
    offline = ("systemctl", "--quiet", f"--root={tmp_path}")
    names = ("rtcached.service", "rtcached@0.service", "rtcached@7.service")
    subprocess.run([*offline, "enable", *names], check=True, capture_output=True)
    links = tmp_path / SYSTEM / "multi-user.target.wants"
    assert {path.name for path in links.iterdir()} == set(names)
    code, out, _ = call(INSTALL, "--uninstall", PATH=fake_host(tmp_path, "249"))
    assert code == 0
    steps = [shlex.split(line[2:]) for line in out.splitlines() if line.startswith("+ systemctl ")]
    assert steps[0] == ["systemctl", "stop", "rtcached.service", "rtcached@*.service"]
    assert steps[1][1] == "disable"
    subprocess.run([*offline, *steps[1][1:]], check=True, capture_output=True)
    assert not links.exists() or not list(links.iterdir())


# --- the container -------------------------------------------------------------------------------


@pytest.fixture
def host(tmp_path: Path) -> Path:
    """A host with one card, as far as files show it."""
    for path in (
        *(f"dev/{name}" for name in ("davinci0", *COMMON_NODES)),
        "usr/local/Ascend/driver/lib64/libascend_hal.so",
        "usr/local/Ascend/driver/version.info",
        "etc/ascend_install.info",
    ):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).touch()
    return tmp_path


def command_for(host: Path, *words: str) -> list[str]:
    """The command that would start a container."""
    base = ("--npu", "0", "--bundle", "/srv/llama", "--root", str(host), "--engine", "podman")
    code, out, err = call(RUN, *base, *words)
    assert (code, err) == (0, "")
    return shlex.split(out)


def values(command: Sequence[str], option: str) -> list[str]:
    return [command[place + 1] for place, word in enumerate(command) if word == option]


def test_a_container_gets_the_nodes_and_files_that_the_doctor_asks_for(host: Path) -> None:
    command = command_for(host, "--", "--log-level", "debug")
    assert command[:2] == ["podman", "run"]
    assert values(command, "--device") == [
        *(f"/dev/{name}" for name in ("davinci0", *COMMON_NODES)),
        "npu:0",
    ]
    assert values(command, "--volume") == [
        "/usr/local/Ascend/driver/lib64:/usr/local/Ascend/driver/lib64:ro",
        "/usr/local/Ascend/driver/version.info:/usr/local/Ascend/driver/version.info:ro",
        "/etc/ascend_install.info:/etc/ascend_install.info:ro",
        "/srv/llama:/bundles/served:ro",
        "/run/rtcached:/run/rtcached",
    ]
    assert "--privileged" not in command
    assert command[-2:] == ["--log-level", "debug"]
    assert values(command, "--group-add") == [str((host / "dev/davinci0").stat().st_gid)]


def test_a_board_has_more_nodes(host: Path) -> None:
    (host / "dev/svm0").touch()
    (host / "etc/sys_version.conf").touch()
    command = command_for(host)
    assert "/dev/svm0" in values(command, "--device")
    assert "/etc/sys_version.conf:/etc/sys_version.conf:ro" in values(command, "--volume")


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ([], "--npu is the number of a device"),
        (["--npu", "zero"], "--npu is the number of a device"),
        (["--npu", "0"], "--bundle is the absolute path"),
        (["--npu", "7", "--bundle", "/b"], "there is no /dev/davinci7"),
        (["--npu"], "--npu needs a value"),
    ],
)
def test_a_container_that_cannot_start(host: Path, words: Sequence[str], sentence: str) -> None:
    code, out, err = call(RUN, "--root", host, *words)
    assert (code, out) == (2, "")
    assert err.startswith(f"run.sh: {sentence}")


def test_applied_it_starts_the_engine(host: Path, tmp_path: Path) -> None:
    engine = tmp_path / "engine"
    engine.write_text('#!/bin/sh\nfor word; do echo "<$word>"; done\n')
    engine.chmod(0o755)
    words = ("--npu", "0", "--bundle", "/b", "--root", host, "--engine", engine, "--apply")
    code, out, _ = call(RUN, *words)
    shown, *told = out.splitlines()
    assert code == 0
    assert told == [f"<{word}>" for word in shlex.split(shown)[1:]]


def test_the_image_says_no_default_device_and_no_root() -> None:
    text = CONTAINERFILE.read_text("utf-8")
    assert "sim:" not in text
    assert "DEVICE_DEVICE" not in text
    assert "\nUSER 10001:10001\n" in text


def test_an_entrypoint_adds_what_there_is() -> None:
    """Without CANN or a driver the command runs all the same."""
    script = TOOLS / "container" / "entrypoint.sh"
    assert call(script, "printenv", "LD_LIBRARY_PATH", LD_LIBRARY_PATH="/mine")[1].startswith(
        "/mine"
    )
    assert call(script, "sh", "-c", "exit 6")[0] == 6
