"""Who has sent a message, and whether one like that may: frames, keys, roles."""

from __future__ import annotations

from collections.abc import Sequence

from ipc.auth import Curve, Principal, may_use
from ipc.codec import Encoding, sniff
from ipc.connections import Connection
from ipc.errors import MalformedMessage
from ipc.handler import ClientRef, Role
from ipc.messages import ADMIN_REQUESTS, AnyRequest, Release, type_name

#: The length of the frame by which ZMQ_REQ_CORRELATE tells replies apart [bytes].
_CORRELATION_BYTES = 4


class Reception:
    """Of one server."""

    def __init__(self, role: Role, tenant: str, name: str, curve: Curve | None) -> None:
        """Args:
        role, tenant, name: the server's.
        curve: who may connect; None where the socket alone says who it is.
        """
        self._role: Role = role
        self._tenant = tenant
        self._name = name
        self._curve = curve

    def is_welcome(self, key: str) -> bool:
        """Whether a client with this key may connect."""
        return self.find(key) is not None

    def find(self, key: str) -> Principal | None:
        """Whom a key stands for at this socket."""
        principal = None if self._curve is None else self._curve.authority.find(key)
        is_welcome = principal is not None and may_use(principal, self._role, self._tenant)
        return principal if is_welcome else None

    def is_as_it_was(self, connection: Connection) -> bool:
        """Whether its key still stands for what it stood for."""
        principal, ref = self.find(connection.user_id), connection.ref
        return principal is not None and (
            ref is None
            or (ref.key, ref.role, ref.tenant) == (principal.name, principal.role, principal.tenant)
        )

    def ref(self, frames: Sequence[bytes], connection: Connection | None) -> ClientRef:
        """Who sent this: what the socket says, or, by CURVE, what the key says now."""
        role, tenant, key = self._role, self._tenant, ""
        if self._curve is not None:
            principal = None if connection is None else self.find(connection.user_id)
            role = "user" if principal is None else principal.role
            tenant = self._tenant if principal is None else principal.tenant
            key = "" if principal is None else principal.name
        is_correlated = len(frames) > 3 and len(frames[1]) == _CORRELATION_BYTES and not frames[2]
        return ClientRef(
            identity=frames[0],
            role=role,
            encoding=sniff(frames[-1]) or Encoding.MSGPACK,
            is_delimited=is_correlated or (len(frames) > 2 and not frames[1]),
            tenant=tenant,
            socket=self._name,
            key=key,
            correlation=frames[1] if is_correlated else b"",
        )

    def check_frames(self, client: ClientRef, frames: Sequence[bytes]) -> None:
        """The frames are those of one message, as a DEALER or a REQ socket sends it.

        Raises:
            MalformedMessage: they are not.
        """
        if len(frames) != len(client.envelope) + 1:
            raise MalformedMessage(
                "bad_frames",
                "expected one frame with the message, or an empty frame and one with the message",
            )

    def check_role(self, client: ClientRef, request: AnyRequest) -> None:
        """Whoever asks may ask this.

        Raises:
            MalformedMessage: it is for administrators, or the key may not connect any more.
        """
        if self._curve is not None and not client.key:
            text = "the key of this connection is not in the daemon's list of keys any more"
            raise MalformedMessage("forbidden", text, request.id)
        what = None if client.role == "admin" else _for_admins(request)
        if what is not None:
            where = "from administrators' keys" if client.key else "on the admin socket"
            text = f"`{what}` is accepted {where} only"
            raise MalformedMessage("forbidden", text, request.id)


def _for_admins(request: AnyRequest) -> str | None:
    """What of a request is for administrators only; None if nothing is."""
    if isinstance(request, ADMIN_REQUESTS):
        return type_name(request)
    if isinstance(request, Release) and request.tenant is not None:
        return "release.tenant"
    return None
