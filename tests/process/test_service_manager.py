"""`rtcached` under a service manager: what it says on a real socket, and when it is silent.

The manager is a socket of the test's own; see `docs/systemd.md` for what systemd makes of it.
"""

from __future__ import annotations

import json
import resource
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from ipc.sync_client import Client
from tests.support.launched import Launched
from tests.support.rtcached import PATIENCE_S, RawClient, run
from tests.support.service_manager import Message, ServiceManager
from tools.daemon_process import DaemonFailed, DaemonProcess

EXECUTE = "acl.mdl.execute_async"
#: Steps that a daemon runs before it is ready.
WARM_UP = 2
ALIVE = {"WATCHDOG": "1"}
STUCK = "Stuck: a call of the driver does not return"

Script = Callable[..., None]


@pytest.fixture(params=["path"])
def manager(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[ServiceManager]:
    """The manager of the daemons that are started after it; it watches them."""
    with ServiceManager(tmp_path if request.param == "path" else None) as manager:
        monkeypatch.setenv("NOTIFY_SOCKET", manager.address)
        monkeypatch.setenv("WATCHDOG_USEC", "300000")
        yield manager


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Script:
    """Scripts faults of the daemons that are started after it."""

    def write(*faults: dict[str, Any]) -> None:
        path = tmp_path / "faults.json"
        path.write_text(json.dumps({"faults": list(faults)}))
        monkeypatch.setenv("RTCACHE_ACLSIM_FAULTS", str(path))

    return write


def is_ready(message: Message) -> bool:
    return "READY" in message


@contextmanager
def starting(bundle: Path, directory: Path, *flags: str) -> Iterator[subprocess.Popen[bytes]]:
    """A daemon that is not waited for; at the end it does not run any more."""
    command = [sys.executable, "-W", "error", "-m", "runtime_cache.daemon", *flags]
    command += ["--model-bundle", str(bundle), "--device", "sim:0"]
    command += ["--ipc-endpoint", f"ipc://{directory}/s"]
    with subprocess.Popen(command, stderr=subprocess.DEVNULL) as process:
        try:
            yield process
        finally:
            process.kill()


def begin(client: RawClient) -> None:
    client.send(type="generate", id="g", prompt="x", max_tokens=5, temperature=0, ignore_eos=True)


@pytest.mark.parametrize(
    "manager", ["path", pytest.param("abstract", marks=pytest.mark.long)], indirect=True
)
def test_from_the_start_to_the_end(
    null_bundle: Path, manager: ServiceManager, script: Script
) -> None:
    """A load that takes longer than the watchdog's time is announced, and trips nothing."""
    script({"function": "acl.mdl.load_from_file", "when": "call", "call": 1, "hang_ms": 700})
    with DaemonProcess(null_bundle, "sim:0") as daemon, Client(daemon.admin_endpoint) as admin:
        ready = manager.until(is_ready)
        *before, _ = manager.heard
        assert all(message.keys() == {"STATUS", "EXTEND_TIMEOUT_USEC"} for message in before)
        said = [message["STATUS"].partition(":")[0] for message in before]
        assert list(dict.fromkeys(said)) == [
            f"Reading the bundle {null_bundle}",
            "Checking the bundle",
            "Opening sim",
            "Loading model.om of null",
            "Warming up",
        ]
        assert all(int(message["EXTEND_TIMEOUT_USEC"]) >= 60_000_000 for message in before)
        status = f"Serving: null on sim:0 at {daemon.endpoint}, 0 requests unanswered"
        assert ready == {"READY": "1", "STATUS": status}
        assert_nothing_ran(admin.stats())
        manager.until(ALIVE.__eq__)
        daemon.process.send_signal(signal.SIGHUP)  # as ExecReload does
        daemon.wait_for("signal")
        manager.until(ALIVE.__eq__)
        daemon.stop()
        assert not any("RELOADING" in message for message in manager.heard)
        (stopping,) = (message for message in manager.rest() if "STOPPING" in message)
        assert stopping == {
            "STOPPING": "1",
            "STATUS": "Draining: 0 requests unanswered",
            "EXTEND_TIMEOUT_USEC": str((30 + 2 * 120 + 60) * 10**6),
        }
        names = [event.get("event") for event in daemon.events]
        assert names.index("models_loaded") < names.index("warmed_up") < names.index("ready")
        assert "watchdog_withheld" not in names


def assert_nothing_ran(stats: dict[str, Any]) -> None:
    """The steps of the warm-up are no traffic, and have left nothing behind."""
    for role in ("prefill", "decode"):
        assert set(stats["device"][role].values()) == {0}
    assert stats["pool"]["free_blocks"] == stats["pool"]["num_blocks"]
    assert stats["engine"]["num_running"] == stats["engine"]["num_waiting"] == 0
    assert stats["cache"]["hit_rate"] is None


def test_a_driver_call_that_does_not_return_stops_the_watchdog(
    null_bundle: Path, manager: ServiceManager, script: Script
) -> None:
    script({"function": EXECUTE, "when": "call", "call": WARM_UP + 1, "hang_ms": 1500})
    with DaemonProcess(null_bundle, "sim:0") as daemon, RawClient(daemon.endpoint) as client:
        manager.until(ALIVE.__eq__)
        begin(client)
        manager.until(lambda message: message.get("STATUS") == STUCK)
        assert client.ask(type="ping", id="p")["type"] == "pong"  # the loop itself is well
        back = manager.next()
        assert back["STATUS"].startswith("Serving: ")  # nothing was said in between
        assert manager.next() == ALIVE
        while client.last_reply()["id"] != "g":
            pass
        assert daemon.wait_for("watchdog_withheld")["level"] == "error"
        assert daemon.wait_for("watchdog_resumed")


def test_a_step_that_takes_long_is_no_stuck_call(
    null_bundle: Path, manager: ServiceManager, script: Script
) -> None:
    """Work that does not end is the daemon's own matter: device.hang_limit_ms."""
    script({"function": EXECUTE, "when": "run", "call": WARM_UP + 1, "hang_ms": 900})
    with DaemonProcess(null_bundle, "sim:0") as daemon, RawClient(daemon.endpoint) as client:
        begin(client)
        assert client.last_reply()["finish_reason"] == "length"
        daemon.stop()
        assert not any(message.get("STATUS") == STUCK for message in manager.rest())


def test_a_process_that_stands_still_says_nothing(
    null_bundle: Path, manager: ServiceManager
) -> None:
    with DaemonProcess(null_bundle, "sim:0") as daemon:
        manager.until(ALIVE.__eq__)
        daemon.process.send_signal(signal.SIGSTOP)
        while (Path(f"/proc/{daemon.process.pid}/stat").read_text().split()[2]) != "T":
            pass
        manager.rest()
        assert manager.rest() == []
        daemon.process.send_signal(signal.SIGCONT)
        manager.until(ALIVE.__eq__)


def test_what_the_watchdog_kills_leaves_the_stacks_of_its_threads(
    null_bundle: Path, manager: ServiceManager, script: Script
) -> None:
    """The manager sends SIGABRT; that nothing else works then does not matter."""
    script({"function": EXECUTE, "when": "call", "call": WARM_UP + 1, "hang_ms": 10**8})
    with DaemonProcess(null_bundle, "sim:0") as daemon, RawClient(daemon.endpoint) as client:
        begin(client)
        manager.until(lambda message: message.get("STATUS") == STUCK)
        daemon.process.send_signal(signal.SIGABRT)
        assert daemon.wait() == -signal.SIGABRT
        daemon.process.returncode = 0  # as wanted here
        texts = [event["text"] for event in daemon.events if "text" in event]
        assert "Fatal Python error: Aborted" in texts
        assert any("execute_async" in text or "executor.py" in text for text in texts)


def test_a_lost_device_is_told(null_bundle: Path, manager: ServiceManager, script: Script) -> None:
    script({"function": EXECUTE, "when": "run", "call": WARM_UP + 1, "code": 507054})
    with DaemonProcess(null_bundle, "sim:0") as daemon, RawClient(daemon.endpoint) as client:
        begin(client)
        assert client.last_reply()["code"] == "device_lost"
        stopping = manager.until(lambda message: "STOPPING" in message)
        assert stopping["STATUS"].startswith("Giving up: ")
        assert daemon.wait() == 4
        daemon.process.returncode = 0  # as wanted here


def test_a_first_step_that_fails_is_tried_again(
    null_bundle: Path, manager: ServiceManager, script: Script
) -> None:
    script({"function": EXECUTE, "when": "run", "call": 1, "code": 507015})
    with DaemonProcess(null_bundle, "sim:0") as daemon, Client(daemon.admin_endpoint) as admin:
        assert daemon.wait_for("warm_up_failed")["role"] == "prefill"
        assert daemon.wait_for("warmed_up")
        assert_nothing_ran(admin.stats())


@pytest.mark.parametrize(
    ("fault", "code"),
    [
        ({"every": 1, "code": 507015}, 1),
        pytest.param({"call": 2, "code": 507054}, 1, marks=pytest.mark.long),
        ({"call": 2, "hang_ms": 10**8}, 5),
    ],
    ids=["fails twice", "is lost", "hangs"],
)
def test_a_device_that_does_not_run_a_step_is_never_ready(
    null_bundle: Path, manager: ServiceManager, script: Script, fault: dict[str, Any], code: int
) -> None:
    script({"function": EXECUTE, "when": "run", **fault})
    daemon = DaemonProcess(
        null_bundle, "sim:0", device_step_timeout_ms="200", device_hang_limit_ms="400"
    )
    with pytest.raises(DaemonFailed):
        daemon.__enter__()
    assert daemon.wait() == code
    *before, last = manager.rest()
    assert not any(map(is_ready, before))
    assert last["STATUS"].startswith("The start failed: ")
    texts = [event["text"] for event in daemon.events if "text" in event]
    assert texts == [f"rtcached: {last['STATUS'].removeprefix('The start failed: ')}"]


def test_a_start_that_fails_says_why(manager: ServiceManager, tmp_path: Path) -> None:
    env = {"NOTIFY_SOCKET": manager.address}
    flags = ("--ipc-endpoint", f"ipc://{tmp_path}/s", "--device", "sim:0")
    ended = run("runtime_cache.daemon", *flags, "--model-bundle", str(tmp_path / "no"), env=env)
    assert ended.code == 2
    why = ended.complaint.removeprefix("rtcached: ")
    assert manager.rest()[-1] == {"STATUS": f"The start failed: {why}"}


def test_a_manager_that_cannot_be_told_stops_the_start(tmp_path: Path) -> None:
    ended = run("runtime_cache.daemon", env={"NOTIFY_SOCKET": "vsock:2:1"})
    assert (ended.code, ended.complaint.partition(":")[0]) == (2, "rtcached")
    assert "NOTIFY_SOCKET" in ended.complaint


def test_more_clients_than_the_usual_limit_of_open_files_allows(
    null_bundle: Path, tmp_path: Path
) -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    # Not this process's own limit: it may have more files open already.
    low = ("sh", "-c", 'ulimit -S -n 100 && exec "$@"', "sh")
    with ExitStack() as stack:
        daemon = stack.enter_context(Launched(null_bundle, f"ipc://{tmp_path}/s", prefix=low))
        allowed, _ = resource.prlimit(daemon.process.pid, resource.RLIMIT_NOFILE)
        assert allowed == min(hard, 1 << 19)
        clients = [stack.enter_context(RawClient(daemon.endpoint)) for _ in range(120)]
        for client in clients:
            client.send(type="ping", id="p")
        assert {client.receive()["type"] for client in clients} == {"pong"}


def test_a_signal_while_a_model_loads_ends_the_start(
    null_bundle: Path, manager: ServiceManager, script: Script, tmp_path: Path
) -> None:
    """Loading cannot be interrupted, but nothing comes behind it, and all is given back."""
    script({"function": "acl.mdl.load_from_file", "when": "call", "call": 1, "hang_ms": 300})
    with starting(null_bundle, tmp_path) as process:
        manager.until(lambda message: message.get("STATUS", "").startswith("Loading "))
        process.send_signal(signal.SIGTERM)
        assert process.wait(PATIENCE_S) == 0
    assert manager.rest() == []
    assert not (tmp_path / "s").exists()


def test_a_signal_while_the_first_step_hangs_gives_it_up(
    null_bundle: Path, manager: ServiceManager, script: Script, tmp_path: Path
) -> None:
    script({"function": EXECUTE, "when": "run", "call": 1, "hang_ms": 10**8})
    hours = ("--device-step-timeout-ms", "200", "--device-hang-limit-ms", "36000000")
    with starting(null_bundle, tmp_path, *hours) as process:
        manager.until(lambda message: message.get("STATUS") == "Warming up")
        process.send_signal(signal.SIGTERM)
        assert process.wait(PATIENCE_S) == 5
    assert manager.next()["STATUS"].startswith("The start failed: ")
