"""The child of `chat_process`: renders one conversation after the other, within hard limits.

Reads JSON messages from its standard input, each behind its length (4 bytes, little-endian), and
answers each on its standard output the same way: `{"text": ...}` or `{"error": ...}`. The first
one brings the template. It ends when its input does.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
from contextlib import suppress
from typing import Any, BinaryIO

from om_models.chat import ChatTemplate, ChatTemplateError

_LENGTH_BYTES = 4
#: Beyond what the daemon waits; for the case that it has gone meanwhile [seconds].
_GRACE_S = 30.0


def main() -> None:
    """Serve until the input ends."""
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)  # the daemon decides when it ends
    requests, replies = sys.stdin.buffer, sys.stdout.buffer
    setup = _receive(requests)
    if setup is None:
        return
    _limit(setup["memory_bytes"])
    template = _Template(setup)
    _send(replies, template.compiled())
    while (request := _receive(requests)) is not None:
        # Its default action ends the process.
        signal.setitimer(signal.ITIMER_REAL, setup["limit_s"] + _GRACE_S)
        _send(replies, template.rendered(request))
        signal.setitimer(signal.ITIMER_REAL, 0)


class _Template:
    def __init__(self, setup: dict[str, Any]) -> None:
        self._setup = setup
        self._template: ChatTemplate

    def compiled(self) -> dict[str, str]:
        """Compile it, and say how that went."""
        try:
            setup = self._setup
            self._template = ChatTemplate(setup["source"], setup["bos_token"], setup["eos_token"])
        except ChatTemplateError as error:
            return {"error": str(error)}
        except MemoryError:
            return {"error": "it takes too much memory"}
        return {"text": ""}

    def rendered(self, request: dict[str, Any]) -> dict[str, str]:
        """One conversation's text, or why there is none."""
        try:
            wants_answer = request["add_generation_prompt"]
            messages = request["messages"]
            return {"text": self._template.render(messages, add_generation_prompt=wants_answer)}
        except ChatTemplateError as error:
            return {"error": str(error)}
        except MemoryError:
            return {"error": "the chat template took too much memory"}


def _limit(memory_bytes: int) -> None:
    """From here on no more memory, no new files; and the first to go when the host's is short."""
    resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_NOFILE, (8, 8))
    with suppress(OSError), open("/proc/self/oom_score_adj", "w", encoding="ascii") as file:
        file.write("1000")


def _receive(requests: BinaryIO) -> dict[str, Any] | None:
    length = requests.read(_LENGTH_BYTES)
    if len(length) < _LENGTH_BYTES:
        return None
    content = requests.read(int.from_bytes(length, "little"))
    message: dict[str, Any] = json.loads(content)
    return message


def _send(replies: BinaryIO, reply: dict[str, str]) -> None:
    try:
        payload = json.dumps(reply).encode("ascii")
    except MemoryError:
        payload = b'{"error": "the chat template makes too much text"}'
    try:
        replies.write(len(payload).to_bytes(_LENGTH_BYTES, "little") + payload)
        replies.flush()
    except BrokenPipeError:
        os._exit(0)  # nobody wants it any more
