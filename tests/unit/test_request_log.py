"""How requests end: the line, the counts, and what is only logged when asked for."""

from __future__ import annotations

from typing import Any

import pytest
from structlog.testing import capture_logs

from ipc import messages as wire
from ipc.codec import Encoding
from ipc.messages import MessageId
from ipc.server import ClientRef
from runtime_cache.ids import RequestId
from runtime_cache.metrics.snapshot import Outcome, PromptTokens
from runtime_cache.request_log import RequestLog
from runtime_cache.work import Work

ID = MessageId("m")
ALICE = ClientRef(b"\0a", "user", Encoding.JSON, False, "team")
GENERATE = wire.Generate(ID, prompt="a secret")
TIMING = wire.Timing(1.5, 250.0, 750.0, 4.0)


def work(message: Any = GENERATE) -> Work:
    made = Work(ALICE, message, arrived_s=10.0)
    made.request_id = RequestId(7)
    return made


def done(reason: str = "stop", **fields: Any) -> wire.Done:
    usage = wire.Usage(10, 8, 2, 3)
    report = wire.CacheReport("diverged", 8, 12)
    fields = {"text": "the answer", "cache": report} | fields
    return wire.Done(
        ID, index=0, token_ids=(), finish_reason=reason, usage=usage, timing=TIMING, **fields
    )


def refusal(code: str = "too_long") -> wire.Error:
    return wire.Error(id=ID, code=code, message="of a secret", retryable=False)


def test_an_answer() -> None:
    requests = RequestLog()
    with capture_logs() as logs:
        requests.done(work(), done(), now_s=10.8)
    assert logs == [
        {
            "event": "request_done",
            "log_level": "info",
            "tenant": "team",
            "request": 7,
            "message_id": "m",
            "kind": "generate",
            "outcome": "stop",
            "prompt_tokens": 10,
            "cached_tokens": 8,
            "prefilled_tokens": 2,
            "completion_tokens": 3,
            "cache": "diverged",
            "queue_ms": 1.5,
            "ttft_ms": 250.0,
            "total_ms": 750.0,
        }
    ]
    assert requests.outcomes == {Outcome("team", "generate", "stop"): 1}
    assert requests.ended_tokens == {"team": PromptTokens(10, 8)}


@pytest.mark.parametrize(
    ("message", "reply", "outcome", "tokens"),
    [
        (GENERATE, done("slow_reader", cache=None), "slow_reader", PromptTokens(10, 8)),
        (GENERATE, refusal(), "too_long", None),
        (
            wire.Register(ID, text="x"),
            wire.Registered(
                ID, prefix_id=wire.PrefixName("p"), num_tokens=5, cached_tokens=4, num_bytes=1
            ),
            "ok",
            PromptTokens(5, 4),
        ),
        (wire.Tokenize(ID, text="x"), wire.Tokenized(ID, token_ids=(1,)), "ok", None),
    ],
)
def test_every_end_is_counted(
    message: Any, reply: Any, outcome: str, tokens: PromptTokens | None
) -> None:
    requests = RequestLog()
    with capture_logs() as logs:
        requests.done(work(message), reply, now_s=11.0)
    assert requests.outcomes == {Outcome("team", wire.type_name(message), outcome): 1}
    assert requests.ended_tokens == ({} if tokens is None else {"team": tokens})
    assert [line["outcome"] for line in logs] == [outcome]
    assert "secret" not in str(logs)


@pytest.mark.parametrize(
    ("message", "reply", "is_counted", "is_logged"),
    [
        (wire.Ping(ID), wire.Ok(ID), False, False),
        (wire.Ping(ID), refusal("draining"), True, True),
        (GENERATE, refusal("queue_full"), True, True),
        (wire.Release(ID, prefix_id=wire.PrefixName("p")), wire.Ok(ID), True, True),
        (wire.Pin(ID, digest="ab"), wire.Ok(ID), True, False),
        (wire.Pin(ID, digest="ab"), refusal("unknown_entry"), True, True),
        (wire.Drain(ID), wire.Ok(ID), True, False),
        (wire.GetStats(ID), wire.Ok(ID), False, False),
    ],
)
def test_what_is_answered_at_once(
    message: Any, reply: Any, is_counted: bool, is_logged: bool
) -> None:
    requests = RequestLog()
    with capture_logs() as logs:
        requests.answered(ALICE, message, reply)
    assert (bool(requests.outcomes), bool(logs)) == (is_counted, is_logged)
    assert "secret" not in str(logs)


def test_a_release_is_logged_with_the_tenant_that_an_operator_names() -> None:
    requests = RequestLog()
    release = wire.Release(ID, prefix_id=wire.PrefixName("p"), tenant="team-a")
    with capture_logs() as logs:
        requests.answered(ALICE, release, wire.Ok(ID))
    assert [line["tenant"] for line in logs] == ["team-a"]


def test_what_is_refused_has_lines_as_long_as_it_may() -> None:
    requests = RequestLog(decode=str, allows=lambda event: event != "request_done")
    unread = Work(ALICE, GENERATE, arrived_s=10.0)
    with capture_logs() as logs:
        requests.answered(ALICE, GENERATE, refusal("queue_full"))
        requests.done(unread, refusal(), now_s=11.0)
    assert logs == []
    assert requests.outcomes.total() == 2
    with capture_logs() as logs:
        requests.answered(ALICE, wire.Release(ID, prefix_id=wire.PrefixName("p")), wire.Ok(ID))
        requests.done(unread, wire.Tokenized(ID, token_ids=()), now_s=11.0)
        requests.done(work(), refusal("internal"), now_s=11.0)
    assert [line.get("outcome") for line in logs] == ["ok", "ok", None, "internal", None]


@pytest.mark.parametrize(
    ("message", "asked"),
    [
        (GENERATE, {"prompt": "a secret"}),
        (wire.Generate(ID, prompt_ids=(1, 2)), {"prompt_ids": (1, 2)}),
        (
            wire.Chat(ID, messages=(wire.ChatMessage("user", "hi"),)),
            {"messages": ({"role": "user", "content": "hi"},)},
        ),
    ],
)
def test_prompts_are_logged_if_that_is_wanted(message: Any, asked: dict[str, Any]) -> None:
    requests = RequestLog(decode=lambda ids: f"<{len(ids)} tokens>")
    with capture_logs() as logs:
        requests.done(work(message), done(), now_s=11.0)
    line = {"event": "request_text", "log_level": "info", "request": 7, "message_id": "m"}
    assert logs[1] == line | {"asked": asked, "answered": "<0 tokens>"}
