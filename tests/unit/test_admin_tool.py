"""What `rtcache-admin` prints and ends with: stable JSON, tables of 80 columns, exit codes."""

from __future__ import annotations

import json
from io import StringIO
from pathlib import Path
from typing import Any

import msgspec
import pytest
from rich.console import Console

from ipc.messages import ConfigOption, Configured, Evicted, Explained
from tests.support.admin_answers import DIGEST, ID, LONG_NAME, WHOLE_ID, entry
from tests.support.admin_client import STATS, WideClient, run
from tools.admin.command import num_bytes as parsed
from tools.admin.command import say, short_count, short_size, short_time
from tools.admin.commands import COMMANDS
from tools.admin.main import new_parser
from tools.admin.registering import Register

GOLDEN = Path(__file__).parent.parent / "golden" / "admin"
#: One command line for each command; `completion` is the library's matter, `keygen` draws keys.
LINES = {
    "list": "list",
    "show": f"show {DIGEST} --text",
    "explain": "explain TEXT",
    "evict": "evict --all",
    "pin": f"pin {DIGEST}",
    "lease": f"lease {DIGEST} --ttl 600",
    "unpin": f"unpin {DIGEST}",
    "register": "register TEXT",
    "release": f"release {WHOLE_ID}",
    "warm": "warm TEXT",
    "verify": "verify",
    "stats": "stats",
    "top": "top --once --interval 0.001",
    "drain": "drain",
    "resume": "resume",
    "reload": "reload",
    "config": "config",
}
UNSTEADY = {"completion", "keygen"}


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory with a text in it."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "TEXT").write_text("hello")
    return tmp_path


def test_every_command_has_a_line() -> None:
    assert {command.name for command in COMMANDS} - UNSTEADY == set(LINES)


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize("name", LINES)
def test_json_is_what_it_was(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Names and types are a promise: fields may be added to these files, never taken away."""
    ran = run(WideClient(), f"{LINES[name]} --json")
    assert ran.out == ""
    found = ran.outcome.result
    if found is None:
        found = json.loads(capsys.readouterr().out)
        found["interval_s"] = 0.001  # by the clock
        rates = [word for word in found if word.endswith("_per_s")]
        assert all(found[word] == 0 for word in rates)
    golden = msgspec.json.decode((GOLDEN / f"{name}.json").read_bytes())
    assert msgspec.json.decode(msgspec.json.encode(found)) == golden


@pytest.mark.parametrize("name", ["list", "show", "stats", "top", "config"])
def test_tables_of_the_widest_values_fit_80_columns(name: str) -> None:
    """Sentences are never broken, so that programs may search them."""
    lines = run(WideClient(), LINES[name]).out.splitlines()
    assert lines
    assert [line for line in lines if len(line) > 80] == []
    if name in ("list", "top"):
        assert DIGEST[:16] in "\n".join(lines)
        assert "…" not in run(WideClient(), "list").out


@pytest.mark.parametrize("command", ["", *(command.name for command in COMMANDS)])
def test_help_fits_80_columns_and_has_an_example(
    command: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit):
        new_parser().parse_args([*command.split(), "--help"])
    said = capsys.readouterr().out
    assert [line for line in said.splitlines() if len(line) > 80] == []
    assert f" rtcache-admin {command}" in said.partition("\nexample")[2]


def test_a_long_tenants_name_is_there_in_pieces() -> None:
    lines = run(WideClient(), "list").out.splitlines()
    at = lines[0].index("tenant")
    pieces = [line[at:].split(" ")[0] for line in lines[1:]]
    assert "".join(pieces).startswith(LONG_NAME)


# -- exit codes ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "counts", "code"),
    [
        ("evict --all", (5, 0, 0), 0),
        ("evict --all", (0, 0, 0), 4),
        ("evict --all", (5, 1, 0), 4),
        ("evict --all --dry-run", (5, 0, 1), 4),
        ("evict --tenant a", (5, 0, 0), 0),
        (f"evict {DIGEST}", (5, 0, 0), 0),
        (f"evict {DIGEST}", (0, 0, 1), 4),
        ("evict --idle 1h", (5, 0, 0), 0),
        ("evict --older-than 1h", (5, 0, 1), 4),
        ("evict --lru 5", (5, 9, 9), 0),
        ("evict --lru 6", (5, 9, 9), 4),
        ("evict --bytes 500", (5, 9, 9), 0),
        ("evict --bytes 401", (5, 9, 9), 0),
        ("evict --bytes 501", (5, 9, 9), 4),
        ("evict --bytes 1", (0, 0, 0), 4),
    ],
)
def test_evicting_tells_whether_all_went(
    line: str, counts: tuple[int, int, int], code: int
) -> None:
    client = WideClient()
    num_blocks, in_use, kept = counts
    client.evicted = Evicted(
        ID,
        num_blocks=num_blocks,
        num_bytes=100 * num_blocks,
        in_use_blocks=in_use,
        kept_blocks=kept,
    )
    assert run(client, line).outcome.code == code


@pytest.mark.parametrize(
    ("counts", "dry_run", "sentence"),
    [
        ((1, 0, 0), False, "evicted 1 block (2.0 KiB)"),
        ((2, 1, 0), False, "evicted 2 blocks (4.0 KiB); stay: 1 in use"),
        (
            (2, 3, 4),
            True,
            "would evict 2 blocks (4.0 KiB); would stay: 3 in use, 4 registered, pinned or leased",
        ),
        ((0, 0, 0), False, "evicted 0 blocks (0.0 KiB): there are none of that kind"),
        ((0, 0, 2), False, "evicted 0 blocks (0.0 KiB); stay: 2 registered, pinned or leased"),
    ],
)
def test_evicting_says_what_went_and_what_stayed(
    counts: tuple[int, int, int], dry_run: bool, sentence: str
) -> None:
    client = WideClient()
    num_blocks, in_use, kept = counts
    client.evicted = Evicted(
        ID,
        num_blocks=num_blocks,
        num_bytes=2048 * num_blocks,
        in_use_blocks=in_use,
        kept_blocks=kept,
    )
    flag = " --dry-run" if dry_run else ""
    assert run(client, f"evict --idle 1h{flag}").out == f"{sentence}\n"


def test_of_a_registered_prefix_the_digest_is_evicted() -> None:
    client = WideClient()
    run(client, f"evict {WHOLE_ID} --tenant {'a' * 3}")
    assert client.asked == [("evict", {"tenant": "aaa", "dry_run": False, "digest": DIGEST})]


@pytest.mark.parametrize(
    ("line", "code", "out"),
    [
        ("reload", 4, "counts from the next start on: ipc.endpoint\n1 key may connect\n"),
        ("drain", 0, "no new requests are taken; 3 requests unfinished\n"),
        ("resume", 0, "new requests are taken\n"),
        ("config log", 0, "info"),
        ("config --changed", 0, "RTCACHE_ENGINE"),
        ("config nothing.such", 4, "there is no option nothing.such\n"),
        ("config log --changed", 4, "all of that is as by default\n"),
        ("stats pool", 0, "num_blocks"),
    ],
)
def test_what_is_said_of_the_daemon(line: str, code: int, out: str) -> None:
    ran = run(WideClient(), line)
    assert ran.outcome.code == code
    assert out in ran.out


def test_brackets_are_no_markup() -> None:
    client = WideClient()
    option = ConfigOption(path="a.b", value='"/etc/[bold]"', origin="default", is_reloadable=False)
    client.config = lambda: Configured(ID, options=(option,))  # type: ignore[method-assign]
    assert "/etc/[bold]" in run(client, "config").out
    client.looks = [STATS | {"warnings": ["[red] is a colour"]}]
    assert "[red] is a colour" in run(client, "stats").out


# -- draining -----------------------------------------------------------------------------------


def look(num_running: int, *, is_draining: bool = True) -> dict[str, Any]:
    engine = STATS["engine"] | {"num_waiting": 0, "num_running": num_running}
    return STATS | {"engine": engine | {"is_draining": is_draining}}


@pytest.mark.parametrize(
    ("looks", "wait", "code", "said"),
    [
        ([look(2), look(0)], "--wait", 0, "nothing is unfinished"),
        ([look(2)], "--wait 0.001", 4, "2 requests still unfinished; no new ones are taken"),
        ([look(2), look(2, is_draining=False)], "--wait", 4, "somebody has resumed"),
    ],
)
def test_drain_waits(
    looks: list[dict[str, Any]],
    wait: str,
    code: int,
    said: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("tools.admin.daemon._LOOK_S", 0.001)
    client = WideClient()
    client.looks = looks
    ran = run(client, f"drain {wait}")
    assert ran.outcome.code == code
    assert said in ran.out


# -- registering many ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("refuses", "code", "last"),
    [
        ((), 0, "registered 3 of 3 prefixes"),
        (("a",), 4, "registered 2 of 3 prefixes"),
        (("a", "b", "c"), 1, "registered 0 of 3 prefixes"),
    ],
)
def test_one_that_is_refused_does_not_stop_the_others(
    here: Path, refuses: tuple[str, ...], code: int, last: str
) -> None:
    lines = [{"text": "a", "name": "first"}, {"text": "b"}, {"text": "c"}]
    (here / "MANY").write_text("\n\n".join(map(json.dumps, lines)))
    client = WideClient()
    client.refuses = refuses
    ran = run(client, "register --jsonl MANY")
    assert ran.outcome == (None, code)
    first, second, _, said = ran.out.splitlines()
    assert said == last
    if refuses:
        assert first == "first: refused: the prompt is empty (invalid_request)"
    if "b" not in refuses:
        assert second == f"line 3: {WHOLE_ID}: 9 tokens, 8 cached already; 2.0 GiB are kept"


def test_many_are_answered_line_by_line(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (here / "MANY").write_text('{"text": "a", "name": "first"}\n{"text": "b"}')
    client = WideClient()
    client.refuses = ("b",)
    assert run(client, "register --jsonl MANY --json").outcome == (None, 4)
    error = {"code": "invalid_request", "message": "the prompt is empty", "retryable": False}
    assert [json.loads(line) for line in capsys.readouterr().out.splitlines()] == [
        {
            "line": 1,
            "name": "first",
            "prefix_id": WHOLE_ID,
            "num_tokens": 9,
            "cached_tokens": 8,
            "num_bytes": 2**31,
        },
        {"line": 2, "name": None, "error": error},
    ]


@pytest.mark.parametrize(
    ("line", "given"),
    [
        ("register -", "a text"),
        ("register --jsonl -", '{"text": "a"}\n'),
        ("register - --ids", "1 2 3"),
        ("register --messages -", '[{"role": "user", "content": "u"}]'),
        ("warm -", "a text"),
        ("explain -", "a text"),
    ],
)
def test_standard_input_is_a_file_too(
    line: str, given: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", StringIO(given))
    assert run(WideClient(), line).outcome.code == 0


# -- names and pages ----------------------------------------------------------------------------


def test_the_beginning_of_a_registered_prefixs_id_is_enough() -> None:
    client = WideClient()
    assert run(client, f"release {WHOLE_ID[:10]}").out == f"released {WHOLE_ID}\n"
    asked = {"limit": 1000, "offset": 0, "tenant": "", "kept": "registered"}
    assert client.asked == [("list", asked)]
    client.entries += (entry(prefix_id=f"{WHOLE_ID[:-1]}x"),)
    with pytest.raises(ValueError, match=f"2 registered prefixes begin with {WHOLE_ID[:10]}"):
        run(client, f"release {WHOLE_ID[:10]}")


def test_a_prompt_is_explained_behind_a_prefix_of_which_the_beginning_is_given(
    tmp_path: Path,
) -> None:
    rest = tmp_path / "rest.txt"
    rest.write_text("x")
    client = WideClient()
    answer, asked = client.explain, []

    def explain(prompt: str, **fields: Any) -> Explained:
        asked.append(fields["prefix_id"])
        return answer(prompt)

    client.explain = explain  # type: ignore[assignment,method-assign]
    run(client, f"explain {rest} --prefix-id {WHOLE_ID[:10]}")
    assert asked == [WHOLE_ID]


def test_all_entries_are_fetched_page_by_page(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tools.admin.listing.MAX_LIST_LIMIT", 3)
    client = WideClient()
    ran = run(client, "list --all --reverse")
    asked = [(fields["limit"], fields["offset"], fields["reverse"]) for _, fields in client.asked]
    assert asked == [(3, 0, True), (3, 3, True)]
    assert ran.out.endswith("4 of 4 prefixes (a shared beginning counts in each)\n")


@pytest.mark.parametrize(
    ("number", "text"),
    [
        (0, "0"),
        (9999, "9999"),
        (10_000, "10k"),
        (999_999, "999k"),
        (10**6, "1M"),
        (10**9, "1G"),
        (2**53, "9P"),
    ],
)
def test_counts_in_tables(number: int, text: str) -> None:
    assert short_count(number) == text


@pytest.mark.parametrize(
    ("duration_s", "text"),
    [(0, "0s"), (59.9, "59s"), (60, "1m"), (3599, "59m"), (86399, "23h"), (86400, "1d")],
)
def test_durations_in_tables(duration_s: float, text: str) -> None:
    assert short_time(duration_s) == text


@pytest.mark.parametrize(("num_bytes", "text"), [(0, "0.0K"), (2**20, "1.0M"), (2**40, "1024.0G")])
def test_sizes_in_tables(num_bytes: int, text: str) -> None:
    assert short_size(num_bytes) == text
    assert parsed(text) == num_bytes


@pytest.mark.parametrize(("text", "num_bytes"), [("8KB", 8000), ("8k", 8000), ("8KiB", 8192)])
def test_sizes_that_are_given(text: str, num_bytes: int) -> None:
    assert parsed(text) == num_bytes


@pytest.mark.parametrize(
    ("counts", "said"),
    [
        ((3, 0, 1), "evicted 3 blocks (24.0 KiB); stay: 1 registered, pinned or leased\n"),
        ((3, 0, 0), "evicted 3 blocks (24.0 KiB)\n"),
        ((0, 1, 0), "evicted 0 blocks (0.0 KiB); stay: 1 in use\n"),
        ((0, 0, 0), "evicted 0 blocks (0.0 KiB): there are none of that kind\n"),
    ],
)
def test_evicting_says_how_much_it_was(counts: tuple[int, int, int], said: str) -> None:
    client = WideClient()
    num_blocks, in_use, kept = counts
    client.evicted = Evicted(
        ID,
        num_blocks=num_blocks,
        num_bytes=8192 * num_blocks,
        in_use_blocks=in_use,
        kept_blocks=kept,
    )
    assert run(client, "evict --bytes 20K").out == said


def test_the_manual_of_register_says_what_a_line_holds() -> None:
    assert all(f'"{word}"' in (Register.__doc__ or "") for word in ("text", "prompt_ids", "name"))


def test_what_users_sent_does_not_move_an_operators_cursor() -> None:
    out = StringIO()
    say(Console(file=out), "a\x1b]0;b\x07\x1b[2Jc\r\x9b1m\u202edä [bold]e\nf")
    assert out.getvalue() == "a\\x1b]0;b\\x07\\x1b[2Jc\\r\\x9b1m\\u202edä [bold]e\nf\n"
