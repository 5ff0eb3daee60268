"""The waiting requests of one tenant, and which of them is admitted next. Pure.

- A preempted request goes first.
- Of the others, first come, the one with the longest cached prefix goes first, so that prefixes are
  used while they are there. Only the first `match_window` in order of arrival are looked at.
- A request that was overtaken `max_overtakes` times is overtaken no more. So who finds `n` requests
  waiting is admitted after at most `n + max_overtakes` others, those preempted meanwhile aside.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from itertools import chain, islice

from runtime_cache.engine.sequence import Sequence


class WaitingQueue:
    """Some waiting requests."""

    def __init__(self, *, match_window: int, max_overtakes: int) -> None:
        self._preempted: deque[Sequence] = deque()
        self._arrived: deque[Sequence] = deque()
        self._match_window = match_window
        self._max_overtakes = max_overtakes

    def __len__(self) -> int:
        return len(self._preempted) + len(self._arrived)

    def __iter__(self) -> Iterator[Sequence]:
        return chain(self._preempted, self._arrived)

    @property
    def oldest(self) -> int:
        """Number of the request that arrived first; there must be one."""
        return min(s.number for s in chain(self._preempted, islice(self._arrived, 1)))

    def add(self, sequence: Sequence) -> None:
        """A new request."""
        self._arrived.append(sequence)

    def put_back(self, sequence: Sequence) -> None:
        """A request that had to give up its blocks; it goes before all others."""
        self._preempted.appendleft(sequence)

    def remove(self, sequence: Sequence) -> None:
        """A request that has its final answer."""
        queue = self._preempted if sequence in self._preempted else self._arrived
        queue.remove(sequence)

    def next(self) -> Sequence:
        """Who is to be admitted now; there must be one. Changes nothing."""
        if self._preempted:
            return self._preempted[0]
        best, longest = self._arrived[0], -1
        for sequence in islice(self._arrived, self._match_window):
            length = sequence.match_length()
            if length > longest:
                best, longest = sequence, length
            if sequence.num_overtaken >= self._max_overtakes:
                break
        return best

    def take(self, sequence: Sequence) -> None:
        """`next` has been admitted: those before it are overtaken."""
        if self._preempted:
            self._preempted.remove(sequence)
            return
        place = self._arrived.index(sequence)
        for overtaken in islice(self._arrived, place):
            overtaken.num_overtaken += 1
        del self._arrived[place]
