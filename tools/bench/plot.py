"""Pictures of benchmark results. Needs the extra `bench` (matplotlib)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path


def require_matplotlib() -> None:
    """Fail before the measuring, not after it.

    Raises:
        ModuleNotFoundError: matplotlib is not installed.
    """
    import matplotlib  # noqa: F401


def latency_plot(
    path: Path, title: str, series: Mapping[str, Mapping[str, Sequence[float]]]
) -> None:
    """Bars of medians with a dot for every run, grouped.

    Args:
        path: .png or .svg; overwritten.
        series: group under the axis → bar in the legend → times [milliseconds].
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.4, 3.2), layout="constrained")
    axes = figure.subplots()
    bars = list(next(iter(series.values())))
    width = 0.8 / len(bars)
    for index, bar in enumerate(bars):
        for place, times in enumerate(group[bar] for group in series.values()):
            x = place + (index - (len(bars) - 1) / 2) * width
            median = sorted(times)[len(times) // 2]
            label = bar if place == 0 else None
            axes.bar(x, median, width * 0.9, color=f"C{index}", alpha=0.7, label=label)
            axes.plot([x] * len(times), times, "k.", markersize=3)
            axes.annotate(f"{median:.0f}", (x, median), ha="center", va="bottom", fontsize=8)
    axes.set_xticks(range(len(series)), list(series))
    axes.set_ylabel("ms")
    axes.set_title(title, fontsize=10)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    figure.savefig(path)


def bar_plot(path: Path, title: str, what: str, bars: Mapping[str, int], *, floor: int) -> None:
    """Bars of counts, and a line for the least there can be.

    Args:
        path: .png or .svg; overwritten.
        what: what is counted.
        bars: name → count.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.4, 3.2), layout="constrained")
    axes = figure.subplots()
    drawn = axes.bar(range(len(bars)), list(bars.values()), 0.6, color="C0", alpha=0.7)
    axes.bar_label(drawn, [f"{count:,}" for count in bars.values()], fontsize=8, padding=2)
    axes.axhline(floor, color="C3", linewidth=1, linestyle="--", label=f"floor: {floor:,}")
    axes.set_xticks(range(len(bars)), list(bars))
    axes.yaxis.set_major_formatter("{x:,.0f}")
    axes.set_ylabel(what)
    axes.set_title(title, fontsize=10)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    figure.savefig(path)
