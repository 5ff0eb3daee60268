"""The requests that have no final reply yet, by client and by the name the client gave them."""

from __future__ import annotations

from ipc.handler import ClientRef
from runtime_cache.errors import DuplicateId
from runtime_cache.work import Work


class Unfinished:
    """Of all clients, in order of arrival."""

    def __init__(self) -> None:
        self._by_client: dict[ClientRef, dict[str, Work]] = {}

    def __len__(self) -> int:
        return sum(map(len, self._by_client.values()))

    def check_new(self, client: ClientRef, message_id: str) -> None:
        """See that no other request has this name.

        Raises:
            DuplicateId: one has.
        """
        if self.find(client, message_id) is not None:
            raise DuplicateId(f"`id` {message_id!r} names an unfinished request of this client")

    def add(self, work: Work) -> None:
        """One that is new."""
        self._by_client.setdefault(work.client, {})[work.message.id] = work

    def remove(self, work: Work) -> None:
        """It has its final reply."""
        works = self._by_client[work.client]
        del works[work.message.id]
        if not works:
            del self._by_client[work.client]

    def find(self, client: ClientRef, message_id: str) -> Work | None:
        """The one of this name."""
        return self._by_client.get(client, {}).get(message_id)

    def of(self, client: ClientRef) -> list[Work]:
        """All of a client."""
        return list(self._by_client.get(client, {}).values())

    def all(self) -> list[Work]:
        """Those of everybody."""
        return [work for works in self._by_client.values() for work in works.values()]
