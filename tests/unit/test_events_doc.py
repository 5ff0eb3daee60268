"""`docs/events.md` against the source: every event with its level and fields, both ways."""

from __future__ import annotations

import re
from collections import defaultdict
from pathlib import Path

import pytest

from runtime_cache import log
from tests.support.log_calls import LogCall, log_calls

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs" / "events.md").read_text("utf-8")
ROW = re.compile(
    r"^\| `(\w+)` \| (debug|info|warning|error|the library's) \| ([^|]*)\| ", re.MULTILINE
)
PATHS = sorted([*(ROOT / "runtime_cache").rglob("*.py"), *(ROOT / "ipc").rglob("*.py")])
CALLS = log_calls(PATHS)
#: What the hook of the sockets does not log as a warning.
HOOK_LEVELS = {"client_gone": "debug"}

Rows = dict[str, tuple[str, frozenset[str]]]


def documented() -> Rows:
    found = {}
    for event, level, fields in ROW.findall(TEXT):
        assert event not in found, f"{event} is listed twice"
        found[event] = (level, frozenset(re.findall(r"`(\w+)`", fields)))
    return found


def in_source(calls: list[LogCall]) -> Rows:
    levels, fields = {}, defaultdict(set)
    for call in calls:
        level = HOOK_LEVELS.get(call.event, call.level)
        assert levels.setdefault(call.event, level) == level, f"{call.event} has two levels"
        fields[call.event] |= call.fields
    return {event: (level, frozenset(fields[event])) for event, level in levels.items()}


def test_the_list_is_what_the_source_logs() -> None:
    found = in_source(CALLS)
    found["library_log"] = ("the library's", found["library_log"][1])
    assert documented() == found


def test_what_has_a_limit_is_named() -> None:
    _, _, rest = TEXT.partition("**Clients cannot fill a disk**")
    paragraph, _, _ = rest.partition("`events_left_out`")
    of_the_hook = {call.event for call in log_calls(sorted((ROOT / "ipc").rglob("*.py")))}
    assert set(re.findall(r"`(\w+)`", paragraph)) == (
        of_the_hook - HOOK_LEVELS.keys() | {"request_done"}
    )
    limit = f"at most {log._MAX_LINES} lines are written in {log._PERIOD_S:g} seconds"
    assert limit in paragraph.replace("\n", " ")


def test_the_walk_sees_calls_of_every_form(tmp_path: Path) -> None:
    path = tmp_path / "a.py"
    path.write_text(
        "log = structlog.get_logger(__name__)\n"
        "log.info('one', a=1, exc_info=None)\n"
        "log.exception('two')\n"
        "log.error('three' if x else 'four', b=2)\n"
        "self._log('five', {'c': 3})\n"
        "self._log_of('six', client)\n"
        "lambda event, fields: log.warning(event, **fields)\n"
        "other.info('not logged')\n"
    )
    found = {call.event: (call.level, set(call.fields)) for call in log_calls([path])}
    assert found == {
        "one": ("info", {"a"}),
        "two": ("error", set()),
        "three": ("error", {"b"}),
        "four": ("error", {"b"}),
        "five": ("warning", {"c"}),
        "six": ("warning", {"role", "tenant", "identity", "key"}),
    }


@pytest.mark.parametrize(
    "call",
    [
        "log.info(name)",
        "log.info('a', **fields)",
        "log.info(f'a {b}')",
        "self._log('a', fields)",
        "self._log('a', {name: 1})",
    ],
)
def test_what_is_no_literal_is_refused(tmp_path: Path, call: str) -> None:
    path = tmp_path / "a.py"
    path.write_text(f"log = structlog.get_logger()\n{call}\n")
    with pytest.raises(AssertionError, match=r"a\.py:2: "):
        log_calls([path])
