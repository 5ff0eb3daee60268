"""Sessions: clients that have promised to be heard of again within a time, their lease.

Decides only: what time it is, it is told. A lease that seems to have run out is looked at twice:
when the daemon was busy, the message that renews it may wait to be read.
"""

from __future__ import annotations

from dataclasses import dataclass

from ipc.handler import ClientRef

#: What lies between the first look and the second [seconds].
GRACE_S = 0.25


@dataclass(slots=True)
class _Lease:
    lease_s: float
    renewed_s: float
    is_suspect: bool = False

    @property
    def ends_s(self) -> float:
        return self.renewed_s + self.lease_s


class Sessions:
    """All open sessions. Times are in seconds of one clock that never goes back."""

    def __init__(self) -> None:
        self._leases: dict[ClientRef, _Lease] = {}

    def __len__(self) -> int:
        return len(self._leases)

    def open(self, client: ClientRef, lease_s: float, now_s: float) -> None:
        """Begin a session, or give the one there is another time."""
        self._leases[client] = _Lease(lease_s, now_s)

    def renew(self, client: ClientRef, now_s: float) -> None:
        """The client was heard of."""
        lease = self._leases.get(client)
        if lease is not None:
            lease.renewed_s = now_s
            lease.is_suspect = False

    def end(self, client: ClientRef) -> None:
        """The client has said good-bye, or has gone; it need not have a session."""
        self._leases.pop(client, None)

    def take_expired(self, now_s: float, *, late_s: float = 0.0) -> list[ClientRef]:
        """End the sessions whose lease has run out, seen so for the second time.

        Args:
            late_s: how much later than it was to be this look is. A daemon that was busy for so
                long has not read what came meanwhile: then the look does not count.
        """
        if late_s > GRACE_S:
            return []
        due = [client for client, lease in self._leases.items() if lease.ends_s <= now_s]
        expired = [client for client in due if self._leases[client].is_suspect]
        for client in due:
            self._leases[client].is_suspect = True
        for client in expired:
            del self._leases[client]
        return expired

    def next_look_s(self, now_s: float) -> float | None:
        """When to look again; None if there is no session."""
        if not self._leases:
            return None
        return max(now_s + GRACE_S, min(lease.ends_s for lease in self._leases.values()))
