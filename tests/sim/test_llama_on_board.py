"""The whole Llama path on a board: a bundle for Ascend310B4, one memory for host and device."""

from __future__ import annotations

from dataclasses import replace

import pytest

from om_models.bundle import Bundle
from runtime_cache.aclsim import inspect
from runtime_cache.aclsim.process import this_process
from tests.sim.test_hit_equals_miss import check_every_hit_length
from tests.support.served import Comparison, random_prompt
from tests.support.tiny import TINY_OPTIONS, make_bundle
from tests.support.watched import watched

pytestmark = pytest.mark.asyncio(loop_factories=["uvloop"])

SOC = "Ascend310B4"


@pytest.fixture(scope="module", params=["float32", "float16"])
def board_bundle(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Bundle:
    options = replace(TINY_OPTIONS, soc_version=SOC, dtype=request.param)
    return make_bundle(tmp_path_factory.mktemp("board"), options=options)


async def test_a_hit_answers_as_a_miss_on_a_board(board_bundle: Bundle) -> None:
    async with watched(board_bundle, memory="") as host:
        config = this_process().config
        assert (config.soc_name, config.capacity_bytes, config.mode) == (SOC, 8 << 30, 0)
        await check_every_hit_length(host, random_prompt(7, 21), Comparison())
        # All copies are of one kind there, and none had to be refused.
        assert set(inspect.report().copies) == {"D2D"}
