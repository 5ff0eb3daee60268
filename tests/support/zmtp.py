"""ZeroMQ's own protocol (ZMTP 3.0, mechanism NULL) written by hand, so that it can be spoilt.

Source: https://rfc.zeromq.org/spec/23/
"""

from __future__ import annotations

import socket
from collections.abc import Sequence

GREETING = b"\xff" + bytes(8) + b"\x7f" + b"\x03\x00" + b"NULL".ljust(20, b"\0") + bytes(32)
_MORE, _LONG, _COMMAND = 1, 2, 4


def frame(body: bytes, *, has_more: bool = False, flags: int = 0) -> bytes:
    """One frame: flags, length, body."""
    flags |= _MORE if has_more else 0
    if len(body) < 256:
        return bytes([flags, len(body)]) + body
    return bytes([flags | _LONG]) + len(body).to_bytes(8, "big") + body


def ready(**properties: bytes) -> bytes:
    """The command that ends the handshake."""
    body = b"\x05READY"
    for name, value in properties.items():
        key = name.replace("_", "-").title().encode()
        body += bytes([len(key)]) + key + len(value).to_bytes(4, "big") + value
    return frame(body, flags=_COMMAND)


def message(frames: Sequence[bytes]) -> bytes:
    """A message of one or more frames."""
    last = len(frames) - 1
    return b"".join(frame(body, has_more=at < last) for at, body in enumerate(frames))


def handshake(identity: bytes = b"") -> bytes:
    """All that a DEALER says before its first message."""
    return GREETING + ready(socket_type=b"DEALER", identity=identity)


def shake_hands(wire_end: socket.socket, identity: bytes = b"") -> None:
    """Be a DEALER; returns when the other side is ready, which libzmq insists on."""
    wire_end.sendall(handshake(identity))
    heard = b""
    while b"READY" not in heard:
        heard += (piece := wire_end.recv(4096))
        assert piece, "the other side hung up"
