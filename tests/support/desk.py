"""A `Service` with a fake engine, made-up facts, and a record of what it sent."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from ipc import messages as wire
from ipc.codec import Encoding
from ipc.server import ClientRef
from om_models.chat import ChatTemplate
from om_models.null_model import byte_level_library
from om_models.tokenizer import Tokenizer
from runtime_cache.cache.listing import EntryQuery
from runtime_cache.cache.prefix_index import PrefixNode
from runtime_cache.cache.results import CacheEntry, CacheReport, Evicted, Keep, ShownEntry
from runtime_cache.cache.verification import Reading, Verdict
from runtime_cache.engine.commands import (
    EmitTokens,
    FailRequest,
    FinishReason,
    FinishRequest,
    ReportExplained,
    ReportToRead,
    end_of,
)
from runtime_cache.engine.events import CancelReason
from runtime_cache.engine.loop import Answer
from runtime_cache.engine.request import NewRequest, TokenArray, TokenLogprobs, Usage
from runtime_cache.errors import DeviceLost, RuntimeCacheError
from runtime_cache.ids import DEFAULT_TENANT, BlockHash, BlockId, PrefixId, RequestId, TenantName
from runtime_cache.intake import Intake, Prompt, Prompted
from runtime_cache.service import Defaults, Service

BOS, EOS, VOCAB = 256, 257, 258
ALICE = ClientRef(b"alice", "user", Encoding.MSGPACK, is_delimited=False)
BOB = ClientRef(b"bob", "user", Encoding.JSON, is_delimited=True)
#: Another tenant than the default one, and a client of it that calls itself as Alice does.
TEAM = TenantName("team-a")
TEAM_ALICE = ClientRef(b"alice", "user", Encoding.MSGPACK, is_delimited=False, tenant=TEAM)
ADMIN = ClientRef(b"admin", "admin", Encoding.MSGPACK, is_delimited=False)
TEMPLATE = (
    "{% for m in messages %}{{ m.role }}:{{ m.content }};{% endfor %}"
    "{% if add_generation_prompt %}>{% endif %}"
)
REPORT = CacheReport(8, "diverged", 8, 12)
USAGE = Usage(10, 8, 2, 3, queue_s=0.0015, ttft_s=0.25, total_s=0.75, cache=REPORT)
#: Where the clock of a desk begins [seconds].
NOW_S = 100.0
#: More than the service tokenises within the loop.
LONG = "x" * 5000


def tokenizer(bos: int | None = BOS) -> Tokenizer:
    """One token a byte: `!` is 0, `a` is 64; `<s>` 256, `</s>` 257."""
    return Tokenizer(byte_level_library(["<s>", "</s>"]), bos, {EOS})


@dataclass(frozen=True)
class SeenIntake(Intake):
    """Notes what it is given to remember: prompt and ids of each answer."""

    remembered: list[tuple[list[int], list[int]]] = field(default_factory=list)

    def remember(self, prompt: Prompt, answer: Sequence[int]) -> None:
        self.remembered.append((prompt.tokens.tolist(), list(answer)))
        super().remember(prompt, answer)


@dataclass(frozen=True)
class HeldIntake(Intake):
    """Reads no prompt before it may; `error` is raised instead of reading."""

    may_read: threading.Event = field(default_factory=threading.Event)
    error: Exception | None = None
    seen: list[Prompted] = field(default_factory=list)

    @property
    def num_read(self) -> int:
        return len(self.seen)

    def read(self, message: Prompted) -> Prompt:
        self.seen.append(message)
        self.may_read.wait()
        if self.error is not None:
            raise self.error
        return super().read(message)


class FakeEngine:
    """Keeps requests until the test answers them; a cancel is answered at once.

    Attributes:
        requests: all that were submitted.
        cancels: id and reason of each cancel.
        asked: the operators' questions, in order, by name and arguments.
        registered: the prefixes that `release_prefix` knows.
        refuses: what every new request is answered by, if anything.
        error: raised instead of an answer to an operator, if anything is.
        nodes: the blocks that are to be read.
        readings: of those blocks, in order.
        verdicts: by block; `new` for all others.
        lost: what it was told of the device, if anything.
    """

    def __init__(self) -> None:
        self.requests: list[NewRequest] = []
        self.cancels: list[tuple[int, CancelReason]] = []
        self.asked: list[tuple[object, ...]] = []
        self.registered: set[tuple[TenantName, PrefixId]] = set()
        self.refuses: tuple[str, str, bool, int | None] | None = None
        self.error: RuntimeCacheError | None = None
        self.nodes: list[PrefixNode] = []
        self.readings: list[Reading] = []
        self.verdicts: dict[int, Verdict] = {}
        self.lost: DeviceLost | None = None
        self._sinks: dict[RequestId, Callable[[Answer], None]] = {}

    def submit(self, request: NewRequest, sink: Callable[[Answer], None]) -> None:
        self.requests.append(request)
        if self.refuses is not None:
            sink(FailRequest(request.request_id, *self.refuses))
            return
        self._sinks[request.request_id] = sink

    def cancel(self, request_id: RequestId, reason: CancelReason) -> None:
        self.cancels.append((request_id, reason))
        if request_id in self._sinks:
            self.finish(end_of(reason), request_id=request_id)

    def release_prefix(self, prefix_id: PrefixId, tenant: TenantName) -> bool:
        is_known = (tenant, prefix_id) in self.registered
        self.registered.discard((tenant, prefix_id))
        return is_known

    def evict(
        self,
        tenant: TenantName | None,
        *,
        max_blocks: int | None = None,
        digest: str | None = None,
        used_until_s: float | None = None,
        created_until_s: float | None = None,
        is_dry_run: bool = False,
    ) -> Evicted:
        what = (max_blocks, digest, used_until_s, created_until_s, is_dry_run)
        self._ask("evict", tenant, *what)
        return Evicted(3 if max_blocks is None else min(max_blocks, 3), num_in_use=2, num_kept=1)

    def show(
        self, tenant: TenantName, digest: str | None, prefix_id: PrefixId | None
    ) -> ShownEntry:
        self._ask("show", tenant, digest, prefix_id)
        entry = CacheEntry("d", 4, 1, 2, 3, NOW_S, NOW_S, 50)
        return ShownEntry(entry, (), 5, bytes(16))

    def start_drain(self) -> int:
        self._ask("drain")
        return len(self._sinks)

    def end_drain(self) -> None:
        self._ask("resume")

    def pin(self, tenant: TenantName, digest: str, ttl_s: float | None) -> Keep:
        self._ask("pin", tenant, digest, ttl_s)
        return _keep(digest, None if ttl_s is None else NOW_S + ttl_s)

    def unpin(self, tenant: TenantName, digest: str) -> Keep:
        self._ask("unpin", tenant, digest)
        return _keep(digest, None)

    def explain(self, tenant: TenantName, tokens: TokenArray) -> ReportExplained:
        self._ask("explain", tenant, tokens.tolist())
        return ReportExplained(REPORT, tokens.size)

    def blocks_to_read(
        self, tenant: TenantName | None, digest: str | None, *, first_block: int, max_blocks: int
    ) -> ReportToRead:
        self._ask("verify", tenant, digest, first_block)
        nodes = [node for node in self.nodes if node.block >= first_block]
        next_block = nodes[max_blocks].block if len(nodes) > max_blocks else None
        return ReportToRead(tuple(nodes[:max_blocks]), next_block)

    def judge(self, reading: Reading) -> Verdict:
        self.readings.append(reading)
        return self.verdicts.get(reading.node.block, Verdict("new"))

    def lose_device(self, error: DeviceLost) -> None:
        self.lost = error

    def _ask(self, *question: object) -> None:
        self.asked.append(question)
        if self.error is not None:
            raise self.error

    # --- what a test lets it answer; the last request unless another is named -------------------

    def emit(self, text: str, *token_ids: int, logprobs: tuple[TokenLogprobs, ...] = ()) -> None:
        request_id = self.requests[-1].request_id
        self._sinks[request_id](EmitTokens(request_id, token_ids, text, logprobs))

    def finish(
        self,
        reason: FinishReason = "length",
        text: str = "",
        *,
        stop: str | None = None,
        usage: Usage = USAGE,
        num_kept_blocks: int = 3,
        request_id: RequestId | None = None,
    ) -> None:
        request_id = request_id or self.requests[-1].request_id
        last = self.requests[-1]
        prefix_id = last.prefix_id if reason == "registered" else None
        if prefix_id is not None:
            self.registered.add((last.tenant, prefix_id))
        self._sinks.pop(request_id)(
            FinishRequest(
                request_id,
                reason,
                text,
                usage,
                stop=stop,
                prefix_id=prefix_id,
                num_kept_blocks=0 if prefix_id is None else num_kept_blocks,
            )
        )

    def fail(self, code: str, message: str) -> None:
        request_id = self.requests[-1].request_id
        self._sinks.pop(request_id)(FailRequest(request_id, code, message, retryable=True))


class FakeFacts:
    """A daemon with blocks of four tokens and a hundred bytes.

    Attributes:
        reads: what was asked of the device, as first slot and number of tokens.
        kv: of one token; every read gives as many of them as it asks for.
        may_read: reads wait for it.
        error: what reads raise, if anything.
    """

    bytes_per_block = 100
    block_size = 4
    digest = "d1"
    is_caching = True
    incarnation = "9f2c4b1e7a5d3806"
    kv_dtype = "float16"
    max_read_tokens = 4

    def __init__(self) -> None:
        self.reads: list[tuple[int, int]] = []
        self.queries: list[EntryQuery] = []
        self.kv = bytes(25)
        self.may_read = asyncio.Event()
        self.error: Exception | None = None

    def read_kv(self, first_slot: int, num_tokens: int) -> Awaitable[bytes]:
        self.reads.append((first_slot, num_tokens))
        return self._read(num_tokens)

    async def _read(self, num_tokens: int) -> bytes:
        await self.may_read.wait()
        if self.error is not None:
            raise self.error
        return self.kv * num_tokens

    def info(self, message_id: wire.MessageId, tenant: TenantName) -> wire.Info:
        return wire.Info(
            message_id,
            model="m",
            digest=self.digest,
            device="none",
            vocab_size=VOCAB,
            max_model_len=64,
            block_size=4,
            chat=True,
            limits={"cache_tokens": 8 if tenant else 400},
            versions={},
        )

    def pong(self, message_id: wire.MessageId) -> wire.Pong:
        return wire.Pong(message_id, version="1", uptime_s=2.5)

    def stats(self) -> dict[str, Any]:
        return {"pool": {"num_blocks": 7}}

    def num_evictable(self, tenant: TenantName | None) -> int:
        return 3 if tenant is None else 2

    def entries(
        self, query: EntryQuery, tenant: TenantName | None
    ) -> tuple[tuple[wire.Entry, ...], int]:
        """No entries; their number shows what was asked for."""
        self.queries.append(query)
        return (), (query.limit or 0) + query.offset + (1000 if tenant is None else len(tenant))

    def shown(
        self, message_id: wire.MessageId, tenant: TenantName, shown: ShownEntry, *, with_text: bool
    ) -> wire.Shown:
        return wire.Shown(
            message_id,
            entry=wire.Entry(
                digest=shown.entry.digest,
                num_tokens=4,
                num_blocks=1,
                num_bytes=100,
                hits=3,
                age_s=0,
                idle_s=0,
                in_use=True,
                tenant=tenant,
            ),
            blocks=(),
            num_requests=shown.entry.num_requests,
            num_continued_by=shown.num_continued_by,
            text="text" if with_text else None,
        )


def cached_node(block: int, num_tokens: int = 4) -> PrefixNode:
    """A cached block."""
    digest, tokens = BlockHash(bytes([block]) * 32), bytes(4 * num_tokens)
    return PrefixNode(digest, tokens, BlockId(block), None, num_tokens, 1, NOW_S, NOW_S)


def _keep(digest: str, expires_s: float | None) -> Keep:
    """Of five tokens in two blocks; the name is the digest in full."""
    kind: Literal["pin", "lease"] = "pin" if expires_s is None else "lease"
    name = digest.ljust(16, "0")
    return Keep(name, kind, name, 5, (BlockId(1), BlockId(2)), NOW_S, expires_s)


class Desk:
    """The service, what it was given and what it sent.

    Attributes:
        sent: client and reply, in order.
        seen: the intake of each tenant, unless the test brings its own.
        now_s: the clock's time.
    """

    def __init__(
        self,
        *,
        defaults: Defaults | None = None,
        template: str | None = TEMPLATE,
        bos: int | None = BOS,
        intakes: Mapping[TenantName, Intake] | None = None,
    ) -> None:
        self.engine = FakeEngine()
        self.facts = FakeFacts()
        self.sent: list[tuple[ClientRef, wire.AnyReply]] = []
        self.now_s = NOW_S
        chat_template = None if template is None else ChatTemplate(template)
        self.seen = {
            tenant: SeenIntake(tokenizer(bos), chat_template, VOCAB)
            for tenant in (DEFAULT_TENANT, TEAM)
        }
        self.service = Service(
            self.engine,
            intakes or self.seen,
            self.facts,
            defaults or Defaults(),
            self._send,
            clock=lambda: self.now_s,
        )
        self._changed = asyncio.Event()

    def say(self, message: wire.AnyRequest, client: ClientRef = ALICE) -> list[wire.AnyReply]:
        """Give the service a message; returns what it sent within the call."""
        before = len(self.sent)
        self.service.on_message(client, message)
        return [reply for _, reply in self.sent[before:]]

    def take(self) -> list[wire.AnyReply]:
        """What was sent since the last time."""
        replies = [reply for _, reply in self.sent]
        self.sent.clear()
        return replies

    @property
    def request(self) -> NewRequest:
        """The last request handed to the engine."""
        return self.engine.requests[-1]

    @property
    def prompt(self) -> list[int]:
        """Its prompt."""
        prompt: list[int] = self.request.prompt.tolist()
        return prompt

    async def until_sent(self) -> list[wire.AnyReply]:
        """Wait for the next replies."""
        while not self.sent:
            self._changed.clear()
            await self._changed.wait()
        return self.take()

    def _send(self, client: ClientRef, reply: wire.AnyReply) -> None:
        self.sent.append((client, reply))
        self._changed.set()
