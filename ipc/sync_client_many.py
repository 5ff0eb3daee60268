"""Many answers at once, for the blocking client: all of them move on while the caller waits for
one.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator

from ipc.answers import Answer, Result
from ipc.blocking_link import ClientLink
from ipc.errors import Closed, IpcError, Timeout
from ipc.many import Outcome, Prompt, pause_s
from ipc.session import Call


class Asked:
    """An answer that is taken as it comes, without waiting."""

    def __init__(self, link: ClientLink, call: Call, timeout_s: float) -> None:
        self._link = link
        self._call = call
        self._timeout_s = timeout_s
        self._answer = Answer()
        self.due_s = time.monotonic() + timeout_s

    def advance(self, now_s: float) -> Result | None:
        """The answer if it is complete; raises what the methods of `Client` raise."""
        while not self._answer.is_done and (reply := self._link.take(self._call)) is not None:
            self._answer.add(reply)
            self.due_s = now_s + self._timeout_s
        if self._answer.is_done:
            return self._answer.result()
        if now_s >= self.due_s:
            self.cancel()
            raise Timeout(self._link.endpoint, self._timeout_s)
        return None

    def cancel(self) -> None:
        """Give it up; nothing happens if it has ended."""
        self._link.give_up(self._call)


class _Job:
    """One request on its way to an outcome, over several tries if need be."""

    def __init__(self, index: int, prompt: Prompt) -> None:
        self.index = index
        self.prompt = prompt
        self.num_tries = 0
        self.due_s = 0.0
        self.asked: Asked | None = None


class Outcomes:
    """The outcomes of many requests; to be iterated over once.

    No request is made before that. Leaving the loop cancels what is unfinished.

    Args:
        prompts: taken as room becomes free.
        ask: makes the request for a prompt.
        wait: lets the client receive, for so many seconds at the most.
        max_at_once: requests that are begun and not handed out yet.
        in_order: hand out in the order of the prompts; False: as they end.
        max_tries: of a request that may succeed later.
    """

    def __init__(
        self,
        prompts: Iterable[Prompt],
        ask: Callable[[Prompt], Asked],
        wait: Callable[[float], None],
        *,
        max_at_once: int,
        in_order: bool,
        max_tries: int,
    ) -> None:
        self._prompts = iter(enumerate(prompts))
        self._ask = ask
        self._wait = wait
        self._max_at_once = max_at_once
        self._in_order = in_order
        self._max_tries = max_tries
        self._jobs: dict[int, _Job] = {}
        self._ended: dict[int, Outcome] = {}
        self._next_index = 0

    def __iter__(self) -> Iterator[Outcome]:
        """Outcomes, errors among them; raises what is wrong with a prompt in itself, and Closed."""
        try:
            while self._fill():
                now_s = time.monotonic()
                for job in [*self._jobs.values()]:
                    self._advance(job, now_s)
                while (outcome := self._take()) is not None:
                    yield outcome
                    self._fill()
                self._wait_for_jobs()
        finally:
            for job in self._jobs.values():
                if job.asked is not None:
                    job.asked.cancel()

    def _fill(self) -> bool:
        """Take as many prompts as there is room for; whether any outcome is to come."""
        while len(self._jobs) + len(self._ended) < self._max_at_once:
            numbered = next(self._prompts, None)
            if numbered is None:
                break
            self._jobs[numbered[0]] = _Job(*numbered)
        return bool(self._jobs or self._ended)

    def _advance(self, job: _Job, now_s: float) -> None:
        """Take what has come for a job, and begin it if it is due."""
        try:
            if job.asked is None and now_s >= job.due_s:
                job.num_tries += 1
                job.asked = self._ask(job.prompt)
            if job.asked is not None and (result := job.asked.advance(now_s)) is not None:
                self._end(job, Outcome(job.index, result))
        except Closed:
            raise
        except IpcError as error:
            wait_s = pause_s(error, job.num_tries)
            if wait_s is None or job.num_tries == self._max_tries:
                self._end(job, Outcome(job.index, None, error))
            else:
                job.asked, job.due_s = None, now_s + wait_s

    def _end(self, job: _Job, outcome: Outcome) -> None:
        del self._jobs[job.index]
        self._ended[job.index] = outcome

    def _take(self) -> Outcome | None:
        """The next outcome to hand out, if there is one."""
        index = self._next_index if self._in_order else next(iter(self._ended), -1)
        outcome = self._ended.pop(index, None)
        self._next_index += outcome is not None
        return outcome

    def _wait_for_jobs(self) -> None:
        """Until something comes, or something is due."""
        due = [job.due_s if job.asked is None else job.asked.due_s for job in self._jobs.values()]
        if due and not self._is_anything_new():
            self._wait(max(0.0, min(due) - time.monotonic()))

    def _is_anything_new(self) -> bool:
        return any(job.num_tries == 0 for job in self._jobs.values())
