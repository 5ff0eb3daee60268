"""One unfinished request as the service sees it: who asked, what for, what is not yet sent."""

from __future__ import annotations

import asyncio
from concurrent.futures import Future
from dataclasses import dataclass, field

from ipc import messages as wire
from ipc.server import ClientRef
from runtime_cache.engine.request import TokenArray
from runtime_cache.ids import RequestId

#: The messages that are not answered at once.
Started = wire.Generate | wire.Chat | wire.Register | wire.Tokenize


@dataclass(eq=False)
class Work:
    """One unfinished request.

    Attributes:
        request_id: the engine's name for it; None while its text is still being tokenised.
        is_mute: its client is gone; nothing is sent any more.
        num_sent: answer tokens sent so far.
        text, token_ids, logprobs: what was not sent, because the client wants one message.
        tokens: the prompt.
        reading: the prompt's tokenising on the worker thread.
        expiry: ends the request at its deadline while its prompt is being tokenised.
    """

    client: ClientRef
    message: Started
    arrived_s: float
    request_id: RequestId | None = None
    is_mute: bool = False
    num_sent: int = 0
    text: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[wire.Logprobs] = field(default_factory=list)
    tokens: TokenArray | None = None
    reading: Future[TokenArray] | None = None
    expiry: asyncio.TimerHandle | None = None

    @property
    def is_streamed(self) -> bool:
        return isinstance(self.message, wire.AnswerRequest) and self.message.stream

    @property
    def num_chars(self) -> int:
        """Characters to tokenise; 0 for token ids."""
        message = self.message
        if isinstance(message, wire.Chat):
            return sum(len(turn.content) for turn in message.messages)
        if isinstance(message, wire.Generate):
            return len(message.prompt or "")
        turns = message.messages or ()
        return len(message.text or "") + sum(len(turn.content) for turn in turns)
