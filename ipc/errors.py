"""What can go wrong between client and daemon; pure. One class answers one question: whose fault?

Foreign errors (zmq, msgspec, OS) are translated to one of these where they arise, with `from`.
"""

from __future__ import annotations

from ipc.messages import Error, MessageId


class IpcError(Exception):
    """Base of the tree; never raised itself."""

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message


class EndpointError(IpcError):
    """The endpoint cannot be used as it is written. The operator's fault; nothing was bound."""


class EndpointBusy(EndpointError):
    """Another daemon owns the endpoint. Nothing was bound, nothing of the other was touched."""


class KeyFileError(IpcError):
    """A key, or a file of keys, cannot be used. The fault of whoever named it; nothing was sent."""


class MalformedMessage(IpcError):
    """A client's message breaks the protocol. The client's fault; only that message is refused.

    Attributes:
        code: the wire code of the refusal.
        message_id: the message's id if it could be read, else None.
    """

    def __init__(self, code: str, message: str, message_id: MessageId | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.message_id = message_id

    def as_reply(self) -> Error:
        """The refusal as it is sent to the client."""
        return Error(id=self.message_id, code=self.code, message=self.message, retryable=False)


class ServerError(IpcError):
    """The daemon answered "no". The connection is fine; other calls go on.

    Attributes:
        code: a word to match on; PROTOCOL.md lists them.
        retryable: whether the same call can succeed later.
        retry_after_ms: when a new try is worthwhile, in milliseconds, if the daemon knows.
    """

    def __init__(self, reply: Error) -> None:
        super().__init__(f"{reply.message} ({reply.code})")
        self.code = reply.code
        self.retryable = reply.retryable
        self.retry_after_ms = reply.retry_after_ms


class Timeout(IpcError):
    """Nothing came from the daemon for as long as the call allows. The call is given up.

    Attributes:
        endpoint: where the daemon was expected.
        timeout_s: how long nothing came, in seconds.
    """

    def __init__(self, endpoint: str, timeout_s: float, why: str | None = None) -> None:
        """Args:
        why: what is known of the reason, as a clause.
        """
        why = why or (
            "either no daemon listens there (is rtcached running, and with this endpoint?), or it "
            "is busy for longer than that (raise the timeout)"
        )
        super().__init__(f"no answer from {endpoint} within {timeout_s:g} s: {why}")
        self.endpoint = endpoint
        self.timeout_s = timeout_s


class ConnectionLost(IpcError):
    """The connection broke before the last reply, most often because the daemon restarted.

    Nobody knows how far the request came; what it had in work is dropped. The client connects again
    by itself, and other calls go on.

    Attributes:
        endpoint: where the daemon was.
        retryable: True: the same call can succeed once the daemon is back.
    """

    retryable = True

    def __init__(self, endpoint: str, kind: str) -> None:
        super().__init__(
            f"the connection to {endpoint} was lost before the answer to `{kind}` was complete, "
            f"most likely because rtcached stopped or was restarted; ask again"
        )
        self.endpoint = endpoint


class NotWelcome(IpcError):
    """The daemon, or what listens in its place, does not accept this client's connections.

    The operator's fault: the keys of both sides do not fit, or only one side has any.

    Attributes:
        endpoint: where the daemon was expected.
    """

    def __init__(self, endpoint: str, why: str) -> None:
        super().__init__(f"{endpoint} does not accept this client: {why}")
        self.endpoint = endpoint


class ProtocolError(IpcError):
    """What the daemon sent breaks the protocol. The daemon's fault, or a message was lost."""


class MessageTooLarge(IpcError):
    """The request exceeds what the wire carries. The caller's fault; nothing was sent."""


class Closed(IpcError):
    """The client was closed, before or during the call, or this is a process that was forked from
    the client's. The caller's doing.
    """
