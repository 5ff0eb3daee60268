"""Every message to its reply, with a fake engine: exactly one final reply, no work left behind."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import msgspec
import pytest

from ipc import messages as wire
from ipc.messages import (
    AnyReply,
    AnyRequest,
    Cancel,
    Chat,
    ChatMessage,
    Done,
    Drain,
    Error,
    Evict,
    Explain,
    Generate,
    GetInfo,
    GetStats,
    ListEntries,
    MessageId,
    Ok,
    Pin,
    Ping,
    PrefixName,
    Register,
    Registered,
    Release,
    Released,
    Resume,
    Show,
    Tokenize,
    Tokenized,
    Tokens,
    Unpin,
    Verify,
)
from ipc.server import ClientRef
from runtime_cache.engine.commands import FinishReason
from runtime_cache.engine.request import TokenLogprobs
from runtime_cache.errors import CapacityError, InvalidRequest, RuntimeCacheError, UnknownEntry
from runtime_cache.ids import DEFAULT_TENANT
from runtime_cache.service import Defaults
from tests.support.desk import (
    ADMIN,
    ALICE,
    BOB,
    EOS,
    LONG,
    NOW_S,
    TEAM,
    TEAM_ALICE,
    USAGE,
    Desk,
)

ID = MessageId("1")
WIRE_USAGE = wire.Usage(10, 8, 2, 3)
WIRE_TIMING = wire.Timing(1.5, 250.0, 750.0, 4.0)
WIRE_REPORT = wire.CacheReport("diverged", 8, 12)
TURNS = (ChatMessage("user", "b"),)
DIGEST = "5e884898"
EVICTED = wire.Evicted(ID, num_blocks=3, num_bytes=300, in_use_blocks=2, kept_blocks=1)
PINNED = wire.Pinned(ID, digest="5e88489800000000", num_tokens=5, num_blocks=2, num_bytes=200)


def done(text: str = "", token_ids: tuple[int, ...] = (), index: int = 0, **more: Any) -> Done:
    fields = {"finish_reason": "length", "usage": WIRE_USAGE, "timing": WIRE_TIMING}
    fields |= {"cache": WIRE_REPORT} | more
    return Done(ID, index=index, text=text, token_ids=token_ids, **fields)


# --- answered within the call -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("message", "reply"),
    [
        (Ping(ID), wire.Pong(ID, version="1", uptime_s=2.5)),
        (GetStats(ID), wire.Stats(ID, stats={"pool": {"num_blocks": 7}})),
        (ListEntries(ID, limit=5), wire.Listed(ID, entries=(), total=1005)),
        (ListEntries(ID, limit=5, offset=10, tenant=""), wire.Listed(ID, entries=(), total=15)),
        (ListEntries(ID, limit=5, tenant=TEAM), wire.Listed(ID, entries=(), total=11)),
        (Tokenize(ID, text="ab"), Tokenized(ID, token_ids=(256, 64, 65))),
        (Tokenize(ID, text=""), Tokenized(ID, token_ids=(256,))),
        (Cancel(ID, target=MessageId("nobody")), Ok(ID)),
        (Evict(ID, max_blocks=3), EVICTED),
        (Evict(ID, all=True), EVICTED),
        (Evict(ID, digest=DIGEST), EVICTED),
        (Evict(ID, idle_s=0), EVICTED),
        (Pin(ID, digest=DIGEST), PINNED),
        (Pin(ID, digest=DIGEST, ttl_s=2.5), msgspec.structs.replace(PINNED, expires_in_s=2.5)),
        (Unpin(ID, digest=DIGEST), wire.Unpinned(ID, digest="5e88489800000000")),
        (Drain(ID), wire.Draining(ID, num_unfinished=0)),
        (Resume(ID), wire.Resumed(ID)),
        (
            Explain(ID, prompt="ab"),
            wire.Explained(ID, prompt_tokens=3, cached_tokens=8, cache=WIRE_REPORT),
        ),
    ],
)
def test_messages_that_need_no_engine_step(message: AnyRequest, reply: AnyReply) -> None:
    desk = Desk()
    assert desk.say(message) == [reply]
    assert desk.service.num_unfinished == 0
    assert desk.engine.requests == []


def test_a_lease_that_ends_while_it_is_asked_for_has_nothing_left() -> None:
    desk = Desk()
    desk.now_s += 1.0
    (pinned,) = desk.say(Pin(ID, digest=DIGEST, ttl_s=0.5))
    assert pinned == msgspec.structs.replace(PINNED, expires_in_s=0.0)


def test_info_is_that_of_the_tenant() -> None:
    desk = Desk()
    for client, cache_tokens in ((ALICE, 400), (TEAM_ALICE, 8)):
        (info,) = desk.say(GetInfo(ID), client)
        assert isinstance(info, wire.Info)
        assert info.limits == {"cache_tokens": cache_tokens}


# --- what operators ask -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("message", "asked"),
    [
        (Evict(ID, max_blocks=2), ("evict", None, 2, None, None, None, False)),
        (Evict(ID, max_blocks=4), ("evict", None, 4, None, None, None, False)),
        (Evict(ID, max_blocks=4, tenant=TEAM), ("evict", TEAM, 4, None, None, None, False)),
        (Evict(ID, max_bytes=299), ("evict", None, 2, None, None, None, False)),
        (Evict(ID, max_bytes=99), ("evict", None, 0, None, None, None, False)),
        (Evict(ID, min_bytes=200), ("evict", None, 2, None, None, None, False)),
        (Evict(ID, min_bytes=201), ("evict", None, 3, None, None, None, False)),
        (Evict(ID, min_bytes=1), ("evict", None, 1, None, None, None, False)),
        (Evict(ID, all=True), ("evict", None, 4096, None, None, None, False)),
        (Evict(ID, all=True, tenant=""), ("evict", "", 4096, None, None, None, False)),
        (Evict(ID, digest=DIGEST, tenant=TEAM), ("evict", TEAM, None, DIGEST, None, None, False)),
        (Evict(ID, digest=DIGEST, dry_run=True), ("evict", None, None, DIGEST, None, None, True)),
        (Evict(ID, idle_s=0.5), ("evict", None, 4096, None, NOW_S - 0.5, None, False)),
        (Evict(ID, age_s=0.5, dry_run=True), ("evict", None, None, None, None, NOW_S - 0.5, True)),
        (Show(ID, digest=DIGEST), ("show", "", DIGEST, None)),
        (Show(ID, prefix_id=PrefixName("p"), tenant=TEAM), ("show", TEAM, None, "p")),
        (Drain(ID), ("drain",)),
        (Resume(ID), ("resume",)),
        (Pin(ID, digest=DIGEST), ("pin", "", DIGEST, None)),
        (Pin(ID, digest=DIGEST, ttl_s=9, tenant=TEAM), ("pin", TEAM, DIGEST, 9)),
        (Unpin(ID, digest=DIGEST, tenant=TEAM), ("unpin", TEAM, DIGEST)),
        (Explain(ID, prompt="ab"), ("explain", "", [256, 64, 65])),
        (Explain(ID, prompt_ids=(1, 2), tenant=TEAM), ("explain", TEAM, [1, 2])),
        (Explain(ID, messages=TURNS), ("explain", "", [84, 82, 68, 81, 25, 65, 26, 29])),
    ],
)
def test_a_question_reaches_the_engine_as_it_was_asked(
    message: AnyRequest, asked: tuple[object, ...]
) -> None:
    desk = Desk()
    desk.say(message, ADMIN)
    assert desk.engine.asked == [asked]


@pytest.mark.parametrize(
    "message",
    [
        ListEntries(ID, tenant="nobody"),
        Evict(ID, all=True, tenant="nobody"),
        Pin(ID, digest=DIGEST, tenant="nobody"),
        Unpin(ID, digest=DIGEST, tenant="nobody"),
        Show(ID, digest=DIGEST, tenant="nobody"),
        Explain(ID, prompt="ab", tenant="nobody"),
        Explain(ID, prompt=LONG, tenant="nobody"),
        Verify(ID, tenant="nobody"),
    ],
)
def test_a_tenant_that_is_not_configured(message: AnyRequest) -> None:
    desk = Desk()
    sentence = "`tenant`: no tenant 'nobody' is configured"
    refusal = Error(id=ID, code="invalid_request", message=sentence, retryable=False)
    for _ in range(2):
        assert desk.say(message, ADMIN) == [refusal]
    assert (desk.engine.asked, desk.service.num_unfinished) == ([], 0)


@pytest.mark.parametrize(
    "message",
    [
        Evict(ID, digest=DIGEST),
        Pin(ID, digest=DIGEST),
        Unpin(ID, digest=DIGEST),
        Show(ID, digest=DIGEST),
        Drain(ID),
        Resume(ID),
        Explain(ID, prompt="ab"),
    ],
)
@pytest.mark.parametrize(
    "error", [UnknownEntry("none"), InvalidRequest("two"), CapacityError("full", retry_after_ms=9)]
)
def test_what_the_engine_refuses_an_operator(message: AnyRequest, error: RuntimeCacheError) -> None:
    desk = Desk()
    desk.engine.error = error
    refusal = Error(
        id=ID,
        code=error.code,
        message=error.message,
        retryable=error.retryable,
        retry_after_ms=error.retry_after_ms,
    )
    assert desk.say(message, ADMIN) == [refusal]
    assert desk.service.num_unfinished == 0


@pytest.mark.parametrize(
    ("message", "code"),
    [
        (Explain(ID, prompt_ids=()), "invalid_request"),
        (Explain(ID, prompt_ids=(258,)), "invalid_request"),
        (Explain(ID, prompt="a", prefix_id=PrefixName("p-9")), "unknown_prefix"),
    ],
)
def test_a_prompt_that_cannot_be_explained(message: AnyRequest, code: str) -> None:
    desk = Desk()
    (reply,) = desk.say(message, ADMIN)
    assert isinstance(reply, Error)
    assert reply.code == code
    assert (desk.engine.asked, desk.service.num_unfinished) == ([], 0)


# --- streamed or not ----------------------------------------------------------------------------


def test_an_answer_says_what_the_cache_did_streamed_or_not() -> None:
    desk = Desk()
    for stream in (True, False):
        desk.say(Generate(ID, prompt="ab", stream=stream))
        desk.engine.finish()
        (reply,) = desk.take()
        assert isinstance(reply, Done)
        assert (reply.usage.cached_tokens, reply.cache) == (8, WIRE_REPORT)


def test_an_answer_that_was_never_admitted_says_nothing_of_the_cache() -> None:
    desk = Desk()
    desk.say(Generate(ID, prompt="ab"))
    desk.engine.finish("cancelled", usage=replace(USAGE, cache=None))
    assert desk.take() == [done(finish_reason="cancelled", cache=None)]


def test_what_a_request_wants_of_the_cache_reaches_the_engine() -> None:
    desk = Desk()
    desk.say(Generate(ID, prompt="a"))
    assert (desk.request.use_cache, desk.request.cache_priority) == (True, 50)
    desk.say(Chat(MessageId("2"), messages=TURNS, use_cache=False, cache_priority=0))
    assert (desk.request.use_cache, desk.request.cache_priority) == (False, 0)


def test_a_streamed_answer_is_the_concatenation_of_its_messages() -> None:
    desk = Desk()
    assert desk.say(Generate(ID, prompt="ab")) == []
    assert desk.prompt == [256, 64, 65]
    desk.engine.emit("x", 7)
    desk.engine.emit("", 8, 9)
    desk.engine.finish("stop", "yz", stop="\n")
    assert desk.take() == [
        Tokens(ID, index=0, text="x", token_ids=(7,)),
        Tokens(ID, index=1, text="", token_ids=(8, 9)),
        done("yz", index=3, finish_reason="stop", stop="\n"),
    ]
    assert desk.service.num_unfinished == 0


def test_an_answer_that_is_not_streamed_is_one_message() -> None:
    desk = Desk()
    desk.say(Generate(ID, prompt="ab", stream=False), BOB)
    desk.engine.emit("x", 7)
    desk.engine.emit("", 8, 9)
    desk.engine.finish("stop", "yz", stop="\n")
    assert desk.sent == [(BOB, done("xyz", (7, 8, 9), finish_reason="stop", stop="\n"))]
    assert desk.service.num_unfinished == 0


def test_log_probabilities_are_finite_and_stay_with_their_tokens() -> None:
    found = TokenLogprobs(7, -0.5, ((7, -0.5), (3, float("-inf"))))
    shown = wire.Logprobs(7, -0.5, (wire.TopToken(7, -0.5), wire.TopToken(3, -9999.0)))
    desk = Desk()
    desk.say(Generate(ID, prompt="ab", logprobs=2))
    desk.engine.emit("x", 7, logprobs=(found,))
    desk.engine.finish()
    assert desk.take() == [
        Tokens(ID, index=0, text="x", token_ids=(7,), logprobs=(shown,)),
        done(index=1),
    ]
    desk.say(Generate(ID, prompt="ab", logprobs=2, stream=False))
    desk.engine.emit("x", 7, logprobs=(found,))
    desk.engine.finish()
    assert desk.take() == [done("x", (7,), logprobs=(shown,))]


@pytest.mark.parametrize(
    ("usage", "timing"),
    [
        (replace(USAGE, completion_tokens=1), wire.Timing(1.5, 250.0, 750.0, None)),
        (replace(USAGE, total_s=0.25), wire.Timing(1.5, 250.0, 250.0, None)),
        (replace(USAGE, completion_tokens=0, ttft_s=None), wire.Timing(1.5, None, 750.0, None)),
    ],
)
def test_a_rate_needs_two_tokens_and_time_between_them(usage: Any, timing: wire.Timing) -> None:
    desk = Desk()
    desk.say(Generate(ID, prompt="ab"))
    desk.engine.finish(usage=usage)
    (reply,) = desk.take()
    assert isinstance(reply, Done)
    assert reply.timing == timing


def test_a_chat_is_laid_out_and_its_answer_is_a_text_of_its_own() -> None:
    desk = Desk()
    desk.say(Chat(ID, messages=TURNS))
    desk.say(Generate(MessageId("2"), prompt_ids=tuple(desk.prompt)))
    chat, generated = desk.engine.requests
    assert chat.prompt.tolist() == generated.prompt.tolist()
    assert chat.prompt.tolist() == [84, 82, 68, 81, 25, 65, 26, 29]  # user:b;>
    assert chat.eos_token_ids == {EOS}
    assert (chat.kind, chat.prefix_id) == ("generate", None)


def test_defaults_and_what_overrides_them() -> None:
    desk = Desk(defaults=Defaults(max_tokens=5, deadline_ms=2000))
    desk.say(Generate(ID, prompt="a"))
    assert desk.request.params.max_tokens == 5
    assert (desk.request.arrived_s, desk.request.deadline_s) == (100.0, 102.0)
    desk.say(Generate(MessageId("2"), prompt="a", max_tokens=9, deadline_ms=500))
    assert desk.request.params.max_tokens == 9
    assert desk.request.deadline_s == 100.5
    desk = Desk()
    desk.say(Generate(ID, prompt="a"))
    assert (desk.request.params.max_tokens, desk.request.deadline_s) == (None, None)


def test_unseeded_requests_get_seeds_of_their_own() -> None:
    desk = Desk()
    for name in "123":
        desk.say(Generate(MessageId(name), prompt="a"))
    seeds = {request.params.seed for request in desk.engine.requests}
    assert len(seeds) == 3
    assert all(0 <= seed < 2**53 for seed in seeds)


# --- refused ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("message", "code", "sentence"),
    [
        (
            Generate(ID, prompt_ids=(1, 258)),
            "invalid_request",
            "`prompt_ids`: token id 258 is outside the vocabulary (0 to 257)",
        ),
        (
            Generate(ID, prompt="a", logit_bias={"300": 1.0}),
            "invalid_request",
            "a key of `logit_bias`: token id 300 is outside the vocabulary (0 to 257)",
        ),
        (
            Chat(ID, messages=TURNS, stop_token_ids=(258,)),
            "invalid_request",
            "`stop_token_ids`: token id 258 is outside the vocabulary (0 to 257)",
        ),
        (
            Register(ID, prompt_ids=()),
            "invalid_request",
            "the prompt is empty: give at least one token",
        ),
        (
            Tokenize(ID, text="\ud800"),
            "invalid_request",
            "the text is not valid Unicode: it has lone surrogates",
        ),
        (
            Generate(ID, prompt="a", prefix_id=PrefixName("p-9")),
            "unknown_prefix",
            "no prefix `p-9` is registered; register it (again) first",
        ),
        (
            Release(ID, prefix_id=PrefixName("p-9")),
            "unknown_prefix",
            "no prefix `p-9` is registered",
        ),
    ],
)
def test_a_wrong_request_is_refused_and_forgotten(
    message: AnyRequest, code: str, sentence: str
) -> None:
    desk = Desk()
    expected = Error(id=ID, code=code, message=sentence, retryable=False)
    for _ in range(2):  # the id is free again
        assert desk.say(message) == [expected]
    assert desk.service.num_unfinished == 0
    assert desk.engine.requests == []


def test_a_model_without_a_chat_template() -> None:
    desk = Desk(template=None)
    sentence = "this model has no chat template; use `generate`"
    refusal = Error(id=ID, code="invalid_request", message=sentence, retryable=False)
    assert desk.say(Chat(ID, messages=TURNS)) == [refusal]


def test_what_the_engine_refuses_within_the_call() -> None:
    desk = Desk()
    desk.engine.refuses = ("queue_full", "256 requests are waiting", True, 500)
    refusal = Error(
        id=ID,
        code="queue_full",
        message="256 requests are waiting",
        retryable=True,
        retry_after_ms=500,
    )
    assert desk.say(Generate(ID, prompt="a")) == [refusal]
    assert desk.service.num_unfinished == 0


def test_a_failure_after_some_tokens() -> None:
    desk = Desk()
    desk.say(Generate(ID, prompt="a"))
    desk.engine.emit("x", 7)
    desk.engine.fail("acl", "acl.rt.memcpy failed")
    assert desk.take()[1:] == [
        Error(id=ID, code="acl", message="acl.rt.memcpy failed", retryable=True)
    ]
    assert desk.service.num_unfinished == 0


def test_an_id_names_one_unfinished_request_of_one_client() -> None:
    desk = Desk()
    desk.say(Generate(ID, prompt="a"))
    sentence = "`id` '1' names an unfinished request of this client"
    refusal = Error(id=ID, code="duplicate_id", message=sentence, retryable=False)
    for message in (Generate(ID, prompt="b"), Tokenize(ID, text="b"), Register(ID, text="b")):
        assert desk.say(message) == [refusal]
    assert desk.say(Generate(ID, prompt="c"), BOB) == []
    assert desk.service.num_unfinished == 2
    assert len(desk.engine.requests) == 2
    desk.engine.finish(request_id=desk.engine.requests[0].request_id)
    assert desk.sent[-1] == (ALICE, done())
    assert desk.say(Generate(ID, prompt="a")) == []


# --- cancelled, gone, slow ----------------------------------------------------------------------


def test_a_cancelled_answer_gets_its_own_end_and_the_cancel_its_ok() -> None:
    desk = Desk()
    desk.say(Generate(ID, prompt="a"))
    desk.engine.emit("x", 7)
    desk.take()
    replies = desk.say(Cancel(MessageId("2"), target=ID))
    assert replies == [done(index=1, finish_reason="cancelled"), Ok(MessageId("2"))]
    assert desk.engine.cancels == [(1, "client")]
    assert desk.say(Cancel(MessageId("3"), target=ID)) == [Ok(MessageId("3"))]
    assert desk.service.num_unfinished == 0


def test_nobody_cancels_the_request_of_another_client() -> None:
    desk = Desk()
    desk.say(Generate(ID, prompt="a"))
    assert desk.say(Cancel(MessageId("2"), target=ID), BOB) == [Ok(MessageId("2"))]
    assert desk.engine.cancels == []
    assert desk.service.num_unfinished == 1


def test_a_cancelled_registration_is_an_error() -> None:
    desk = Desk()
    desk.say(Register(ID, text="a"))
    error = Error(id=ID, code="cancelled", message="the request was cancelled", retryable=True)
    assert desk.say(Cancel(MessageId("2"), target=ID)) == [error, Ok(MessageId("2"))]


@pytest.mark.parametrize("reason", ["client_gone", "slow_reader"])
def test_all_requests_of_a_client_end_and_only_one_that_is_there_is_told(reason: str) -> None:
    desk = Desk()
    for name in "123":
        desk.say(Generate(MessageId(name), prompt="a"))
    desk.say(Generate(ID, prompt="b"), BOB)
    tell = {"client_gone": desk.service.on_client_gone, "slow_reader": desk.service.on_slow_reader}
    tell[reason](ALICE)
    tell[reason](ALICE)
    assert desk.engine.cancels == [(1, reason), (2, reason), (3, reason)]
    ends = [(client, reply.id, getattr(reply, "finish_reason", "")) for client, reply in desk.sent]
    expected = [(ALICE, MessageId(name), "slow_reader") for name in "123"]
    assert ends == (expected if reason == "slow_reader" else [])
    assert desk.service.num_unfinished == 1
    desk.take()
    desk.engine.emit("x", 7)
    assert [client for client, _ in desk.sent] == [BOB]


# --- prefixes -----------------------------------------------------------------------------------


def register(desk: Desk, text: str = "abcdefghi", client: ClientRef = ALICE) -> Registered:
    desk.say(Register(ID, text=text), client)
    desk.engine.finish("registered")
    (reply,) = desk.take()
    assert isinstance(reply, Registered)
    return reply


def test_a_registered_prefix_is_used_and_given_up() -> None:
    desk = Desk()
    reply = register(desk)
    assert (desk.request.kind, desk.request.prefix_id) == ("register", reply.prefix_id)
    assert (reply.num_tokens, reply.cached_tokens, reply.num_bytes) == (10, 8, 300)
    desk.say(Generate(ID, prompt="x", prefix_id=reply.prefix_id))
    assert desk.prompt == [256, *range(64, 73), 87]
    desk.engine.finish()
    desk.take()
    release = Release(ID, prefix_id=reply.prefix_id)
    assert desk.say(release) == [Released(ID, prefix_id=reply.prefix_id)]
    (again,) = desk.say(release)
    assert isinstance(again, Error)
    assert again.code == "unknown_prefix"
    (refused,) = desk.say(Generate(ID, prompt="x", prefix_id=reply.prefix_id))
    assert isinstance(refused, Error)
    assert refused.code == "unknown_prefix"
    assert desk.service.num_unfinished == 0


def test_equal_tokens_have_equal_names_everywhere() -> None:
    names = [register(Desk(), text).prefix_id for text in ("ab", "ab", "<s>ab", "abc")]
    assert names[0] == names[1] == names[2] == "p-af0bc9416e19e4091cb4288037bf9895"
    assert names[3] != names[0]


def test_registering_again_changes_nothing() -> None:
    desk = Desk()
    assert register(desk) == register(desk)


def test_a_failed_registration_leaves_no_name() -> None:
    desk = Desk()
    desk.say(Register(ID, text="ab"))
    name = PrefixName(str(desk.request.prefix_id))
    desk.engine.fail("capacity", "release some")
    (reply,) = desk.take()
    assert isinstance(reply, Error)
    (refused,) = desk.say(Generate(ID, prompt="x", prefix_id=name))
    assert isinstance(refused, Error)
    assert refused.code == "unknown_prefix"


@pytest.mark.parametrize("num_blocks", [0, 1, 3])
def test_a_registration_takes_the_blocks_that_hold_what_is_kept(num_blocks: int) -> None:
    desk = Desk()
    desk.say(Register(ID, text="a"))
    desk.engine.finish("registered", num_kept_blocks=num_blocks)
    (reply,) = desk.take()
    assert isinstance(reply, Registered)
    assert (reply.num_tokens, reply.num_bytes) == (10, num_blocks * 100)


# --- tenants ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "message", [Generate(ID, prompt="a"), Chat(ID, messages=TURNS), Register(ID, text="a")]
)
def test_a_request_is_of_the_tenant_of_its_socket(message: AnyRequest) -> None:
    desk = Desk()
    for client, tenant in ((ALICE, ""), (ADMIN, ""), (TEAM_ALICE, TEAM)):
        desk.say(message, client)
        assert desk.request.tenant == tenant
    assert desk.service.num_unfinished == 3  # one name, three clients


def test_a_prefix_is_known_to_its_tenant_only() -> None:
    desk = Desk()
    prefix_id = register(desk).prefix_id
    release = Release(ID, prefix_id=prefix_id)
    for message in (Generate(ID, prompt="x", prefix_id=prefix_id), release):
        (refused,) = desk.say(message, TEAM_ALICE)
        assert isinstance(refused, Error)
        assert refused.code == "unknown_prefix"
    desk.take()
    assert register(desk, client=TEAM_ALICE).prefix_id == prefix_id
    assert desk.say(release, TEAM_ALICE) == [Released(ID, prefix_id=prefix_id)]
    desk.say(Generate(ID, prompt="x", prefix_id=prefix_id))
    assert desk.prompt == [256, *range(64, 73), 87]


def test_only_an_operator_hears_who_has_registered_a_prefix() -> None:
    desk = Desk()
    prefix_id = register(desk, client=TEAM_ALICE).prefix_id
    none = f"no prefix `{prefix_id}` is registered"
    elsewhere = f"{none}; tenant `team-a` has one: --tenant team-a"
    release = Release(ID, prefix_id=prefix_id)
    unknown = Error(id=ID, code="unknown_prefix", message=none, retryable=False)
    for client, message in ((ALICE, none), (ADMIN, elsewhere)):
        assert desk.say(release, client) == [msgspec.structs.replace(unknown, message=message)]
    short = PrefixName(prefix_id[:10])
    (reply,) = desk.say(Release(ID, prefix_id=short), ADMIN)
    assert isinstance(reply, Error)
    assert reply.message == elsewhere.replace(prefix_id, short)
    assert desk.say(release, TEAM_ALICE) == [Released(ID, prefix_id=prefix_id)]
    assert desk.say(release, ADMIN) == [unknown]


def test_an_operator_releases_a_prefix_of_the_tenant_that_is_named() -> None:
    desk = Desk()
    prefix_id = register(desk, client=TEAM_ALICE).prefix_id
    assert register(desk).prefix_id == prefix_id
    release = Release(ID, prefix_id=prefix_id, tenant=TEAM)
    released = Released(ID, prefix_id=prefix_id)
    assert desk.say(release, ADMIN) == [released]
    (refused,) = desk.say(release, ADMIN)
    assert isinstance(refused, Error)
    assert refused.message == (
        f"no prefix `{prefix_id}` is registered; the default tenant has one: without --tenant"
    )
    assert desk.say(msgspec.structs.replace(release, tenant=""), ADMIN) == [released]
    (refused,) = desk.say(msgspec.structs.replace(release, tenant="team-z"), ADMIN)
    assert isinstance(refused, Error)
    assert (refused.code, refused.message) == (
        "invalid_request",
        "`tenant`: no tenant 'team-z' is configured",
    )


def test_an_operator_explains_with_the_prefixes_of_the_tenant_that_is_named() -> None:
    desk = Desk()
    prefix_id = register(desk, "ab", TEAM_ALICE).prefix_id
    question = Explain(ID, prompt="c", prefix_id=prefix_id, tenant=TEAM)
    (reply,) = desk.say(question, ADMIN)
    assert isinstance(reply, wire.Explained)
    assert desk.engine.asked == [("explain", TEAM, [256, 64, 65, 66])]
    (refused,) = desk.say(msgspec.structs.replace(question, tenant=""), ADMIN)
    assert isinstance(refused, Error)
    assert refused.code == "unknown_prefix"


# --- texts that are remembered ------------------------------------------------------------------


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("reason", ["stop", "length", "cancelled", "deadline"])
def test_the_ids_behind_an_answer_are_remembered_however_it_ends(
    reason: FinishReason, stream: bool
) -> None:
    desk = Desk()
    desk.say(Generate(ID, prompt="ab", stream=stream))
    desk.engine.emit("x", 7)
    desk.engine.emit("", 8, 9)
    desk.engine.finish(reason, "yz")
    assert desk.seen[DEFAULT_TENANT].remembered == [([256, 64, 65], [7, 8, 9])]
    assert desk.seen[TEAM].remembered == []


def test_an_answer_is_remembered_for_its_own_tenant() -> None:
    desk = Desk()
    desk.say(Generate(ID, prompt="ab"), TEAM_ALICE)
    desk.engine.emit("A", 32)
    desk.engine.finish("stop")
    assert desk.seen[TEAM].remembered == [([256, 64, 65], [32])]
    assert desk.seen[DEFAULT_TENANT].remembered == []


def test_what_a_vanished_client_was_told_is_remembered_too() -> None:
    desk = Desk()
    desk.say(Generate(ID, prompt="ab"))
    desk.engine.emit("x", 7)
    desk.service.on_client_gone(ALICE)
    assert desk.seen[DEFAULT_TENANT].remembered == [([256, 64, 65], [7])]


def test_what_is_no_answer_is_not_remembered() -> None:
    desk = Desk()
    register(desk)
    desk.say(Tokenize(ID, text="a"))
    desk.say(Explain(ID, prompt="a"), ADMIN)
    desk.say(Generate(ID, prompt="a"))
    desk.engine.emit("x", 7)
    desk.engine.fail("acl", "no")
    assert desk.seen[DEFAULT_TENANT].remembered == []
