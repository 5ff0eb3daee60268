"""What an embedded model gives back: text with facts, and the errors behind codes."""

from __future__ import annotations

import copy
import json
import pickle

import pytest

from ipc import messages as wire
from ipc.answers import Answer
from ipc.messages import CacheReport, Done, Error, MessageId, Timing, Usage
from runtime_cache import errors
from runtime_cache.llm.results import Closed, Prefix, Result, SomeFailed, error_of

DONE = Done(
    MessageId("1"),
    index=0,
    text="Hello you",
    token_ids=(5, 6),
    finish_reason="length",
    usage=Usage(10, 8, 2, 2),
    timing=Timing(1.0, 2.0, 3.0, 4.0),
    stop="!",
    logprobs=(wire.Logprobs(5, -0.5, ()),),
    cache=CacheReport("hit"),
)


def failure(code: str, message: str = "no", *, retryable: bool = False) -> Error:
    return Error(id=MessageId("1"), code=code, message=message, retryable=retryable)


def test_a_result_is_its_text_and_more() -> None:
    result = Result.of(DONE)
    assert (result, str(result), result.text) == ("Hello you", "Hello you", "Hello you")
    assert type(result.text) is type(str(result)) is str
    for name in Result.__slots__:
        assert getattr(result, name) is getattr(DONE, name)
    expected = "Result('Hello you', finish_reason='length', completion_tokens=2, cached_tokens=8)"
    assert repr(result) == expected


def test_a_result_goes_where_text_goes() -> None:
    result = Result.of(DONE)
    turn = {"role": "assistant", "content": result}
    assert json.loads(json.dumps(turn)) == {"role": "assistant", "content": "Hello you"}
    assert f"<{result}>" == "<Hello you>"
    assert (result.split(), result + "!") == (["Hello", "you"], "Hello you!")


def test_a_result_can_be_copied_and_kept() -> None:
    for other in (pickle.loads(pickle.dumps(Result.of(DONE))), copy.deepcopy(Result.of(DONE))):
        assert type(other) is Result
        assert (other, other.usage, other.cache) == ("Hello you", DONE.usage, DONE.cache)


def test_a_result_of_pieces() -> None:
    answer = Answer()
    answer.add(wire.Tokens(MessageId("1"), index=0, text="Oh. ", token_ids=(4,)))
    answer.add(DONE)
    result = Result.of(answer.result())
    assert (result.text, result.token_ids) == ("Oh. Hello you", (4, 5, 6))
    assert (result.usage, result.cache, result.stop) == (DONE.usage, DONE.cache, "!")


def test_a_prefix_is_its_id_and_its_size() -> None:
    registered = wire.Registered(
        MessageId("1"),
        prefix_id=wire.PrefixName("p-1"),
        num_tokens=500,
        cached_tokens=7,
        num_bytes=4096,
    )
    prefix = Prefix.of(registered)
    assert prefix == "p-1"
    assert (prefix.num_tokens, prefix.cached_tokens, prefix.num_bytes) == (500, 7, 4096)


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        ("invalid_request", errors.InvalidRequest),
        ("too_long", errors.TooLong),
        ("unknown_prefix", errors.UnknownPrefix),
        ("unknown_entry", errors.UnknownEntry),
        ("queue_full", errors.QueueFull),
        ("draining", errors.Draining),
        ("internal", errors.InternalError),
        ("device", errors.DeviceError),
        # A driver's error; which call it was, is not known any more.
        ("acl", errors.DeviceError),
        ("device_lost", errors.DeviceError),
        ("closed", Closed),
        ("cancelled", errors.RequestError),
        ("something_new", errors.RequestError),
    ],
)
def test_a_code_becomes_its_error(code: str, kind: type[errors.RuntimeCacheError]) -> None:
    error = error_of(failure(code, retryable=True))
    assert type(error) is kind
    assert (error.code, error.message, str(error), error.retryable) == (code, "no", "no", True)


def test_when_to_try_again() -> None:
    reply = Error(id=None, code="queue_full", message="full", retryable=True, retry_after_ms=5000)
    assert error_of(reply).retry_after_ms == 5000


def test_some_failed_has_the_answers_of_the_others() -> None:
    result, full = Result.of(DONE), error_of(failure("queue_full", "full", retryable=True))
    error = SomeFailed([result, full, result])
    assert error.results == [result, full, result]
    assert str(error) == (
        "1 of 3 prompts failed, `results` has the answers to the others; prompt 1: full"
    )
    assert error.retryable
    assert not SomeFailed([full, error_of(failure("too_long"))]).retryable
