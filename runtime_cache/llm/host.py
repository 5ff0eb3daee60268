"""A runtime and its service on a thread of their own, asked without sockets from any thread.

The engine and the service are the daemon's; the messages are those of the wire, not encoded. What
is opened here is given back by `close`, at the latest when the interpreter ends.
"""

from __future__ import annotations

import asyncio
import atexit
import os
import threading
from collections.abc import Sequence
from concurrent.futures import Future, wait
from contextlib import suppress
from itertools import count
from queue import SimpleQueue

import structlog
import uvloop

from ipc.codec import Encoding
from ipc.messages import AnyReply, AnyRequest, Cancel, Error, MessageId, Tokens, type_name
from ipc.server import ClientRef
from runtime_cache.config import Config
from runtime_cache.errors import DeviceError, InternalError, OutOfDeviceMemory
from runtime_cache.facts import DaemonFacts
from runtime_cache.llm.results import Closed
from runtime_cache.request_log import RequestLog
from runtime_cache.runtime import Runtime
from runtime_cache.service import Defaults, Service
from runtime_cache.tenants import new_intakes

log = structlog.get_logger(__name__)

#: Where the replies to requests go, each with the request's id, in order.
Inbox = SimpleQueue[tuple[MessageId, AnyReply]]

#: Waits that an interrupt is to end are made in turns of this length [seconds]: CPython handles a
#: signal that arrives just before a wait begins only when the wait is over.
TURN_S = 0.5

#: Whom the service answers. It is the operator as well: there is nobody else.
_CLIENT = ClientRef(b"embedded", "admin", Encoding.MSGPACK, is_delimited=False)


class Host:
    """An opened model. Every method may be called from any thread.

    Attributes:
        config: what it was opened with.
    """

    def __init__(self, config: Config) -> None:
        """Use `Host.open`."""
        self.config = config
        self._pid = os.getpid()
        self._ids = count(1)
        self._opened: Future[None] = Future()
        self._failure: BaseException | None = None
        #: Guards `_is_closing`, and that nothing is asked after the stop. Re-entrant, since a
        #: finalizer may run anywhere.
        self._lock = threading.RLock()
        self._is_closing = False
        self._loop = uvloop.new_event_loop()
        self._stop = asyncio.Event()
        # Of the loop's thread alone.
        self._service: Service
        self._inboxes: dict[MessageId, Inbox] = {}
        self._thread = threading.Thread(target=self._run, name="llm", daemon=True)

    @classmethod
    def open(cls, config: Config) -> Host:
        """Open bundle, device and engine; waits for those of this process that are on their way
        down, which may hold the memory.

        Raises:
            ConfigError: configuration or bundle; nothing is left open.
            DeviceError: the device or its driver; nothing is left open.
        """
        for other in open_hosts():
            if other._is_closing:
                other._join()
        host = cls(config)
        try:
            _hosts.add(host)
            host._thread.start()
            while not host._opened.done():  # in turns, see TURN_S
                wait([host._opened], timeout=TURN_S)
            host._opened.result()
        except OutOfDeviceMemory as error:
            if open_hosts():
                raise _with_hint(error) from error
            raise
        except BaseException:
            host.ask_to_close()
            if host._thread.ident is None:  # interrupted before it was started
                _hosts.discard(host)
            raise
        return host

    @property
    def is_closed(self) -> bool:
        """Whether it is closed, or about to be, or another process's."""
        return self._is_closing or os.getpid() != self._pid

    def new_id(self) -> MessageId:
        """An id no other request has."""
        return MessageId(str(next(self._ids)))

    def ask(self, requests: Sequence[AnyRequest], inbox: Inbox) -> None:
        """Hand in requests, all at once; each is answered in the inbox, `Tokens` apart once.

        Raises:
            Closed: nothing was handed in.
        """
        self.check_owner()
        with self._lock:
            if self._is_closing:
                raise Closed("this LLM is closed")
            self._loop.call_soon_threadsafe(self._take, requests, inbox)

    def check_owner(self) -> None:
        """Raises:
        Closed: this is another process than the one that opened it.
        """
        if os.getpid() != self._pid:
            raise Closed(
                f"this LLM belongs to process {self._pid}; after a fork, make a new one in the "
                f"child, or start processes with the method `spawn`"
            )

    def give_up(self, ids: Sequence[MessageId]) -> None:
        """Cancel what is unfinished of these; it is not answered any more. Never waits."""
        with self._lock:
            if not self.is_closed:
                self._loop.call_soon_threadsafe(self._cancel, ids)

    def ask_to_close(self) -> None:
        """Begin to close; does not wait, so that a finalizer may call it on any thread."""
        if os.getpid() != self._pid:
            return
        with self._lock:
            if not self._is_closing:
                self._is_closing = True
                self._loop.call_soon_threadsafe(self._stop.set)

    def close(self) -> None:
        """Cancel what is unfinished, give everything back. Idempotent.

        Raises:
            DeviceError: the first failure, after everything was tried; raised once.
        """
        self.ask_to_close()
        if os.getpid() == self._pid:
            self._join()
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    def _join(self) -> None:
        """Wait for the thread's end; it never ran if opening was interrupted early."""
        if self._thread.ident is not None:
            self._thread.join()

    # --- on the loop's thread ------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._loop.run_until_complete(self._serve())
        except BaseException as error:
            self._failure = error
            if self._opened.done():  # a finalizer may have asked, and nobody hears of it
                is_device = isinstance(error, DeviceError)
                log.error("close_failed", error=str(error), exc_info=None if is_device else error)
        with self._lock:
            self._is_closing = True
        self._loop.run_until_complete(self._refuse_the_rest())
        self._loop.close()
        _hosts.discard(self)
        if not self._opened.done() and self._failure is not None:
            failure, self._failure = self._failure, None
            self._opened.set_exception(failure)

    async def _serve(self) -> None:
        runtime = await Runtime.open(self.config)
        try:
            self._service = self._make_service(runtime)
            self._opened.set_result(None)
            await self._stop.wait()
            await runtime.engine.drain(0)
            await self._service.close()
        finally:
            await runtime.close()

    def _make_service(self, runtime: Runtime) -> Service:
        engine, log_config = self.config.engine, self.config.log
        return Service(
            runtime.engine,
            new_intakes(runtime),
            DaemonFacts(runtime, ()),
            Defaults(engine.default_max_tokens, engine.default_deadline_ms),
            send=self._deliver,
            requests=RequestLog(runtime.tokenizer.decode if log_config.prompts else None),
        )

    async def _refuse_the_rest(self) -> None:
        """Answer what a broken service has left, and what came too late for it."""
        await asyncio.sleep(0)  # what was handed in before is taken before this goes on
        for message_id in list(self._inboxes):
            self._fail(message_id)

    def _take(self, requests: Sequence[AnyRequest], inbox: Inbox) -> None:
        for request in requests:
            self._inboxes[request.id] = inbox
            try:
                self._service.on_message(_CLIENT, request)
            except Exception:
                log.exception("request_failed", message_id=request.id, kind=type_name(request))
                self._fail(request.id)

    def _fail(self, message_id: MessageId) -> None:
        text = "the LLM failed on this request; its log has the details"
        error = Error(id=message_id, code=InternalError.code, message=text, retryable=False)
        self._deliver(_CLIENT, error)

    def _cancel(self, ids: Sequence[MessageId]) -> None:
        for message_id in ids:
            if self._inboxes.pop(message_id, None) is not None:
                self._service.on_message(_CLIENT, Cancel(self.new_id(), target=message_id))

    def _deliver(self, client: ClientRef, reply: AnyReply) -> None:
        """The service's `send`. What nobody waits for goes nowhere: it was given up."""
        if reply.id is None or reply.id not in self._inboxes:
            return
        self._inboxes[reply.id].put((reply.id, reply))
        if not isinstance(reply, Tokens):
            del self._inboxes[reply.id]


#: The open ones; after a fork, those of the parent as well.
_hosts: set[Host] = set()


def open_hosts() -> list[Host]:
    """Those of this process that are not closed yet."""
    return [host for host in list(_hosts) if host._pid == os.getpid()]


def _with_hint(error: OutOfDeviceMemory) -> OutOfDeviceMemory:
    """The same error, for a process that has another model open."""
    detail = f"another LLM of this process is open, close() it first; {error.detail}"
    return OutOfDeviceMemory(error.function, error.acl_code, error.acl_name, detail)


@atexit.register
def _close_all() -> None:
    """pyACL is to be finalised before the process ends."""
    for host in open_hosts():
        with suppress(Exception):  # it is in the log
            host.close()
