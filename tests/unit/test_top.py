"""The figures of `rtcache-admin top`: rates between two looks, the pool's bar, what is missing."""

from __future__ import annotations

import argparse
import copy
import json
from io import StringIO
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from ipc.errors import ServerError, Timeout
from ipc.messages import Error
from tests.support.admin_answers import DIGEST, ID, entry
from tests.support.admin_client import STATS, WideClient, run
from tools.admin import top
from tools.admin.top_figures import Figures, HotPrefix, Look, bar, figures
from tools.admin.top_view import view


def looked(at_s: float, **sections: dict[str, Any]) -> Look:
    """A look at a daemon, with these figures in place of the usual ones."""
    stats = copy.deepcopy(STATS)
    for section, values in sections.items():
        stats[section].update(values)
    return Look(at_s, stats, ())


def test_the_first_look_has_no_rates() -> None:
    frame = figures(looked(5.0))
    assert (frame.interval_s, frame.recent_hit_rate) == (None, None)
    assert (frame.answer_tokens_per_s, frame.prefill_tokens_per_s) == (None, None)
    assert frame.evicted_blocks_per_s is None
    assert (frame.hit_rate, frame.num_waiting, frame.num_running) == (1.0, 1024, 1024)


def test_rates_are_those_between_two_looks() -> None:
    before = looked(
        5.0,
        engine={"answer_tokens": 100, "prefill_tokens": 50},
        cache={"queried_tokens": 1000, "hit_tokens": 400, "evicted_blocks": 7},
    )
    now = looked(
        7.0,
        engine={"answer_tokens": 175, "prefill_tokens": 51},
        cache={"queried_tokens": 1300, "hit_tokens": 625, "evicted_blocks": 7},
    )
    frame = figures(now, before)
    assert frame.interval_s == 2.0
    assert (frame.answer_tokens_per_s, frame.prefill_tokens_per_s) == (37.5, 0.5)
    assert (frame.recent_hit_rate, frame.evicted_blocks_per_s) == (0.75, 0.0)


def test_between_two_daemons_there_are_no_rates() -> None:
    before = looked(5.0, daemon={"uptime_s": 100.0})
    now = looked(7.0, daemon={"uptime_s": 1.0}, engine={"answer_tokens": 0})
    assert figures(now, before).answer_tokens_per_s is None
    assert figures(now, before).interval_s is None


def test_nobody_asked_meanwhile() -> None:
    assert figures(looked(7.0), looked(5.0)).recent_hit_rate is None


def test_what_an_older_daemon_does_not_tell() -> None:
    look = looked(5.0)
    del look.stats["latency"]  # type: ignore[attr-defined]
    del look.stats["engine"]["answer_tokens"]
    frame = figures(look, look._replace(at_s=4.0))
    assert frame.latency["ttft_ms"] == {"p50": None, "p90": None, "p99": None, "max": None}
    assert frame.answer_tokens_per_s == 0


def test_the_hottest_prefixes() -> None:
    entries = (entry(), entry(prefix_id=None, tenant="", kept="", in_use=False))
    frame = figures(looked(5.0)._replace(hottest=entries))
    assert [(hot.name, hot.kept, hot.in_use) for hot in frame.hottest] == [
        (f"p-{DIGEST[:32]}", "leased", True),
        (DIGEST, "", False),
    ]
    assert isinstance(frame.hottest[0], HotPrefix)


@pytest.mark.parametrize(
    ("parts", "width", "cells"),
    [
        ((1, 1, 2), 8, [2, 2, 4]),
        ((0, 0, 5), 8, [0, 0, 8]),
        ((1, 999_998, 1), 10, [1, 8, 1]),
        ((1, 1, 1), 10, [3, 3, 4]),
        ((1, 0, 99), 10, [1, 0, 9]),
    ],
)
def test_bars(parts: tuple[int, ...], width: int, cells: list[int]) -> None:
    assert bar(parts, width) == cells


@given(st.lists(st.integers(0, 2**40), min_size=3, max_size=3).filter(any), st.integers(3, 100))
def test_a_bar_is_full_and_shows_all_there_is(parts: list[int], width: int) -> None:
    cells = bar(parts, width)
    assert sum(cells) == width
    assert [cell > 0 for cell in cells] == [part > 0 for part in parts]
    total = sum(parts)
    for part, cell in zip(parts, cells, strict=True):
        assert cell <= 1 or abs(cell - part * width / total) < len(parts)


# -- frame after frame --------------------------------------------------------------------------


class Interrupted(WideClient):
    """Ends the watching after so many looks, as Ctrl-C does; some of them fail before."""

    def __init__(self, *looks: dict[str, Any] | Exception) -> None:
        super().__init__()
        self.script = list(looks)

    def stats(self, **_: Any) -> dict[str, Any]:
        if not self.script:
            raise KeyboardInterrupt
        look = self.script.pop(0)
        if isinstance(look, Exception):
            raise look
        return look


@pytest.fixture(autouse=True)
def _no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(top.time, "sleep", lambda _: None)


def test_until_it_is_interrupted(capsys: pytest.CaptureFixture[str]) -> None:
    ran = run(Interrupted(STATS, STATS, STATS), "top --json")
    assert ran.outcome == (None, 0)
    frames = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert len(frames) == 3
    assert frames[0]["interval_s"] is None
    assert frames[1]["interval_s"] is not None
    assert list(frames[0]) == [*Figures.__dataclass_fields__, "note"]


def test_a_daemon_that_is_away_is_waited_for() -> None:
    away = Timeout("ipc:///s", 5.0)
    ran = run(Interrupted(away, STATS, away, STATS), "top")
    assert ran.out.count("rtcached 0.1.0") == 3
    assert ran.out.count("trying again") == 1


def test_a_refusal_ends_it() -> None:
    error = Error(id=ID, code="forbidden", message="no", retryable=False)
    with pytest.raises(ServerError):
        run(Interrupted(STATS, ServerError(error)), "top")


def test_on_a_terminal_the_screen_is_given_back() -> None:
    page = StringIO()
    out = Console(file=page, force_terminal=True, width=80, height=40)
    args = argparse.Namespace(
        once=False, interval=1.0, rows=5, json=False, timeout=60.0, endpoint="ipc:///s"
    )
    assert top.Top().run(Interrupted(STATS, STATS), args, out) == (None, 0)  # type: ignore[arg-type]
    said = page.getvalue()
    assert said.index("\x1b[?1049h") < said.index("rtcached 0.1.0") < said.rindex("\x1b[?1049l")


def test_a_note_stands_above_the_frame() -> None:
    page = StringIO()
    Console(file=page, width=80).print(view(figures(looked(5.0)), "no answer " * 20))
    lines = page.getvalue().splitlines()
    assert lines[0].startswith("no answer")
    assert max(map(len, lines)) <= 80
