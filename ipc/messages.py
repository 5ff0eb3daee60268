"""Every message that crosses the socket: where the types of all kinds meet. Pure.

`PROTOCOL.md` says the same in prose for people who write clients in other languages; a test holds
the two together.
"""

from __future__ import annotations

from msgspec import Struct, structs

from ipc.admin_replies import *  # noqa: F403
from ipc.admin_replies import (
    Configured,
    Draining,
    Evicted,
    Explained,
    Listed,
    Pinned,
    Reloaded,
    Resumed,
    Shown,
    Stats,
    Unpinned,
    Verified,
)
from ipc.admin_requests import *  # noqa: F403
from ipc.admin_requests import (
    Drain,
    Evict,
    Explain,
    GetConfig,
    GetStats,
    ListEntries,
    Pin,
    Reload,
    Resume,
    Show,
    Unpin,
    Verify,
)
from ipc.fields import *  # noqa: F403
from ipc.replies import *  # noqa: F403
from ipc.replies import (
    Done,
    Error,
    Info,
    Ok,
    Opened,
    Pong,
    Registered,
    Released,
    SessionClosed,
    Tokenized,
    Tokens,
)
from ipc.requests import *  # noqa: F403
from ipc.requests import (
    AnswerRequest,
    Cancel,
    Chat,
    CloseSession,
    Credit,
    Generate,
    GetInfo,
    OpenSession,
    Ping,
    Register,
    Release,
    Request,
    Tokenize,
)

AnyRequest = (
    Generate
    | Chat
    | Cancel
    | Credit
    | OpenSession
    | CloseSession
    | Ping
    | GetInfo
    | Tokenize
    | Register
    | Release
    | ListEntries
    | Show
    | Evict
    | Pin
    | Unpin
    | Explain
    | Verify
    | GetStats
    | Drain
    | Resume
    | Reload
    | GetConfig
)

#: The messages that only the admin socket accepts.
ADMIN_REQUESTS: tuple[type[Request], ...] = (
    ListEntries,
    Show,
    Evict,
    Pin,
    Unpin,
    Explain,
    Verify,
    GetStats,
    Drain,
    Resume,
    Reload,
    GetConfig,
)

AnyReply = (
    Tokens
    | Done
    | Error
    | Ok
    | Opened
    | SessionClosed
    | Pong
    | Info
    | Tokenized
    | Registered
    | Released
    | Listed
    | Shown
    | Evicted
    | Pinned
    | Unpinned
    | Explained
    | Verified
    | Stats
    | Draining
    | Resumed
    | Reloaded
    | Configured
)


def without_stream(request: AnyRequest) -> AnyRequest:
    """The same request, to be answered by one message (what a REQ client can receive)."""
    if isinstance(request, AnswerRequest) and request.stream:
        return structs.replace(request, stream=False)
    return request


def type_name(message: type[Struct] | Struct) -> str:
    """The word in the field `type`, such as `generate`."""
    tag = message.__struct_config__.tag
    if not isinstance(tag, str):
        raise TypeError(f"{message!r} is a part of messages, not a message")
    return tag
