"""A client whose daemon gives the widest answers, for tests of what the admin tool prints."""

from __future__ import annotations

from io import StringIO
from typing import Any, NamedTuple

import msgspec
from rich.console import Console

from ipc.answers import Result
from ipc.errors import ServerError
from ipc.messages import (
    CacheReport,
    Configured,
    Draining,
    Error,
    Evicted,
    Explained,
    Listed,
    Pinned,
    PrefixName,
    Registered,
    Released,
    Reloaded,
    Resumed,
    Shown,
    Timing,
    Unpinned,
    Usage,
    Verified,
)
from tests.support.admin_answers import DIGEST, ID, OPTIONS, WHOLE_ID, block, entry
from tools.admin.command import Outcome
from tools.admin.main import new_parser

LATENCY = {"num": 3, "p50": 123456.7, "p90": 1234567.8, "p99": 86400000.0, "max": 86400000.0}
#: As the daemon's, as far as `top` and `stats` look.
STATS: dict[str, Any] = {
    "daemon": {
        "version": "0.1.0",
        "uptime_s": 86399999.0,
        "state": "recovering",
        "device": "npu:0",
        "soc": "Ascend910B4",
        "model": "a-model-with-a-very-long-name-" * 4,
    },
    "warnings": ["The cache is too small for what is asked of it: " + "more words " * 12],
    "latency": {"window_s": 300, "ttft_ms": LATENCY, "inter_token_ms": {"num": 0, "p50": None}},
    "pool": {
        "num_blocks": 1_000_000,
        "live_blocks": 1,
        "cached_blocks": 999_998,
        "free_blocks": 1,
        "kept_blocks": 0,
        "bytes_per_block": 2**31,
    },
    "cache": {"hit_rate": 1.0, "queried_tokens": 9, "hit_tokens": 9, "evicted_blocks": 2**53 - 1},
    "engine": {
        "num_waiting": 1024,
        "num_running": 1024,
        "is_draining": False,
        "answer_tokens": 2**53 - 1,
        "prefill_tokens": 0,
    },
}


class WideClient:
    """Answers like `ipc.sync_client.Client`, without a daemon.

    Attributes:
        evicted: the reply to `evict`.
        refuses: texts that `register` refuses.
        looks: what `stats` tells, one after the other; the last one again and again.
    """

    def __init__(self) -> None:
        self.evicted = Evicted(
            ID, num_blocks=10, num_bytes=10 * 2**31, in_use_blocks=2**31, kept_blocks=2**31
        )
        self.entries = tuple(entry(**fields) for fields in _ENTRIES)
        self.refuses: tuple[str, ...] = ()
        self.looks: list[dict[str, Any]] = [STATS]
        self.asked: list[tuple[str, dict[str, Any]]] = []

    def list(self, limit: int = 100, *, offset: int = 0, **asked: Any) -> Listed:
        self.asked.append(("list", {"limit": limit, "offset": offset, **asked}))
        part = self.entries[offset : offset + limit]
        return Listed(ID, entries=part, total=len(self.entries))

    def show(self, digest: str | None = None, *, with_text: bool = False, **_: Any) -> Shown:
        return Shown(
            ID,
            entry=entry(),
            blocks=(block(), block(num_requests=0, is_kept=False)),
            num_requests=1024,
            num_continued_by=10_000,
            text="what it says" if with_text else None,
        )

    def evict(self, **asked: Any) -> Evicted:
        self.asked.append(("evict", asked))
        return msgspec.structs.replace(self.evicted, dry_run=asked.get("dry_run", False))

    def pin(self, digest: str, ttl_s: float | None = None, **_: Any) -> Pinned:
        return Pinned(
            ID, digest=DIGEST, num_tokens=9, num_blocks=1, num_bytes=2**31, expires_in_s=ttl_s
        )

    def unpin(self, digest: str, **_: Any) -> Unpinned:
        return Unpinned(ID, digest=DIGEST)

    def explain(self, prompt: str | None = None, **_: Any) -> Explained:
        return Explained(ID, prompt_tokens=9, cached_tokens=8, cache=CacheReport("hit"))

    def generate(self, text: str, **_: Any) -> WideClient:
        return self

    def result(self) -> Result:
        """Of `generate`."""
        return Result(
            text="",
            token_ids=(1,),
            finish_reason="length",
            usage=Usage(9, 8, 1, 1),
            timing=Timing(0.5, 25.0, 75.0, 20.0),
            stop=None,
            cache=CacheReport("hit"),
        )

    def register(self, text: str | None = None, **_: Any) -> Registered:
        if text in self.refuses:
            refusal = "the prompt is empty"
            error = Error(id=ID, code="invalid_request", message=refusal, retryable=False)
            raise ServerError(error)
        prefix_id = PrefixName(WHOLE_ID)
        return Registered(ID, prefix_id=prefix_id, num_tokens=9, cached_tokens=8, num_bytes=2**31)

    def release(self, prefix_id: str, **_: Any) -> Released:
        return Released(ID, prefix_id=PrefixName(prefix_id))

    def verify(self, digest: str | None = None, **_: Any) -> Verified:
        return Verified(
            ID,
            num_blocks=9,
            num_bytes=2**31,
            num_new=9,
            num_changed=0,
            num_not_finite=0,
            dropped_blocks=0,
            in_use_blocks=0,
        )

    def stats(self, **_: Any) -> dict[str, Any]:
        return self.looks.pop(0) if len(self.looks) > 1 else self.looks[0]

    def drain(self) -> Draining:
        return Draining(ID, num_unfinished=3)

    def resume(self) -> Resumed:
        return Resumed(ID)

    def reload(self) -> Reloaded:
        return Reloaded(ID, changed=("log.level",), needs_restart=("ipc.endpoint",), num_keys=1)

    def config(self) -> Configured:
        return Configured(ID, options=OPTIONS)


_ENTRIES: tuple[dict[str, Any], ...] = (
    {},
    {"prefix_id": None, "kept": "", "expires_in_s": None, "hits": 0, "idle_s": 0.4},
    {"prefix_id": None, "kept": "pinned", "expires_in_s": None, "tenant": "", "in_use": False},
    {"digest": "", "prefix_id": PrefixName("p-0"), "num_blocks": 0, "kept": "registered"},
)


class Ran(NamedTuple):
    """What a command did: its outcome, what it printed."""

    outcome: Outcome
    out: str


def run(client: WideClient, line: str) -> Ran:
    """A command line, with the files' names as they are; the text is that of 80 columns."""
    args = new_parser().parse_args(line.split())
    page = StringIO()
    out = Console(
        file=page, width=80, quiet=args.json, highlight=False, markup=False, color_system=None
    )
    if hasattr(args.command, "run_here"):
        return Ran(args.command.run_here(args, out), page.getvalue())
    return Ran(args.command.run(client, args, out), page.getvalue())
