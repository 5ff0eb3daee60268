"""Says why a program died that followed a wrong address: by then the program itself cannot.

`faulthandler` writes where it died into a pipe, whose other end a small process holds. That passes
it on to standard error with a sentence about what kills; it ends with the program, and says nothing
if there was nothing to say. It is no child of the program, which may wait for its own.
"""

from __future__ import annotations

import faulthandler
import os
import sys

SENTENCE = (
    "software device: the program died of SIGSEGV, at an address that it may not follow. Device"
    " memory of a card (from 2^60 on) cannot be read or written by the host: copy it with"
    " acl.rt.memcpy. Memory that was freed cannot either"
)

_WATCHER = """\
import os, sys
if os.fork():
    os._exit(0)
os.setsid()
text = sys.stdin.buffer.read()
if text:
    os.write(2, text)
if b"Segmentation fault" in text:
    os.write(2, sys.argv[1].encode() + b"\\n")
"""


def watch() -> None:
    """Starts the process that waits for this one's death."""
    reader, writer = os.pipe()
    command = [sys.executable, "-I", "-S", "-c", _WATCHER, SENTENCE]
    actions = [(os.POSIX_SPAWN_DUP2, reader, 0)]
    starter = os.posix_spawn(sys.executable, command, dict(os.environ), file_actions=actions)
    os.waitpid(starter, 0)
    os.close(reader)
    faulthandler.enable(file=writer, all_threads=False)
