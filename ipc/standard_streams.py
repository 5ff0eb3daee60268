"""Standard input, output and error of a command that was started without (`rtcached <&- >&-`).

What is opened first would get their numbers: libuv ends a process that closes one of them, and what
people are to read would be written into a socket.
"""

from __future__ import annotations

import os
import sys

_STREAMS = (("stdin", "r"), ("stdout", "w"), ("stderr", "w"))


def ensure() -> None:
    """Let those that are closed lead nowhere; to be called before anything else is opened."""
    while (number := os.open(os.devnull, os.O_RDWR)) < len(_STREAMS):
        os.set_inheritable(number, True)  # or children would be without it
    os.close(number)
    for number, (name, mode) in enumerate(_STREAMS):
        if getattr(sys, name) is None:
            stream = os.fdopen(number, mode, encoding="utf-8", closefd=False)
            setattr(sys, name, stream)
            setattr(sys, f"__{name}__", stream)
