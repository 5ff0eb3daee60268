"""The codec: encodings by the first byte, refusals with a sentence, and nothing but refusals."""

from __future__ import annotations

import contextlib
import json
import math
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ipc.codec import (
    Encoding,
    Limits,
    decode_reply,
    decode_request,
    encode,
    salvage_id,
    sniff,
)
from ipc.errors import MalformedMessage, ProtocolError
from ipc.messages import AnyRequest, MessageId, Ping, Stats, type_name

LIMITS = Limits()
GOLDEN = Path(__file__).parent.parent / "golden" / "wire"
FRAMES = [path.read_bytes() for path in sorted(GOLDEN.glob("*.json"))] + [
    bytes.fromhex(path.read_text()) for path in sorted(GOLDEN.glob("*.hex"))
]
PING = Ping(MessageId("1"))


def refusal(payload: bytes, limits: Limits = LIMITS) -> MalformedMessage:
    with pytest.raises(MalformedMessage) as caught:
        decode_request(payload, limits)
    return caught.value


def packed(**fields: Any) -> bytes:
    return msgspec.msgpack.encode(fields)


def in_json(**fields: Any) -> bytes:
    return json.dumps(fields).encode()


def test_the_first_byte_decides() -> None:
    by_byte = {bytes([byte]): sniff(bytes([byte])) for byte in range(256)}
    json_starts = {key for key, value in by_byte.items() if value is Encoding.JSON}
    msgpack_starts = {key for key, value in by_byte.items() if value is Encoding.MSGPACK}
    assert json_starts == {b"{", b" ", b"\t", b"\r", b"\n"}
    assert msgpack_starts == {bytes([byte]) for byte in (*range(0x80, 0x90), 0xDE, 0xDF)}
    assert sniff(b"") is None


@pytest.mark.parametrize("space", [b" ", b"\t", b"\r\n", b"\n  \t"])
def test_white_space_around_json_is_fine(space: bytes) -> None:
    payload = space + b'{"type":"ping","id":"1"}' + space
    assert decode_request(payload, LIMITS) == PING


@pytest.mark.parametrize("head", [b"\xde\x00\x02", b"\xdf\x00\x00\x00\x02"])
def test_wide_msgpack_maps_are_fine(head: bytes) -> None:
    payload = head + encode(PING, Encoding.MSGPACK)[1:]
    assert decode_request(payload, LIMITS) == PING


@pytest.mark.parametrize(
    ("payload", "code", "message_id", "sentence"),
    [
        (b"", "bad_encoding", None, "the payload is empty; expected a JSON object or a msgpack"),
        (b"[1]", "bad_encoding", None, "the first byte is 0x5b; expected a JSON object"),
        (b"\x93\x01\x02\x03", "bad_encoding", None, "the first byte is 0x93"),
        (b"\xef\xbb\xbf{}", "bad_encoding", None, "the first byte is 0xef"),
        (b'{"type":"ping","id":"q"', "bad_encoding", "q", "the JSON cannot be read: Input data"),
        (b'{"id":"q"} x', "bad_encoding", "q", "the JSON cannot be read: JSON is malformed"),
        (b'{"id":"\xff"}', "bad_encoding", None, "the JSON cannot be read: Invalid UTF-8"),
        (
            b'{"type":"tokenize","id":"q","text":"\xff"}',
            "bad_encoding",
            "q",
            "the JSON cannot be read: Invalid UTF-8",
        ),
        (
            packed(type="tokenize", id="q", text="Q").replace(b"Q", b"\xff"),
            "bad_encoding",
            "q",
            "the msgpack cannot be read: Invalid UTF-8",
        ),
        (
            b"\x82\xa2id\xa1q\xa4type\xa4pi",
            "bad_encoding",
            "q",
            "the msgpack cannot be read: Input data was truncated",
        ),
        (packed(type="ping", id="q") + b"\x00", "bad_encoding", "q", "the msgpack cannot be read"),
        (b"\x81\x01\x02", "bad_encoding", None, "the msgpack cannot be read: Expected `str`"),
        (
            b'{"id":"q","x":' + b"[" * 100_000,
            "bad_encoding",
            "q",
            "the JSON is nested too deeply",
        ),
        (
            b"\x82\xa2id\xa1q\xa1x" + b"\x91" * 100_000,
            "bad_encoding",
            "q",
            "the msgpack is nested too deeply",
        ),
        (in_json(id="q"), "invalid_request", "q", "`type`: missing"),
        (in_json(type="ping"), "invalid_request", None, "`id`: missing"),
        (in_json(type=5, id="q"), "invalid_request", "q", "`type`: expected text, got 5"),
        (
            in_json(type="pong", id="q"),
            "unknown_type",
            "q",
            "`type`: there is no request 'pong' in this protocol",
        ),
        (
            in_json(type="ping", id="q", v=2),
            "unsupported_version",
            "q",
            "`v`: this daemon speaks protocol version 1, got 2",
        ),
        (
            in_json(type="teleport", id="q", v=2, to="mars"),
            "unsupported_version",
            "q",
            "`v`: this daemon speaks protocol version 1, got 2",
        ),
        (
            packed(type="ping", id="q", v=msgspec.msgpack.Ext(1, b"x")),
            "unsupported_version",
            "q",
            "`v`: this daemon speaks protocol version 1, got binary data",
        ),
        (in_json(type="ping", id="q", v=1.0), "invalid_request", "q", "`v`: expected an integer"),
        (
            in_json(type="ping", id="q", vv=1),
            "invalid_request",
            "q",
            "`vv`: there is no such field in this message",
        ),
        (
            in_json(type="ping", id="a b"),
            "invalid_request",
            None,
            '`id`: expected visible ASCII characters without spaces, got "a b"',
        ),
        (
            in_json(type="ping", id="x" * 65),
            "invalid_request",
            None,
            "`id`: expected at most 64 characters, got 65",
        ),
        (packed(type="ping", id=b"q"), "invalid_request", None, "`id`: expected text, got binary"),
        (
            in_json(type="chat", id="q", messages=[]),
            "invalid_request",
            "q",
            "`messages`: expected at least 1 items, got 0",
        ),
        (
            in_json(type="chat", id="q", messages=[{"role": "bot", "content": ""}]),
            "invalid_request",
            "q",
            '`messages[0].role`: expected one of system, user, assistant, tool, got "bot"',
        ),
        (
            in_json(type="chat", id="q", messages=[{"role": "user"}]),
            "invalid_request",
            "q",
            "`messages[0].content`: missing",
        ),
        (in_json(type="cancel", id="q"), "invalid_request", "q", "`target`: missing"),
        (
            in_json(type="evict", id="q"),
            "invalid_request",
            "q",
            "exactly one of `max_blocks`, `max_bytes`, `min_bytes`, `all`, `digest`, `idle_s` and "
            "`age_s` must be given, got none",
        ),
        (
            in_json(type="evict", id="q", idle_s=0, all=True),
            "invalid_request",
            "q",
            "exactly one of `max_blocks`, `max_bytes`, `min_bytes`, `all`, `digest`, `idle_s` and "
            "`age_s` must be given, got `all` and `idle_s`",
        ),
        (
            in_json(type="pin", id="q", digest="5E884898"),
            "invalid_request",
            "q",
            '`digest`: expected lower-case hexadecimal digits, got "5E884898"',
        ),
        (
            in_json(type="list", id="q", sort="name"),
            "invalid_request",
            "q",
            '`sort`: expected one of used, age, size, hits, tokens, got "name"',
        ),
        (
            in_json(type="list", id="q", kept="all"),
            "invalid_request",
            "q",
            '`kept`: expected one of none, any, registered, pinned, leased, got "all"',
        ),
        (
            in_json(type="pin", id="q", digest="5e88489"),
            "invalid_request",
            "q",
            "`digest`: expected at least 8 characters, got 7",
        ),
        (
            in_json(type="explain", id="q", prompt="p", tenant="a b"),
            "invalid_request",
            "q",
            '`tenant`: expected visible ASCII characters without spaces, got "a b"',
        ),
    ],
)
def test_refusals(payload: bytes, code: str, message_id: str | None, sentence: str) -> None:
    error = refusal(payload)
    assert (error.code, error.message_id) == (code, message_id)
    assert error.message.startswith(sentence)


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"temperature": -1}, "`temperature`: expected a number ≥ 0, got -1"),
        ({"temperature": 101}, "`temperature`: expected a number ≤ 100, got 101"),
        ({"temperature": "hot"}, '`temperature`: expected a number, got "hot"'),
        ({"temperature": math.nan}, "`temperature`: expected a number ≥ 0, got nan"),
        ({"temperature": None}, "`temperature`: expected a number, got null"),
        ({"top_p": 0}, "`top_p`: expected a number > 0, got 0"),
        ({"max_tokens": 1.5}, "`max_tokens`: expected an integer or null, got 1.5"),
        ({"max_tokens": True}, "`max_tokens`: expected an integer or null, got true"),
        ({"stream": 1}, "`stream`: expected true or false, got 1"),
        ({"stop": "x"}, '`stop`: expected a list, got "x"'),
        ({"stop": ["x" * 300]}, "`stop[0]`: expected at most 256 characters, got 300"),
        ({"stop": ["a"] * 17}, "`stop`: expected at most 16 items, got 17"),
        ({"stop_token_ids": [1, -1]}, "`stop_token_ids[1]`: expected an integer ≥ 0, got -1"),
        ({"logit_bias": {"x": 1}}, "a key of `logit_bias`: expected a token id in decimal"),
        ({"logit_bias": {"1": 101}}, "`logit_bias[...]`: expected a number ≤ 100"),
        ({"logit_bias": [1]}, "`logit_bias`: expected an object, got a list of 1"),
        ({"prompt": {"x": 1}}, "`prompt`: expected text or null, got an object"),
        ({"prompt": 2**63}, "`prompt`: expected text or null, got 9223372036854775808"),
        ({"seed": "x" * 60}, f'`seed`: expected an integer or null, got "{"x" * 39}…"'),
        (
            {"prompt_ids": [1]},
            "exactly one of `prompt` and `prompt_ids` must be given, got `prompt` and `prompt_ids`",
        ),
    ],
)
def test_a_refusal_names_field_expectation_and_value(fields: dict[str, Any], sentence: str) -> None:
    error = refusal(packed(**({"type": "generate", "id": "q", "prompt": "p"} | fields)))
    assert (error.code, error.message_id, error.message) == ("invalid_request", "q", sentence)


def test_a_large_message_is_refused_without_decoding_it_again_for_the_value() -> None:
    payload = packed(type="generate", id="q", prompt="p" * 70_000, temperature=-1)
    assert refusal(payload).message == "`temperature`: expected a number ≥ 0"


def test_an_integer_too_long_to_print_is_refused_not_printed() -> None:
    payload = b'{"type":"ping","id":"q","v":' + b"9" * 4000 + b"}"
    assert refusal(payload).message == (
        "`v`: this daemon speaks protocol version 1, got an integer of more than 128 bits"
    )


@pytest.mark.parametrize("encoding", list(Encoding))
def test_the_size_limit_is_exact(encoding: Encoding) -> None:
    payload = encode(PING, encoding)
    size = len(payload)
    assert decode_request(payload, Limits(max_message_bytes=size)) == PING
    error = refusal(payload, Limits(max_message_bytes=size - 1))
    assert (error.code, error.message_id) == ("too_large", "1")
    assert error.message == f"the message has {size} bytes, the limit is {size - 1}"


def test_a_refusal_becomes_an_error_reply() -> None:
    reply = MalformedMessage("too_large", "no", MessageId("q")).as_reply()
    assert encode(reply, Encoding.JSON) == (
        b'{"type":"error","id":"q","code":"too_large","message":"no","retryable":false}'
    )


@pytest.mark.parametrize("length", [1, 31, 32, 64])
def test_an_id_near_the_beginning_is_found_in_what_cannot_be_read(length: int) -> None:
    name = "x" * length
    assert salvage_id(b'{ "id" :\n"' + name.encode() + b'", "prompt": "') == name
    assert salvage_id(packed(id=name)) == name
    assert salvage_id(packed(type="generate", id=name, prompt="p" * 300)[:200]) == name


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"\x82",
        b"{",
        b'{"id":""',
        b'{"id":"' + b"x" * 65 + b'"',
        b'{"id":"a b"',
        b'{"id":5',
        b'{"prompt":"' + b" " * 256 + b'","id":"q"}',
        b'{"prompt":"\\"id\\":\\"q\\"',
        packed(id="x" * 65),
        packed(id="a b"),
        packed(id="abc")[:-1],
        packed(id=5),
    ],
)
def test_no_id_is_made_up(payload: bytes) -> None:
    assert salvage_id(payload) is None


def test_replies_that_cannot_be_read_are_the_daemons_fault() -> None:
    for payload in (b"", b"x", b"{", b'{"type":"ping","id":"1"}', b'{"x":' + b"[" * 100_000):
        with pytest.raises(ProtocolError, match="the daemon's message is not readable"):
            decode_reply(payload)


def test_what_cannot_be_encoded_is_the_callers_error() -> None:
    with pytest.raises(TypeError):
        encode(Stats(MessageId("1"), stats={"x": object()}), Encoding.JSON)


# --- fuzzing ------------------------------------------------------------------------------------


#: On a loaded machine a slow example is no finding.
untimed = settings(deadline=None)


def decodes_or_is_refused(payload: bytes) -> None:
    """Nothing but a request or a refusal comes out, and both can be sent on."""
    refused: MalformedMessage | None = None
    try:
        request = decode_request(payload, LIMITS)
        for encoding in Encoding:
            assert decode_request(encode(request, encoding), LIMITS) == request
    except MalformedMessage as error:
        refused = error
    if refused is not None:
        reply = refused.as_reply()
        assert [decode_reply(encode(reply, encoding)) for encoding in Encoding] == [reply, reply]
    with contextlib.suppress(ProtocolError):
        decode_reply(payload)


@untimed
@given(st.binary(max_size=200))
def test_random_bytes(payload: bytes) -> None:
    decodes_or_is_refused(payload)


@untimed
@given(st.sampled_from([b"{", b" ", b"\x80", b"\x82", b"\x8f", b"\xde", b"\xdf"]), st.binary())
def test_random_bytes_that_look_right_at_first(head: bytes, rest: bytes) -> None:
    decodes_or_is_refused(head + rest)


@untimed
@given(st.sampled_from(FRAMES), st.data())
def test_mutated_frames(frame: bytes, data: st.DataObject) -> None:
    mutated = bytearray(frame)
    for _ in range(data.draw(st.integers(1, 4))):
        position = data.draw(st.integers(0, len(mutated) - 1))
        change = data.draw(st.sampled_from(["flip", "insert", "delete", "cut"]))
        if change == "flip":
            mutated[position] = data.draw(st.integers(0, 255))
        elif change == "insert":
            mutated[position:position] = data.draw(st.binary(min_size=1, max_size=8))
        elif change == "delete":
            del mutated[position : position + data.draw(st.integers(1, 8))]
        else:
            del mutated[position:]
        if not mutated:
            break
    decodes_or_is_refused(bytes(mutated))


ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=10,
)
FIELDS = st.sampled_from(
    [
        "id",
        "v",
        "prompt",
        "prompt_ids",
        "messages",
        "temperature",
        "stop",
        "logit_bias",
        "max_blocks",
        "all",
        "text",
        "target",
        "use_cache",
        "cache_priority",
        "digest",
        "ttl_s",
        "idle_s",
        "tenant",
        "limit",
        "offset",
    ]
)
TYPES = st.sampled_from([type_name(request) for request in AnyRequest.__args__])


@untimed
@given(TYPES | ANYTHING, st.dictionaries(FIELDS | st.text(), ANYTHING, max_size=6))
def test_well_formed_messages_with_any_content(kind: object, fields: dict[str, object]) -> None:
    message = {"type": kind} | fields
    decodes_or_is_refused(msgspec.msgpack.encode(message))
    decodes_or_is_refused(msgspec.json.encode(message))
