"""A whole daemon with two tenants besides the default one: nobody meets anybody else's cache."""

from __future__ import annotations

import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ipc.sync_client import Client
from tests.support.rtcached import RawClient, run
from tools.admin.main import main
from tools.daemon_process import DaemonFailed, DaemonProcess

PROMPT = "You are a help desk. " * 10  # 210 tokens
#: Of 127 blocks: 31 and 31; the default tenant has 65.
TENANTS = """
[[tenants]]
name = "alice"
endpoint = "ipc://{directory}/alice"
share_percent = 25

[[tenants]]
name = "bob"
endpoint = "ipc://{directory}/bob"
share_percent = 25
"""
NAMES = ("", "alice", "bob")


def write_config(directory: Path, text: str = TENANTS) -> str:
    path = directory / "rtcached.toml"
    path.write_text(text.format(directory=directory))
    return str(path)


class Sockets:
    """The daemon's sockets, one client each."""

    def __init__(self, daemon: DaemonProcess, directory: Path) -> None:
        self.daemon = daemon
        self.clients = {"": RawClient(daemon.endpoint)}
        for name in NAMES[1:]:
            self.clients[name] = RawClient(f"ipc://{directory}/{name}")
        self.admin = Client(daemon.admin_endpoint)

    def close(self) -> None:
        self.admin.close()
        for client in self.clients.values():
            client.close()

    def generate(self, name: str, prompt: str = PROMPT, **fields: Any) -> dict[str, Any]:
        request = {"type": "generate", "prompt": prompt, "max_tokens": 1, "temperature": 0}
        done = self.clients[name].ask(id="g", **(request | fields))
        assert done["type"] == "done", done
        return done

    def digests(self, tenant: str) -> set[str]:
        return {entry["digest"] for entry in self.listed(tenant=tenant)}

    def listed(self, **fields: Any) -> list[dict[str, Any]]:
        with RawClient(self.daemon.admin_endpoint) as admin:
            entries: list[dict[str, Any]] = admin.ask(type="list", id="l", **fields)["entries"]
        return entries


@pytest.fixture(scope="module")
def sockets(null_bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sockets]:
    directory = tmp_path_factory.mktemp("t")
    config = write_config(directory)
    with DaemonProcess(null_bundle, "sim:0", config=config) as daemon:
        found = Sockets(daemon, directory)
        yield found
        found.close()


@pytest.fixture
def cold(sockets: Sockets) -> Sockets:
    """Nothing is cached, for anybody."""
    for entry in sockets.listed():
        if "prefix_id" in entry:
            sockets.clients[entry.get("tenant", "")].ask(
                type="release", id="r", prefix_id=entry["prefix_id"]
            )
    sockets.admin.evict(all=True)
    return sockets


def test_the_same_prompt_is_cold_for_each_and_then_a_hit(cold: Sockets):
    prompt = "Nobody has asked it. " * 10  # not even before it was evicted
    answers = [cold.generate(name, prompt) for name in NAMES]
    assert [answer["usage"]["cached_tokens"] for answer in answers] == [0, 0, 0]
    # What others have cached does not even change the reason.
    assert [answer["cache"] for answer in answers] == [{"reason": "cold"}] * 3
    answers = [cold.generate(name, prompt) for name in NAMES]
    assert [answer["usage"]["cached_tokens"] for answer in answers] == [209] * 3
    assert [answer["cache"] for answer in answers] == [{"reason": "hit"}] * 3


def test_a_flood_on_one_socket_evicts_nothing_of_the_others(cold: Sockets):
    for name in NAMES:
        cold.generate(name)
    before = {name: cold.digests(name) for name in NAMES}
    evicted = {name: tenant["evicted_blocks"] for name, tenant in tenants_of(cold).items()}
    for number in range(12):  # 360 blocks, of 31
        cold.generate("alice", f"{number:04}" * 480)
    after = {name: tenant["evicted_blocks"] for name, tenant in tenants_of(cold).items()}
    assert after["alice"] - evicted["alice"] > 300
    for name in ("", "bob"):
        assert after[name] == evicted[name]
        assert cold.digests(name) == before[name]
        assert cold.generate(name)["usage"]["cached_tokens"] == 209


def tenants_of(sockets: Sockets) -> dict[str, Any]:
    tenants: dict[str, Any] = sockets.admin.stats()["tenants"]
    return tenants


def test_operators_see_each_part(cold: Sockets):
    for name in NAMES:
        cold.generate(name)
    assert {name: tenant["num_blocks"] for name, tenant in tenants_of(cold).items()} == {
        "": 65,
        "alice": 31,
        "bob": 31,
    }
    everything = cold.listed()
    assert sorted(entry.get("tenant", "") for entry in everything) == sorted(NAMES)
    assert len({entry["digest"] for entry in everything}) == 3
    for name in NAMES:
        (entry,) = cold.listed(tenant=name)
        assert entry in [e | {k: entry[k] for k in ("age_s", "idle_s")} for e in everything]
    assert set(cold.admin.stats()["ipc"]) == {"user", "admin", "user:alice", "user:bob"}


def test_an_operator_releases_what_a_tenant_has_registered(
    cold: Sockets, capsys: pytest.CaptureFixture[str]
):
    alice = cold.clients["alice"]
    prefix_id = alice.ask(type="register", id="r", text=PROMPT)["prefix_id"]
    (entry,) = cold.listed()
    short, hint = prefix_id[:10], "; tenant `alice` has one: --tenant alice (unknown_"
    for words in (("release", short), ("show", short), ("pin", entry["digest"][:8])):
        assert main([*words, "--endpoint", cold.daemon.admin_endpoint]) == 1
        assert hint in capsys.readouterr().err
    refused = alice.ask(type="release", id="r", prefix_id=prefix_id, tenant="alice")
    assert refused["code"] == "forbidden"
    assert refused["message"] == "`release.tenant` is accepted on the admin socket only"
    words = ("release", short, "--tenant", "alice", "--endpoint", cold.daemon.admin_endpoint)
    assert main(words) == 0
    assert capsys.readouterr().out == f"released {prefix_id}\n"
    assert alice.ask(type="release", id="r", prefix_id=prefix_id)["message"] == (
        f"no prefix `{prefix_id}` is registered"
    )


def test_a_client_learns_nothing_of_others(cold: Sockets):
    """Every verb that a user's socket takes, before and after others fill their parts."""
    asked = [
        {"type": "info"},
        {"type": "tokenize", "text": PROMPT},
        {"type": "release", "prefix_id": "p-none"},
        {"type": "generate", "prompt": "x", "prefix_id": "p-none"},
        {"type": "list"},
        {"type": "stats"},
        {"type": "evict", "all": True},
        {"type": "explain", "prompt": PROMPT},
        {"type": "cancel", "target": "g"},
        {"type": "generate", "prompt": PROMPT, "tenant": "bob"},
    ]

    def answers() -> list[dict[str, Any]]:
        client = cold.clients["alice"]
        return [client.ask(id=str(number), **fields) for number, fields in enumerate(asked)]

    before = answers()
    assert [answer.get("code", answer["type"]) for answer in before] == [
        "info",
        "tokenized",
        "unknown_prefix",
        "unknown_prefix",
        *("forbidden",) * 4,
        "ok",
        "invalid_request",
    ]
    assert before[0]["limits"]["cache_tokens"] == 31 * 64
    assert before[0]["max_model_len"] == 31 * 64 + 1
    for name in ("", "bob"):
        cold.generate(name)
        cold.clients[name].ask(type="register", id="r", text=PROMPT)
    assert answers() == before
    texts = " ".join(map(str, before))
    assert not [word for word in ("bob", "very secret", str(65 * 64)) if word in texts]


def test_a_registered_prefix_is_its_tenants(cold: Sockets):
    prefix_id = cold.clients["bob"].ask(type="register", id="r", text=PROMPT)["prefix_id"]
    ask = {"type": "generate", "prompt": "x", "prefix_id": prefix_id, "max_tokens": 1}
    for name in ("", "alice"):
        assert cold.clients[name].ask(id="g", **ask)["code"] == "unknown_prefix"
        refusal = cold.clients[name].ask(type="release", id="r", prefix_id=prefix_id)
        assert refusal["code"] == "unknown_prefix"
    assert cold.clients["bob"].ask(id="g", **ask)["usage"]["cached_tokens"] == 210
    assert (
        cold.clients["bob"].ask(type="release", id="r", prefix_id=prefix_id)["type"] == "released"
    )


def test_start_and_end(null_bundle: Path, tmp_path: Path):
    config = write_config(tmp_path)
    daemon = DaemonProcess(null_bundle, "sim:0", config=config, ipc_endpoint=f"ipc://{tmp_path}/s")
    with daemon:
        ready = daemon.wait_for("ready")
        assert ready["endpoints"] == {"user": daemon.endpoint, "admin": daemon.admin_endpoint}
        assert ready["tenants"] == {name: f"ipc://{tmp_path}/{name}" for name in NAMES[1:]}
        assert ready["capacity_tokens"] == 127 * 64
        assert stat.S_IMODE((tmp_path / "alice").stat().st_mode) == 0o660
        second = DaemonProcess(null_bundle, "sim:0", config=config)
        with pytest.raises(DaemonFailed, match=f"already serves at {tmp_path}/alice"):
            second.__enter__()
    left = sorted(path.name for path in tmp_path.iterdir())
    assert left == ["alice.lock", "bob.lock", "rtcached.toml", "s.admin.lock", "s.lock"]
    assert "very secret" not in daemon.log_text()


def test_a_part_too_small_for_two_blocks(null_bundle: Path, tmp_path: Path):
    config = write_config(tmp_path, TENANTS.replace("25", "1"))
    ended = run(
        "runtime_cache.daemon",
        *("--config", config, "--model-bundle", str(null_bundle), "--device", "sim:0"),
        *("--ipc-endpoint", f"ipc://{tmp_path}/s"),
    )
    assert (ended.code, ended.complaint) == (
        2,
        "rtcached: of 127 blocks every tenant needs at least 2, which is 1.57 percent:\n"
        "  - tenant 'alice' gets 1 with 1 percent\n"
        "  - tenant 'bob' gets 1 with 1 percent",
    )
    assert not any(path.is_socket() for path in tmp_path.iterdir())


def test_check_config_shows_tenants(tmp_path: Path):
    config = write_config(tmp_path)
    ended = run("runtime_cache.daemon", "--check-config", "--config", config)
    rows = [line.split(maxsplit=2) for line in ended.out.splitlines()]
    assert ["tenants[1].name", '"bob"', config] in rows
    assert ["tenants[1].share_percent", "25.0", config] in rows


def names_of_one_prompt(bundle: Path, directory: Path, **options: str) -> dict[str, set[str]]:
    """What a daemon of its own calls the same prompt, tenant by tenant."""
    config = write_config(directory)
    with DaemonProcess(bundle, "sim:0", config=config, **options) as daemon:
        found = Sockets(daemon, directory)
        for name in NAMES:
            found.generate(name)
        names = {name: found.digests(name) for name in NAMES}
        found.close()
    return names


def test_names_are_the_same_after_a_restart_as_long_as_the_salt_is_kept(
    null_bundle: Path, tmp_path: Path
):
    state = str(tmp_path / "state")
    first = names_of_one_prompt(null_bundle, tmp_path, daemon_state_dir=state)
    (tmp_path / "state/salts/alice").unlink()
    second = names_of_one_prompt(null_bundle, tmp_path, daemon_state_dir=state)
    assert {name for name in NAMES if first[name] == second[name]} == {"", "bob"}
