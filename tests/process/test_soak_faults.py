"""Daemons on a device that fails at random: every answer right, each request answered once.

One daemon after the other serves the same clients. Steps fail, at calls and at runs; some come
late, some hang; now and then the device is lost or hangs for good, and the daemon ends and is
started again, as a service manager would do.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from ipc.sync_client import Client as AdminClient
from om_models.plan import ConvertOptions
from runtime_cache.daemon import EXIT_DEVICE
from tests.support.coded_model import make_coded_bundle
from tests.support.fault_traffic import Traffic
from tests.support.process_state import look_at
from tests.support.rtcached import wait_until_idle
from tools.daemon_process import DaemonFailed, DaemonProcess

EXECUTE, COPY = "acl.mdl.execute_async", "acl.rt.memcpy_async"
NUM_CLIENTS = 8
MAX_GROWTH_KIB = 48 * 1024
#: In a row; each fails if the weather strikes two of its first steps, one time in some hundreds.
MAX_STARTS = 3
#: 64 blocks of 16 tokens; contexts of 128.
OPTIONS = ConvertOptions(
    "sim", kv_tokens=1024, dtype="float32", gears="prefill=8,32@32,128 decode=1,2,4@32,128"
)


class Life(NamedTuple):
    """How a daemon ends, and what was scripted for it.

    Attributes:
        code: its exit code.
        fault: what ends it; None: a signal does.
        hang_limit_ms: of its configuration.
    """

    code: int
    fault: dict[str, Any] | None = None
    hang_limit_ms: int = 60_000


#: What happens to every daemon, in parts of all calls.
WEATHER: tuple[dict[str, Any], ...] = (
    {"function": EXECUTE, "when": "run", "code": 507015, "probability": 0.01},
    {"function": EXECUTE, "when": "call", "code": 507011, "probability": 0.005},
    {"function": EXECUTE, "when": "call", "code": 207001, "probability": 0.005},
    {"function": COPY, "when": "run", "code": 507013, "probability": 0.002},
    {"function": COPY, "when": "call", "code": 207018, "probability": 0.002},
    {"function": EXECUTE, "when": "run", "delay_ms": 20, "probability": 0.01},
    {"function": EXECUTE, "when": "run", "hang_ms": 1300, "probability": 0.003},
)


def lost(call: int) -> Life:
    """The device has an ECC error in the run of that number."""
    return Life(4, {"function": EXECUTE, "when": "run", "code": 507054, "call": call})


def hung(call: int) -> Life:
    """The run of that number does not end."""
    fault = {"function": EXECUTE, "when": "run", "hang_ms": 10**7, "call": call}
    return Life(5, fault, hang_limit_ms=2500)


class Host:
    """Where the daemons live, one after the other."""

    def __init__(self, bundle: Path, directory: Path, seed: int) -> None:
        self.endpoints = [f"ipc://{directory}/s", f"ipc://{directory}/t"]
        self._bundle = bundle
        self._directory = directory
        self._chance = random.Random(seed)

    def daemon(self, life: Life) -> DaemonProcess:
        """A daemon that is to be started."""
        # The first one strikes if several are due.
        faults = [*([] if life.fault is None else [life.fault]), *WEATHER]
        script = {"seed": self._chance.randrange(10**6), "faults": faults}
        (self._directory / "faults.json").write_text(json.dumps(script))
        (self._directory / "rtcached.toml").write_text(self._config(life))
        return DaemonProcess(
            self._bundle,
            "sim:0",
            config=str(self._directory / "rtcached.toml"),
            ipc_endpoint=self.endpoints[0],
        )

    def _config(self, life: Life) -> str:
        return f"""
            [device]
            step_timeout_ms = 1000
            hang_limit_ms = {life.hang_limit_ms}
            memory_check_s = 0.2
            [cache]
            block_size = 16
            low_watermark_mb = 0
            [sim]
            threads = 1
            [[tenants]]
            name = "t"
            endpoint = "{self.endpoints[1]}"
            share_percent = 40
        """


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_coded_bundle(tmp_path_factory.mktemp("soak"), OPTIONS).path


@pytest.fixture
def directory(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Short, since sockets lie in it."""
    with tempfile.TemporaryDirectory(prefix="rtcache-") as name:
        monkeypatch.setenv("RTCACHE_ACLSIM_FAULTS", f"{name}/faults.json")
        yield Path(name)


async def started(host: Host, life: Life, num_tries: int = MAX_STARTS) -> DaemonProcess:
    """A daemon that serves; one whose first steps fail is started again, as the unit says."""
    daemon = host.daemon(life)
    try:
        await asyncio.to_thread(daemon.__enter__)
    except DaemonFailed:
        if num_tries == 1 or daemon.process.poll() != EXIT_DEVICE:
            raise
        return await started(host, life, num_tries - 1)
    return daemon


@asynccontextmanager
async def living(host: Host, traffic: Traffic, life: Life) -> AsyncIterator[DaemonProcess]:
    """One daemon, from its start to its end with the right exit code."""
    daemon = await started(host, life)
    traffic.begin_life()
    try:
        yield daemon
        traffic.end_life()
        if life.fault is None:
            daemon.process.send_signal(signal.SIGTERM)
        assert await asyncio.to_thread(daemon.wait) == life.code, daemon.log_text()
    except BaseException:
        await asyncio.to_thread(daemon.__exit__, *sys.exc_info())
        raise
    daemon.process.returncode = 0  # as wanted here
    await asyncio.to_thread(daemon.__exit__, None, None, None)


async def soak(host: Host, lives: Iterable[Life], seconds: float, seed: int) -> Traffic:
    """Serve through all lives, and the time given to each that no fault ends."""
    traffic = Traffic([host.endpoints[number % 3 == 2] for number in range(NUM_CLIENTS)], seed)
    for life in lives:
        async with living(host, traffic, life) as daemon:
            end_s = time.monotonic() + seconds
            while daemon.process.poll() is None and (life.fault or time.monotonic() < end_s):
                traffic.check()
                await asyncio.sleep(0.05)
    async with living(host, traffic, Life(0)) as daemon:
        await measured(daemon, traffic, seconds)
    return traffic


async def measured(daemon: DaemonProcess, traffic: Traffic, seconds: float) -> None:
    """The last life: nothing is left and nothing has grown when everybody has gone."""
    await asyncio.sleep(seconds / 2)
    before_kib = look_at(daemon.process.pid).resident_kib
    free_bytes = await asyncio.to_thread(free_device_memory, daemon)
    await asyncio.sleep(seconds / 2)
    growth_kib = look_at(daemon.process.pid).resident_kib - before_kib
    await traffic.stop()
    await asyncio.to_thread(check_idle, daemon)
    assert growth_kib < MAX_GROWTH_KIB
    assert await asyncio.to_thread(free_device_memory, daemon) == free_bytes


def free_device_memory(daemon: DaemonProcess) -> int:
    with AdminClient(daemon.admin_endpoint) as admin:
        free_bytes: int = admin.stats()["device"]["memory"]["free_bytes"]
        return free_bytes


def check_idle(daemon: DaemonProcess) -> None:
    with AdminClient(daemon.admin_endpoint) as admin:
        assert admin.ping().state in ("serving", "hung", "recovering")
        wait_until_idle(admin)
        stats = admin.stats()
    for pool in (stats["pool"], *stats["tenants"].values()):
        blocks = pool["live_blocks"], pool["cached_blocks"], pool["free_blocks"]
        assert blocks[0] == pool["kept_blocks"]
        assert sum(blocks) == pool["num_blocks"]
    engine, device = stats["engine"], stats["device"]
    assert (engine["num_waiting"], engine["num_running"]) == (0, 0)
    kinds = ("refused", "finished", "cancelled", "expired", "failed", "registered")
    assert sum(engine[kind] for kind in kinds) == engine["arrived"]
    assert engine["recomputed"] == sum(engine["recomputed_by"].values())
    assert device["probes"]["num_probes"] >= engine["failed_steps"] - engine["hung_steps"]


def test_a_lost_device_a_hung_one_and_a_restart(bundle: Path, directory: Path) -> None:
    host = Host(bundle, directory, seed=1)
    traffic = asyncio.run(soak(host, [lost(60), hung(60)], seconds=2.0, seed=1))
    assert traffic.ends["length"] > 0
    assert traffic.ends["device_lost"] > 0
    assert traffic.ends["device_hung"] > 0
    assert traffic.num_unheard <= 2 * NUM_CLIENTS


def lives_for(seconds: float, chance: random.Random) -> Iterator[Life]:
    """As many as there is time for."""
    end_s = time.monotonic() + seconds
    while time.monotonic() < end_s:
        # The first two are the daemon's own, before it is ready.
        yield lost(chance.randint(3, 3000))
        yield hung(chance.randint(3, 3000))
        yield Life(0)


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_half_an_hour(bundle: Path, directory: Path) -> None:
    seed = int(os.environ.get("RTCACHE_SOAK_SEED", "0"))
    lives = lives_for(1740, random.Random(seed))
    traffic = asyncio.run(soak(Host(bundle, directory, seed), lives, seconds=60.0, seed=seed))
    assert {"length", "cancelled", "device_lost", "device_hung"} <= set(traffic.ends)
    assert traffic.num_unheard < sum(traffic.ends.values()) / 100
