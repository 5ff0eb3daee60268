"""What operators ask that takes more than one turn of the event loop: to evict much, to verify."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial

from ipc import messages as wire
from runtime_cache.admin import AdminDesk
from runtime_cache.evicting import Eviction
from runtime_cache.verifying import Verifier
from runtime_cache.work import Work


class Chores:
    """Carries them out beside the requests of users; `Work.stop` gives one up."""

    def __init__(
        self,
        admin: AdminDesk,
        verifier: Verifier,
        finish: Callable[[Work, wire.AnyReply], None],
        fail: Callable[[Work, Exception], None],
    ) -> None:
        """Args:
        finish: takes the final reply, also if the work has ended meanwhile.
        fail: the same for what went wrong.
        """
        self._admin = admin
        self._verifier = verifier
        self._finish = finish
        self._fail = fail

    def start(self, work: Work, message: wire.Verify | wire.Evict) -> None:
        """Begin; what can be done at once is done on return.

        Raises:
            InvalidRequest: there is no such tenant.
        """
        if isinstance(message, wire.Evict):
            self._evict(work, self._admin.eviction(message))
            return
        tenant = self._admin.one_or_all(message.tenant)
        work.verifying = asyncio.ensure_future(self._verifier.verify(message, tenant))
        work.verifying.add_done_callback(partial(self._on_verified, work))

    def _evict(self, work: Work, eviction: Eviction) -> None:
        """Evict a part now; if there is more, in the event loop's next turn."""
        try:
            reply = eviction.next_part()
        except Exception as error:
            self._fail(work, error)
            return
        if reply is not None:
            self._finish(work, reply)
        else:
            loop = asyncio.get_running_loop()
            work.next_part = loop.call_soon(self._evict, work, eviction)

    def _on_verified(self, work: Work, verifying: asyncio.Task[wire.Verified]) -> None:
        if verifying.cancelled():
            return  # its final reply has been sent, or nobody wants one
        error = verifying.exception()
        if isinstance(error, Exception):
            self._fail(work, error)
        else:
            self._finish(work, verifying.result())
