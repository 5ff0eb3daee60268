"""An answer as it grows, and as a whole. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from ipc.errors import Closed, ProtocolError
from ipc.messages import (
    AnyReply,
    CacheReport,
    Done,
    Logprobs,
    Timing,
    Tokens,
    Usage,
    type_name,
)


@dataclass(frozen=True, slots=True)
class Piece:
    """What one message added to an answer.

    Attributes:
        text: new text; may be empty.
        token_ids: new tokens.
        logprobs: one entry per new token, if asked for.
    """

    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[Logprobs, ...] = ()


@dataclass(frozen=True, slots=True)
class Result:
    """A whole answer.

    Attributes:
        text: all of it.
        token_ids: all answer tokens.
        finish_reason: why it ended.
        stop: the stop string or token text that ended it, if one did.
        usage: token counts.
        timing: durations measured in the daemon.
        logprobs: one entry per token, if asked for.
        cache: why so many prompt tokens were cached, and not more; None if the request ended
            before it was admitted.
    """

    text: str
    token_ids: tuple[int, ...]
    finish_reason: str
    stop: str | None
    usage: Usage
    timing: Timing
    logprobs: tuple[Logprobs, ...] = ()
    cache: CacheReport | None = None


class Answer:
    """Puts the messages of one answer together."""

    def __init__(self) -> None:
        self._pieces: list[Piece] = []
        self._done: Done | None = None

    @property
    def is_done(self) -> bool:
        """Whether the last message has been added."""
        return self._done is not None

    def add(self, reply: AnyReply) -> Piece:
        """Add the next message.

        Raises:
            ProtocolError: it is not part of an answer.
        """
        if not isinstance(reply, (Tokens, Done)):
            raise ProtocolError(f"expected `tokens` or `done`, got `{type_name(reply)}`")
        if isinstance(reply, Done):
            self._done = reply
        piece = Piece(reply.text, reply.token_ids, reply.logprobs)
        self._pieces.append(piece)
        return piece

    def result(self) -> Result:
        """The whole answer.

        Raises:
            Closed: it was given up before its end.
        """
        done = self._done
        if done is None:
            raise Closed("the answer was given up before its end")
        return Result(
            text="".join(piece.text for piece in self._pieces),
            token_ids=tuple(token for piece in self._pieces for token in piece.token_ids),
            finish_reason=done.finish_reason,
            stop=done.stop,
            usage=done.usage,
            timing=done.timing,
            logprobs=tuple(entry for piece in self._pieces for entry in piece.logprobs),
            cache=done.cache,
        )
