"""How a device call fails inside the software device: one exception, and the text it leaves.

`AclFailure` never leaves the package: the calling convention turns it into an integer code, and
its sentence into what `acl.get_recent_err_msg` returns to the same thread.
"""

from __future__ import annotations

import threading
from collections import deque

MAX_SENTENCES = 16


class AclFailure(Exception):
    """A call or a queued task failed with a documented code.

    Attributes:
        code: the number the caller sees.
        sentence: what happened, for a person.
    """

    def __init__(self, code: int, sentence: str) -> None:
        super().__init__(f"{code}: {sentence}")
        self.code = code
        self.sentence = sentence


class RecentMessages(threading.local):
    """The error text of each thread, cleared when read, as in pyACL's default mode."""

    def __init__(self) -> None:
        self._sentences: deque[str] = deque(maxlen=MAX_SENTENCES)

    def add(self, sentence: str) -> None:
        """Keeps a sentence for the calling thread; the oldest is dropped beyond 16."""
        self._sentences.append(sentence)

    def take(self) -> str | None:
        """Returns the calling thread's sentences, newest first, and forgets them."""
        if not self._sentences:
            return None
        text = "\n".join(reversed(self._sentences))
        self._sentences.clear()
        return text


recent_messages = RecentMessages()
