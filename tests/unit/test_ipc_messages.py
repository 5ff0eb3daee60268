"""The message types: limits at -1/0/+1, golden frames, and that PROTOCOL.md is complete."""

from __future__ import annotations

import inspect
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
    with pytest.raises(ValueError, match="`temperature` must be a finite number, got nan"):
        Generate(messages.MessageId("a"), prompt="p", temperature=math.nan)


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
    ],
)
def test_what_a_message_must_not_be(message: dict[str, Any]) -> None:
    assert not is_accepted({"id": "a"} | message)


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


def documented(message: type[msgspec.Struct]) -> dict[str, str]:
    """Field → meaning as a sentence, from the docstrings of a type and of its bases."""
    found = {}
    for cls in reversed(message.__mro__):
        docstring = inspect.cleandoc(cls.__doc__ or "")
        for name, text in re.findall(r"^    (\w+): (.+(?:\n {8}.+)*)", docstring, re.MULTILINE):
            meaning = " ".join(text.split())
            found[name] = meaning[0].upper() + meaning[1:].rstrip(".") + "."
    return found


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
        ("timing", messages.Timing),
        ("position", messages.Logprobs),
        ("candidate", messages.TopToken),
        ("entry", messages.Entry),
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
