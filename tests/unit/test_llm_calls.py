"""Many requests at once: how many are handed in, what is done about refusals, the order."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import pytest

from ipc.messages import AnyRequest, Done, Error, Generate, MessageId, Pong, Timing, Usage
from runtime_cache.config import Config, EngineConfig
from runtime_cache.errors import InternalError, QueueFull, RuntimeCacheError
from runtime_cache.llm import calls
from runtime_cache.llm.host import Host, Inbox
from runtime_cache.llm.results import Closed, Result


class FakeHost:
    """Answers at once what it has room for, and refuses the rest.

    Attributes:
        asked: the ids handed in, call by call.
        given_up: the ids that nobody waits for any more.
        room: how many of one call are answered.
    """

    def __init__(self, room: int, max_waiting: int = 100) -> None:
        self.config = Config(engine=EngineConfig(max_waiting=max_waiting))
        self.asked: list[list[str]] = []
        self.given_up: list[str] = []
        self.room = room

    def ask(self, requests: Sequence[AnyRequest], inbox: Inbox) -> None:
        self.asked.append([request.id for request in requests])
        for request in requests[self.room :]:
            inbox.put((request.id, refusal(request.id)))
        for request in reversed(requests[: self.room]):
            inbox.put((request.id, answer(request.id)))

    def give_up(self, ids: Sequence[MessageId]) -> None:
        self.given_up += ids


def answer(message_id: MessageId) -> Done:
    return Done(
        message_id,
        index=0,
        text=f"answer {message_id}",
        token_ids=(),
        finish_reason="stop",
        usage=Usage(1, 0, 1, 0),
        timing=Timing(0, 0, 0, None),
    )


def refusal(message_id: MessageId) -> Error:
    return Error(id=message_id, code="queue_full", message="full", retryable=True)


def answers(fake: Any, number: int) -> list[Result | RuntimeCacheError]:
    requests = [Generate(MessageId(str(index)), prompt="p") for index in range(number)]
    return calls.answers(cast("Host", fake), requests)


def test_answers_come_in_the_order_of_the_requests() -> None:
    fake = FakeHost(room=10)
    assert answers(fake, 3) == ["answer 0", "answer 1", "answer 2"]
    assert fake.asked == [["0", "1", "2"]]
    assert answers(fake, 0) == []


@pytest.mark.parametrize(
    ("max_waiting", "first"), [(2, ["0", "1"]), (3, ["0", "1", "2"]), (4, ["0", "1", "2"])]
)
def test_no_more_are_handed_in_than_may_wait(max_waiting: int, first: list[str]) -> None:
    fake = FakeHost(room=10, max_waiting=max_waiting)
    assert answers(fake, 3) == ["answer 0", "answer 1", "answer 2"]
    assert fake.asked[0] == first
    assert sum(map(len, fake.asked)) == 3


def test_what_is_refused_is_handed_in_again() -> None:
    fake = FakeHost(room=2)
    assert answers(fake, 5) == [f"answer {index}" for index in range(5)]
    # Room was for two; from then on one is handed in when another has ended.
    assert fake.asked == [["0", "1", "2", "3", "4"], ["2"], ["3"], ["4"]]


def test_the_refusal_of_a_single_prompt_is_told() -> None:
    assert [type(error) for error in answers(FakeHost(room=0), 1)] == [QueueFull]
    with pytest.raises(QueueFull, match="full"):
        calls.ask_one(cast("Host", FakeHost(room=0)), Generate(MessageId("1"), prompt="p"))


def test_many_that_are_all_refused_come_again_when_others_have_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fake = FakeHost(room=0)
    waits: list[float] = []

    def others_end(seconds: float) -> None:
        waits.append(seconds)
        fake.room = 2

    monkeypatch.setattr("runtime_cache.llm.calls.time.sleep", others_end)
    assert answers(fake, 3) == ["answer 0", "answer 1", "answer 2"]
    assert len(waits) == 1


def test_an_exception_while_waiting_gives_up_the_rest() -> None:
    class Interrupted(FakeHost):
        def ask(self, requests: Sequence[AnyRequest], inbox: Inbox) -> None:
            inbox.put((requests[0].id, answer(requests[0].id)))
            inbox.put(cast("Any", None))  # cannot be taken apart

    fake = Interrupted(room=3)
    with pytest.raises(TypeError):
        answers(fake, 3)
    assert sorted(fake.given_up) == ["1", "2"]


def test_a_host_that_closes_meanwhile() -> None:
    class Closing(FakeHost):
        def ask(self, requests: Sequence[AnyRequest], inbox: Inbox) -> None:
            if self.asked:
                raise Closed("this LLM is closed")
            super().ask(requests, inbox)

    with pytest.raises(Closed):
        answers(Closing(room=1, max_waiting=1), 2)


def test_a_reply_that_is_no_answer() -> None:
    class Odd(FakeHost):
        def ask(self, requests: Sequence[AnyRequest], inbox: Inbox) -> None:
            inbox.put((requests[0].id, Pong(requests[0].id, version="1", uptime_s=0)))

    with pytest.raises(InternalError, match="was answered by `pong`"):
        answers(Odd(room=1), 1)
