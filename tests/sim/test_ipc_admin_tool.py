"""What each command of `rtcache-admin` sends, and what it refuses before it sends anything."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ipc.errors import ServerError
from ipc.messages import (
    AnyRequest,
    ChatMessage,
    Drain,
    Error,
    Evict,
    Explain,
    Generate,
    GetConfig,
    GetStats,
    ListEntries,
    MessageId,
    Pin,
    PrefixName,
    Register,
    Registered,
    Reload,
    Resume,
    Show,
    Unpin,
    Verified,
    Verify,
)
from ipc.sync_client import Client
from tests.support.admin_answers import WHOLE_ID
from tests.support.ipc_daemon import DaemonThread
from tools.admin.command import seconds, size
from tools.admin.commands import COMMANDS
from tools.admin.main import main

Output = pytest.CaptureFixture[str]

#: A command's message follows the ping.
ID = MessageId("2")
DIGEST = "5e884898"
CONVERSATION = (ChatMessage("system", "s"), ChatMessage("user", "u"))
TURNS = [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[DaemonThread]:
    with DaemonThread(f"ipc://{tmp_path}/s", role="admin") as thread:
        yield thread


@pytest.fixture
def files(tmp_path: Path) -> dict[str, str]:
    """What stands for a file's name in a command line → its path."""
    contents = {
        "TEXT": "hello",
        "IDS": "[1, 2,3]\n",
        "BARE": " 1 2\n3 ",
        "NO_IDS": "1 two",
        "LINES": "1 2\n3\n",
        "NO_END": "[1, 2",
        "NO_START": "1, 2]",
        "NO_NUMBER": "1,, 2",
        "TURNS": json.dumps(TURNS),
        "NO_TURNS": '{"role": "user"}',
        "NO_JSON": "hello",
        "MANY": '{"text": "a", "name": "first"}\n\n{"prompt_ids": [1]}\n',
        "EMPTY": "\n \n",
        "TWO_IN_ONE": '{"text": "a"}\n{"text": "a", "prompt_ids": [1]}',
        "TYPO": '{"txt": "a"}',
        "ROBOT": '[{"role": "robot", "content": "x"}]',
    }
    for name, content in contents.items():
        (tmp_path / name).write_text(content)
    return {name: str(tmp_path / name) for name in contents}


def run(daemon: DaemonThread, files: dict[str, str], line: str) -> int:
    words = [files.get(word, word) for word in line.split()]
    return main([*words, "--endpoint", daemon.endpoint])


@pytest.mark.parametrize(
    ("line", "request_sent"),
    [
        ("list", ListEntries(ID)),
        ("list --limit 5 --offset 7 --tenant a", ListEntries(ID, limit=5, offset=7, tenant="a")),
        ("list --sort size --reverse", ListEntries(ID, sort="size", reverse=True)),
        ("list --sort used --kept none", ListEntries(ID, kept="none")),
        ("list --older-than 1h --idle 0", ListEntries(ID, min_age_s=3600.0, min_idle_s=0.0)),
        (
            "list --min-size 1MiB --min-hits 2 --max-hits 3",
            ListEntries(ID, min_bytes=1024**2, min_hits=2, max_hits=3),
        ),
        (f"show {DIGEST}", Show(ID, digest=DIGEST)),
        (f"show {DIGEST} --text --tenant a", Show(ID, digest=DIGEST, tenant="a", with_text=True)),
        (f"show {WHOLE_ID}", Show(ID, prefix_id=PrefixName(WHOLE_ID))),
        ("evict --all", Evict(ID, all=True)),
        ("evict --lru 99 --tenant a", Evict(ID, max_blocks=99, tenant="a")),
        (f"evict {DIGEST}", Evict(ID, digest=DIGEST)),
        (
            f"evict {DIGEST} --tenant a --dry-run",
            Evict(ID, digest=DIGEST, tenant="a", dry_run=True),
        ),
        ("evict --older-than 1d", Evict(ID, age_s=86400.0)),
        ("evict --tenant a", Evict(ID, all=True, tenant="a")),
        ("evict --idle 2h", Evict(ID, idle_s=7200.0)),
        ("evict --idle 0", Evict(ID, idle_s=0.0)),
        (f"pin {DIGEST}", Pin(ID, digest=DIGEST)),
        (f"pin {DIGEST} --tenant a", Pin(ID, digest=DIGEST, tenant="a")),
        (f"lease {DIGEST} --ttl 600", Pin(ID, digest=DIGEST, ttl_s=600.0)),
        (f"lease {DIGEST} --ttl 10m --tenant a", Pin(ID, digest=DIGEST, ttl_s=600.0, tenant="a")),
        (f"unpin {DIGEST} --tenant a", Unpin(ID, digest=DIGEST, tenant="a")),
        ("explain TEXT", Explain(ID, prompt="hello")),
        ("explain TEXT --tenant a", Explain(ID, prompt="hello", tenant="a")),
        ("explain TEXT --prefix-id p", Explain(ID, prompt="hello", prefix_id=PrefixName("p"))),
        ("explain --ids IDS", Explain(ID, prompt_ids=(1, 2, 3))),
        ("explain LINES --ids", Explain(ID, prompt_ids=(1, 2, 3))),
        ("explain BARE --ids", Explain(ID, prompt_ids=(1, 2, 3))),
        (
            "explain --messages TURNS",
            Explain(ID, messages=CONVERSATION),
        ),
        ("register TEXT", Register(ID, text="hello")),
        ("register --ids IDS", Register(ID, prompt_ids=(1, 2, 3))),
        ("register --messages TURNS", Register(ID, messages=CONVERSATION)),
        ("stats", GetStats(ID)),
        ("drain", Drain(ID)),
        ("resume", Resume(ID)),
        ("reload", Reload(ID)),
        ("config", GetConfig(ID)),
    ],
)
def test_each_option_reaches_the_daemon(
    daemon: DaemonThread, files: dict[str, str], line: str, request_sent: AnyRequest, capsys: Output
) -> None:
    assert run(daemon, files, line) == 0
    assert daemon.daemon.requests[1:] == [request_sent]
    out, err = capsys.readouterr()
    assert (out != "", err) == (True, "")


@pytest.mark.parametrize(
    ("line", "fields"),
    [
        ("verify", {}),
        (f"verify {DIGEST} --tenant a", {"digest": DIGEST, "tenant": "a"}),
        ("verify --json", {}),
    ],
)
def test_verify_goes_on_until_everything_is_read(
    daemon: DaemonThread, files: dict[str, str], line: str, fields: dict[str, str], capsys: Output
) -> None:
    assert run(daemon, files, line) == 1  # it finds damage
    assert daemon.daemon.requests[1:] == [
        Verify(MessageId(str(number + 1)), first_block=first_block, **fields)  # type: ignore[arg-type]
        for number, first_block in ((1, 0), (2, 2), (3, 3))
    ]
    out = capsys.readouterr().out
    if "--json" in line:
        assert json.loads(out) == {
            "num_blocks": 3,
            "num_bytes": 3072,
            "num_new": 1,
            "num_changed": 1,
            "num_not_finite": 0,
            "dropped_blocks": 2,
            "in_use_blocks": 1,
        }
        return
    assert out == (
        "3 blocks read (3.0 KiB), 1 of them for the first time: 1 have changed, 0 hold something "
        "that is no finite number\n"
        "2 blocks have left the cache, the damaged ones and what may have come of them (still in "
        "use or kept: 1)\n"
    )


@pytest.mark.parametrize(("first_block", "code"), [(0, 1), (3, 0)])
def test_a_prefix_that_leaves_the_cache_while_it_is_verified(
    daemon: DaemonThread,
    files: dict[str, str],
    first_block: int,
    code: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: Output,
) -> None:
    verify = Client.verify

    def leaving(client: Client, digest: str | None, **fields: Any) -> Verified:
        if fields["first_block"] == first_block:
            gone = Error(id=ID, code="unknown_entry", message="no", retryable=False)
            raise ServerError(gone)
        return verify(client, digest, **fields)

    monkeypatch.setattr(Client, "verify", leaving)
    assert run(daemon, files, f"verify {DIGEST}") == code
    out, err = capsys.readouterr()
    assert out.startswith("2 blocks read") == (code == 0)
    assert ("unknown_entry" in err) == (code == 1)


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ("explain", "give either a file or --messages\n"),
        ("explain TEXT --messages TURNS", "give either a file or --messages"),
        ("explain --ids --messages TURNS", "--ids is about a file, not about --messages"),
        ("explain --ids NO_IDS", "NO_IDS holds something else than token ids"),
        ("explain --ids NO_END", "NO_END holds something else than token ids"),
        ("explain --ids NO_START", "NO_START holds something else than token ids"),
        ("explain --ids NO_NUMBER", "NO_NUMBER holds something else than token ids"),
        ("explain --messages NO_TURNS", "NO_TURNS is not a JSON list of turns: Expected `array`"),
        ("explain --messages NO_JSON", "NO_JSON is not a JSON list of turns: JSON is malformed"),
        ("explain --messages ROBOT", "messages: Invalid enum value 'robot'"),
        ("explain --messages TURNS --prefix-id p", "`prefix_id` cannot be given together with"),
        ("warm /nowhere", "/nowhere: No such file or directory"),
        ("register", "give either a file or --messages, or --jsonl\n"),
        ("register TEXT --jsonl MANY", "--jsonl stands alone"),
        ("register --jsonl TEXT", "TEXT, line 1: JSON is malformed"),
        ("register --jsonl EMPTY", "EMPTY holds no prompt"),
        ("register --jsonl TWO_IN_ONE", "TWO_IN_ONE, line 2: exactly one of `text`, `prompt_ids`"),
        ("register --jsonl TYPO", "TYPO, line 1: Object contains unknown field `txt`"),
        ("evict", "say what is to go: ID, --lru, --bytes"),
        ("show p-123", "p-123: give 8 digits of the prefix id, or more"),
    ],
)
def test_a_wrong_command_line_sends_nothing(
    daemon: DaemonThread, files: dict[str, str], line: str, complaint: str, capsys: Output
) -> None:
    assert run(daemon, files, line) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert complaint in err
    assert len(daemon.daemon.requests) == 1


def test_a_report_is_a_sentence_or_a_json_object(
    daemon: DaemonThread, files: dict[str, str], capsys: Output
) -> None:
    assert run(daemon, files, "explain TEXT") == 0
    assert capsys.readouterr().out == "cached 0 of 9 tokens: nothing cached begins like it\n"
    assert run(daemon, files, "explain TEXT --json") == 0
    assert json.loads(capsys.readouterr().out) == {
        "prompt_tokens": 9,
        "cached_tokens": 0,
        "cache": {"reason": "cold", "diverged_at": None, "nearest_tokens": None, "detail": ""},
    }


def test_warm_computes_and_then_asks_what_is_left(
    daemon: DaemonThread, files: dict[str, str], capsys: Output
) -> None:
    assert run(daemon, files, "warm TEXT") == 4
    assert daemon.daemon.requests[1:] == [
        Generate(ID, prompt="hello", max_tokens=1, temperature=0, stream=False),
        Explain(MessageId("3"), prompt="hello"),
    ]
    computed, left = capsys.readouterr().out.splitlines()
    assert computed.endswith("computed")
    assert left == (
        "not all of it can be reused now: cached 0 of 9 tokens: nothing cached begins like it"
    )
    assert run(daemon, files, "warm TEXT --json") == 4
    assert json.loads(capsys.readouterr().out)["reusable_tokens"] == 0


@pytest.mark.parametrize("code", ["forbidden", "internal"])
def test_what_is_left_is_told_on_the_admin_socket_only(
    daemon: DaemonThread,
    files: dict[str, str],
    code: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: Output,
) -> None:
    def refused(*_: object) -> None:
        raise ServerError(Error(id=ID, code=code, message="no", retryable=False))

    monkeypatch.setattr(Client, "explain", refused)
    assert run(daemon, files, "warm TEXT --json") == (0 if code == "forbidden" else 1)
    out = capsys.readouterr().out
    assert code != "forbidden" or json.loads(out)["reusable_tokens"] is None


@pytest.mark.parametrize(
    ("num_bytes", "kept"),
    [(0, "nothing of so short a prefix is kept"), (2048, "2.0 KiB are kept")],
)
def test_a_registration_says_what_it_holds(
    daemon: DaemonThread,
    files: dict[str, str],
    num_bytes: int,
    kept: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: Output,
) -> None:
    reply = Registered(
        ID, prefix_id=PrefixName("p-1"), num_tokens=3, cached_tokens=1, num_bytes=num_bytes
    )
    monkeypatch.setattr("ipc.sync_client.Client.register", lambda *_, **__: reply)
    assert run(daemon, files, "register TEXT") == 0
    said = f"p-1: 3 tokens, 1 of them were cached already; {kept}\n"
    assert capsys.readouterr().out == said


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: str(command.name))
def test_the_manual_of_each_command_is_its_docstring(
    command: object, monkeypatch: pytest.MonkeyPatch, capsys: Output
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit) as caught:
        main([str(getattr(command, "name", "")), "--help"])
    assert caught.value.code == 0
    said = capsys.readouterr().out
    assert (command.__doc__ or "").splitlines()[0] in said
    assert "rtcache-admin" in said.partition("example")[2]
    assert max(map(len, said.splitlines())) <= 80


@pytest.mark.parametrize(
    ("text", "expected"),
    [("0", 0), ("600", 600), ("1.5", 1.5), ("90s", 90), ("10m", 600), ("2h", 7200), ("1d", 86400)],
)
def test_durations(text: str, expected: float) -> None:
    assert seconds(text) == expected


@pytest.mark.parametrize("text", ["", "m", "-1", "1 m", "1w", "1e3", "inf", "nan", "1.", "١"])
def test_what_is_no_duration(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="expected a duration"):
        seconds(text)


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [
        (0, "0.0 KiB"),
        (1024**2 - 1, "1024.0 KiB"),
        (1024**2, "1.0 MiB"),
        (1024**3 - 1, "1024.0 MiB"),
        (1024**3, "1.0 GiB"),
        (5 * 1024**4, "5120.0 GiB"),
    ],
)
def test_sizes(num_bytes: int, text: str) -> None:
    assert size(num_bytes) == text
