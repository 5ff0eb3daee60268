"""Which requests run out of time, and when the next one does. Pure."""

from __future__ import annotations

import heapq

from runtime_cache.ids import RequestId


class Deadlines:
    """Deadlines of unfinished requests, earliest first."""

    def __init__(self) -> None:
        # Entries of ended requests stay in the heap until they come to its top, or until they are
        # the greater part of it.
        self._heap: list[tuple[float, RequestId]] = []
        self._live: dict[RequestId, float] = {}

    def __len__(self) -> int:
        return len(self._live)

    @property
    def next_s(self) -> float | None:
        """The earliest deadline; None if there is none."""
        return self._heap[0][0] if self._heap else None

    def add(self, request_id: RequestId, deadline_s: float) -> None:
        """Watch a request."""
        self._live[request_id] = deadline_s
        heapq.heappush(self._heap, (deadline_s, request_id))

    def discard(self, request_id: RequestId) -> None:
        """The request has ended, or never had a deadline."""
        if self._live.pop(request_id, None) is None:
            return
        if len(self._heap) > 2 * len(self._live) + 16:
            self._heap = [(deadline_s, live) for live, deadline_s in self._live.items()]
            heapq.heapify(self._heap)
        self._drop_ended()

    def expired(self, now_s: float) -> list[RequestId]:
        """The requests whose deadline is `now_s` or before, earliest first; they are forgotten."""
        gone = []
        while self._heap and self._heap[0][0] <= now_s:
            _, request_id = heapq.heappop(self._heap)
            del self._live[request_id]
            gone.append(request_id)
            self._drop_ended()
        return gone

    def _drop_ended(self) -> None:
        while self._heap and self._heap[0][1] not in self._live:
            heapq.heappop(self._heap)
