"""How a device call fails inside the software device: one exception, and the text it leaves.

`AclFailure` never leaves the package: the calling convention turns it into an integer code, and
its sentence into what `acl.get_recent_err_msg` returns to the same thread.
"""

from __future__ import annotations

import threading
from collections import deque

MAX_SENTENCES = 16
#: Codes of the runtime below ACL, which alone sets the last error of a thread.
_RUNTIME_CODES = (107, 207, 507)


class AclFailure(Exception):
    """A call or a queued task failed with a documented code.

    Attributes:
        code: the number the caller sees.
        sentence: what happened, for a person.
        is_noted: the report of misuse has it already: synchronising tells it once more.
    """

    def __init__(self, code: int, sentence: str, *, is_noted: bool = False) -> None:
        super().__init__(f"{code}: {sentence}")
        self.code = code
        self.sentence = sentence
        self.is_noted = is_noted


class _Sentences(threading.local):
    """The sentences of each thread."""

    def __init__(self) -> None:
        self.own: deque[str] = deque(maxlen=MAX_SENTENCES)


class RecentMessages:
    """The error text, cleared when read: of each thread, as in pyACL's default mode.

    Attributes:
        is_shared: one text for all threads instead (`err_msg_mode` "1" in the file of `acl.init`).
    """

    def __init__(self) -> None:
        self._threads = _Sentences()
        self._shared: deque[str] = deque(maxlen=MAX_SENTENCES)
        self.is_shared = False

    def _sentences(self) -> deque[str]:
        return self._shared if self.is_shared else self._threads.own

    def add(self, sentence: str) -> None:
        """Keeps a sentence for the calling thread; the oldest is dropped beyond 16."""
        self._sentences().append(sentence)

    def take(self) -> str | None:
        """Returns the sentences, newest first, and forgets them; None if there are none."""
        sentences = self._sentences()
        if not sentences:
            return None
        text = "\n".join(reversed(sentences))
        sentences.clear()
        return text

    def forget(self) -> None:
        """Back to one empty text for each thread; other threads keep theirs."""
        self._shared.clear()
        self._threads.own.clear()
        self.is_shared = False


class LastError(threading.local):
    """The runtime's last failure in each thread, until it is taken.

    Attributes:
        code: 0 if there was none.
    """

    code = 0

    def note(self, code: int) -> None:
        """Keeps a code, unless it is one of the layers above the runtime."""
        if code // 1000 in _RUNTIME_CODES:
            self.code = code

    def take(self) -> int:
        """Returns the code and forgets it."""
        code, self.code = self.code, 0
        return code


recent_messages = RecentMessages()
last_error = LastError()
