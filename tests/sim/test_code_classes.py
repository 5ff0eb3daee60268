"""Each return code, at each call of a step and in what it queued: what the driver makes of it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import pytest

from om_models.bundle import Bundle
from runtime_cache.aclsim import faults, inspect
from runtime_cache.device import acl_codes
from runtime_cache.device.acl_codes import AclClass, class_of
from runtime_cache.device.acl_device import AclDevice
from runtime_cache.device.select import load_acl
from runtime_cache.engine.commands import FailRequest
from runtime_cache.engine.executor import Executor
from runtime_cache.errors import AclError, DeviceError, DeviceLost, OutOfDeviceMemory, StepTimeout
from runtime_cache.runtime import Runtime
from tests.sim.conftest import Opener
from tests.support.coded_model import CODED_VARIANTS, answer, make_coded_bundle
from tests.support.served import Served, config_for, random_prompt, served
from tests.support.sum_chat import BLOCK, ONE, Chat, step
from tests.support.sum_model import VARIANTS, SumModel


class Place(NamedTuple):
    """Where a code comes from: the call itself, or the work that it queued."""

    function: str
    when: faults.When
    call: int = 1


COPY, EXECUTE = "acl.rt.memcpy_async", "acl.mdl.execute_async"
SYNCHRONIZE = "acl.rt.synchronize_stream_with_timeout"
#: Upload, run, append, download, wait.
PLACES = [
    *(Place(COPY, when, call) for when in ("call", "run") for call in (1, 2, 3)),
    Place(EXECUTE, "call"),
    Place(EXECUTE, "run"),
    Place(SYNCHRONIZE, "call"),
]
CODES = sorted(acl_codes._CODES)
UNKNOWN = 424242
OF_CLASS = {
    kind: [code for code in [*CODES, UNKNOWN] if class_of(code) is kind] for kind in AclClass
}
MODEL = VARIANTS[0]


def expected_error(code: int, place: Place) -> type[AclError]:
    kind = class_of(code)
    if kind is AclClass.DEVICE:
        return DeviceLost
    is_found_by_waiting = place.when == "run" or place.function == SYNCHRONIZE
    if kind is AclClass.TIMEOUT and is_found_by_waiting:
        return StepTimeout  # nobody knows whether the work is over
    return OutOfDeviceMemory if kind is AclClass.MEMORY else AclError


def fail(executor: Executor, code: int, place: Place) -> AclError:
    """Run a step with the fault; what it says."""
    fault = faults.inject(place.function, code=code, call=place.call, when=place.when)
    with pytest.raises(AclError) as caught:
        executor.run(step(ONE, Chat(MODEL, [1]).feed(1)))
    assert fault.has_fired
    return caught.value


def check_works(executor: Executor) -> None:
    chat = Chat(MODEL, [2])
    assert executor.run(step(ONE, chat.feed(3))).tolist() == [chat.logits()]


@pytest.mark.parametrize("kind", [kind for kind in AclClass if kind is not AclClass.DEVICE])
def test_after_any_code_but_a_loss_the_next_step_is_right(
    kind: AclClass, open_executor: Opener
) -> None:
    executor = open_executor(MODEL)
    for code in OF_CLASS[kind]:
        for place in PLACES:
            error = fail(executor, code, place)
            assert type(error) is expected_error(code, place), (code, place)
            assert (error.acl_code, error.function in (place.function, SYNCHRONIZE)) == (code, True)
            assert executor.is_in_flight == isinstance(error, StepTimeout)
            executor.recover(30_000)
            assert not executor.is_in_flight
            check_works(executor)
    assert executor.probes.num_failed == 0
    assert executor.probes.num_probes == len(OF_CLASS[kind]) * len(PLACES)
    inspect.clear()  # what ran behind dropped work read what nobody had written


@contextmanager
def own_executor(bundle: Path) -> Iterator[Executor]:
    """An executor on a device that may get lost."""
    acl, device_id = load_acl("sim:0")
    device = AclDevice.open(acl, device_id)
    yield Executor.open(device, MODEL.manifest(), bundle, block_size=BLOCK)
    inspect.reset()


@pytest.mark.parametrize("place", PLACES)
def test_a_code_of_a_lost_device_says_so_wherever_it_comes(
    place: Place, sum_bundles: dict[SumModel, Path]
) -> None:
    for code in OF_CLASS[AclClass.DEVICE]:
        with own_executor(sum_bundles[MODEL]) as executor:
            error = fail(executor, code, place)
            assert type(error) is DeviceLost
            assert (error.acl_code, error.retryable) == (code, True)


# --- what becomes of requests --------------------------------------------------------------------

PROMPT = random_prompt(3, 10)


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    return make_coded_bundle(tmp_path_factory.mktemp("codes"), CODED_VARIANTS["fp32"])


async def outcome(host: Served, code: int, place: Place) -> str:
    """Of a request whose first step meets the fault."""
    before = host.engine.state.snapshot().engine
    host.engine.evict(None)
    fault = faults.inject(place.function, code=code, call=place.call, when=place.when)
    ear = host.submit(PROMPT, 3)
    final = await ear.final
    assert fault.has_fired
    after = host.engine.state.snapshot().engine
    if isinstance(final, FailRequest):
        assert ear.emitted == []
        return f"{final.code}, {'retry' if final.retryable else 'no retry'}"
    assert after.recomputed == before.recomputed + 1
    assert [token for piece in ear.emitted for token in piece.token_ids] == answer(PROMPT, 3)
    return "computed again"


#: Whoever would fail again fails now.
PERMANENT = {AclClass.CALLER, AclClass.MODEL, AclClass.INSTALL}
SURVIVED = [kind for kind in AclClass if kind is not AclClass.DEVICE]


@pytest.mark.asyncio(loop_factories=["uvloop"])
@pytest.mark.parametrize("kind", SURVIVED)
async def test_what_becomes_of_a_request(bundle: Bundle, kind: AclClass) -> None:
    expected = "acl, no retry" if kind in PERMANENT else "computed again"
    cases = [(code, Place(EXECUTE, "run")) for code in OF_CLASS[kind]]
    cases += [(OF_CLASS[kind][0], place) for place in PLACES]
    async with served(bundle) as host:
        for code, place in cases:
            assert await outcome(host, code, place) == expected, (code, place)
            host.check_idle()
            assert (await host.greedy(PROMPT, 3)).token_ids == tuple(answer(PROMPT, 3))
        inspect.clear()  # what ran behind dropped work read what nobody had written


@pytest.mark.asyncio(loop_factories=["uvloop"])
@pytest.mark.parametrize("place", PLACES)
async def test_a_loss_is_told_to_all_requests(bundle: Bundle, place: Place) -> None:
    inspect.reset()
    runtime = await Runtime.open(config_for(bundle, max_running=1))
    host = Served(runtime)
    waiting = host.submit(PROMPT, 3)
    assert await outcome(host, 507901, place) == "device_lost, retry"
    assert isinstance(await waiting.final, FailRequest)
    assert isinstance(host.engine.fatal.result(), DeviceLost)
    assert host.engine.condition == "lost"
    await host.engine.drain(0)
    with pytest.raises(DeviceError):
        await runtime.close()
    inspect.reset()
