"""Waiting for replies, on the caller's thread. An exception while waiting, such as
KeyboardInterrupt, cancels what is unfinished.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Sequence
from queue import Empty, SimpleQueue

from ipc.answers import Answer, Piece
from ipc.messages import AnyReply, AnyRequest, Chat, Done, Error, Generate, MessageId, type_name
from runtime_cache.errors import InternalError, QueueFull, RuntimeCacheError
from runtime_cache.llm.host import TURN_S, Host, Inbox
from runtime_cache.llm.results import Closed, Result, error_of

#: When to ask again what was refused because other threads' prompts wait [seconds].
_RETRY_S = 0.02


def ask_one(host: Host, request: AnyRequest) -> AnyReply:
    """The one reply to a request.

    Raises:
        RuntimeCacheError: the reply is an error.
    """
    (reply,) = _ask_many(host, [request])
    if isinstance(reply, Error):
        raise error_of(reply)
    return reply


def answers(host: Host, requests: Sequence[Generate | Chat]) -> list[Result | RuntimeCacheError]:
    """The answers in the order of the requests, all of which have ended."""
    return [_result(reply) for reply in _ask_many(host, requests)]


class Stream:
    """An answer on its way: iterate over its pieces, or call `result()`, or first one and then
    the other.

    It was asked for when this object was made. Leaving the loop early, or an exception in it,
    cancels the answer.
    """

    def __init__(self, host: Host, request: Generate | Chat, owner: object) -> None:
        """Args:
        owner: is kept alive, and so kept from closing the host, while the answer is on its way.
        """
        self._host = host
        self._owner = owner
        self._id = request.id
        self._inbox: Inbox = SimpleQueue()
        self._answer = Answer()
        self._is_over = False
        host.ask([request], self._inbox)

    def __iter__(self) -> Iterator[Piece]:
        """Pieces as they come; no more of them once the stream is given up, from any thread.

        Raises:
            RuntimeCacheError: the request was refused, or failed.
        """
        try:
            while (piece := self._next()) is not None:
                if piece.text or piece.token_ids:
                    yield piece
        finally:
            self.cancel()

    def result(self) -> Result:
        """The whole answer, pieces that were iterated over included.

        Raises:
            RuntimeCacheError: the request was refused, or failed.
            Closed: it was given up before its end.
        """
        for _ in self:
            pass
        if not self._answer.is_done:
            raise Closed("the answer was given up before its end")
        return Result.of(self._answer.result())

    def cancel(self) -> None:
        """Give the answer up; nothing happens if it has ended."""
        if not self._is_over:
            self._is_over = True
            self._host.give_up([self._id])

    def __del__(self) -> None:
        """What nobody reads is not computed to its end."""
        self.cancel()

    def _next(self) -> Piece | None:
        """None if there is none to come."""
        while not self._is_over:
            self._host.check_owner()
            try:
                _, reply = self._inbox.get(timeout=TURN_S)
            except Empty:
                continue
            self._is_over = isinstance(reply, Done | Error)
            if isinstance(reply, Error):
                raise error_of(reply)
            return self._answer.add(reply)
        return None


def _ask_many(host: Host, requests: Sequence[AnyRequest]) -> list[AnyReply]:
    """The one reply to each of many requests, in their order.

    So many as the engine lets wait are handed in at once; what of many is refused all the same,
    because others wait as well, is handed in again when one of these has ended, or a while later.
    """
    inbox: Inbox = SimpleQueue()
    by_id = {request.id: request for request in requests}
    replies: dict[MessageId, AnyReply] = {}
    waiting, unfinished = deque(requests), set[MessageId]()
    room, is_many = host.config.engine.max_waiting, len(requests) > 1
    try:
        while waiting or unfinished:
            some = [waiting.popleft() for _ in range(min(room - len(unfinished), len(waiting)))]
            unfinished.update(request.id for request in some)
            if some:
                host.ask(some, inbox)
            message_id, reply = _next_reply(inbox)
            unfinished.remove(message_id)
            if is_many and isinstance(reply, Error) and reply.code == QueueFull.code:
                room = max(1, len(unfinished))
                waiting.append(by_id[message_id])
                if not unfinished:
                    time.sleep(_RETRY_S)
            else:
                replies[message_id] = reply
    except BaseException:
        host.give_up(list(unfinished))
        raise
    return [replies[request.id] for request in requests]


def _next_reply(inbox: Inbox) -> tuple[MessageId, AnyReply]:
    """Wait for a reply, in turns (see TURN_S)."""
    while True:
        try:
            return inbox.get(timeout=TURN_S)
        except Empty:
            continue


def _result(reply: AnyReply) -> Result | RuntimeCacheError:
    if isinstance(reply, Done):
        return Result.of(reply)
    if isinstance(reply, Error):
        return error_of(reply)
    raise InternalError(f"a prompt was answered by `{type_name(reply)}`")
