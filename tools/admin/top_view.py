"""How a frame of `rtcache-admin top` looks: at most 80 columns wide."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from tools.admin.command import (
    DIGEST_CHARS,
    PREFIX_ID_CHARS,
    short_count,
    short_size,
    short_time,
    size,
)
from tools.admin.top_figures import Figures, HotPrefix, bar

_WIDTH = 80
_LABEL = 8
#: Cells of the pool's bar: what it stands for, character and colour.
_PARTS = (("live", "█", "red"), ("cached", "▓", "green"), ("free", "░", "bright_black"))
_LATENCY_WORDS = {
    "ttft_ms": "first token",
    "inter_token_ms": "next token",
    "queue_ms": "in queue",
    "total_ms": "whole request",
}


def view(frame: Figures, note: str = "") -> RenderableType:
    """A frame for people.

    Args:
        note: stands above it, if it is not empty.
    """
    return Group(*_lines(frame, note))


def _lines(frame: Figures, note: str) -> Iterator[RenderableType]:
    if note:
        yield _cut(Text(note, style="bold red"))
    yield _cut(_headline(frame))
    yield from _pool(frame)
    yield _labelled(
        "hits",
        f"{_percent(frame.hit_rate)} of prompt tokens, {_percent(frame.recent_hit_rate)} lately; "
        f"{_number(frame.evicted_blocks_per_s)} blocks/s evicted",
    )
    yield _labelled(
        "tokens",
        f"{_number(frame.answer_tokens_per_s)}/s answered, "
        f"{_number(frame.prefill_tokens_per_s)}/s of prompts computed",
    )
    yield _labelled(
        "queue",
        f"{short_count(frame.num_waiting)} waiting, {short_count(frame.num_running)} running",
    )
    yield Text()
    yield _latency(frame)
    yield Text()
    yield _hottest(frame)
    for warning in frame.warnings:
        yield Text(f"! {warning}", style="yellow")


def _headline(frame: Figures) -> Text:
    is_well = frame.state == "serving"
    text = Text(f"rtcached {frame.version} ", style="bold")
    text.append(frame.state, style="green" if is_well else "bold red")
    text.append(f" for {short_time(frame.uptime_s)}, {frame.model} on {frame.device}", style="")
    return text


def _pool(frame: Figures) -> Iterator[Text]:
    parts = (frame.live_blocks, frame.cached_blocks, frame.free_blocks)
    line = Text(f"{'pool':<{_LABEL}}", style="bold")
    for num_cells, (_, cell, style) in zip(bar(parts, _WIDTH - _LABEL), _PARTS, strict=True):
        line.append(cell * num_cells, style=style)
    yield line
    legend = ", ".join(
        f"{word} {short_count(part)} ({part / frame.num_blocks:.0%})"
        for part, (word, _, _) in zip(parts, _PARTS, strict=True)
    )
    total = f"{short_count(frame.num_blocks)} blocks of {size(frame.bytes_per_block)}"
    yield _labelled("", f"{legend}; {total}")


def _labelled(label: str, text: str) -> Text:
    line = Text(f"{label:<{_LABEL}}", style="bold")
    line.append(text, style="")
    return _cut(line)


def _cut(text: Text) -> Text:
    text.truncate(_WIDTH, overflow="ellipsis")
    return text


def _latency(frame: Figures) -> Table:
    table = Table(box=None, pad_edge=False)
    table.add_column("ms", min_width=14)
    columns = list(next(iter(frame.latency.values())))
    for name in columns:
        table.add_column(name, justify="right", min_width=9)
    for name, row in frame.latency.items():
        table.add_row(_LATENCY_WORDS[name], *(_number(row[column]) for column in columns))
    return table


def _hottest(frame: Figures) -> Table:
    table = Table(box=None, pad_edge=False, collapse_padding=True)
    table.add_column("hottest", no_wrap=True, min_width=PREFIX_ID_CHARS)
    table.add_column("tenant", no_wrap=True, overflow="ellipsis", max_width=16)
    for name in ("hits", "tokens", "size", "idle"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("held", no_wrap=True)
    for prefix in frame.hottest:
        table.add_row(
            _name(prefix),
            prefix.tenant or "-",
            short_count(prefix.hits),
            str(prefix.num_tokens),
            short_size(prefix.num_bytes),
            short_time(prefix.idle_s),
            prefix.kept or ("in use" if prefix.in_use else "-"),
        )
    return table


def _name(prefix: HotPrefix) -> str:
    is_registered = prefix.name.startswith("p-")
    return prefix.name[: PREFIX_ID_CHARS if is_registered else DIGEST_CHARS]


def _percent(part: float | None) -> str:
    return "-" if part is None else f"{100 * part:.1f} %"


def _number(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.1f}" if value < 10_000 else short_count(int(value))
