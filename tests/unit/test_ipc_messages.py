"""The message types: limits at -1/0/+1, golden frames, and that PROTOCOL.md is complete."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import msgspec
import pytest

import ipc
from ipc import messages
from ipc.codec import Encoding, Limits, decode_reply, decode_request, encode
from ipc.errors import MalformedMessage
from ipc.messages import (
    ADMIN_REQUESTS,
    AnyReply,
    AnyRequest,
    Chat,
    ChatMessage,
    Generate,
    Ping,
    Request,
    type_name,
    without_stream,
)
from ipc.schemas import documented

GOLDEN = Path(__file__).parent.parent / "golden" / "wire"
PROTOCOL = (Path(ipc.__file__).parent / "PROTOCOL.md").read_text(encoding="utf-8")
REQUESTS: tuple[type[Request], ...] = AnyRequest.__args__
REPLIES: tuple[type[msgspec.Struct], ...] = AnyReply.__args__


def decode(message: dict[str, Any]) -> AnyRequest:
    return decode_request(msgspec.msgpack.encode(message), Limits())


def generate(**fields: Any) -> dict[str, Any]:
    return {"type": "generate", "id": "a", "prompt": "p"} | fields


def is_accepted(message: dict[str, Any]) -> bool:
    try:
        decode(message)
    except MalformedMessage as refusal:
        if refusal.code != "invalid_request":
            raise
        return False
    return True


@pytest.mark.parametrize(
    ("name", "good", "bad"),
    [
        ("max_tokens", [1, 1_048_576, None], [0, 1_048_577, 1.0, "1", True]),
        ("temperature", [0, 0.0, 100, 100.0], [-0.001, 100.001, None, "1"]),
        ("top_k", [0, 2**31 - 1], [-1, 2**31]),
        ("top_p", [5e-324, 1], [0, -0.1, 1.0000001]),
        ("min_p", [0, 1], [-0.1, 1.0000001]),
        ("seed", [0, 2**53 - 1, None], [-1, 2**53]),
        ("repetition_penalty", [5e-324, 100], [0, 100.1]),
        ("presence_penalty", [-2, 2], [-2.0000001, 2.0000001]),
        ("frequency_penalty", [-2, 2], [-2.0000001, 2.0000001]),
        ("logprobs", [0, 20, None], [-1, 21]),
        ("deadline_ms", [1, 86_400_000, None], [0, 86_400_001]),
        ("ignore_eos", [True, False], [0, 1, None]),
        ("stream", [True, False], ["true"]),
        ("use_cache", [True, False], [0, 1, None, "false"]),
        ("cache_priority", [0, 100], [-1, 101, 50.0, None, "50"]),
        ("credit", [1, 1_000_000, None], [0, -1, 1_000_001, 1.0, "1", True]),
        ("stop", [[], ["x"] * 16, ["x" * 256]], [["x"] * 17, [""], ["x" * 257], "x", [1]]),
        ("stop_token_ids", [[], [0] * 256, [2**31 - 1]], [[0] * 257, [-1], [2**31]]),
        ("prefix_id", ["x", "x" * 128, None], ["", "x" * 129, "a b", "a\n"]),
        ("id", ["x", "!", "~", "x" * 64], ["", "x" * 65, "a b", "a\n", "é", "\x7f", 1, None]),
        (
            "logit_bias",
            [{}, {"0": -100, "2147483647": 100.0}, {str(n): 0 for n in range(1024)}],
            [{"x": 1}, {"-1": 1}, {"01": 1}, {"1": 100.1}, {str(n): 0 for n in range(1025)}],
        ),
    ],
)
def test_a_field_is_accepted_up_to_its_limits_and_not_beyond(
    name: str, good: list[object], bad: list[object]
) -> None:
    assert [value for value in good if not is_accepted(generate(**{name: value}))] == []
    assert [value for value in bad if is_accepted(generate(**{name: value}))] == []


DIGESTS = ["01234567", "89abcdef" * 8]
BAD_DIGESTS = ["", "0123456", "0" * 65, "0123456G", "0123456A", "0x123456", "01234567\n", 12345678]
TENANTS = ["", "a", "~" * 64]
BAD_TENANTS = ["a" * 65, "a b", "é", "a\n", 1]
PERIODS = [5e-324, 1, 31_536_000]
BAD_PERIODS = [-1, -0.001, 31_536_000.1, math.inf, math.nan, "1", True]
COUNTS = [0, 2**53 - 1, None]
BAD_COUNTS = [-1, 2**53, 1.0, "1", True]
KEPT = ["none", "any", "registered", "pinned", "leased"]


@pytest.mark.parametrize(
    ("message", "name", "good", "bad"),
    [
        ({"type": "list"}, "limit", [1, 1000], [0, 1001, None]),
        ({"type": "list"}, "offset", [0, 2**31 - 1], [-1, 2**31, None, 1.5]),
        ({"type": "list"}, "tenant", [*TENANTS, None], BAD_TENANTS),
        ({"type": "list"}, "sort", ["used", "age", "size", "hits", "tokens"], ["", "Used", None]),
        ({"type": "list"}, "reverse", [True, False], [None, 0, "true"]),
        ({"type": "list"}, "min_age_s", [0, None, *PERIODS], BAD_PERIODS),
        ({"type": "list"}, "min_idle_s", [0, None, *PERIODS], BAD_PERIODS),
        ({"type": "list"}, "min_bytes", COUNTS, BAD_COUNTS),
        ({"type": "list"}, "min_hits", COUNTS, BAD_COUNTS),
        ({"type": "list"}, "max_hits", COUNTS, BAD_COUNTS),
        ({"type": "list"}, "kept", [*KEPT, None], ["", "all", True]),
        ({"type": "show"}, "digest", DIGESTS, [*BAD_DIGESTS, None]),
        ({"type": "show"}, "prefix_id", ["x", "x" * 128], ["", "x" * 129, "a b", None]),
        ({"type": "show", "digest": "0" * 8}, "tenant", TENANTS, [*BAD_TENANTS, None]),
        ({"type": "show", "digest": "0" * 8}, "with_text", [True, False], [None, 1]),
        ({"type": "evict"}, "max_bytes", [1, 2**53 - 1], [0, 2**53, None]),
        ({"type": "evict"}, "min_bytes", [1, 2**53 - 1], [0, 2**53, None]),
        ({"type": "evict"}, "age_s", [0, *PERIODS], [*BAD_PERIODS, None]),
        ({"type": "evict", "all": True}, "dry_run", [True, False], [None, 1]),
        ({"type": "evict"}, "max_blocks", [1, 2**31 - 1], [0, 2**31]),
        ({"type": "evict"}, "all", [True], [False, None, 1]),
        ({"type": "evict"}, "digest", DIGESTS, [*BAD_DIGESTS, None]),
        ({"type": "evict"}, "idle_s", [0, *PERIODS], [*BAD_PERIODS, None]),
        ({"type": "evict", "all": True}, "tenant", [*TENANTS, None], BAD_TENANTS),
        ({"type": "pin"}, "digest", DIGESTS, [*BAD_DIGESTS, None]),
        ({"type": "pin", "digest": "0" * 8}, "ttl_s", [*PERIODS, None], [0, *BAD_PERIODS]),
        ({"type": "pin", "digest": "0" * 8}, "tenant", TENANTS, [*BAD_TENANTS, None]),
        ({"type": "unpin"}, "digest", DIGESTS, [*BAD_DIGESTS, None]),
        ({"type": "unpin", "digest": "0" * 8}, "tenant", TENANTS, [*BAD_TENANTS, None]),
        ({"type": "explain"}, "prompt", ["", "p"], [None, 1]),
        ({"type": "explain"}, "prompt_ids", [[], [0]], [None, [-1], "1"]),
        ({"type": "explain", "prompt": "p"}, "tenant", TENANTS, [*BAD_TENANTS, None]),
        ({"type": "explain", "prompt": "p"}, "prefix_id", ["x", None], ["", "x" * 129, "a b"]),
        ({"type": "verify"}, "digest", [*DIGESTS, None], BAD_DIGESTS),
        ({"type": "verify"}, "first_block", [0, 2**31 - 1], [-1, 2**31, None, 1.5]),
        ({"type": "verify"}, "tenant", [*TENANTS, None], BAD_TENANTS),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_a_field_of_an_operator_is_accepted_up_to_its_limits_and_not_beyond(
    message: dict[str, Any], name: str, good: list[object], bad: list[object]
) -> None:
    message = {"id": "a"} | message
    assert [value for value in good if not is_accepted(message | {name: value})] == []
    assert [value for value in bad if is_accepted(message | {name: value})] == []


@pytest.mark.parametrize(
    ("message", "name", "good", "bad"),
    [
        ({"type": "open"}, "lease_ms", [1000, 3_600_000], [999, 3_600_001, None, 1000.0]),
        ({"type": "credit", "target": "t"}, "credit", [1, 1_000_000], [0, 1_000_001, None, 1.0]),
        ({"type": "credit", "credit": 1}, "target", ["x" * 64], ["", "x" * 65, None]),
        ({"type": "cancel"}, "target", ["x" * 64], ["", "x" * 65, None]),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_a_field_of_a_session_is_accepted_up_to_its_limits_and_not_beyond(
    message: dict[str, Any], name: str, good: list[object], bad: list[object]
) -> None:
    message = {"id": "a"} | message
    assert [value for value in good if not is_accepted(message | {name: value})] == []
    assert [value for value in bad if is_accepted(message | {name: value})] == []


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize(
    "name",
    [
        "temperature",
        "top_p",
        "min_p",
        "repetition_penalty",
        "presence_penalty",
        "frequency_penalty",
    ],
)
def test_numbers_are_finite(name: str, value: float) -> None:
    assert not is_accepted(generate(**{name: value}))
    assert not is_accepted(generate(logit_bias={"1": value}))


def test_a_nan_cannot_be_put_into_a_request_by_its_maker_either() -> None:
    message_id = messages.MessageId("a")
    with pytest.raises(ValueError, match="`temperature` must be a finite number, got nan"):
        Generate(message_id, prompt="p", temperature=math.nan)
    with pytest.raises(ValueError, match="`ttl_s` must be a finite number, got nan"):
        messages.Pin(message_id, digest="0" * 8, ttl_s=math.nan)
    with pytest.raises(ValueError, match="`idle_s` must be a finite number, got inf"):
        messages.Evict(message_id, idle_s=math.inf)


@pytest.mark.parametrize("num_ids", [0, 1, 1_048_576])
def test_prompts_may_be_token_ids(num_ids: int) -> None:
    request = decode({"type": "generate", "id": "a", "prompt_ids": [7] * num_ids})
    assert isinstance(request, Generate)
    assert request.prompt_ids == (7,) * num_ids
    assert request.prompt is None


@pytest.mark.parametrize(
    "message",
    [
        {"type": "generate", "prompt_ids": [7] * 1_048_577},
        {"type": "generate", "prompt_ids": [-1]},
        {"type": "generate", "prompt_ids": [2**31]},
        {"type": "generate", "prompt_ids": [1.0]},
        {"type": "generate"},
        {"type": "generate", "prompt": "p", "prompt_ids": [1]},
        {"type": "chat"},
        {"type": "chat", "messages": []},
        {"type": "chat", "messages": [{"role": "user", "content": ""}] * 4097},
        {"type": "chat", "messages": [{"role": "robot", "content": ""}]},
        {"type": "chat", "messages": [{"role": "user", "content": "", "name": "x"}]},
        {"type": "chat", "messages": [{"role": "user", "content": ""}], "prompt": "p"},
        {"type": "cancel"},
        {"type": "cancel", "target": ""},
        {"type": "ping", "prompt": "p"},
        {"type": "tokenize"},
        {"type": "tokenize", "text": "", "messages": [{"role": "user", "content": ""}]},
        {"type": "register"},
        {"type": "register", "text": "", "prompt_ids": []},
        {"type": "release"},
        {"type": "list", "limit": 0},
        {"type": "list", "limit": 1001},
        {"type": "evict"},
        {"type": "evict", "max_blocks": 0},
        {"type": "evict", "max_blocks": 1, "all": True},
        {"type": "evict", "idle_s": 0, "digest": "0" * 8},
        {"type": "evict", "tenant": "a"},
        {"type": "evict", "max_bytes": 1, "age_s": 1},
        {"type": "evict", "max_bytes": 1, "min_bytes": 1},
        {"type": "show"},
        {"type": "show", "digest": "0" * 8, "prefix_id": "p-1"},
        {"type": "open"},
        {"type": "close", "lease_ms": 1000},
        {"type": "credit", "target": "t"},
        {"type": "drain", "tenant": ""},
        {"type": "resume", "tenant": ""},
        {"type": "reload", "path": "rtcached.toml"},
        {"type": "config", "path": "log"},
        {"type": "pin"},
        {"type": "pin", "ttl_s": 1},
        {"type": "unpin"},
        {"type": "unpin", "digest": "0" * 8, "ttl_s": 1},
        {"type": "explain"},
        {"type": "explain", "prompt": "p", "prompt_ids": [1]},
        {"type": "explain", "messages": [{"role": "user", "content": ""}], "prefix_id": "p-1"},
        {"type": "explain", "prompt": "p", "max_tokens": 1},
        {"type": "verify", "max_blocks": 1},
    ],
)
def test_what_a_message_must_not_be(message: dict[str, Any]) -> None:
    assert not is_accepted({"id": "a"} | message)


#: What other servers let a client choose: whose entries it sees, or what enters their key.
CHOICES = ["tenant", "salt", "cache_salt", "extra_key", "namespace", "adapter", "lora", "kv_dtype"]
#: What a user's message has for administrators alone: a server refuses it from others.
FOR_ADMINS = {messages.Release: "tenant"}


@pytest.mark.parametrize("name", CHOICES)
@pytest.mark.parametrize(
    "request_type", [request for request in REQUESTS if request not in ADMIN_REQUESTS]
)
def test_no_request_of_a_user_names_a_tenant_or_alters_the_key(
    request_type: type[Request], name: str
) -> None:
    path = GOLDEN / f"request.{type_name(request_type)}.1.json"
    message = json.loads(path.read_bytes())
    assert is_accepted(message)
    choices = set(CHOICES) - {FOR_ADMINS.get(request_type)}
    assert not is_accepted(message | {name: "a"}) or name not in choices
    assert not choices & set(request_type.__struct_fields__)


def test_the_requests_that_name_a_tenant_are_those_of_administrators() -> None:
    named = {request for request in REQUESTS if "tenant" in request.__struct_fields__}
    assert named == {
        messages.ListEntries,
        messages.Show,
        messages.Evict,
        messages.Pin,
        messages.Unpin,
        messages.Explain,
        messages.Verify,
        *FOR_ADMINS,
    }
    assert named < {*ADMIN_REQUESTS, *FOR_ADMINS}


def test_the_defaults_change_nothing() -> None:
    request = decode(generate())
    assert isinstance(request, Generate)
    assert (request.temperature, request.top_k, request.top_p, request.min_p) == (1.0, 0, 1.0, 0.0)
    assert (request.repetition_penalty, request.presence_penalty) == (1.0, 0.0)
    assert (request.max_tokens, request.seed, request.deadline_ms) == (None, None, None)
    assert (request.stop, request.stop_token_ids, request.logit_bias) == ((), (), {})
    assert (request.stream, request.ignore_eos, request.logprobs, request.v) == (
        True,
        False,
        None,
        1,
    )
    assert (request.use_cache, request.cache_priority) == (True, 50)


def test_without_stream_changes_only_what_streams() -> None:
    message_id = messages.MessageId("a")
    ping = Ping(message_id)
    chat = Chat(message_id, messages=(ChatMessage("user", "x"),), top_k=3)
    assert without_stream(ping) is ping
    assert without_stream(chat) == Chat(
        message_id, messages=(ChatMessage("user", "x"),), top_k=3, stream=False
    )
    assert without_stream(without_stream(chat)) == without_stream(chat)


def test_parts_of_messages_have_no_type_word() -> None:
    assert type_name(ping := Ping(messages.MessageId("a"))) == "ping", ping
    with pytest.raises(TypeError, match="is a part of messages"):
        type_name(ChatMessage)


# --- golden frames ------------------------------------------------------------------------------


def golden(kind: str) -> list[Path]:
    return sorted(GOLDEN.glob(f"{kind}.*.json"))


def golden_pair(path: Path) -> tuple[bytes, bytes]:
    """The same message in JSON and in msgpack."""
    return path.read_bytes(), bytes.fromhex(path.with_suffix(".msgpack.hex").read_text())


@pytest.mark.parametrize("path", golden("request"), ids=lambda path: path.stem)
def test_golden_requests(path: Path) -> None:
    as_json, as_msgpack = golden_pair(path)
    request = decode_request(as_json, Limits())
    assert decode_request(as_msgpack, Limits()) == request
    assert encode(request, Encoding.JSON) == as_json
    assert encode(request, Encoding.MSGPACK) == as_msgpack


@pytest.mark.parametrize("path", golden("reply"), ids=lambda path: path.stem)
def test_golden_replies(path: Path) -> None:
    as_json, as_msgpack = golden_pair(path)
    reply = decode_reply(as_json)
    assert decode_reply(as_msgpack) == reply
    assert encode(reply, Encoding.JSON) == as_json
    assert encode(reply, Encoding.MSGPACK) == as_msgpack


def test_every_message_has_a_golden_frame() -> None:
    assert {path.name.split(".")[1] for path in golden("request")} == set(map(type_name, REQUESTS))
    assert {path.name.split(".")[1] for path in golden("reply")} == set(map(type_name, REPLIES))


def test_two_frames_byte_for_byte() -> None:
    ping = Ping(messages.MessageId("1"))
    assert encode(ping, Encoding.JSON) == b'{"type":"ping","id":"1"}'
    assert encode(ping, Encoding.MSGPACK).hex() == "82a474797065a470696e67a26964a131"


def test_replies_may_gain_fields() -> None:
    newer = {"type": "pong", "id": "1", "version": "9", "uptime_s": 1, "mood": "good"}
    assert decode_reply(json.dumps(newer).encode()) == messages.Pong(
        messages.MessageId("1"), version="9", uptime_s=1.0
    )


def test_replies_of_a_daemon_without_the_newer_fields_are_read() -> None:
    done = json.loads((GOLDEN / "reply.done.1.json").read_bytes())
    del done["cache"]
    reply = decode_reply(json.dumps(done).encode())
    assert isinstance(reply, messages.Done)
    assert reply.cache is None
    entry = messages.Entry(
        digest="d",
        num_tokens=1,
        num_blocks=1,
        num_bytes=1,
        hits=0,
        age_s=0.0,
        idle_s=0.0,
        in_use=False,
    )
    assert not {"tenant", "kept", "expires_in_s", "priority"} & msgspec.to_builtins(entry).keys()
    assert (entry.tenant, entry.kept, entry.expires_in_s, entry.priority) == ("", "", None, 50)


def test_a_reason_that_a_newer_daemon_gives_is_read() -> None:
    newer = {"type": "explained", "id": "1", "prompt_tokens": 1, "cached_tokens": 0}
    reply = decode_reply(json.dumps(newer | {"cache": {"reason": "moon"}}).encode())
    assert isinstance(reply, messages.Explained)
    assert reply.cache == messages.CacheReport("moon")
    done = json.loads((GOLDEN / "reply.done.1.json").read_bytes()) | {"finish_reason": "bored"}
    reply = decode_reply(json.dumps(done).encode())
    assert isinstance(reply, messages.Done)
    assert reply.finish_reason == "bored"


# --- PROTOCOL.md --------------------------------------------------------------------------------


def chapter(title: str) -> str:
    """The text from `## title` to the next heading of that level."""
    found = re.search(rf"^## {title}\n(.*?)(?=^## |\Z)", PROTOCOL, re.DOTALL | re.MULTILINE)
    assert found is not None, title
    return found[1]


def section(text: str, title: str) -> str:
    found = re.search(
        rf"^### {re.escape(title)}\n(.*?)(?=^### |\Z)", text, re.DOTALL | re.MULTILINE
    )
    assert found is not None, title
    return found[1]


def described(text: str) -> dict[str, tuple[str, str]]:
    """Field → (default, meaning), from the table in a section."""
    rows = re.findall(r"^\| `(\w+)` \| [^|]+ \| `?([^|`]*)`? \| (.+) \|$", text, re.MULTILINE)
    return {name: (default, meaning) for name, default, meaning in rows}


def declared(message: type[msgspec.Struct]) -> dict[str, tuple[str, str]]:
    """Field → (default, meaning), from the type and its docstring."""
    meanings = documented(message)
    return {
        field.name: (default_word(field), meanings[field.name])
        for field in msgspec.structs.fields(message)
    }


def default_word(field: msgspec.structs.FieldInfo) -> str:
    if field.required:
        return "required"
    value = field.default
    if value is msgspec.NODEFAULT:
        value = field.default_factory()
    return "absent" if value is None else json.dumps(value)


def examples(text: str) -> list[bytes]:
    return [found.encode() for found in re.findall(r"```json\n(.*?)\n```", text, re.DOTALL)]


def test_the_protocol_page_describes_every_request_with_all_fields() -> None:
    texts = {True: chapter("Requests of administrators"), False: chapter("Requests")}
    common = described(section(chapter("Requests"), "Common fields"))
    answer = described(section(chapter("Requests"), "Answer fields"))
    assert common == declared(Request)
    assert common | answer == declared(messages.AnswerRequest)
    for request in REQUESTS:
        text = section(texts[request in ADMIN_REQUESTS], f"`{type_name(request)}`")
        inherited = common | (answer if issubclass(request, messages.AnswerRequest) else {})
        assert inherited | described(text) == declared(request)


def test_the_protocol_page_describes_every_reply_with_all_fields() -> None:
    for reply in REPLIES:
        text = section(chapter("Replies"), f"`{type_name(reply)}`")
        inherited = {} if reply is messages.Error else declared(messages.Reply)
        assert inherited | described(text) == declared(reply)


@pytest.mark.parametrize(
    ("title", "part"),
    [
        ("turn", messages.ChatMessage),
        ("usage", messages.Usage),
        ("cache report", messages.CacheReport),
        ("timing", messages.Timing),
        ("position", messages.Logprobs),
        ("candidate", messages.TopToken),
        ("entry", messages.Entry),
        ("block", messages.BlockEntry),
        ("option", messages.ConfigOption),
    ],
)
def test_the_protocol_page_describes_every_part(title: str, part: type[msgspec.Struct]) -> None:
    assert described(section(chapter("Parts of messages"), title)) == declared(part)


def test_every_example_on_the_protocol_page_decodes_and_is_a_golden_frame() -> None:
    requests = examples(chapter("Requests")) + examples(chapter("Requests of administrators"))
    replies = examples(chapter("Replies"))
    assert len(requests) + len(replies) == len(examples(PROTOCOL))
    shown_requests = {encode(decode_request(text, Limits()), Encoding.JSON) for text in requests}
    shown_replies = {encode(decode_reply(text), Encoding.JSON) for text in replies}
    assert shown_requests == {path.read_bytes() for path in golden("request")}
    assert shown_replies == {path.read_bytes() for path in golden("reply")}


def test_the_protocol_page_lists_every_code_this_package_sends() -> None:
    sources = [path.read_text() for path in Path(ipc.__file__).parent.glob("*.py")]
    sent = {
        code
        for source in sources
        for code in re.findall(r'MalformedMessage\(\s*"(\w+)"|code="(\w+)"', source)
        for code in code
        if code
    }
    assert sent == {
        "bad_frames",
        "bad_encoding",
        "too_large",
        "unsupported_version",
        "unknown_type",
        "invalid_request",
        "forbidden",
        "internal",
    }
    assert sent <= set(re.findall(r"`(\w+)`", chapter("Error codes")))
