"""Every message that crosses the socket: where `fields`, `requests` and `replies` meet. Pure.

`PROTOCOL.md` says the same in prose for people who write clients in other languages; a test holds
the two together.
"""

from __future__ import annotations

from msgspec import Struct

from ipc.fields import *  # noqa: F403
from ipc.replies import *  # noqa: F403
from ipc.requests import *  # noqa: F403


def type_name(message: type[Struct] | Struct) -> str:
    """The word in the field `type`, such as `generate`."""
    tag = message.__struct_config__.tag
    if not isinstance(tag, str):
        raise TypeError(f"{message!r} is a part of messages, not a message")
    return tag
