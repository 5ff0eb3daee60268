"""The whole engine on a board, whose one memory serves host and device: run mode 0."""

from __future__ import annotations

from dataclasses import replace

import pytest

from om_models.bundle import Bundle
from runtime_cache.aclsim import faults, inspect
from runtime_cache.device.acl_api import RunMode
from tests.sim.test_coded_kv import PROMPT, check
from tests.support.coded_model import CODED_VARIANTS, make_coded_bundle
from tests.support.watched import watched

pytestmark = pytest.mark.asyncio(loop_factories=["uvloop"])


@pytest.fixture(scope="module", params=CODED_VARIANTS)
def board_bundle(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Bundle:
    options = replace(CODED_VARIANTS[request.param], soc_version="Ascend310B4")
    return make_coded_bundle(tmp_path_factory.mktemp("board"), options)


async def test_hits_misses_and_copies(board_bundle: Bundle) -> None:
    async with watched(board_bundle) as host:
        assert host.runtime._device is not None
        assert host.runtime._device.run_mode is RunMode.DEVICE
        assert host.runtime.soc_name == "Ascend310B4"
        for num_cached in (0, 3, 4, 10, 20):
            host.engine.evict(None)
            if num_cached:
                await host.greedy(PROMPT[:num_cached], 1)
            assert await check(host, PROMPT) == num_cached
        # On a board every copy is one within the device, and its memory is the host's too.
        assert {kind for kind, number in inspect.report().copies.items() if number} == {"D2D"}
        assert host.runtime.memory.info is not None
        assert host.runtime.memory.info.total_bytes == 1 << 30


@pytest.mark.parametrize("when", ["call", "run"])
async def test_a_failed_step(board_bundle: Bundle, when: faults.When) -> None:
    async with watched(board_bundle) as host:
        for call in range(1, 4):
            host.engine.evict(None)
            faults.inject("acl.rt.memcpy_async", code=507013, call=call, when=when)
            assert await check(host, PROMPT) == 0
        assert host.engine.state.snapshot().engine.recomputed == 3
        inspect.clear()  # what ran behind dropped work read what nobody had written


async def test_what_is_kept_can_be_read(board_bundle: Bundle) -> None:
    async with watched(board_bundle) as host:
        await host.register("p", PROMPT)
        first = await host.runtime.read_kv(host.runtime.cache.pool.blocks.start * 4, 4)
        assert first == await host.runtime.read_kv(host.runtime.cache.pool.blocks.start * 4, 4)
        assert await check(host, PROMPT) == len(PROMPT) - 1
