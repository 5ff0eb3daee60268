"""Moves messages between a ZeroMQ socket and callbacks in the event loop's thread.

One receiver for the socket's whole life, called by the loop: there is no awaited receive that a
cancellation could interrupt, so no message is lost that way (pyzmq issue 1925), and no task per
send (issue 1203). Works on asyncio and uvloop alike.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Protocol

import zmq

# As plain ints: to join two of pyzmq's flags takes as long as to send a message.
_LAST = int(zmq.NOBLOCK)
_MORE = int(zmq.NOBLOCK | zmq.SNDMORE)

#: Messages taken per wake-up before other work of the loop gets its turn.
_MAX_BATCH = 128


class Inspector(Protocol):
    """Looks at where messages come from."""

    def wants(self, identity: bytes) -> bool:
        """Whether the frame after this one, which a ROUTER puts first, is to be looked at."""

    def look(self, identity: bytes, frame: zmq.Frame) -> None:
        """The frame, before its message is delivered."""


class Pump:
    """Owns the receiving side of `socket`; everything happens in the loop's thread.

    Args:
        socket: stays the caller's to close, after `stop()`.
        deliver: called with the frames of each message, in order. Of a message with more
            than `max_frames` frames it gets `max_frames + 1`. What it raises goes to the loop's
            exception handler; the next message is delivered all the same.
        max_frames: frames to keep of a message.
        inspector: of a ROUTER's messages.
    """

    def __init__(
        self,
        socket: zmq.Socket[bytes],
        deliver: Callable[[Sequence[bytes]], None],
        *,
        max_frames: int,
        inspector: Inspector | None = None,
    ) -> None:
        self._socket = socket
        # Without pyzmq's wrapper, which looks at options that are never used here, and takes
        # longer for that than libzmq for the message.
        self._send = super(zmq.Socket, socket).send
        self._deliver = deliver
        self._max_frames = max_frames
        self._inspector = inspector
        self._loop = asyncio.get_running_loop()
        self._fd = socket.fileno()
        self._pending: asyncio.Handle | None = None
        self._is_running = True
        self._loop.add_reader(self._fd, self._drain)
        # The descriptor only reports changes; look once at what came before it was watched.
        self._drain_soon()

    def send(self, frames: Sequence[bytes]) -> None:
        """Hand a message to libzmq, at once and in order.

        Raises:
            zmq.Again: the peer's queue is full. Nothing was sent.
            zmq.ZMQError: as libzmq says. Nothing was sent.
        """
        try:
            for frame in frames[:-1]:
                self._send(frame, _MORE)
            self._send(frames[-1], _LAST)
        finally:
            # Sending may consume the descriptor's signal that something can be received.
            self._drain_soon()

    def send_tracked(self, frames: Sequence[bytes]) -> zmq.MessageTracker | None:
        """The same without copying the last frame.

        Returns:
            What tells when libzmq has let go of it.

        Raises:
            zmq.Again, zmq.ZMQError: as `send`.
        """
        try:
            for frame in frames[:-1]:
                self._send(frame, _MORE)
            return self._send(frames[-1], _LAST, copy=False, track=True)
        finally:
            self._drain_soon()

    def stop(self) -> None:
        """Deliver nothing more. May be called twice."""
        if self._is_running:
            self._is_running = False
            self._loop.remove_reader(self._fd)
            if self._pending is not None:
                self._pending.cancel()

    def _drain_soon(self) -> None:
        if self._pending is None and self._is_running:
            self._pending = self._loop.call_soon(self._drain)

    def _drain(self) -> None:
        if self._pending is not None:
            self._pending.cancel()
            self._pending = None
        for _ in range(_MAX_BATCH):
            frames = self._receive()
            if frames is None:
                return
            try:
                self._deliver(frames)
            except BaseException:
                self._drain_soon()  # what has come already would otherwise wait for the next
                raise
            if not self._is_running:
                return
        self._drain_soon()

    def _receive(self) -> list[bytes] | None:
        """The next message, or None if there is none yet."""
        socket = self._socket
        try:
            frames = [socket.recv(zmq.NOBLOCK)]
        except zmq.Again:
            return None
        inspector = self._inspector
        if inspector is not None and socket.get(zmq.RCVMORE) and inspector.wants(frames[0]):
            seen = socket.recv(zmq.NOBLOCK, copy=False)
            inspector.look(frames[0], seen)
            frames.append(seen.bytes)
        while socket.get(zmq.RCVMORE):
            frame = socket.recv(zmq.NOBLOCK)
            if len(frames) <= self._max_frames:
                frames.append(frame)
        return frames
