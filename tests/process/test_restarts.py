"""A daemon that is killed under load and started again: what is in its way, what clients see."""

from __future__ import annotations

import asyncio
import random
import signal
import subprocess
import sys
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import pytest

from ipc.sync_client import Client
from tests.support.load import Load, answers_of
from tests.support.rtcached import PATIENCE_S, wait_until, wait_until_idle
from tests.support.service_manager import ServiceManager
from tools.daemon_process import DaemonProcess

NUM_QUESTIONS = 12
NUM_CLIENTS = 6
#: Longer than a daemon takes to start, on a busy machine too: no call may run into it [seconds].
CALL_PATIENCE_S = 60.0


class Lives:
    """One daemon after the other at one endpoint.

    Attributes:
        daemon: the one that runs, or ran last.
    """

    def __init__(self, bundle: Path, endpoint: str) -> None:
        self._bundle = bundle
        self.endpoint = endpoint
        self.daemon: DaemonProcess

    def begin(self) -> None:
        """Start the next one; returns when it is ready."""
        self.daemon = DaemonProcess(self._bundle, "sim:0", ipc_endpoint=self.endpoint)
        self.daemon.__enter__()

    def kill(self) -> None:
        """End it as the kernel does when memory is out, or a watchdog when it bites."""
        self.daemon.kill()
        self.daemon.process.returncode = 0  # as wanted here
        self.end()

    def end(self) -> None:
        """End it in order."""
        self.daemon.__exit__(None, None, None)


Scene = Callable[[Lives, Load], Awaitable[None]]


def under_load(bundle: Path, endpoint: str, scene: Scene, seed: int = 1) -> Load:
    """Let something happen to a daemon that clients ask all the time; at the end it is well."""
    lives = Lives(bundle, endpoint)

    async def run() -> Load:
        right = await answers_of(endpoint, NUM_QUESTIONS)
        load = Load(endpoint, right, timeout_s=CALL_PATIENCE_S, seed=seed)
        await load.while_running(NUM_CLIENTS, lambda: scene(lives, load))
        return load

    lives.begin()
    try:
        load = asyncio.run(run())
        with Client(f"{endpoint}.admin") as admin:
            wait_until_idle(admin)
            assert admin.stats()["pool"]["live_blocks"] == 0
    finally:
        lives.end()
    return load


@pytest.fixture
def directory(tmp_path: Path) -> Iterator[Path]:
    """Of the socket; in the end there is none in it."""
    yield tmp_path
    assert sorted(path.name for path in tmp_path.glob("s*")) == ["s.admin.lock", "s.lock"]


# --- killed ---------------------------------------------------------------------------------------


def kill_again_and_again(bundle: Path, directory: Path, num_kills: int, seed: int) -> None:
    chance = random.Random(seed)

    async def scene(lives: Lives, load: Load) -> None:
        for _ in range(num_kills):
            await load.pieces(chance.randint(1, 200))
            await asyncio.to_thread(lives.kill)
            await asyncio.to_thread(lives.begin)
            await load.answers(2 * NUM_CLIENTS)

    load = under_load(bundle, f"ipc://{directory}/s", scene, seed)
    # Every client was in the middle of a call, and no call waited for its time to be over.
    assert load.ends.total() >= num_kills
    assert set(load.ends) == {"ConnectionLost"}


def test_killed_in_the_middle_of_answers(null_bundle: Path, directory: Path):
    kill_again_and_again(null_bundle, directory, num_kills=1, seed=1)


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_killed_100_times(null_bundle: Path, directory: Path):
    seed = random.SystemRandom().randrange(2**32)
    print(f"seed {seed}")  # pytest shows it if the test fails
    kill_again_and_again(null_bundle, directory, num_kills=100, seed=seed)


def test_a_watchdog_bites(null_bundle: Path, directory: Path, monkeypatch: pytest.MonkeyPatch):
    """A process that stands still tells its manager nothing; the manager has it killed."""

    async def scene(lives: Lives, load: Load) -> None:
        await load.pieces(20)
        lives.daemon.process.send_signal(signal.SIGSTOP)
        await asyncio.to_thread(manager.until_silent, 0.3)
        await asyncio.to_thread(lives.kill)
        await asyncio.to_thread(lives.begin)
        await load.answers(2 * NUM_CLIENTS)

    with ServiceManager(directory) as manager:
        monkeypatch.setenv("NOTIFY_SOCKET", manager.address)
        monkeypatch.setenv("WATCHDOG_USEC", "300000")
        load = under_load(null_bundle, f"ipc://{directory}/s", scene)
    assert set(load.ends) == {"ConnectionLost"}


# --- asked ----------------------------------------------------------------------------------------


def test_signals_in_the_middle_of_answers(null_bundle: Path, directory: Path):
    """To read the configuration costs nobody anything. At the end, what was begun ends whole; what
    comes too late is told to try again, or finds nobody.
    """

    async def scene(lives: Lives, load: Load) -> None:
        def num_reloaded() -> int:
            return [event.get("event") for event in lives.daemon.events].count("reloaded")

        for number in range(1, 4):
            await load.pieces(20)
            lives.daemon.process.send_signal(signal.SIGHUP)
            await asyncio.to_thread(wait_until, lambda wanted=number: num_reloaded() == wanted)
            await load.answers(2 * NUM_CLIENTS)
        assert load.ends == {}
        await load.pieces(20)
        await asyncio.to_thread(lives.end)
        await asyncio.to_thread(lives.begin)
        await load.answers(2 * NUM_CLIENTS)

    load = under_load(null_bundle, f"ipc://{directory}/s", scene)
    assert load.num_torn == 0
    assert set(load.ends) <= {"draining", "ConnectionLost"}


# --- started --------------------------------------------------------------------------------------


def test_of_many_started_at_once_one_serves(null_bundle: Path, directory: Path):
    endpoint = f"ipc://{directory}/s"
    flags = ("--model-bundle", str(null_bundle), "--device", "sim:0", "--ipc-endpoint", endpoint)
    command = [sys.executable, "-m", "runtime_cache.daemon", *flags]
    started = [subprocess.Popen(command, stderr=subprocess.PIPE, text=True) for _ in range(3)]
    try:
        with Client(endpoint) as client:
            incarnation = client.ping().incarnation
            wait_until(lambda: sum(one.poll() is None for one in started) == 1)
            assert client.ping().incarnation == incarnation
        (serving,) = (one for one in started if one.poll() is None)
        serving.send_signal(signal.SIGTERM)
        said = [one.communicate(timeout=PATIENCE_S)[1] for one in started]
    finally:
        for one in started:
            one.kill()
    assert sorted(one.returncode for one in started) == [0, 2, 2]
    refusals = [text for one, text in zip(started, said, strict=True) if one.returncode]
    assert all(f"another daemon (process {serving.pid}) already serves" in t for t in refusals)
