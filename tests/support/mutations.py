"""Recorded frames, spoilt: what a byte-mutating fuzzer does to them.

Pure: all chance comes from the caller's generator.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from pathlib import Path

GOLDEN = Path(__file__).parents[1] / "golden" / "wire"

#: Changes one frame; may draw parts of another one, or of the words of the protocol.
Mutation = Callable[[random.Random, bytes, "Corpus"], bytes]

#: What parsers stumble over: numbers at the edge of a type, heads of values, half characters.
_STUMBLING_BLOCKS = (
    *(b"null", b"true", b"NaN", b"-Infinity", b"1e999", b"-0", b"0.0", b"1.0", b"-1"),
    *(b"9" * 30, b"9" * 5000, b"18446744073709551616", b"9007199254740993", b"2147483648"),
    *(b'"\\ud800"', b'"\\u0000"', b"\xff", b"\xc0\x80", b"\xed\xa0\x80", b"\xf4\x90\x80\x80"),
    *(b"{", b"}", b"[", b"]", b'"', b",", b":", b" ", b"\n", b"\xef\xbb\xbf", b"\\", b"/**/"),
    *(b"\xc0", b"\xc1", b"\xc2", b"\xc3", b"\xcb\x7f\xf8" + b"\0" * 6, b"\xcf" + b"\xff" * 8),
    *(b"\xd3\x80" + b"\0" * 7, b"\xd4\x01x", b"\xc7\xff\x01", b"\xd6\xff\0\0\0\0"),
)
#: Heads of msgpack's values with a length that promises more than there is.
_PROMISES = (
    *(b"\xdb", b"\xdd", b"\xdf", b"\xc6", b"\xc9"),  # 32 bits of length
    *(b"\xda", b"\xdc", b"\xde", b"\xc5", b"\xc8"),  # 16 bits
    *(b"\xd9", b"\xc4", b"\xc7"),  # 8 bits
)
_EDGES = (0x00, 0x01, 0x7F, 0x80, 0x8F, 0x90, 0x9F, 0xA0, 0xBF, 0xFE, 0xFF)


class Corpus:
    """The recorded frames, and the words that occur in them.

    Attributes:
        requests, replies: in both encodings.
    """

    def __init__(self, directory: Path = GOLDEN) -> None:
        self.requests = _recorded(directory, "request.")
        self.replies = _recorded(directory, "reply.")
        self.frames = (*self.requests, *self.replies)
        names = {path.name.split(".")[1] for path in directory.glob("re*.json")}
        self.type_words = tuple(sorted(name.encode() for name in names))


def _recorded(directory: Path, prefix: str) -> tuple[bytes, ...]:
    as_json = [path.read_bytes().strip() for path in sorted(directory.glob(f"{prefix}*.json"))]
    packed = [bytes.fromhex(path.read_text()) for path in sorted(directory.glob(f"{prefix}*.hex"))]
    return (*as_json, *packed)


def _place(chance: random.Random, frame: bytes) -> int:
    return chance.randrange(len(frame) + 1)


def _span(chance: random.Random, frame: bytes, longest: int = 16) -> slice:
    begin = _place(chance, frame)
    return slice(begin, begin + chance.randint(1, longest))


def flip_bits(chance: random.Random, frame: bytes, corpus: Corpus) -> bytes:
    """One to four bits are the other way round."""
    changed = bytearray(frame)
    for _ in range(chance.randint(1, 4) if changed else 0):
        changed[chance.randrange(len(changed))] ^= 1 << chance.randrange(8)
    return bytes(changed)


def set_byte(chance: random.Random, frame: bytes, corpus: Corpus) -> bytes:
    """One byte, often a length, has a value at an edge."""
    at = _place(chance, frame)
    return frame[:at] + bytes([chance.choice(_EDGES)]) + frame[at + 1 :]


def insert(chance: random.Random, frame: bytes, corpus: Corpus) -> bytes:
    """Something that parsers stumble over stands somewhere."""
    at = _place(chance, frame)
    return frame[:at] + chance.choice(_STUMBLING_BLOCKS) + frame[at:]


def replace(chance: random.Random, frame: bytes, corpus: Corpus) -> bytes:
    """The same, in the place of what was there."""
    span = _span(chance, frame)
    return frame[: span.start] + chance.choice(_STUMBLING_BLOCKS) + frame[span.stop :]


def delete(chance: random.Random, frame: bytes, corpus: Corpus) -> bytes:
    """Some bytes are missing."""
    span = _span(chance, frame)
    return frame[: span.start] + frame[span.stop :]


def cut(chance: random.Random, frame: bytes, corpus: Corpus) -> bytes:
    """The end is missing."""
    return frame[: _place(chance, frame)]


def repeat(chance: random.Random, frame: bytes, corpus: Corpus) -> bytes:
    """A part, or all of it, stands there several times."""
    span = _span(chance, frame, longest=len(frame) + 1)
    return frame[: span.start] + frame[span] * chance.randint(2, 20) + frame[span.stop :]


def splice(chance: random.Random, frame: bytes, corpus: Corpus) -> bytes:
    """The beginning of one frame and the end of another, of whatever encoding."""
    other = chance.choice(corpus.frames)
    return frame[: _place(chance, frame)] + other[_place(chance, other) :]


def promise(chance: random.Random, frame: bytes, corpus: Corpus) -> bytes:
    """A length field that promises more bytes, items or pairs than there are."""
    at = _place(chance, frame)
    length = chance.choice((b"\xff" * 4, b"\x7f\xff\xff\xff", b"\x00\x00\x00\x00", b"\x40\0\0\0"))
    return frame[:at] + chance.choice(_PROMISES) + length + frame[at + 5 :]


def nest(chance: random.Random, frame: bytes, corpus: Corpus) -> bytes:
    """Lists in lists, shallow or deeper than any parser goes."""
    at, depth = _place(chance, frame), chance.choice((2, 50, 2000))
    left, right = chance.choice(
        ((b"[", b"]"), (b'{"x":', b"}"), (b"\x91", b""), (b"\x81\xa1x", b""))
    )
    return frame[:at] + left * depth + frame[at:] + right * depth


def rename(chance: random.Random, frame: bytes, corpus: Corpus) -> bytes:
    """One message's fields under the name of another."""
    old, new = chance.choice(corpus.type_words), chance.choice(corpus.type_words)
    for word in (word for word in corpus.type_words if word in frame):
        old = word
    return frame.replace(old, new, 1)


def wrap(chance: random.Random, frame: bytes, corpus: Corpus) -> bytes:
    """A frame within the other encoding's text, or behind its head."""
    head = chance.choice(
        (b"{", b'{"id":"w","type":"', b"\x81\xa2id", b"\x82\xa2id\xa1w\xa4type\xd9", b" ")
    )
    return head + frame


def inflate(chance: random.Random, frame: bytes, corpus: Corpus) -> bytes:
    """So long a text somewhere that the message is beyond the daemon's limit."""
    at = _place(chance, frame)
    return frame[:at] + chance.choice((b"x", b" ", b"\x91", b"[")) * 70_000 + frame[at:]


MUTATIONS: tuple[Mutation, ...] = (
    flip_bits,
    set_byte,
    insert,
    replace,
    delete,
    cut,
    repeat,
    splice,
    promise,
    nest,
    rename,
    wrap,
)


def mutated(chance: random.Random, corpus: Corpus) -> bytes:
    """A recorded frame after no, one or a few mutations; requests more often than replies."""
    frame = chance.choice(corpus.requests if chance.random() < 0.9 else corpus.replies)
    return mutated_from(chance, frame, corpus)


def mutated_from(chance: random.Random, frame: bytes, corpus: Corpus) -> bytes:
    """A frame after no, one or a few mutations."""
    for _ in range(chance.choice((0, 1, 1, 1, 1, 2, 3))):
        frame = chance.choice(MUTATIONS)(chance, frame, corpus)
    return inflate(chance, frame, corpus) if chance.random() < 0.01 else frame


def framed(chance: random.Random, payload: bytes, corpus: Corpus) -> Sequence[bytes]:
    """A payload as one message: mostly as it should be, else of more frames, or of empty ones."""
    draw = chance.random()
    if draw < 0.80:
        return (payload,)
    if draw < 0.90:
        return (b"", payload)
    if draw < 0.92:
        return (b"corr", b"", payload)
    return chance.choice(
        (
            (payload, b""),
            (b"", b"", payload),
            (b"corr", b"", payload, b""),
            (b"", payload, payload),
            (payload, chance.choice(corpus.frames)),
            (b"\0", payload),
            (b"",),
            (payload,) * chance.choice((3, 40)),
        )
    )
