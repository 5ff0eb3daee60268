"""`generate_many` of both clients: order, bounds, errors, tries."""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Iterator, Sequence
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest

from ipc.answers import Result
from ipc.client import Client as AsyncClient
from ipc.client_many import Outcomes
from ipc.errors import Closed, ServerError, Timeout
from ipc.many import Outcome
from ipc.messages import Cancel, Chat, Generate, Timing, Usage
from ipc.sync_client import Client
from tests.support.ipc_daemon import CountingDaemon, DaemonThread


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[DaemonThread]:
    with DaemonThread(f"ipc://{tmp_path}/s") as thread:
        yield thread


def blocking(endpoint: str, prompts: Sequence[Any], **options: Any) -> list[Outcome]:
    with Client(endpoint) as client:
        return list(client.generate_many(prompts, **options))


def awaited(endpoint: str, prompts: Sequence[Any], **options: Any) -> list[Outcome]:
    async def scene() -> list[Outcome]:
        async with AsyncClient(endpoint) as client:
            return [outcome async for outcome in client.generate_many(prompts, **options)]

    return asyncio.run(scene())


@pytest.fixture(params=[blocking, awaited])
def many(request: pytest.FixtureRequest) -> Any:
    return request.param


def answers(daemon: DaemonThread) -> list[Any]:
    seen = daemon.daemon.requests
    return [request for request in seen if isinstance(request, (Generate, Chat))]


@pytest.mark.parametrize("max_at_once", [1, 3, 100])
def test_in_the_order_of_the_prompts(daemon: DaemonThread, many: Any, max_at_once: int) -> None:
    outcomes = many(daemon.endpoint, [f"count {n}" for n in range(20)], max_at_once=max_at_once)
    assert [outcome.index for outcome in outcomes] == list(range(20))
    assert [len(outcome.get().token_ids) for outcome in outcomes] == list(range(20))
    assert [request.prompt for request in answers(daemon)] == [f"count {n}" for n in range(20)]


def test_as_they_end(daemon: DaemonThread, many: Any) -> None:
    prompts = ["hold", "count 1", "count 2", "count 3"]
    outcomes = many(daemon.endpoint, prompts, in_order=False, max_at_once=2, timeout_s=1)
    assert [outcome.index for outcome in outcomes] == [1, 2, 3, 0]
    assert isinstance(outcomes[-1].error, Timeout)
    with pytest.raises(Timeout):
        outcomes[-1].get()


def test_what_prompts_may_be(daemon: DaemonThread, many: Any) -> None:
    prompts = [
        "count 1",
        [7, 8],
        {"prompt": "count 2", "max_tokens": 9},
        {"messages": [{"role": "user", "content": "echo"}]},
    ]
    outcomes = many(daemon.endpoint, prompts, max_tokens=5)
    assert [outcome.get().text for outcome in outcomes] == ["0 ", "", "0 1 ", "echo"]
    asked = answers(daemon)
    assert [request.max_tokens for request in asked] == [5, 5, 9, 5]
    assert asked[1].prompt_ids == (7, 8)
    assert {request.credit for request in asked} == {None}


def test_one_that_is_refused_costs_no_other(daemon: DaemonThread, many: Any) -> None:
    prompts = ["count 1", {"prompt": "x", "top_p": 2}, "count 2"]
    outcomes = many(daemon.endpoint, prompts)
    assert [outcome.error is None for outcome in outcomes] == [True, False, True]
    assert isinstance(outcomes[1].error, ServerError)
    assert outcomes[1].error.code == "invalid_request"


@pytest.mark.parametrize("max_tries", [1, 3])
def test_what_is_refused_for_now_is_tried_again(
    daemon: DaemonThread, many: Any, max_tries: int
) -> None:
    outcomes = many(daemon.endpoint, ["refuse", "count 1"], max_tries=max_tries)
    assert isinstance(outcomes[0].error, ServerError)
    assert outcomes[0].error.code == "queue_full"
    assert outcomes[1].get().text == "0 "
    assert [request.prompt for request in answers(daemon)].count("refuse") == max_tries


def test_a_prompt_that_is_none_ends_the_loop(daemon: DaemonThread, many: Any) -> None:
    with pytest.raises(TypeError):
        many(daemon.endpoint, ["count 1", {"prompt": "x", "spelling": 1}])
    with pytest.raises(ValueError, match="exactly one"):
        many(daemon.endpoint, [{}])


def test_prompts_are_taken_as_room_becomes_free(daemon: DaemonThread) -> None:
    taken = []

    def prompts() -> Iterator[str]:
        for number in range(100):
            taken.append(number)
            yield f"count {number}"

    with Client(daemon.endpoint) as client:
        for outcome in client.generate_many(prompts(), max_at_once=4):
            assert len(taken) <= outcome.index + 5
    assert len(taken) == 100


def test_leaving_the_loop_cancels_the_rest(daemon: DaemonThread) -> None:
    with Client(daemon.endpoint) as client:
        for _ in client.generate_many(["count 1", "hold", "hold"]):
            break
        client.ping()
    assert [type(request) for request in daemon.daemon.requests].count(Cancel) == 2


async def test_leaving_the_async_loop_cancels_the_rest(tmp_path: Path) -> None:
    daemon, endpoint = CountingDaemon(), f"ipc://{tmp_path}/s"
    async with daemon.serve(endpoint), AsyncClient(endpoint) as client:
        outcomes = client.generate_many(["count 1", "hold", "hold"])
        async with aclosing(aiter(outcomes)) as rest:
            async for _ in rest:
                break
        await client.ping()
    assert [type(request) for request in daemon.requests].count(Cancel) == 2


async def test_a_closed_client_ends_the_loop(tmp_path: Path) -> None:
    daemon, endpoint = CountingDaemon(), f"ipc://{tmp_path}/s"
    async with daemon.serve(endpoint), AsyncClient(endpoint) as client:
        outcomes = aiter(client.generate_many(["count 1", "hold", "hold"]))
        assert (await anext(outcomes)).index == 0
        client.close()
        with pytest.raises(Closed):
            await anext(outcomes)


class Remembered(Result):
    """An answer that can be missed: `Result` has no room for a weak reference."""


class Ready:
    """Asked, and answered at once."""

    def __init__(self, made: list[weakref.ref[Remembered]]) -> None:
        self._made = made

    async def result(self) -> Result:
        answer = Remembered("", (), "stop", None, Usage(0, 0, 0, 0), Timing(0, None, 0, None))
        self._made.append(weakref.ref(answer))
        return answer


@pytest.mark.parametrize("in_order", [True, False])
async def test_what_was_handed_out_is_not_kept(in_order: bool) -> None:
    made: list[weakref.ref[Remembered]] = []
    outcomes = Outcomes(
        ["prompt"] * 100,
        lambda prompt: Ready(made),
        max_at_once=4,
        in_order=in_order,
        max_tries=1,
    )
    async for _ in outcomes:
        assert sum(answer() is not None for answer in made) <= 5
    assert len(made) == 100
