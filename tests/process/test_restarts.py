"""A daemon that is killed under load and started again: what is in its way, what clients see."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from pathlib import Path

import pytest

from ipc.sync_client import Client
from tests.support.load import Load, answers_of
from tests.support.rtcached import wait_until_idle
from tools.daemon_process import DaemonProcess

NUM_QUESTIONS = 12
NUM_CLIENTS = 6


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


async def kill_and_restart(lives: Lives, num_kills: int, seed: int) -> Counter[str]:
    """Kill it in the middle of answers, start it again, see that all are served; so many times.

    Returns:
        How calls ended that brought no whole answer.
    """
    chance = random.Random(seed)
    right = await answers_of(lives.endpoint, NUM_QUESTIONS)
    load = Load(lives.endpoint, right, timeout_s=2, seed=seed)

    async def scene() -> None:
        for _ in range(num_kills):
            await load.pieces(chance.randint(1, 200))
            await asyncio.to_thread(lives.kill)
            await asyncio.to_thread(lives.begin)
            await load.answers(2 * NUM_CLIENTS)

    await load.while_running(NUM_CLIENTS, scene)
    return load.ends


def check(bundle: Path, directory: Path, num_kills: int, seed: int) -> None:
    lives = Lives(bundle, f"ipc://{directory}/s")
    lives.begin()
    try:
        ends = asyncio.run(kill_and_restart(lives, num_kills, seed))
        with Client(f"{lives.endpoint}.admin") as admin:
            wait_until_idle(admin)
            assert admin.stats()["pool"]["live_blocks"] == 0
    finally:
        lives.end()
    # Every client was in the middle of a call when its daemon was killed.
    assert ends.total() >= num_kills
    assert set(ends) <= {"Timeout", "ConnectionLost"}
    assert sorted(path.name for path in directory.iterdir()) == ["s.admin.lock", "s.lock"]


def test_killed_in_the_middle_of_answers(null_bundle: Path, tmp_path: Path):
    check(null_bundle, tmp_path, num_kills=2, seed=1)


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_killed_100_times(null_bundle: Path, tmp_path: Path):
    seed = random.SystemRandom().randrange(2**32)
    print(f"seed {seed}")  # pytest shows it if the test fails
    check(null_bundle, tmp_path, num_kills=100, seed=seed)
