"""A chat template in a process of its own: whatever it does, it costs no more than its limits.

A template is a stranger's program, and Jinja's sandbox keeps it from Python's internals but not
from running for ever or filling the memory (a loop inside a loop, a list that holds itself twice
over). No bound inside the interpreter holds against that, as one call of a filter may take hours
with the interpreter's lock held. So it runs in a child that has a limit of memory, and that is
killed when a conversation takes too long; the next conversation gets a new one. The child has
nothing to do with the daemon but two pipes, and ends when they are closed.

What the child does is in `chat_worker`; what it may do besides is in `chat`.
"""

from __future__ import annotations

import json
import math
import os
import select
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from typing import Any

from om_models.chat import ChatTemplateError, Message, check_messages, check_syntax

#: A conversation may take this long [seconds]; one of 4 MiB takes a tenth of a second.
RENDER_LIMIT_S = 3.0
#: The child's start, and the template's compilation.
_START_LIMIT_S = 20.0
#: If that failed, it is not tried again before this [seconds].
_RETRY_S = 60.0
#: Address space of the child [bytes].
MEMORY_LIMIT_BYTES = 1024**3
#: Of a reply [bytes]; JSON takes at most 12 for a character.
_MAX_REPLY_BYTES = 256 * 1024**2
_LENGTH_BYTES = 4
_CHUNK_BYTES = 256 * 1024
_BOOT = "import sys; sys.path[:] = sys.argv[1:]; from om_models.chat_worker import main; main()"
#: Of the environment, what an interpreter needs.
_ENVIRONMENT = ("PATH", "HOME", "LANG", "LC_", "LD_", "PYTHON")


class ChatProcess:
    """One model's chat template; as `chat.ChatTemplate`, which it is to others. Thread-safe.

    The child is started by `start`, or by the first conversation.
    """

    may_wait = True

    def __init__(
        self,
        source: str,
        bos_token: str = "",
        eos_token: str = "",
        *,
        limit_s: float = RENDER_LIMIT_S,
        memory_bytes: int = MEMORY_LIMIT_BYTES,
    ) -> None:
        """Args:
        source: Jinja text of the model.
        bos_token, eos_token: for the template's use.
        limit_s: what a conversation may take [seconds].
        memory_bytes: address space of the child [bytes].

        Raises:
            ChatTemplateError: the source is not a template. It was read, not compiled.
        """
        check_syntax(source)
        self._setup = {
            "source": source,
            "bos_token": bos_token,
            "eos_token": eos_token,
            "limit_s": limit_s,
            "memory_bytes": memory_bytes,
        }
        self._limit_s = limit_s
        self._lock = threading.Lock()
        self._child: _Child | None = None
        self._is_closed = False
        #: Why the template cannot be used, and until when that counts; empty if it can.
        self._fault = ""
        self._fault_until_s = 0.0

    def start(self) -> None:
        """Start the child, so that the first conversation need not wait for it.

        Raises:
            ChatTemplateError: the template cannot be compiled within the limits.
        """
        with self._lock:
            self._started()

    def render(self, messages: Sequence[Message], *, add_generation_prompt: bool = True) -> str:
        """The prompt's text; see `chat.ChatTemplate.render`.

        Raises:
            ChatTemplateError: as there, or it took too long or too much memory. The next
                conversation is as good as any.
        """
        check_messages(messages)
        request = {"messages": list(messages), "add_generation_prompt": add_generation_prompt}
        with self._lock:
            child = self._started()
            try:
                return _text_of(child.ask(request, self._limit_s))
            except _Ended as ended:
                self._drop()
                raise ChatTemplateError(f"the chat template {ended}") from ended

    def close(self) -> None:
        """End the child, whatever it is doing; nothing is rendered any more. Idempotent."""
        self._is_closed = True
        child = self._child
        if child is not None:
            child.kill()  # whoever waits for it, with the lock held, then does no longer
        with self._lock:
            self._drop()

    def _started(self) -> _Child:
        self._check_open()
        if self._fault and time.monotonic() < self._fault_until_s:
            raise ChatTemplateError(self._fault)
        if self._child is None:
            self._child = _Child()
            try:
                self._check_open()
                _text_of(self._child.ask(self._setup, _START_LIMIT_S))
            except (ChatTemplateError, _Ended) as error:
                self._drop()
                self._check_open()
                self._fault = f"the chat template cannot be compiled: {error}"
                # What it said will not change; what killed it may have passed.
                wait_s = _RETRY_S if isinstance(error, _Ended) else math.inf
                self._fault_until_s = time.monotonic() + wait_s
                raise ChatTemplateError(self._fault) from error
            except BaseException:
                self._drop()
                raise
        return self._child

    def _check_open(self) -> None:
        if self._is_closed:
            raise ChatTemplateError("the chat template is closed")

    def _drop(self) -> None:
        if self._child is not None:
            self._child.end()
            self._child = None


class _Ended(Exception):
    """The child does not answer any more; the message says why."""


class _Child:
    """The process, and what is said to it: JSON, each message behind its length."""

    def __init__(self) -> None:
        environment = {n: text for n, text in os.environ.items() if n.startswith(_ENVIRONMENT)}
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-c", _BOOT, *sys.path],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,  # never a line of a prompt in a log
                bufsize=0,
                env=environment,
                start_new_session=True,  # Ctrl-C at the terminal is not for it
            )
        except OSError as error:
            raise ChatTemplateError(f"cannot start a process for it: {error.strerror}") from error
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._to, self._from = self._process.stdin.fileno(), self._process.stdout.fileno()
        os.set_blocking(self._to, False)
        os.set_blocking(self._from, False)

    def ask(self, request: dict[str, Any], limit_s: float) -> dict[str, Any]:
        """One message there, one back.

        Raises:
            _Ended: it took longer, or the child has ended.
        """
        end_s = time.monotonic() + limit_s
        payload = json.dumps(request).encode("ascii")
        self._write(len(payload).to_bytes(_LENGTH_BYTES, "little") + payload, end_s, limit_s)
        num_bytes = int.from_bytes(self._read(_LENGTH_BYTES, end_s, limit_s), "little")
        if num_bytes > _MAX_REPLY_BYTES:
            raise _Ended("makes too much text")
        reply: dict[str, Any] = json.loads(self._read(num_bytes, end_s, limit_s))
        return reply

    def kill(self) -> None:
        """Stop it; to be called from any thread."""
        self._process.kill()

    def end(self) -> None:
        """Stop it; nothing of it is left."""
        self._process.kill()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()
        self._process.wait()

    def _write(self, content: bytes, end_s: float, limit_s: float) -> None:
        left = memoryview(content)
        while left:
            self._wait(self._to, select.POLLOUT, end_s, limit_s)
            try:
                left = left[os.write(self._to, left[:_CHUNK_BYTES]) :]
            except BlockingIOError:
                continue
            except BrokenPipeError as error:
                raise _Ended(self._cause()) from error

    def _read(self, num_bytes: int, end_s: float, limit_s: float) -> bytes:
        content = bytearray()
        while len(content) < num_bytes:
            self._wait(self._from, select.POLLIN, end_s, limit_s)
            try:
                chunk = os.read(self._from, min(_CHUNK_BYTES, num_bytes - len(content)))
            except BlockingIOError:
                continue
            if not chunk:
                raise _Ended(self._cause())
            content += chunk
        return bytes(content)

    def _wait(self, fd: int, event: int, end_s: float, limit_s: float) -> None:
        poll = select.poll()
        poll.register(fd, event)
        if not poll.poll(max(0.0, end_s - time.monotonic()) * 1000):
            raise _Ended(f"took longer than {limit_s:g} s, and was stopped")

    def _cause(self) -> str:
        self._process.wait()
        code = self._process.returncode
        return f"ended its process (code {code}), most likely as it took too much memory"


def _text_of(reply: dict[str, Any]) -> str:
    if "error" in reply:
        raise ChatTemplateError(str(reply["error"]))
    return str(reply["text"])
