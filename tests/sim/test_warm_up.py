"""The first steps are run for nobody: no counter shows them, no block, no cached token."""

from __future__ import annotations

import pytest

from om_models.bundle import Bundle
from runtime_cache.aclsim import faults
from runtime_cache.errors import AclError
from runtime_cache.runtime import Runtime
from tests.support.served import Served, check_idle, config_for, opened_runtime, random_prompt
from tests.support.watched import watched

pytestmark = pytest.mark.asyncio(loop_factories=["uvloop"])

EXECUTE = "acl.mdl.execute_async"


def assert_untouched(runtime: Runtime) -> None:
    check_idle(runtime)
    for counters in runtime.executor.counters.values():
        assert (counters.num_steps, counters.rows_appended, counters.rows_copied) == (0, 0, 0)
    assert len(runtime.cache.index) == 0
    assert runtime.cache.num_free == runtime.cache.num_usable


@pytest.mark.parametrize("block_size", [1, 8])
async def test_a_step_of_each_role_runs_and_leaves_nothing(
    tiny_bundle: Bundle, block_size: int
) -> None:
    config = config_for(tiny_bundle, cache={"block_size": block_size})
    async with opened_runtime(config) as runtime:
        before = await runtime.read_kv(block_size, 1)
        await runtime.warm_up()
        assert await runtime.read_kv(block_size, 1) != before  # it has run
        assert_untouched(runtime)


async def test_answers_are_the_same_with_and_without(tiny_bundle: Bundle) -> None:
    prompt = random_prompt(3, 20)
    answers = []
    for is_warm in (False, True):
        async with opened_runtime(config_for(tiny_bundle)) as runtime:
            if is_warm:
                await runtime.warm_up()
            host = Served(runtime)
            answers.append((await host.greedy(prompt), await host.greedy(prompt)))
    assert answers[0] == answers[1]


async def test_deterministic_mode_warms_the_gears_that_it_uses(tiny_bundle: Bundle) -> None:
    async with watched(tiny_bundle, cache={"deterministic": True}) as host:
        await host.runtime.warm_up()
        assert_untouched(host.runtime)


async def test_a_step_that_fails_once_is_run_again(tiny_bundle: Bundle) -> None:
    async with opened_runtime(config_for(tiny_bundle)) as runtime:
        faults.inject(EXECUTE, call=2, code=507015, when="run")
        await runtime.warm_up()
        assert runtime.recovery.state == "serving"
        assert_untouched(runtime)


async def test_a_step_that_fails_again_ends_the_start(tiny_bundle: Bundle) -> None:
    """A device that is lost, or a step that hangs: see process/test_service_manager.py."""
    async with opened_runtime(config_for(tiny_bundle)) as runtime:
        for call in (1, 2):
            faults.inject(EXECUTE, call=call, code=507015, when="run")
        with pytest.raises(AclError, match="507015"):
            await runtime.warm_up()
