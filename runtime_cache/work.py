"""One unfinished request as the service sees it: who asked, what for, what has come of it."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from ipc import messages as wire
from ipc.server import ClientRef
from runtime_cache.ids import RequestId, TenantName
from runtime_cache.intake import Prompt, Prompted
from runtime_cache.outflow import Outflow

#: The messages that are not answered at once.
Started = (
    wire.Generate
    | wire.Chat
    | wire.Register
    | wire.Tokenize
    | wire.Explain
    | wire.Verify
    | wire.Evict
)


@dataclass(eq=False)
class Work:
    """One unfinished request.

    Attributes:
        request_id: the engine's name for it; None while its text is still being tokenised.
        is_mute: its client is gone; nothing is sent any more.
        outflow: the answer so far, sent or not.
        prompt: None while its text is still being tokenised.
        next_part: the next turn of an eviction that takes several.
        verifying: the reading of cached KV, if that is what is wanted.
        expiry: ends the request at its deadline while its prompt is being tokenised.
    """

    client: ClientRef
    message: Started
    arrived_s: float
    request_id: RequestId | None = None
    is_mute: bool = False
    prompt: Prompt | None = None
    expiry: asyncio.TimerHandle | None = None
    next_part: asyncio.Handle | None = None
    verifying: asyncio.Task[wire.Verified] | None = None
    outflow: Outflow = field(init=False)

    def __post_init__(self) -> None:
        """Nothing of its answer is known yet."""
        credit = self.message.credit if isinstance(self.message, wire.AnswerRequest) else None
        self.outflow = Outflow(self.message.id, is_streamed=self.is_streamed, credit=credit)

    def stop(self) -> None:
        """End what runs beside it in the event loop."""
        for running in (self.expiry, self.next_part, self.verifying):
            if running is not None:
                running.cancel()

    @property
    def tenant(self) -> TenantName:
        """Whose cache it is about: that of the socket, unless an operator names another."""
        if isinstance(self.message, wire.Explain):
            return TenantName(self.message.tenant)
        return TenantName(self.client.tenant)

    @property
    def token_ids(self) -> list[int]:
        """The answer so far, sent or not."""
        return self.outflow.token_ids

    @property
    def is_streamed(self) -> bool:
        return isinstance(self.message, wire.AnswerRequest) and self.message.stream

    @property
    def prompted(self) -> Prompted:
        """The message whose prompt is wanted; for `explain` the request that it asks about."""
        message = self.message
        assert not isinstance(message, wire.Verify | wire.Evict)  # they have none
        if not isinstance(message, wire.Explain):
            return message
        if message.messages is not None:
            return wire.Chat(message.id, messages=message.messages)
        return wire.Generate(
            message.id,
            prompt=message.prompt,
            prompt_ids=message.prompt_ids,
            prefix_id=message.prefix_id,
        )

    @property
    def num_chars(self) -> int:
        """Characters to tokenise; 0 for token ids."""
        message = self.prompted
        if isinstance(message, wire.Chat):
            return sum(len(turn.content) for turn in message.messages)
        if isinstance(message, wire.Generate):
            return len(message.prompt or "")
        turns = message.messages or ()
        return len(message.text or "") + sum(len(turn.content) for turn in turns)
