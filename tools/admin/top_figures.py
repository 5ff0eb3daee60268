"""What `rtcache-admin top` shows, reckoned from two looks at the daemon. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from ipc.messages import Entry

_PERCENTILES = ("p50", "p90", "p99", "max")
#: The rows of the latency table, by their names in `stats.latency`.
_LATENCIES = ("ttft_ms", "inter_token_ms", "queue_ms", "total_ms")


class Look(NamedTuple):
    """What the daemon told at one time.

    Attributes:
        at_s: when, on a clock that never goes back.
        stats: its figures.
        hottest: the prefixes with most hits, best first.
    """

    at_s: float
    stats: Mapping[str, Any]
    hottest: Sequence[Entry]


@dataclass(frozen=True, slots=True)
class HotPrefix:
    """One of the prefixes with most hits; fields as of `ipc.messages.Entry`."""

    name: str
    tenant: str
    num_tokens: int
    num_bytes: int
    hits: int
    idle_s: float
    kept: str
    in_use: bool


@dataclass(frozen=True, slots=True)
class Figures:
    """One frame. These names are what `--json` prints.

    Attributes:
        interval_s: between the two looks; None at the first one, or if the daemon has restarted
            between them; then there are no rates either.
        hit_rate: cached part of all prompt tokens so far, 0 to 1; None before the first.
        recent_hit_rate: the same of those that came between the two looks.
        answer_tokens_per_s, prefill_tokens_per_s: tokens sampled, and prompt tokens computed.
        evicted_blocks_per_s: to make room, or because an operator wanted it.
        latency: name → percentiles of the last minutes [milliseconds]; None where nothing was.
        hottest: with most hits, best first.
    """

    version: str
    model: str
    device: str
    state: str
    uptime_s: float
    interval_s: float | None
    num_blocks: int
    live_blocks: int
    cached_blocks: int
    free_blocks: int
    kept_blocks: int
    bytes_per_block: int
    hit_rate: float | None
    recent_hit_rate: float | None
    answer_tokens_per_s: float | None
    prefill_tokens_per_s: float | None
    evicted_blocks_per_s: float | None
    num_waiting: int
    num_running: int
    latency: dict[str, dict[str, float | None]]
    hottest: tuple[HotPrefix, ...]
    warnings: tuple[str, ...]


def figures(now: Look, before: Look | None = None) -> Figures:
    """One frame from what the daemon told now and before."""
    stats, pool, engine = now.stats, now.stats["pool"], now.stats["engine"]
    since = None if before is None or _is_newer_daemon(now, before) else before
    return Figures(
        version=stats["daemon"]["version"],
        model=stats["daemon"]["model"],
        device=stats["daemon"]["device"],
        state=stats["daemon"]["state"],
        uptime_s=stats["daemon"]["uptime_s"],
        interval_s=None if since is None else round(now.at_s - since.at_s, 3),
        num_blocks=pool["num_blocks"],
        live_blocks=pool["live_blocks"],
        cached_blocks=pool["cached_blocks"],
        free_blocks=pool["free_blocks"],
        kept_blocks=pool["kept_blocks"],
        bytes_per_block=pool["bytes_per_block"],
        hit_rate=stats["cache"]["hit_rate"],
        recent_hit_rate=_recent_hit_rate(now, since),
        answer_tokens_per_s=_rate(now, since, "engine", "answer_tokens"),
        prefill_tokens_per_s=_rate(now, since, "engine", "prefill_tokens"),
        evicted_blocks_per_s=_rate(now, since, "cache", "evicted_blocks"),
        num_waiting=engine["num_waiting"],
        num_running=engine["num_running"],
        latency=_latency(stats.get("latency", {})),
        hottest=tuple(map(_hot, now.hottest)),
        warnings=tuple(stats["warnings"]),
    )


def bar(parts: Sequence[int], width: int) -> list[int]:
    """Cells of a bar for each part; together exactly `width`, and none that is there has none.

    Args:
        parts: at least one of them above 0, and no more of those than `width`.
    """
    total = sum(parts)
    cells = [part * width // total or int(part > 0) for part in parts]
    while (left := width - sum(cells)) != 0:
        step = 1 if left > 0 else -1
        # Where the bar is furthest from the truth; a part's only cell stays.
        errors = [
            (step * (part * width / total - cell), index)
            for index, (part, cell) in enumerate(zip(parts, cells, strict=True))
            if part and (step > 0 or cell > 1)
        ]
        cells[max(errors)[1]] += step
    return cells


def _is_newer_daemon(now: Look, before: Look) -> bool:
    return bool(now.stats["daemon"]["uptime_s"] < before.stats["daemon"]["uptime_s"])


def _grown(now: Look, since: Look, section: str, name: str) -> int:
    return int(now.stats[section].get(name, 0)) - int(since.stats[section].get(name, 0))


def _rate(now: Look, since: Look | None, section: str, name: str) -> float | None:
    if since is None or now.at_s <= since.at_s:
        return None
    return round(_grown(now, since, section, name) / (now.at_s - since.at_s), 3)


def _recent_hit_rate(now: Look, since: Look | None) -> float | None:
    if since is None:
        return None
    num_queried = _grown(now, since, "cache", "queried_tokens")
    if not num_queried:
        return None
    return round(_grown(now, since, "cache", "hit_tokens") / num_queried, 4)


def _latency(stats: Mapping[str, Any]) -> dict[str, dict[str, float | None]]:
    rows = {name: stats.get(name) or {} for name in _LATENCIES}
    return {name: {p: row.get(p) for p in _PERCENTILES} for name, row in rows.items()}


def _hot(entry: Entry) -> HotPrefix:
    return HotPrefix(
        name=entry.prefix_id or entry.digest,
        tenant=entry.tenant,
        num_tokens=entry.num_tokens,
        num_bytes=entry.num_bytes,
        hits=entry.hits,
        idle_s=entry.idle_s,
        kept=entry.kept,
        in_use=entry.in_use,
    )
