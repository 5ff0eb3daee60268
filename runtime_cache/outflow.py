"""The tokens of one answer on their way to its client: what was sent, what is held back. Pure.

A client that wants a stream may grant credit: so many `tokens` messages. Without credit left, text
and tokens are held together until some comes, and then go as one message; the answer's last
message needs no credit and carries what is still held. A client that wants one message is the same
case: it never has credit, and what is held for it has no bound but that of the answer.
"""

from __future__ import annotations

from collections.abc import Sequence

from ipc import messages as wire


class Outflow:
    """Of one answer.

    Attributes:
        token_ids: the answer so far, sent or not.
        num_sent: how many of them were sent.
    """

    def __init__(
        self,
        message_id: wire.MessageId,
        *,
        is_streamed: bool,
        credit: int | None = None,
    ) -> None:
        """Args:
        credit: how many messages may be sent before more is granted; None for no such limit.
        """
        self.token_ids: list[int] = []
        self.num_sent = 0
        self._message_id = message_id
        self._has_credit = is_streamed and credit is not None
        self._credit = credit if is_streamed else 0
        self._text: list[str] = []
        self._logprobs: list[wire.Logprobs] = []

    @property
    def num_held(self) -> int:
        """Tokens that were not sent."""
        return len(self.token_ids) - self.num_sent

    @property
    def held_text(self) -> str:
        """Text that was not sent."""
        return "".join(self._text)

    @property
    def held_ids(self) -> tuple[int, ...]:
        """Tokens that were not sent."""
        return tuple(self.token_ids[self.num_sent :])

    @property
    def held_logprobs(self) -> tuple[wire.Logprobs, ...]:
        """Of the tokens that were not sent."""
        return tuple(self._logprobs)

    def take(
        self, text: str, token_ids: Sequence[int], logprobs: Sequence[wire.Logprobs] = ()
    ) -> wire.Tokens | None:
        """Add what was computed; the message that may be sent now."""
        if self._credit is None:  # nothing is ever held
            piece = self._piece(text, tuple(token_ids), tuple(logprobs))
            self.token_ids += token_ids
            self.num_sent = len(self.token_ids)
            return piece
        self.token_ids += token_ids
        self._text.append(text)
        self._logprobs += logprobs
        return self._spend()

    def grant(self, credit: int) -> wire.Tokens | None:
        """Add credit; the message that may be sent now. Of no effect where there is no credit."""
        if self._credit is None or not self._has_credit:
            return None
        self._credit += credit
        return self._spend() if self._text else None

    def _spend(self) -> wire.Tokens | None:
        """All that is held as one message, if there is credit for it."""
        if not self._credit:
            return None
        self._credit -= 1
        piece = self._piece(self.held_text, self.held_ids, self.held_logprobs)
        self.num_sent = len(self.token_ids)
        self._text.clear()
        self._logprobs.clear()
        return piece

    def _piece(
        self, text: str, token_ids: tuple[int, ...], logprobs: tuple[wire.Logprobs, ...]
    ) -> wire.Tokens:
        return wire.Tokens(
            id=self._message_id,
            index=self.num_sent,
            text=text,
            token_ids=token_ids,
            logprobs=logprobs,
        )
