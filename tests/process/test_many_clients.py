"""A daemon with many clients that stream at once: every token comes once, and memory is bounded."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from rich.console import Console

from ipc.sync_client import Client
from tests.support.many_clients import Count, Plan, stream_from
from tests.support.process_state import look_at
from tests.support.rtcached import wait_until_idle
from tools.bench.stage import null_bundle
from tools.daemon_process import DaemonProcess

#: Beyond what the daemon has when every cache has its size [KiB].
MAX_GROWTH_KIB = 96 * 1024


class Watch:
    """What the daemon is seen to do meanwhile.

    Attributes:
        resident_kib: its memory, again and again.
        max_running: the most answers that were being written at one time.
    """

    def __init__(self, daemon: DaemonProcess, admin: Client, pause_s: float) -> None:
        self.resident_kib: list[int] = []
        self.max_running = 0
        self._process_id = daemon.process.pid
        self._admin = admin
        self._pause_s = pause_s

    def look(self) -> None:
        self.resident_kib.append(look_at(self._process_id).resident_kib)
        self.max_running = max(self.max_running, self._admin.stats()["engine"]["num_running"])
        time.sleep(self._pause_s)  # how often to look; nothing depends on it

    @property
    def growth_kib(self) -> int:
        """From where a third of the time had passed to the end."""
        later = self.resident_kib[len(self.resident_kib) // 3 :]
        return max(later) - later[0]


@contextmanager
def many_at_once(num_clients: int, num_tokens: int) -> Iterator[DaemonProcess]:
    """A daemon that writes so many answers at once."""
    kv_tokens = -(-num_clients * (num_tokens + 64) // 64) * 64
    sizes = {"context": 1024, "max_batch": num_clients, "kv_tokens": max(kv_tokens, 2048)}
    with (
        null_bundle(Console(quiet=True), **sizes) as bundle,
        DaemonProcess(bundle, "sim:0") as daemon,
    ):
        yield daemon


def stream(plan: Plan, pause_s: float) -> tuple[Count, Watch]:
    with (
        many_at_once(plan.num_clients, plan.num_tokens) as daemon,
        Client(daemon.admin_endpoint, timeout_s=60) as admin,
    ):
        watch = Watch(daemon, admin, pause_s)
        count = stream_from(daemon.endpoint, plan, watch.look)
        wait_until_idle(admin)
        engine = admin.stats()["engine"]
    # One final message each: what the daemon says it has finished is what the clients got.
    assert (engine["arrived"], engine["finished"]) == (count.num_answers, count.num_answers)
    assert count.num_tokens == count.num_answers * plan.num_tokens
    return count, watch


def test_a_hundred_clients() -> None:
    count, watch = stream(Plan(100, 2, num_tokens=100, duration_s=1.0), pause_s=0.05)
    assert count.num_answers >= 100
    assert watch.max_running > 50


@pytest.mark.long
@pytest.mark.timeout(600)
def test_a_thousand_clients_for_a_minute(capsys: pytest.CaptureFixture[str]) -> None:
    count, watch = stream(Plan(1000, 4, num_tokens=400, duration_s=60.0), pause_s=1.0)
    series = [round(kib / 1024) for kib in watch.resident_kib]
    with capsys.disabled():
        print(
            f"\n1000 clients: {count.num_answers} answers, {count.num_tokens} tokens, "
            f"{watch.max_running} at once; resident MiB {series[:: max(1, len(series) // 12)]}, "
            f"growth {watch.growth_kib} KiB"
        )
    assert count.num_answers >= 1000
    assert watch.max_running > 900
    assert watch.growth_kib < MAX_GROWTH_KIB
