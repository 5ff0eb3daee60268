"""What `rtcache-bench device` runs on a Llama: every gear, and as many tokens as it says."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from om_models.bundle import Bundle
from runtime_cache.engine.device_counters import RoleCounters
from runtime_cache.engine.executor import Executor
from tests.support.devices import num_leaked, opened
from tools.bench import device_probes
from tools.bench.device_probes import LEAST_RUNS, MemoryProbe, Prompt, StepProbe

RUNS = LEAST_RUNS + 1  # the first one warms up


@pytest.fixture
def executor(tiny_bundle: Bundle) -> Iterator[Executor]:
    with opened(soc_name=tiny_bundle.manifest.soc_version) as device:
        executor = Executor.open(device, tiny_bundle.manifest, tiny_bundle.path, block_size=16)
        yield executor
        executor.close()


@pytest.mark.parametrize("is_scattered", [True, False])
def test_every_gear_is_filled(tiny_bundle: Bundle, executor: Executor, is_scattered: bool) -> None:
    manifest = tiny_bundle.manifest
    probe = StepProbe(executor, manifest)
    for gear in manifest.prefill_gears:
        assert len(probe.step("prefill", gear, 0, is_scattered=is_scattered)) == LEAST_RUNS
    for gear in manifest.decode_gears:
        assert len(probe.step("decode", gear, 0, is_scattered=is_scattered)) == LEAST_RUNS
    fed = RUNS * sum(gear.chunk for gear in manifest.prefill_gears)
    assert executor.counters["prefill"] == RoleCounters(RUNS * len(manifest.prefill_gears), fed)
    fed = RUNS * sum(gear.batch for gear in manifest.decode_gears)
    assert executor.counters["decode"] == RoleCounters(RUNS * len(manifest.decode_gears), fed)


def test_a_hit_computes_what_is_new(tiny_bundle: Bundle, executor: Executor) -> None:
    probe = StepProbe(executor, tiny_bundle.manifest)
    assert probe.max_tokens == 128
    prompt = Prompt.fitting(probe.max_tokens)
    assert prompt == Prompt(127, 115)
    for num_known, num_new in ((0, 127), (prompt.num_shared, 12)):
        before = executor.counters["prefill"].rows_appended
        assert len(probe.first_token(prompt, num_known, 0)) == LEAST_RUNS
        assert executor.counters["prefill"].rows_appended - before == RUNS * num_new


def test_copies_give_their_memory_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_probes, "MOST_RUNS", LEAST_RUNS)
    with opened() as device:
        probe = MemoryProbe(device, 4096)
        for copy in (probe.upload, probe.download, probe.move):
            assert len(copy(4096, 1)) == LEAST_RUNS
        # 16 rows of 256 bytes: each is the target of one copy.
        queued_s, done_s = probe.many_moves(16, 256, 1)
        assert len(queued_s) == len(done_s) == LEAST_RUNS
        assert all(queued <= done for queued, done in zip(queued_s, done_s, strict=True))
        probe.close()
        assert num_leaked() == 0
