"""The units as systemd reads them, what they promise, and whether it is what the daemon does."""

from __future__ import annotations

import os
import re
import subprocess
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

import pytest

from runtime_cache import daemon, options
from tests.support.needed import need
from tools.doctor.checks_devices import COMMON_NODES

ROOT = Path(__file__).parents[2]
SYSTEMD = ROOT / "tools" / "systemd"
UNITS = ("rtcached.service", "rtcached@.service")
DROP_INS = ("board-nodes.conf", "host-mounts.conf")
PROGRAM = "/opt/runtime-cache/bin/rtcached"
#: In tenths; systemd's own scale from 0, nothing is open, to 10.
MOST_EXPOSED = 30

Settings = dict[str, list[str]]


def settings(path: Path) -> Settings:
    """Name → values, in order; an empty value clears those before it, as systemd has it."""
    found: Settings = defaultdict(list)
    for line in path.read_text("utf-8").splitlines():
        name, equals, value = line.partition("=")
        if not equals or line.startswith(("#", ";")):
            continue
        found[name].append(value)
    return found


def analyze(*words: str, units: Path) -> tuple[int, str]:
    """Exit code, and everything that systemd-analyze says of the units in a directory."""
    need("systemd-analyze")
    ended = subprocess.run(
        ["systemd-analyze", "--no-pager", *words],
        env=os.environ | {"SYSTEMD_UNIT_PATH": f"{units}:"},  # before the host's own
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    return ended.returncode, ended.stdout


def installed(directory: Path, drop_ins: Sequence[str] = ()) -> list[str]:
    """The units with a program that is there, and with drop-ins; their paths."""
    for unit in UNITS:
        text = (SYSTEMD / unit).read_text("utf-8")
        assert text.count(PROGRAM) == 1
        (directory / unit).write_text(text.replace(PROGRAM, "/bin/true"))
        (directory / f"{unit}.d").mkdir()
        for name in drop_ins:
            (directory / f"{unit}.d" / name).write_bytes((SYSTEMD / name).read_bytes())
    return [str(directory / unit) for unit in UNITS]


@pytest.mark.parametrize("drop_ins", [(), DROP_INS], ids=["alone", "with drop-ins"])
def test_systemd_finds_nothing_to_say(tmp_path: Path, drop_ins: Sequence[str]) -> None:
    assert analyze("verify", *installed(tmp_path, drop_ins), units=tmp_path) == (0, "")


def test_systemd_would_have_said_something(tmp_path: Path) -> None:
    """So that the silence above means what it seems to."""
    installed(tmp_path)
    unit = tmp_path / UNITS[0]
    unit.write_text(unit.read_text().replace("WatchdogSec=60", "WatchdogSec=soon\nProtectAll=yes"))
    _, said = analyze("verify", str(unit), units=tmp_path)
    assert "rtcached.service:" in said
    assert "Failed to parse sec value" in said
    assert "Unknown key 'ProtectAll'" in said


@pytest.mark.parametrize(
    ("unit", "drop_ins"),
    [(UNITS[0], []), (UNITS[0], ["host-mounts.conf"]), (UNITS[1], ["board-nodes.conf"])],
)
def test_little_is_exposed(tmp_path: Path, unit: str, drop_ins: Sequence[str]) -> None:
    installed(tmp_path, drop_ins)
    threshold = f"--threshold={MOST_EXPOSED}"
    code, said = analyze(
        "security", "--offline=true", threshold, str(tmp_path / unit), units=tmp_path
    )
    assert "Overall exposure level" in said
    assert code == 0, said


def test_the_documentation_says_how_much_is_exposed(tmp_path: Path) -> None:
    text = (ROOT / "docs" / "systemd.md").read_text("utf-8")
    for path in installed(tmp_path):
        _, said = analyze("security", "--offline=true", path, units=tmp_path)
        (level,) = re.findall(r"exposure level for \S+: (\d+\.\d)", said)
        row = rf"^\| `{re.escape(Path(path).name)}`.* \| (\d+\.\d) \|$"
        # Another release of systemd may look at one thing more.
        (written,) = re.findall(row, text, re.M)
        assert abs(float(written) - float(level)) <= 0.3


def test_the_users_file_is_understood() -> None:
    need("systemd-sysusers")
    command = ["systemd-sysusers", "--dry-run", str(SYSTEMD / "rtcached.sysusers")]
    ended = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "rtcached" in ended.stderr + ended.stdout or _has_user("rtcached")


def _has_user(name: str) -> bool:
    return f"\n{name}:" in Path("/etc/passwd").read_text("utf-8")


# --- what the units promise --------------------------------------------------------------------


@pytest.mark.parametrize("unit", UNITS)
def test_exit_codes_that_need_a_person_are_not_restarted(unit: str) -> None:
    found = settings(SYSTEMD / unit)
    assert found["Restart"] == ["on-failure"]
    (prevented,) = found["RestartPreventExitStatus"]
    assert set(map(int, prevented.split())) == {daemon.EXIT_CONFIG, daemon.EXIT_MEMORY}
    assert found["StartLimitBurst"] == ["5"]
    assert found["SuccessExitStatus"] == ["130 143"]


def test_the_documentation_says_the_same_of_exit_codes() -> None:
    text = (ROOT / "docs" / "faults.md").read_text("utf-8")
    (prevented,) = settings(SYSTEMD / UNITS[0])["RestartPreventExitStatus"]
    assert f"`RestartPreventExitStatus={prevented}`" in text


@pytest.mark.parametrize("unit", UNITS)
def test_it_is_watched_and_told(unit: str) -> None:
    found = settings(SYSTEMD / unit)
    assert found["Type"] == ["notify"]
    assert found["ExecReload"] == ["/bin/kill -HUP $MAINPID"]
    assert int(found["WatchdogSec"][0]) >= 30
    assert int(found["LimitNOFILE"][0]) > 4096


def test_no_service_has_a_default_device() -> None:
    """What a service runs on is written down by whoever set it up, never by us."""
    text = (SYSTEMD / "rtcached.service").read_text("utf-8")
    assert "sim:" not in text
    assert "RTCACHE_DEVICE_DEVICE" not in text
    assert "RTCACHE_DEVICE_DEVICE=npu:%i" in settings(SYSTEMD / "rtcached@.service")["Environment"]
    assert options.load(str(ROOT / "rtcached.toml"), env={}).config.device.device == ""


def test_environment_names_are_options() -> None:
    known = {option.env for option in options.options()}
    for unit in UNITS:
        names = {line.partition("=")[0] for line in settings(SYSTEMD / unit)["Environment"]}
        assert {name for name in names if name.startswith("RTCACHE_")} <= known


def test_two_instances_share_nothing_that_one_of_them_writes() -> None:
    found = settings(SYSTEMD / "rtcached@.service")
    for name in ("RuntimeDirectory", "StateDirectory", "LogsDirectory"):
        assert found[name] == ["rtcached-%i"]
    endpoint = "RTCACHE_IPC_ENDPOINT=ipc:///run/rtcached-%i/rtcached.sock"
    assert endpoint in found["Environment"]


def test_the_nodes_of_the_driver_are_allowed() -> None:
    for unit, own in zip(UNITS, ("davinci0", "davinci%i"), strict=True):
        found = settings(SYSTEMD / unit)
        assert found["DevicePolicy"] == ["closed"]
        allowed = {
            value.removeprefix("/dev/").removesuffix(" rw") for value in found["DeviceAllow"]
        }
        assert {own, *COMMON_NODES} <= allowed
    assert "PrivateDevices" not in settings(SYSTEMD / UNITS[0])


#: Each of these gives a process mounts of its own. Source: systemd.exec(5), sandboxing.
MOUNTS = (
    *("ProtectSystem", "ProtectHome", "PrivateTmp", "ProtectKernelTunables", "ProtectProc"),
    *("ProtectKernelModules", "ProtectKernelLogs", "ProtectControlGroups"),
)


def test_daemons_beside_each_other_have_the_hosts_mounts() -> None:
    """Or the driver takes each for a container, which has all devices as long as it runs."""
    own = settings(SYSTEMD / "rtcached.service")
    assert own["ProtectSystem"] == ["strict"]
    assert set(MOUNTS) <= own.keys()
    assert not set(MOUNTS) & settings(SYSTEMD / "rtcached@.service").keys()
    cleared = settings(SYSTEMD / "host-mounts.conf")
    assert cleared.keys() == set(MOUNTS)
    assert {value for values in cleared.values() for value in values} == {"no", "default"}


def test_the_units_say_the_same_but_for_what_they_differ_in() -> None:
    one, each = (settings(SYSTEMD / unit) for unit in UNITS)
    for name in (*MOUNTS, "DeviceAllow", "Description", "Environment", "EnvironmentFile"):
        one.pop(name, None)
        each.pop(name, None)
    plain = {name: [value.replace("-%i", "") for value in values] for name, values in each.items()}
    assert plain == one


def test_every_line_is_as_old_as_the_oldest_systemd_that_is_met() -> None:
    """Hosts have 249; what is newer would be a warning at each start there."""
    newer = r"notify-reload|ExitType|RestartSteps|RestartMaxDelay|RestrictFileSystems|OpenFile"
    for name in (*UNITS, *DROP_INS):
        assert re.search(newer, (SYSTEMD / name).read_text("utf-8")) is None
