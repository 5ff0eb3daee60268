"""What goes wrong in service, through real sockets, and what is left afterwards: nothing.

Server, service and runtime in one process, a tiny Llama on the software device. After each fault
the next answer is right, no block is held, no work is left, and the gauges add up (`House.check`).
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import zmq
import zmq.asyncio

from ipc.client import Client
from ipc.errors import ServerError
from om_models.bundle import Bundle
from runtime_cache.aclsim import faults, inspect
from runtime_cache.errors import DeviceError
from runtime_cache.runtime import Runtime
from tests.support.house import House, ask, is_decode, is_prefill, open_house
from tests.support.served import Comparison, Served, config_for, oracle, random_prompt
from tests.support.tiny import tiny_reference

pytestmark = pytest.mark.asyncio(loop_factories=["uvloop"])

EXECUTE, COPY = "acl.mdl.execute_async", "acl.rt.memcpy_async"
#: With the BOS token 100 tokens: four chunks of 32.
LONG = "a" * 99


@pytest.fixture
async def house(tiny_bundle: Bundle, tmp_path: Path) -> AsyncIterator[House]:
    async with open_house(tiny_bundle, tmp_path) as house:
        yield house


@pytest.fixture
async def client(house: House) -> AsyncIterator[Client]:
    async with Client(house.server.endpoint) as client:
        yield client


@asynccontextmanager
async def lazy_client(endpoint: str) -> AsyncIterator[zmq.asyncio.Socket]:
    """A socket that nobody reads."""
    socket = zmq.asyncio.Context.instance().socket(zmq.DEALER)
    socket.set(zmq.RCVHWM, 1)
    socket.set(zmq.LINGER, 0)
    socket.connect(endpoint)
    try:
        yield socket
    finally:
        socket.close()


async def failure_of(answer: Any) -> ServerError:
    with pytest.raises(ServerError) as caught:
        await answer
    return caught.value


# --- clients that go or do not read -------------------------------------------------------------


@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_a_client_that_vanishes(house: House, client: Client, role: str) -> None:
    house.pause_at(is_prefill(32) if role == "prefill" else is_decode(110))
    async with Client(house.server.endpoint) as doomed:
        doomed.generate(LONG, ignore_eos=True)
        doomed.generate("waits", ignore_eos=True)
        await doomed.ping()  # so both have arrived
        await house.paused()
    await house.send_until_it_fails(house.seen[0], pause_s=0.001)
    assert house.service.num_unfinished == 0
    assert house.server.counters.clients_gone == 1
    house.resume()
    await house.check(client)
    assert house.engine.state.snapshot().engine.cancelled == 2


async def test_a_client_that_does_not_read(tiny_bundle: Bundle, tmp_path: Path) -> None:
    async with (
        # More than one answer's pieces: who reads must not look slow on a busy machine.
        open_house(tiny_bundle, tmp_path, max_queued_replies=64) as house,
        Client(house.server.endpoint) as client,
        lazy_client(house.server.endpoint) as lazy,
    ):
        house.pause_at(is_decode(110))
        await lazy.send_json({"type": "generate", "id": "1", "prompt": LONG, "ignore_eos": True})
        await house.paused()
        await house.send_until_it_fails(house.seen[0], "x" * 65_536)
        assert house.server.counters.slow_readers == 1
        assert house.service.num_unfinished == 0
        house.resume()
        await house.check(client)


# --- cancel -------------------------------------------------------------------------------------


async def test_a_cancel_between_the_chunks_of_a_prompt(house: House, client: Client) -> None:
    house.pause_at(is_prefill(32))
    answer = client.generate(LONG, temperature=0)
    await house.paused()
    await client.cancel(answer.id)
    result = await answer.result()
    assert (result.finish_reason, result.token_ids) == ("cancelled", ())
    assert result.usage.prefilled_tokens == 32
    assert house.runtime.cache.num_live == 25  # the step in flight still writes into them
    house.resume()
    await house.check(client)


async def test_a_cancel_in_the_middle_of_an_answer(house: House, client: Client) -> None:
    whole = await ask(client, LONG, max_tokens=20)
    house.pause_at(is_decode(110))
    answer = client.generate(LONG, temperature=0, max_tokens=20, ignore_eos=True)
    await house.paused()
    await client.cancel(answer.id)
    result = await answer.result()
    assert result.finish_reason == "cancelled"
    assert result.token_ids == whole.token_ids[:11]
    assert whole.text.startswith(result.text)
    house.resume()
    await house.check(client)


async def test_a_cancel_in_the_queue(tiny_bundle: Bundle, tmp_path: Path) -> None:
    async with (
        open_house(tiny_bundle, tmp_path, max_running=1) as house,
        Client(house.server.endpoint) as client,
    ):
        house.pause_at(is_decode())
        first, second = client.generate("a", max_tokens=3, ignore_eos=True), client.generate("b")
        await house.paused()
        await client.cancel(second.id)
        assert (await second.result()).finish_reason == "cancelled"
        house.resume()
        assert (await first.result()).finish_reason == "length"
        await house.check(client)


# --- prompts that cannot be served --------------------------------------------------------------


@pytest.mark.parametrize(
    ("prompt", "code", "sentence"),
    [
        (
            {"prompt": "x" * 127},
            "too_long",
            "the prompt has 128 tokens; with room for one answer token, context and pool take "
            "prompts of at most 127",
        ),
        (
            {"prompt": "x" * 100_000},
            "too_long",
            "the prompt has 100001 tokens; with room for one answer token, context and pool take "
            "prompts of at most 127",
        ),
        (
            {"prompt_ids": [1, 258]},
            "invalid_request",
            "`prompt_ids`: token id 258 is outside the vocabulary (0 to 257)",
        ),
        (
            {"prompt_ids": []},
            "invalid_request",
            "the prompt is empty: give at least one token",
        ),
    ],
)
async def test_a_prompt_that_cannot_be_served(
    house: House, client: Client, prompt: dict[str, Any], code: str, sentence: str
) -> None:
    error = await failure_of(client.generate(**prompt).result())
    assert (error.code, error.retryable) == (code, False)
    assert sentence in str(error)
    await house.check(client)


async def test_the_longest_prompt_has_room_for_one_token(house: House, client: Client) -> None:
    result = await ask(client, "x" * 126, max_tokens=None)
    assert (result.finish_reason, result.usage.prompt_tokens) == ("length", 127)
    assert len(result.token_ids) == 1
    await house.check(client)


async def test_more_work_than_blocks(
    tiny_bundle: Bundle, tmp_path: Path, record_property: Any
) -> None:
    """Requests give their blocks up and come back; all end right."""
    comparison = Comparison()
    prompts = [random_prompt(n, 30) for n in range(6)]
    async with (
        open_house(tiny_bundle, tmp_path, num_blocks=26) as house,
        Client(house.server.endpoint) as client,
    ):
        results = await asyncio.gather(
            *(ask(client, None, prompt_ids=prompt, max_tokens=40) for prompt in prompts)
        )
        assert house.engine.state.snapshot().engine.preemptions > 0
        for prompt, result in zip(prompts, results, strict=True):
            comparison.check(result.token_ids, *oracle(tiny_reference(), prompt, 40))
            assert result.usage.prefilled_tokens >= 30
        await house.check(client)
    comparison.report(record_property)


# --- deadlines ----------------------------------------------------------------------------------


@pytest.mark.parametrize(("num_past", "num_tokens"), [(32, 0), (110, 11)])
async def test_a_deadline_while_running(
    house: House, client: Client, num_past: int, num_tokens: int
) -> None:
    house.pause_at(is_decode(num_past) if num_tokens else is_prefill(num_past))
    answer = client.generate(LONG, ignore_eos=True, deadline_ms=1)
    await house.paused()
    house.clock.now_s += 1
    result = await answer.result()
    assert (result.finish_reason, len(result.token_ids)) == ("deadline", num_tokens)
    assert result.timing.total_ms == 1000
    house.resume()
    await house.check(client)


async def test_a_deadline_in_the_queue(tiny_bundle: Bundle, tmp_path: Path) -> None:
    async with (
        open_house(tiny_bundle, tmp_path, max_running=1) as house,
        Client(house.server.endpoint) as client,
    ):
        house.pause_at(is_prefill())
        first, second = (
            client.generate("a", max_tokens=3, ignore_eos=True),
            client.generate("b", deadline_ms=1),
        )
        await house.paused()
        await client.ping()  # so both have arrived
        house.clock.now_s += 1
        result = await second.result()
        assert (result.finish_reason, result.token_ids) == ("deadline", ())
        assert (result.timing.queue_ms, result.timing.ttft_ms) == (1000, None)
        house.resume()
        assert (await first.result()).finish_reason == "length"
        await house.check(client)


# --- the device ---------------------------------------------------------------------------------


@pytest.mark.parametrize("when", ["call", "run"])
@pytest.mark.parametrize("function", [EXECUTE, COPY])
@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_a_step_that_fails(
    tiny_bundle: Bundle, tmp_path: Path, role: str, function: str, when: Any
) -> None:
    """Its requests fail, those that wait are served, and nothing it wrote is ever reused."""
    async with (
        open_house(tiny_bundle, tmp_path, on_failed_step="fail") as house,
        Client(house.server.endpoint) as client,
    ):
        house.pause_at(is_prefill(32) if role == "prefill" else is_decode(110))
        answer = client.generate(LONG, ignore_eos=True)
        await house.paused()
        waiting = client.generate("b", max_tokens=3, ignore_eos=True)
        await client.ping()  # so it has arrived
        fault = faults.inject(function, code=507015, when=when)
        house.resume()
        error = await failure_of(answer.result())
        assert fault.has_fired
        assert (error.code, error.retryable) == ("acl", True)
        assert "507015" in str(error)
        assert (await waiting.result()).finish_reason == "length"
        assert house.runtime.cache.counters.dropped_blocks > 0
        again = await ask(client, LONG)
        comparison = Comparison()
        prompt = house.runtime.tokenizer.encode(LONG, add_bos=True).tolist()
        comparison.check(again.token_ids, *oracle(tiny_reference(), prompt, 8))
        await house.check(client)


@pytest.mark.parametrize("when", ["call", "run"])
@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_a_step_that_fails_once_is_computed_again(
    house: House, client: Client, role: str, when: Any
) -> None:
    """Its client notices nothing but the time: no token twice, none lost."""
    prompt = house.runtime.tokenizer.encode(LONG, add_bos=True).tolist()
    house.pause_at(is_prefill(32) if role == "prefill" else is_decode(110))
    answer = client.generate(LONG, max_tokens=20, temperature=0, ignore_eos=True)
    await house.paused()
    fault = faults.inject(EXECUTE, code=507015, when=when)
    house.resume()
    pieces = [piece async for piece in answer]
    tokens = [token for piece in pieces for token in piece.token_ids]
    assert fault.has_fired
    Comparison().check(tokens, *oracle(tiny_reference(), prompt, 20))
    assert "".join(piece.text for piece in pieces) == house.runtime.tokenizer.decode(tokens)
    stats = await client.stats()
    assert stats["engine"]["recomputed_by"] == {"failed_step": 1}
    assert stats["engine"]["failed_steps"] == stats["device"]["probes"]["num_probes"] == 1
    assert (stats["engine"]["failed"], stats["device"]["probes"]["num_failed"]) == (0, 0)
    await house.check(client)


async def test_a_lost_device(tiny_bundle: Bundle) -> None:
    """Every request is told, the rest of the device is given up, and closing says so."""
    inspect.reset()
    runtime = await Runtime.open(config_for(tiny_bundle, max_running=1))
    host = Served(runtime)
    fault = faults.inject("acl.rt.synchronize_stream_with_timeout", call=2, code=507010)
    heard = [host.submit([1, 2, 3]), host.submit([4, 5])]
    finals = [await ear.final for ear in heard]
    assert fault.has_fired
    assert [getattr(final, "code", "") for final in finals] == ["device_lost", "device_lost"]
    assert host.engine.fatal.done()
    assert await host.engine.drain(0) == 0
    with pytest.raises(DeviceError):
        await runtime.close()
    await runtime.close()
    inspect.reset()


# --- drain --------------------------------------------------------------------------------------


async def test_a_drain_that_ends_in_the_middle_of_an_answer(house: House, client: Client) -> None:
    house.pause_at(is_decode(110))
    answer = client.generate(LONG, ignore_eos=True)
    await house.paused()
    draining = asyncio.ensure_future(house.engine.drain(0))
    result = await answer.result()
    assert (result.finish_reason, len(result.token_ids)) == ("shutdown", 11)
    error = await failure_of(ask(client))
    assert (error.code, error.retryable) == ("draining", True)
    assert not draining.done()
    house.resume()
    assert await draining == 1
    assert house.service.num_unfinished == 0
    assert house.runtime.cache.num_live == 0


async def test_a_drain_with_time_lets_answers_end(house: House, client: Client) -> None:
    house.pause_at(is_decode(110))
    answer = client.generate(LONG, max_tokens=20, ignore_eos=True)
    await house.paused()
    draining = asyncio.ensure_future(house.engine.drain(1e6))
    await asyncio.sleep(0)
    house.resume()
    result = await answer.result()
    assert (result.finish_reason, len(result.token_ids)) == ("length", 20)
    assert await draining == 0
    assert house.runtime.cache.num_live == 0
