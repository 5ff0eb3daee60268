"""`rtcache-admin` on a running daemon: as a process where that matters, else within this one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any
from unittest.mock import ANY

import pytest

from ipc.errors import ServerError
from ipc.sync_client import Client
from tests.support.rtcached import PATIENCE_S, Ended, run, wait_until_idle
from tools.admin.main import main
from tools.daemon_process import DaemonProcess

PREFIX = "You are a help desk. " * 10  # 210 bytes, as many tokens: three whole blocks


@pytest.fixture(scope="module")
def daemon(null_bundle: Path) -> Iterator[DaemonProcess]:
    with DaemonProcess(null_bundle, "sim:0") as running:
        yield running


@pytest.fixture
def cold(daemon: DaemonProcess) -> DaemonProcess:
    """The daemon, with nothing kept and nothing cached."""
    with Client(daemon.admin_endpoint) as client:
        for entry in client.list(kept="any").entries:
            if entry.prefix_id is not None:
                client.release(entry.prefix_id)
            else:
                client.unpin(entry.digest)
        wait_until_idle(client)  # blocks of a step that still runs stay
        client.evict(all=True)
    return daemon


def admin(daemon: DaemonProcess, *words: str) -> Ended:
    """The command line, without the half second that a process takes to start."""
    out, complaint = StringIO(), StringIO()
    with redirect_stdout(out), redirect_stderr(complaint):
        try:
            code = main([*words, "--endpoint", daemon.admin_endpoint])
        except SystemExit as end:
            code = int(end.code or 0)
    return Ended(code, out.getvalue(), complaint.getvalue().rstrip("\n"))


def reply(daemon: DaemonProcess, *words: str, code: object = 0) -> dict[str, Any]:
    """What the command prints with --json."""
    ended = admin(daemon, *words, "--json")
    assert (code, "") == (ended.code, ended.complaint)
    found: dict[str, Any] = json.loads(ended.out)
    return found


def steady(listed: dict[str, Any]) -> list[dict[str, Any]]:
    """Entries without what only time changes."""
    moving = {"age_s", "idle_s", "expires_in_s"}
    return [{k: v for k, v in e.items() if k not in moving} for e in listed["entries"]]


@pytest.fixture
def prompt_file(tmp_path: Path) -> str:
    path = tmp_path / "prompt.txt"
    path.write_text(PREFIX)
    return str(path)


def test_stats_after_a_cancel_say_why(cold: DaemonProcess):
    before = reply(cold, "stats")["engine"]
    by_client = before["cancelled_by"].get("client", 0) + 1
    with Client(cold.endpoint) as client:
        stream = client.generate("abc", temperature=0, ignore_eos=True)
        next(iter(stream))  # leaving the loop cancels
        client.ping()
    by_reason = {
        "cancelled": before["cancelled"] + 1,
        "cancelled_by": before["cancelled_by"] | {"client": by_client},
    }
    for encoding in ("json", "msgpack"):
        with Client(cold.admin_endpoint, encoding=encoding) as admin_client:
            engine = admin_client.stats()["engine"]
            assert {name: engine[name] for name in by_reason} == by_reason
    assert reply(cold, "stats")["engine"]["cancelled_by"]["client"] == by_client
    assert "cancelled_by.client" in admin(cold, "stats").out


def ask(daemon: DaemonProcess, prompt: str) -> None:
    """Have a prompt computed, and one token."""
    with Client(daemon.endpoint) as client:
        client.generate(prompt, max_tokens=1, temperature=0, ignore_eos=True).result()


def test_a_prefix_below_a_block_is_kept_too(cold: DaemonProcess, tmp_path: Path):
    path = tmp_path / "short.txt"
    path.write_text("short")
    prefix_id = reply(cold, "register", str(path))["prefix_id"]
    (entry,) = reply(cold, "list")["entries"]
    assert (entry["prefix_id"], entry["kept"]) == (prefix_id, "registered")
    assert (entry["num_tokens"], entry["num_blocks"], entry["num_bytes"]) == (5, 1, 8192)
    assert reply(cold, "release", prefix_id) == {"prefix_id": prefix_id}
    assert reply(cold, "list")["entries"][0]["kept"] == ""


def test_hits_of_a_shared_beginning_are_seen(cold: DaemonProcess):
    for end in ("a", "b", "c"):
        ask(cold, PREFIX + end * 100)
    entries = reply(cold, "list")["entries"]
    assert [(entry["num_tokens"], entry["hits"]) for entry in entries] == [(310, 2)] * 3


def test_register_list_release_evict(cold: DaemonProcess, prompt_file: str):
    registered = reply(cold, "register", prompt_file)
    prefix_id = registered.pop("prefix_id")
    assert registered == {"num_tokens": 210, "cached_tokens": 0, "num_bytes": 4 * 8192}
    (entry,) = reply(cold, "list")["entries"]
    shown = {name: entry[name] for name in ("prefix_id", "num_tokens", "num_blocks", "in_use")}
    assert shown == {"prefix_id": prefix_id, "num_tokens": 210, "num_blocks": 4, "in_use": False}
    assert reply(cold, "evict", "--all", code=4) == evicted(0, kept_blocks=4)
    assert reply(cold, "release", prefix_id) == {"prefix_id": prefix_id}
    assert reply(cold, "evict", "--lru", "1", "--dry-run") == evicted(1, dry_run=True)
    assert reply(cold, "evict", "--lru", "1") == evicted(1)
    assert reply(cold, "evict", "--bytes", "10000") == evicted(2)
    assert reply(cold, "evict", "--bytes", "10000", code=4) == evicted(1)
    assert reply(cold, "list") == {"entries": [], "total": 0}


def evicted(num_blocks: int, **more: Any) -> dict[str, Any]:
    """What `evict` prints."""
    stay = {"in_use_blocks": 0, "kept_blocks": 0, "dry_run": False}
    return {"num_blocks": num_blocks, "num_bytes": num_blocks * 8192} | stay | more


def test_list_in_pages(cold: DaemonProcess):
    for letter in "abc":
        ask(cold, letter * 10)
    whole = reply(cold, "list")
    assert [entry["num_tokens"] for entry in whole["entries"]] == [10, 10, 10]
    pages = [reply(cold, "list", "--limit", "2", "--offset", offset) for offset in ("0", "2", "4")]
    assert [page["total"] for page in pages] == [3, 3, 3]
    digests = [entry["digest"] for page in pages for entry in page["entries"]]
    assert digests == [entry["digest"] for entry in whole["entries"]]
    out = admin(cold, "list", "--offset", "2").out
    assert out.endswith("1 of 3 prefixes from number 2 on (a shared beginning counts in each)\n")


def test_pin_lease_unpin(cold: DaemonProcess):
    ask(cold, PREFIX)
    (entry,) = reply(cold, "list")["entries"]
    digest = entry["digest"]
    kept = {"digest": digest, "num_tokens": 210, "num_blocks": 4, "num_bytes": 4 * 8192}
    assert reply(cold, "pin", digest[:8]) == kept | {"expires_in_s": None}
    assert reply(cold, "evict", "--all", code=4)["kept_blocks"] == 4
    assert reply(cold, "evict", digest, code=4)["num_blocks"] == 0
    (entry,) = reply(cold, "list")["entries"]
    assert (entry["kept"], entry["expires_in_s"], entry["in_use"]) == ("pinned", None, False)
    assert reply(cold, "lease", digest, "--ttl", "10m") == kept | {"expires_in_s": None}
    (entry,) = reply(cold, "list")["entries"]
    assert (entry["kept"], entry["expires_in_s"]) == ("pinned", None)
    assert reply(cold, "unpin", digest) == {"digest": digest}
    leased = reply(cold, "lease", digest, "--ttl", "10m")
    assert leased == kept | {"expires_in_s": leased["expires_in_s"]}
    assert 0 < leased["expires_in_s"] <= 600
    (entry,) = reply(cold, "list")["entries"]
    assert entry["kept"] == "leased"
    assert 0 < entry["expires_in_s"] <= 600
    assert reply(cold, "unpin", digest[:16]) == {"digest": digest}
    assert admin(cold, "unpin", digest).complaint.endswith("(unknown_entry)")
    assert reply(cold, "evict", digest[:8])["num_blocks"] == 4
    assert admin(cold, "pin", digest).complaint.endswith("(unknown_entry)")


def test_a_lease_ends_by_itself(cold: DaemonProcess):
    ask(cold, PREFIX)
    (entry,) = reply(cold, "list")["entries"]
    assert reply(cold, "lease", entry["digest"], "--ttl", "0.001")["num_blocks"] == 4
    assert reply(cold, "evict", "--all")["num_blocks"] == 4


def test_evict_what_is_idle(cold: DaemonProcess):
    ask(cold, PREFIX)
    assert reply(cold, "evict", "--idle", "1h", code=4)["num_blocks"] == 0
    assert reply(cold, "evict", "--older-than", "1h", code=4)["num_blocks"] == 0
    assert reply(cold, "evict", "--older-than", "0", "--dry-run")["num_blocks"] == 4
    assert reply(cold, "evict", "--idle", "0")["num_blocks"] == 4


def test_warm_computes_and_keeps_nothing(cold: DaemonProcess, prompt_file: str):
    Path(prompt_file).write_text("Warm. " * 35)
    cold_answer = {"prompt_tokens": 210, "cached_tokens": 0, "cache": explained("cold")}
    cold_answer["reusable_tokens"] = 209
    assert reply(cold, "warm", prompt_file, "--priority", "80") == cold_answer
    (entry,) = reply(cold, "list")["entries"]
    assert (entry["num_tokens"], entry["kept"], entry["priority"]) == (210, "", 80)
    assert admin(cold, "warm", prompt_file).out == (
        "210 tokens, 209 of them were cached already, 1 computed\n"
    )
    assert reply(cold, "evict", "--all")["num_blocks"] == 4


def test_verify_reads_everything_and_changes_nothing(cold: DaemonProcess):
    ask(cold, PREFIX)
    found = {"num_changed": 0, "num_not_finite": 0, "dropped_blocks": 0, "in_use_blocks": 0}
    read = found | {"num_blocks": 4, "num_bytes": 210 * 128}
    assert reply(cold, "verify") == read | {"num_new": 4}
    assert reply(cold, "verify") == read | {"num_new": 0}
    (entry,) = reply(cold, "list")["entries"]
    assert reply(cold, "verify", entry["digest"][:8])["num_blocks"] == 4
    assert admin(cold, "verify").out.startswith("4 blocks read (26.2 KiB), 0 of them for the first")
    assert admin(cold, "verify", "0" * 16).complaint.endswith("(unknown_entry)")


def explained(reason: str, **more: Any) -> dict[str, Any]:
    """A cache report as --json prints it."""
    return {"reason": reason, "diverged_at": None, "nearest_tokens": None, "detail": ""} | more


def test_explain_runs_nothing_and_says_why(cold: DaemonProcess, tmp_path: Path):
    path = tmp_path / "prompt.txt"
    prompt = "What explains the world? " * 8 + "Anything.."  # not asked before: it is not "evicted"

    def explain(text: str, *words: str) -> tuple[int, int, dict[str, Any], str]:
        path.write_text(text)
        found = reply(cold, "explain", str(path), *words)
        said = admin(cold, "explain", str(path), *words).out
        return found["prompt_tokens"], found["cached_tokens"], found["cache"], said

    assert explain(prompt) == (
        210,
        0,
        explained("cold"),
        "cached 0 of 210 tokens: nothing cached begins like it\n",
    )
    assert explain("x")[2] == explained("too_short")
    ask(cold, prompt)
    assert explain(prompt) == (
        210,
        209,
        explained("hit"),
        "cached 209 of 210 tokens: that is all that can be reused\n",
    )
    assert explain(prompt + "!" * 90) == (
        300,
        210,
        explained("extended", diverged_at=210, nearest_tokens=210),
        "cached 210 of 300 tokens: the nearest cached prefix ends after 210 tokens, the prompt "
        "goes on\n",
    )
    assert explain(prompt[:37] + "!" * 90) == (
        127,
        37,
        explained("diverged", diverged_at=37, nearest_tokens=210),
        "cached 37 of 127 tokens: diverged at token 37; the nearest cached prefix has 210 tokens\n",
    )
    ids = ", ".join(map(str, [*prompt.encode()][:37]))
    assert explain(f"[{ids}]", "--ids")[0] == 37
    reply(cold, "evict", "--all")
    assert explain(prompt)[2]["reason"] == "evicted"
    assert reply(cold, "stats")["engine"]["num_running"] == 0


def test_explain_says_what_the_answer_then_says(cold: DaemonProcess):
    """Nothing is between the two, so both see the same cache."""
    prompts = [PREFIX, PREFIX, PREFIX[:100] + "x" * 50, PREFIX + "y", "z"]
    with Client(cold.admin_endpoint) as client:
        for prompt in prompts:
            before = client.explain(prompt)
            result = client.generate(prompt, max_tokens=1, temperature=0).result()
            usage = result.usage
            assert (usage.prompt_tokens, usage.cached_tokens, result.cache) == (
                before.prompt_tokens,
                before.cached_tokens,
                before.cache,
            )


def test_explain_with_a_registered_prefix(cold: DaemonProcess, prompt_file: str, tmp_path: Path):
    prefix_id = reply(cold, "register", prompt_file)["prefix_id"]
    rest = tmp_path / "rest.txt"
    rest.write_text("x")
    found = reply(cold, "explain", str(rest), "--prefix-id", prefix_id)
    assert (found["prompt_tokens"], found["cached_tokens"]) == (211, 210)


def test_for_people(cold: DaemonProcess, prompt_file: str):
    out = admin(cold, "register", prompt_file).out
    prefix_id = out.partition(":")[0]
    assert out == (f"{prefix_id}: 210 tokens, 0 of them were cached already; 32.0 KiB are kept\n")
    listed = admin(cold, "list").out
    assert f"{prefix_id[:18]} registered" in listed
    assert listed.endswith("1 of 1 prefix (a shared beginning counts in each)\n")
    assert admin(cold, "evict", "--all").out == (
        "evicted 0 blocks (0.0 KiB); stay: 4 registered, pinned or leased\n"
    )
    digest = reply(cold, "list")["entries"][0]["digest"]
    short = digest[:16]
    kept = f"{short}: 210 tokens (32.0 KiB) are kept"
    assert admin(cold, "pin", digest).out == f"{kept} until it is unpinned\n"
    assert admin(cold, "lease", digest, "--ttl", "90s").out == (
        f"{short}: is pinned already; it stays until it is unpinned\n"
    )
    assert admin(cold, "unpin", digest).out == f"unpinned {short}\n"
    assert admin(cold, "lease", digest, "--ttl", "90s").out == f"{kept} for 90 s\n"
    assert admin(cold, "unpin", digest).out == f"unpinned {short}\n"
    assert admin(cold, "release", prefix_id).out == f"released {prefix_id}\n"


def test_stats_shows_each_gauge_once_in_80_columns(cold: DaemonProcess):
    out = admin(cold, "stats").out
    assert max(map(len, out.splitlines())) <= 80
    stats = reply(cold, "stats")
    sections = ["daemon", "warnings", "latency", "pool", "cache", "engine", "device", "ipc"]
    assert [name for name in stats if name in sections] == sections
    assert stats["pool"] | {"free_blocks": 127, "live_blocks": 0} == stats["pool"]
    assert out.count("free_blocks") == 1


def test_a_table_of_long_entries_fits_80_columns(cold: DaemonProcess, prompt_file: str):
    admin(cold, "register", prompt_file)
    for command in ("list", "config"):
        assert max(map(len, admin(cold, command).out.splitlines())) <= 80


@pytest.mark.parametrize(
    ("words", "code", "complaint"),
    [
        (("release", f"p-{'0' * 32}"), 1, "is registered (unknown_prefix)"),
        (("release", "p-00000000"), 1, "no prefix `p-00000000` is registered (unknown_prefix)"),
        (("release", "p-none"), 2, "p-none: give 8 digits of the prefix id, or more"),
        (("show", "0" * 64), 1, "nothing cached has the digest"),
        (("show", f"p-{'0' * 32}"), 1, "is registered (unknown_prefix)"),
        (("config", "nothing.such"), 4, ""),
        (("register", "/nowhere"), 2, "/nowhere: No such file or directory"),
        (("register", "/dev/null"), 1, "the prompt is empty: give at least one token"),
        (("evict", "--lru", "0"), 2, "--lru: expected a whole number from 1 to 2147483647, got 0"),
        (("list", "--limit", "0"), 2, "--limit: expected a whole number from 1 to 1000, got 0"),
        (("list", "--limit", "x"), 2, "--limit: expected a whole number from 1 to 1000, got x"),
        (("top", "--rows", "0"), 2, "--rows: expected a whole number from 1 to 1000, got 0"),
        (("warm", "/dev/null", "--priority", "101"), 2, "--priority: expected a whole number from"),
        (("evict", "--bytes", "0"), 2, "--bytes: expected more than zero bytes"),
        (("evict",), 2, "--idle, --all, or whose: --tenant"),
        (("evict", "--all", "--idle", "1h"), 2, "--idle: not allowed with argument --all"),
        (("evict", "--all", "0" * 64), 2, "ID: not allowed with argument --all"),
        (("evict", "--bytes", "much"), 2, "expected a size such as 512MB or 1.5GiB, got much"),
        (("evict", "--idle", "soon"), 2, "expected a duration such as 600, 10m or 2h, got soon"),
        (("evict", "0" * 64), 1, "(unknown_entry)"),
        (("evict", "--all", "--tenant", "nobody"), 1, "no tenant 'nobody' is configured"),
        (("list", "--tenant", "nobody"), 1, "no tenant 'nobody' is configured"),
        (("list", "--offset", "-1"), 2, "--offset: expected a whole number from 0 to 2147483647"),
        (("pin", "0" * 7), 1, "`digest`: expected at least 8 characters, got 7"),
        (("pin", "0" * 64), 1, "(unknown_entry)"),
        (("pin", "hello world"), 1, "`digest`: expected lower-case hexadecimal digits"),
        (("unpin", "0" * 8), 1, "(unknown_entry)"),
        (("lease", "0" * 8), 2, "the following arguments are required: --ttl"),
        (("lease", "0" * 8, "--ttl", "0"), 2, "argument --ttl: expected more than zero seconds"),
        (("lease", "0" * 8, "--ttl", "-5"), 2, "argument --ttl: expected a duration such as"),
        (("lease", "0" * 8, "--ttl", "366d"), 1, "`ttl_s`: expected a number ≤ 31536000"),
        (("explain",), 2, "give either a file or --messages"),
        (("explain", "/dev/null"), 1, "the prompt is empty: give at least one token"),
        (("explain", "/dev/null", "--tenant", "nobody"), 1, "no tenant 'nobody' is configured"),
        (("warm", "/dev/null"), 1, "the prompt is empty: give at least one token"),
        (("warm", "/nowhere"), 2, "/nowhere: No such file or directory"),
        (("reboot",), 2, "invalid choice: 'reboot'"),
    ],
)
def test_refusals(cold: DaemonProcess, words: tuple[str, ...], code: int, complaint: str):
    ended = admin(cold, *words)
    assert ended.code == code
    assert code == 4 or ended.out == ""
    assert complaint in ended.complaint


def test_show_says_who_holds_a_prefix_and_what_it_says(cold: DaemonProcess, prompt_file: str):
    prefix_id = reply(cold, "register", prompt_file)["prefix_id"]
    shown = reply(cold, "show", prefix_id[:10], "--text")
    (entry,) = reply(cold, "list")["entries"]
    assert shown["entry"] | {"age_s": 0, "idle_s": 0} == entry | {"age_s": 0, "idle_s": 0}
    assert shown["text"] == PREFIX
    assert [block["num_tokens"] for block in shown["blocks"]] == [64, 64, 64, 18]
    assert {(block["num_requests"], block["is_kept"]) for block in shown["blocks"]} == {(0, True)}
    assert (shown["num_requests"], shown["num_continued_by"]) == (0, 0)
    assert reply(cold, "show", entry["digest"][:8])["text"] is None
    first = reply(cold, "show", shown["blocks"][0]["digest"])
    assert (first["entry"]["num_tokens"], first["num_continued_by"]) == (64, 1)
    assert admin(cold, "show", prefix_id).out.splitlines()[1] == f"id       {prefix_id}"
    assert reply(cold, "release", prefix_id[:12]) == {"prefix_id": prefix_id}


def test_list_sorts_and_chooses(cold: DaemonProcess):
    for prompt in ("a" * 300, "b" * 10, "c" * 100, "b" * 10):
        ask(cold, prompt)

    def lengths(*words: str) -> list[int]:
        return [entry["num_tokens"] for entry in reply(cold, "list", *words)["entries"]]

    assert lengths("--sort", "tokens") == [300, 100, 10]
    assert lengths("--sort", "size", "--reverse") == [10, 100, 300]
    assert lengths("--sort", "age") == [300, 10, 100]
    assert lengths("--sort", "hits")[0] == 10
    assert lengths("--min-hits", "1") == [10]
    assert lengths("--max-hits", "0", "--sort", "tokens") == [300, 100]
    assert lengths("--min-size", "16KiB", "--sort", "tokens") == [300, 100]
    assert lengths("--min-size", "17KiB") == [300]
    assert (
        lengths("--kept", "any") == lengths("--older-than", "1h") == lengths("--idle", "1h") == []
    )
    assert len(lengths("--kept", "none", "--all")) == 3


@pytest.mark.parametrize("what", ["ID", "--all", "--lru=1", "--bytes=8192", "--idle=0"])
def test_a_dry_run_changes_nothing_and_tells_what_the_real_one_does(cold: DaemonProcess, what: str):
    for prompt in (PREFIX, "x" * 100, "y" * 70):
        ask(cold, prompt)
    digest = reply(cold, "list", "--sort", "tokens")["entries"][0]["digest"]
    assert reply(cold, "lease", digest, "--ttl", "1h")["num_blocks"] == 4
    word = what.replace("ID", digest)
    before = steady(reply(cold, "list"))
    foreseen = reply(cold, "evict", word, "--dry-run", code=ANY)
    assert steady(reply(cold, "list")) == before
    assert reply(cold, "evict", word, code=ANY) == foreseen | {"dry_run": False}
    assert foreseen["kept_blocks"] == 4


def test_drain_and_resume(null_bundle: Path, slow_steps: None):
    with DaemonProcess(null_bundle, "sim:0") as cold, Client(cold.endpoint) as client:
        running = iter(client.generate("abc", temperature=0, ignore_eos=True))
        next(running)
        assert reply(cold, "drain") == {"num_unfinished": 1}
        refused = admin(cold, "warm", "/dev/null")
        assert client.ping().state == "draining"
        with pytest.raises(ServerError, match="an operator lets it take no new requests"):
            client.generate("abc", max_tokens=1).result()
        assert client.tokenize("abc")  # is no work of the device
        assert reply(cold, "evict", "--all", "--dry-run", code=ANY)["dry_run"]
        assert reply(cold, "drain", "--wait", "0.001", code=4) == {"num_unfinished": 1}
        running.close()  # cancels
        assert reply(cold, "drain", "--wait") == {"num_unfinished": 0}
        assert reply(cold, "resume") == {}
        client.generate("abc", max_tokens=1, temperature=0).result()
    assert refused.code == 1


def test_register_many(cold: DaemonProcess, tmp_path: Path):
    path = tmp_path / "many.jsonl"
    path.write_text('{"text": "one", "name": "first"}\n{"prompt_ids": [1, 2]}\n{"text": ""}\n')
    ended = admin(cold, "register", "--jsonl", str(path), "--json")
    first, second, third = map(json.loads, ended.out.splitlines())
    assert (ended.code, ended.complaint) == (4, "")
    assert (first["name"], first["num_tokens"], second["num_tokens"]) == ("first", 3, 2)
    assert third["error"]["code"] == "invalid_request"
    assert reply(cold, "list", "--kept", "registered")["total"] == 2
    said = admin(cold, "register", "--jsonl", str(path)).out.splitlines()
    assert said[0].startswith(f"first: {first['prefix_id']}: 3 tokens")
    assert said[-1] == "registered 2 of 3 prefixes"


def test_top_once(cold: DaemonProcess):
    ask(cold, PREFIX)
    frame = reply(cold, "top", "--once", "--interval", "0.01")
    pool = frame["live_blocks"], frame["cached_blocks"], frame["free_blocks"]
    assert sum(pool) == frame["num_blocks"] == 127
    assert frame["interval_s"] > 0
    assert (frame["state"], frame["device"], frame["note"]) == ("serving", "sim:0", "")
    assert frame["latency"]["ttft_ms"]["p50"] > 0
    assert [prefix["num_tokens"] for prefix in frame["hottest"]] == [210]
    assert max(map(len, admin(cold, "top", "--once", "--interval", "0.01").out.splitlines())) <= 80


def test_config_tells_where_values_come_from(cold: DaemonProcess):
    options = {option["path"]: option for option in reply(cold, "config")["options"]}
    assert options["device.device"]["value"] == '"sim:0"'
    assert options["device.device"]["origin"] == "flag --device"
    assert options["cache.block_size"] == {
        "path": "cache.block_size",
        "value": "64",
        "origin": "default",
        "is_reloadable": False,
    }
    assert options["log.level"]["is_reloadable"]
    changed = reply(cold, "config", "--changed")["options"]
    assert {option["path"] for option in changed} >= {"device.device", "model.bundle"}
    assert all(option["origin"] != "default" for option in changed)


def test_reload(cold: DaemonProcess):
    assert reply(cold, "reload") == {"changed": [], "needs_restart": [], "num_keys": None}


def test_common_options_may_stand_before_the_command(cold: DaemonProcess):
    ended = run("tools.admin.main", "--endpoint", cold.admin_endpoint, "--json", "list")
    assert (ended.code, json.loads(ended.out)) == (0, {"entries": [], "total": 0})


def test_a_prefix_that_is_no_text(cold: DaemonProcess, tmp_path: Path):
    (tmp_path / "noise").write_bytes(b"\xff\xfe")
    ended = admin(cold, "register", str(tmp_path / "noise"))
    assert (ended.code, ended.complaint) == (
        2,
        f"rtcache-admin: {tmp_path}/noise is not UTF-8 text: invalid start byte",
    )


def test_on_the_users_socket(cold: DaemonProcess):
    ended = run("tools.admin.main", "stats", "--endpoint", cold.endpoint)
    assert ended.code == 1
    assert "accepted on the admin socket only (forbidden)" in ended.complaint


def test_nobody_is_there(tmp_path: Path):
    endpoint = f"ipc://{tmp_path}/none"
    ended = run("tools.admin.main", "stats", "--endpoint", endpoint, "--timeout", "0.1")
    assert ended.code == 3
    assert endpoint in ended.complaint


def test_a_reader_that_goes_away_is_no_error(cold: DaemonProcess):
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "wb") as nobody:
        ended = subprocess.run(
            [sys.executable, "-m", "tools.admin.main", "stats", "--endpoint", cold.admin_endpoint],
            stdout=nobody,
            stderr=subprocess.PIPE,
            timeout=PATIENCE_S,
            check=False,
        )
    assert (ended.returncode, ended.stderr) == (0, b"")
