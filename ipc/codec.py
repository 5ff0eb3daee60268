"""Bytes to messages and back: msgpack or JSON, recognised by the first byte. Pure.

Whatever bytes come in, `decode_request` returns a valid request or raises `MalformedMessage` with
a sentence for the client; it raises nothing else.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import Enum

import msgspec

from ipc.errors import MalformedMessage, ProtocolError
from ipc.messages import (
    ID_PATTERN,
    MAX_ID_CHARS,
    PROTOCOL_VERSION,
    AnyReply,
    AnyRequest,
    MessageId,
)
from ipc.sentences import explain, show


class Encoding(str, Enum):
    """How a message is written. A daemon answers in the encoding it was asked in."""

    MSGPACK = "msgpack"
    JSON = "json"


@dataclass(frozen=True, slots=True)
class Limits:
    """What one message may cost.

    Attributes:
        max_message_bytes: a larger one is refused with an error reply, unread [bytes].
        max_wire_bytes: libzmq drops the connection of a peer that sends a larger frame [bytes].
        max_frames: payload frames of a message, the delimiter and what is before it included.
    """

    max_message_bytes: int = 4 * 1024 * 1024
    max_wire_bytes: int = 64 * 1024 * 1024
    max_frames: int = 3


class _Envelope(msgspec.Struct):
    """The fields every request has, read from a message that is otherwise refused."""

    type: object = None
    id: object = None
    v: object = PROTOCOL_VERSION


_encoders = {
    Encoding.MSGPACK: msgspec.msgpack.Encoder().encode,
    Encoding.JSON: msgspec.json.Encoder().encode,
}
_request_decoders = {
    Encoding.MSGPACK: msgspec.msgpack.Decoder(AnyRequest).decode,
    Encoding.JSON: msgspec.json.Decoder(AnyRequest).decode,
}
_reply_decoders = {
    Encoding.MSGPACK: msgspec.msgpack.Decoder(AnyReply).decode,
    Encoding.JSON: msgspec.json.Decoder(AnyReply).decode,
}
_envelope_decoders = {
    Encoding.MSGPACK: msgspec.msgpack.Decoder(_Envelope).decode,
    Encoding.JSON: msgspec.json.Decoder(_Envelope).decode,
}
_untyped_decoders = {
    Encoding.MSGPACK: msgspec.msgpack.Decoder().decode,
    Encoding.JSON: msgspec.json.Decoder().decode,
}

#: First bytes of a JSON object, or of the white space before one.
_JSON_STARTS = frozenset(b"{ \t\r\n")
#: First bytes of a msgpack map: fixmap, map 16, map 32.
_MSGPACK_STARTS = frozenset([*range(0x80, 0x90), 0xDE, 0xDF])

#: Where `salvage_id` looks [bytes].
_SALVAGE_BYTES = 256
_JSON_ID = re.compile(rb'"id"[ \t\r\n]*:[ \t\r\n]*"([!#-\[\]-~]{1,64})"')
_MSGPACK_ID = re.compile(rb"\xa2id(?:([\xa1-\xbf])|\xd9([\x20-\x40]))", re.DOTALL)

#: Messages above this size are refused without showing the value at fault [bytes].
_MAX_SHOWN_BYTES = 65536

#: What msgspec's decoders raise on bytes they cannot read.
_DECODE_ERRORS = (msgspec.DecodeError, RecursionError, UnicodeDecodeError)


def sniff(payload: bytes) -> Encoding | None:
    """The encoding a payload seems to be in, by its first byte; None if it is neither."""
    if not payload:
        return None
    if payload[0] in _JSON_STARTS:
        return Encoding.JSON
    return Encoding.MSGPACK if payload[0] in _MSGPACK_STARTS else None


def encode(message: AnyRequest | AnyReply, encoding: Encoding) -> bytes:
    """A message as bytes.

    Raises:
        TypeError: a field (of `stats`) holds what neither encoding can carry.
        UnicodeEncodeError: a text holds half a surrogate pair.
    """
    return _encoders[encoding](message)


def decode_request(payload: bytes, limits: Limits) -> AnyRequest:
    """A client's message, checked against every limit that one message shows.

    Raises:
        MalformedMessage: with one of the codes `too_large`, `bad_encoding`,
            `unsupported_version`, `unknown_type`, `invalid_request`.
    """
    encoding = sniff(payload)
    if len(payload) > limits.max_message_bytes:
        raise MalformedMessage(
            "too_large",
            f"the message has {len(payload)} bytes, the limit is {limits.max_message_bytes}",
            salvage_id(payload),
        )
    if encoding is None:
        raise MalformedMessage("bad_encoding", _not_recognised(payload))
    try:
        request = _request_decoders[encoding](payload)
    except _DECODE_ERRORS as error:
        raise _refusal(payload, encoding, error) from error
    if request.v != PROTOCOL_VERSION:
        raise _wrong_version(request.v, request.id)
    return request


def decode_reply(payload: bytes) -> AnyReply:
    """A daemon's message.

    Raises:
        ProtocolError: it is not one.
    """
    encoding = sniff(payload)
    if encoding is None:
        raise ProtocolError(f"the daemon's message is not readable: {_not_recognised(payload)}")
    try:
        return _reply_decoders[encoding](payload)
    except _DECODE_ERRORS as error:
        raise ProtocolError(f"the daemon's message is not readable: {error}") from error


def salvage_id(payload: bytes) -> MessageId | None:
    """The id of a message that cannot be decoded, if it stands near the beginning.

    Best effort, so that a client knows which of its calls failed: a message that is too large or
    cut off is answered with its id when the field is written early, as every encoder that keeps
    the order of fields does.
    """
    head = payload[:_SALVAGE_BYTES]
    if sniff(payload) is Encoding.JSON:
        match = _JSON_ID.search(head)
        return MessageId(match[1].decode("ascii")) if match else None
    match = _MSGPACK_ID.search(head)
    if match is None:
        return None
    length = match[1][0] - 0xA0 if match[1] else match[2][0]
    raw = head[match.end() : match.end() + length]
    return _valid_id(raw.decode("latin-1")) if len(raw) == length else None


def _refusal(payload: bytes, encoding: Encoding, error: Exception) -> MalformedMessage:
    """Why the typed decoder did not accept `payload`."""
    try:
        envelope = _envelope_decoders[encoding](payload)
    except _DECODE_ERRORS as broken:
        return MalformedMessage("bad_encoding", _broken(encoding, broken), salvage_id(payload))
    message_id = _valid_id(envelope.id)
    if envelope.v != PROTOCOL_VERSION:
        return _wrong_version(envelope.v, message_id)
    if isinstance(error, UnicodeDecodeError) or str(error).startswith("Invalid UTF-8"):
        # In a value that the envelope leaves out.
        return MalformedMessage("bad_encoding", _broken(encoding, error), message_id)
    if str(error).endswith("- at `$.type`") and isinstance(envelope.type, str):
        text = f"`type`: there is no request {envelope.type[:MAX_ID_CHARS]!r} in this protocol"
        return MalformedMessage("unknown_type", text, message_id)
    content = None
    if len(payload) <= _MAX_SHOWN_BYTES:
        content = _untyped(payload, encoding)
    return MalformedMessage("invalid_request", explain(str(error), content), message_id)


def _untyped(payload: bytes, encoding: Encoding) -> object:
    """The payload without a type; None if it holds what only the untyped decoder refuses."""
    try:
        return _untyped_decoders[encoding](payload)
    except (*_DECODE_ERRORS, TypeError):  # TypeError: a map key that cannot be hashed
        return None


def _valid_id(value: object) -> MessageId | None:
    if isinstance(value, str) and len(value) <= MAX_ID_CHARS and re.match(ID_PATTERN, value):
        return MessageId(value)
    return None


def _wrong_version(version: object, message_id: MessageId | None) -> MalformedMessage:
    return MalformedMessage(
        "unsupported_version",
        f"`v`: this daemon speaks protocol version {PROTOCOL_VERSION}, got {show(version)}",
        message_id,
    )


def _not_recognised(payload: bytes) -> str:
    if not payload:
        return "the payload is empty; expected a JSON object or a msgpack map"
    return f"the first byte is 0x{payload[0]:02x}; expected a JSON object or a msgpack map"


def _broken(encoding: Encoding, error: Exception) -> str:
    name = "JSON" if encoding is Encoding.JSON else "msgpack"
    if isinstance(error, RecursionError):
        return f"the {name} is nested too deeply"
    if isinstance(error, UnicodeDecodeError):  # what older versions of msgspec raise
        return f"the {name} cannot be read: Invalid UTF-8"
    return f"the {name} cannot be read: {str(error)[:200]}"
