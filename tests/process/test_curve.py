"""A whole daemon on TCP: who may connect, whom a key stands for, and what a reload changes."""

from __future__ import annotations

import random
import signal
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
import zmq

from ipc.cli import main as cli_main
from ipc.curve_keys import CurveKeys
from ipc.errors import NotWelcome, ServerError
from ipc.sync_client import Client
from runtime_cache.daemon import main as daemon_main
from tests.support.curve import TENANTS, CurveSocket, KeyFolder, curve_options, keyed_daemon
from tests.support.rtcached import PATIENCE_S, run, wait_until_idle
from tools.admin.main import main as admin_main
from tools.daemon_process import DaemonProcess

PROMPT = "You are a help desk. " * 10  # 210 tokens
KEYS = {
    "alice-1": {"tenant": "alice"},
    "alice-2": {"tenant": "alice", "quota": {"max_requests": 1, "tokens_per_minute": 300}},
    "bob": {"tenant": "bob"},
    "nobody": {},
    "chief": {"role": "admin"},
}


@pytest.fixture(scope="module")
def the_folder(tmp_path_factory: pytest.TempPathFactory) -> KeyFolder:
    return KeyFolder(tmp_path_factory.mktemp("k"))


@pytest.fixture
def folder(the_folder: KeyFolder) -> KeyFolder:
    """Every file as it is at the start."""
    the_folder.list.unlink(missing_ok=True)
    the_folder.write(KEYS)
    the_folder.config.write_text(TENANTS)
    return the_folder


@pytest.fixture(scope="module")
def the_daemon(null_bundle: Path, the_folder: KeyFolder) -> Iterator[DaemonProcess]:
    the_folder.write(KEYS)
    the_folder.config.write_text(TENANTS)
    with keyed_daemon(null_bundle, the_folder) as running:
        yield running


@pytest.fixture
def daemon(the_daemon: DaemonProcess, folder: KeyFolder) -> DaemonProcess:
    """Everything as it is at the start, and nothing cached."""
    with Client(the_daemon.admin_endpoint) as admin:
        assert admin.reload().needs_restart == ()
        wait_until_idle(admin)
        admin.evict(all=True)
    return the_daemon


def cached(client: Client, prompt: str = PROMPT) -> int:
    done = client.generate(prompt, max_tokens=1, temperature=0.0).result()
    return done.usage.cached_tokens


def test_who_may_connect_and_what_for(daemon: DaemonProcess, folder: KeyFolder) -> None:
    strangers = {
        "no key": None,
        "a key of nobody": folder.curve("stranger"),
        "the wrong daemon": CurveKeys(folder.pair("stranger").public, folder.pair("bob")),
    }
    for curve in strangers.values():
        with (
            Client(daemon.endpoint, curve=curve) as client,
            pytest.raises(NotWelcome),
        ):
            client.ping()
    for name in KEYS:
        with Client(daemon.endpoint, curve=folder.curve(name)) as client:
            assert client.ping().state == "serving"
            if name == "chief":
                assert client.stats()["engine"]["num_running"] == 0
                continue
            with pytest.raises(ServerError, match="from administrators' keys only") as refused:
                client.stats()
            assert refused.value.code == "forbidden"

    # Plain bytes on the port, and a connection that says nothing, hurt nobody.
    host, port = daemon.endpoint.removeprefix("tcp://").split(":")
    with socket.create_connection((host, int(port))) as plain:
        plain.sendall(b"GET / HTTP/1.1\r\n\r\n" * 100)
        with Client(daemon.endpoint, curve=folder.curve("bob")) as client:
            assert client.ping().state == "serving"


#: What a client of CURVE says first: ZMTP's greeting, and HELLO with an empty key and box.
GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x01" + b"CURVE".ljust(20, b"\0") + bytes(32)
HELLO = b"\x04\xc8\x05HELLO\x01\x00" + bytes(192)


def test_damaged_handshakes_hurt_nobody(daemon: DaemonProcess, folder: KeyFolder) -> None:
    host, port = daemon.endpoint.removeprefix("tcp://").split(":")
    chance = random.Random(1)
    with ExitStack() as stack:
        for _ in range(150):
            said = bytearray(GREETING + HELLO)
            for _ in range(chance.randrange(4)):
                said[chance.randrange(len(said))] = chance.randrange(256)
            plain = stack.enter_context(socket.create_connection((host, int(port))))
            plain.sendall(said[: chance.randrange(1, len(said) + 1)])
        with Client(daemon.endpoint, curve=folder.curve("chief")) as chief:
            assert chief.ping().state == "serving"
            assert chief.stats()["security"]["num_keys"] == len(KEYS)


def test_the_tenant_is_that_of_the_key(daemon: DaemonProcess, folder: KeyFolder) -> None:
    with ExitStack() as stack:
        clients = {
            name: stack.enter_context(Client(daemon.endpoint, curve=folder.curve(name)))
            for name in KEYS
        }
        assert cached(clients["alice-1"]) == 0
        assert cached(clients["alice-2"]) == 209  # the same tenant
        assert [cached(clients[name]) for name in ("bob", "nobody")] == [0, 0]
        registered = clients["alice-1"].register("A prefix of Alice's. " * 4)
        for name in ("bob", "nobody"):
            with pytest.raises(ServerError, match=r"no prefix .* is registered"):
                clients[name].release(registered.prefix_id)
        with CurveSocket(daemon.endpoint, folder.curve("bob")) as bob:
            reply = bob.ask(type="generate", id="1", prompt=PROMPT, tenant="alice")
            assert (reply["type"], reply["code"]) == ("error", "invalid_request")
        clients["alice-2"].release(registered.prefix_id)
        entries = clients["chief"].list().entries
        assert {entry.tenant for entry in entries} == {"", "alice", "bob"}


def test_one_identity_is_not_one_client(daemon: DaemonProcess, folder: KeyFolder) -> None:
    # Chosen by the clients, and the same after the first has gone: it is the key that counts.
    with CurveSocket(daemon.endpoint, folder.curve("chief"), identity=b"me") as chief:
        assert chief.ask(type="stats", id="1")["type"] == "stats"
        chief.send(type="generate", id="g", prompt="secret", max_tokens=4000)
        chief.receive()
    with CurveSocket(daemon.endpoint, folder.curve("bob"), identity=b"me") as bob:
        reply = bob.ask(type="stats", id="2")
        assert (reply["id"], reply["code"]) == ("2", "forbidden")
        assert bob.ask(type="ping", id="3")["id"] == "3"


def test_a_key_that_is_removed_ends_at_once(daemon: DaemonProcess, folder: KeyFolder) -> None:
    with (
        Client(daemon.endpoint, curve=folder.curve("chief")) as chief,
        Client(daemon.endpoint, curve=folder.curve("nobody")) as other,
        CurveSocket(daemon.endpoint, folder.curve("bob")) as bob,
        CurveSocket(daemon.endpoint, folder.curve("bob")) as silent,
    ):
        silent.wait_for_event(zmq.EVENT_HANDSHAKE_SUCCEEDED)
        bob.send(type="generate", id="g", prompt=PROMPT, max_tokens=4000, ignore_eos=True)
        assert bob.receive()["type"] == "tokens"
        assert other.ping().state == "serving"
        folder.write({name: KEYS[name] for name in ("chief", "nobody")})
        reloaded = chief.reload()
        assert (reloaded.changed, reloaded.num_keys) == (("ipc.keys_file",), 2)
        bob.wait_for_event(zmq.EVENT_HANDSHAKE_FAILED_AUTH)
        # Its request is over, and one that had not asked anything yet can do no more.
        wait_until_idle(chief)
        refused = silent.ask(type="ping", id="p")
        assert (refused["type"], refused["code"]) == ("error", "forbidden")
        assert other.ping().state == "serving"
        folder.write(KEYS)
        daemon.process.send_signal(signal.SIGHUP)
        wait_for_keys(chief, len(KEYS))
        with Client(daemon.endpoint, curve=folder.curve("bob")) as again:
            assert cached(again) == 209


def test_another_role_or_tenant_is_another_key(daemon: DaemonProcess, folder: KeyFolder) -> None:
    with (
        Client(daemon.endpoint, curve=folder.curve("chief")) as chief,
        CurveSocket(daemon.endpoint, folder.curve("bob")) as bob,
    ):
        assert bob.ask(type="ping", id="1")["type"] == "pong"
        folder.write({**KEYS, "bob": {"role": "admin", "tenant": "bob"}})
        chief.reload()
        # The connection is cut and comes again by itself, as what the key is now.
        bob.wait_for_event(zmq.EVENT_DISCONNECTED)
        assert bob.ask(type="stats", id="2")["type"] == "stats"


def test_quotas(null_bundle: Path, folder: KeyFolder, slow_steps: None) -> None:
    own = {"ipc_admin_endpoint": f"ipc://{folder.directory}/q"}
    with (
        keyed_daemon(null_bundle, folder, **own) as daemon,
        CurveSocket(daemon.endpoint, folder.curve("alice-2")) as first,
        CurveSocket(daemon.endpoint, folder.curve("alice-2")) as second,
        Client(daemon.endpoint, curve=folder.curve("alice-1")) as other,
    ):
        first.send(type="generate", id="g", prompt="x", max_tokens=4000, ignore_eos=True)
        assert first.receive()["type"] == "tokens"
        # One at a time, over all connections of the key; what costs nothing is free.
        busy = second.ask(type="generate", id="h", prompt="x")
        assert (busy["code"], busy["retryable"]) == ("quota", True)
        assert "1 unfinished requests, its quota is 1" in busy["message"]
        assert second.ask(type="ping", id="p")["type"] == "pong"
        assert first.ask(type="cancel", id="c", target="g")["type"] in ("ok", "done")
        first.receive()
        # 300 tokens a minute, of which the next takes 421.
        second.ask(type="generate", id="i", prompt=2 * PROMPT, max_tokens=1, ignore_eos=True)
        spent = second.ask(type="generate", id="j", prompt="x")
        assert spent["code"] == "quota"
        assert "300 tokens a minute" in spent["message"]
        assert 1000 < spent["retry_after_ms"] < 120_000
        assert other.generate("x", max_tokens=1).result().finish_reason == "length"


@pytest.mark.parametrize("fault", ["not TOML", "unknown tenant", "missing", "writable", "config"])
def test_what_is_wrong_changes_nothing(
    daemon: DaemonProcess, folder: KeyFolder, fault: str
) -> None:
    config = folder.config
    with (
        Client(daemon.endpoint, curve=folder.curve("chief")) as chief,
        Client(daemon.endpoint, curve=folder.curve("bob")) as bob,
    ):
        assert bob.ping().state == "serving"
        if fault == "not TOML":
            folder.list.write_text("[[keys]")
        elif fault == "unknown tenant":
            folder.write({"chief": {"role": "admin", "tenant": "carol"}})
        elif fault == "missing":
            folder.list.unlink()
        elif fault == "writable":
            folder.write({})
            folder.list.chmod(0o666)
        else:
            folder.write({})
            config.write_text(config.read_text() + '\n[log]\nlevel = "loud"\n')
        daemon.events.clear()
        daemon.process.send_signal(signal.SIGHUP)
        failed = daemon.wait_for("reload_failed")
        assert failed["level"] == "error"
        assert str(config if fault == "config" else folder.list) in failed["error"]
        with pytest.raises(ServerError) as refused:
            chief.reload()
        assert refused.value.code == "invalid_config"
        for text in (failed["error"], str(refused.value)):
            assert text.startswith("the former configuration and keys stay in force: ")
        assert bob.ping().state == "serving"
        with Client(daemon.endpoint, curve=folder.curve("alice-1")) as newcomer:
            assert newcomer.ping().state == "serving"


def test_what_a_reload_changes_and_what_has_to_wait(
    daemon: DaemonProcess, folder: KeyFolder
) -> None:
    config = folder.config
    before = config.read_text()
    with Client(daemon.endpoint, curve=folder.curve("chief")) as chief:
        config.write_text(
            "[engine]\ndefault_max_tokens = 3\nmax_waiting = 7\n[log]\nlevel = 'warning'\n"
            + before.replace("25", "20", 1)
        )
        reloaded = chief.reload()
        assert set(reloaded.changed) == {"engine.default_max_tokens", "log.level"}
        assert set(reloaded.needs_restart) == {"engine.max_waiting", "tenants[0].share_percent"}
        assert reloaded.num_keys == len(KEYS)
        assert chief.generate("x", ignore_eos=True).result().usage.completion_tokens == 3
        options = {option.path: option for option in chief.config().options}
        assert options["engine.default_max_tokens"].value == "3"
        assert options["engine.default_max_tokens"].origin == str(config)
        assert options["engine.default_max_tokens"].is_reloadable
        assert options["engine.max_waiting"].value == "1024"
        assert not options["engine.max_waiting"].is_reloadable
        config.write_text(before)
        assert set(chief.reload().changed) == {"engine.default_max_tokens", "log.level"}
        assert chief.reload().changed == ()


def test_sockets_of_one_kind_only(null_bundle: Path, folder: KeyFolder) -> None:
    folder.config.write_text(
        '[[tenants]]\nname = "alice"\nendpoint = "tcp://127.0.0.1:0"\nshare_percent = 25\n'
        '[[tenants]]\nname = "bob"\nendpoint = ""\nshare_percent = 25\n'
    )
    with keyed_daemon(null_bundle, folder, ipc_admin_endpoint="tcp://localhost:*") as daemon:
        alices = daemon.wait_for("ready")["tenants"]["alice"]
        for endpoint, welcome in (
            (daemon.admin_endpoint, {"chief"}),
            (alices, {"alice-1", "alice-2", "chief"}),
        ):
            for name in KEYS:
                with Client(endpoint, curve=folder.curve(name)) as client:
                    if name in welcome:
                        assert client.ping().state == "serving"
                    else:
                        with pytest.raises(NotWelcome, match="its key is not in the daemon's list"):
                            client.ping()


def test_a_port_besides_the_unix_socket(null_bundle: Path, folder: KeyFolder) -> None:
    unix = f"ipc://{folder.directory}/u"
    own = {"ipc_endpoint": unix, "ipc_admin_endpoint": f"{unix}.admin"}
    with keyed_daemon(null_bundle, folder, ipc_tcp_endpoint="tcp://127.0.0.1:*", **own) as daemon:
        port = daemon.wait_for("ready")["endpoints"]["tcp"]
        with (
            Client(unix) as local,
            Client(port, curve=folder.curve("nobody")) as remote,
            Client(daemon.admin_endpoint) as admin,
        ):
            # Both are the default tenant's, and two clients with the same ids.
            assert [cached(local), cached(remote)] == [0, 209]
            assert set(admin.stats()["ipc"]) == {"user", "tcp", "admin"}
            folder.write({"chief": KEYS["chief"]})
            admin.reload()
            assert local.ping().state == "serving"
            with pytest.raises(NotWelcome):
                remote.ping()


Say = pytest.CaptureFixture[str]


def check_config(capsys: Say, *flags: str) -> tuple[int, str, str]:
    """Exit code, output and complaint of `rtcached --check-config`."""
    code = daemon_main(["--check-config", *flags])
    return (code, *capsys.readouterr())


def flags_of(folder: KeyFolder) -> list[str]:
    options = curve_options(folder) | {
        "config": str(folder.config),
        "ipc_admin_endpoint": f"ipc://{folder.list}.s",
    }
    return [f"--{name.replace('_', '-')}={value}" for name, value in options.items()]


def test_a_secret_that_others_may_read_stops_the_start(folder: KeyFolder, capsys: Say) -> None:
    folder.server.chmod(0o644)
    code, _, complaint = check_config(capsys, *flags_of(folder))
    folder.server.chmod(0o600)
    assert code == 2
    assert "ipc.server_key_file: the key file" in complaint
    assert "has mode 0644: others may use the secret in it" in complaint


def test_a_wrong_list_stops_the_start(folder: KeyFolder, capsys: Say) -> None:
    assert check_config(capsys, *flags_of(folder))[0] == 0
    folder.write({"a": {"tenant": "carol"}})
    code, out, complaint = check_config(capsys, *flags_of(folder))
    assert (code, out) == (2, "")
    assert "a: there is no tenant 'carol' in the configuration" in complaint


def test_a_daemon_with_wrong_keys_does_not_start(null_bundle: Path, folder: KeyFolder) -> None:
    folder.list.unlink()
    bundle = ("--model-bundle", str(null_bundle), "--device", "sim:0")
    ended = run("runtime_cache.daemon", *bundle, *flags_of(folder))
    assert ended.code == 2
    assert "cannot read the list of keys" in ended.complaint


def test_tcp_without_keys_is_refused_with_a_sentence(capsys: Say) -> None:
    tcp = ("--ipc-endpoint=tcp://127.0.0.1:5555", "--ipc-admin-endpoint=ipc://a")
    code, _, complaint = check_config(capsys, *tcp)
    assert code == 2
    assert "tcp://127.0.0.1:5555: TCP needs CURVE" in complaint
    assert "ipc.server_key_file and ipc.keys_file (docs/security.md)" in complaint
    assert "--insecure-tcp" in complaint


def test_insecure_tcp_is_said_aloud(null_bundle: Path, tmp_path: Path) -> None:
    # As the flag's own name says it; DaemonProcess gives every flag a value.
    options = {"ipc_endpoint": "tcp://127.0.0.1:*", "ipc_admin_endpoint": f"ipc://{tmp_path}/a"}
    with DaemonProcess(null_bundle, "sim:0", ipc_insecure_tcp="true", **options) as daemon:
        warning = daemon.wait_for("insecure_tcp")
        assert (warning["level"], warning["role"]) == ("warning", "user")
        with Client(warning["endpoint"]) as client:
            assert client.ping().state == "serving"
            with pytest.raises(ServerError, match="on the admin socket only"):
                client.stats()
        with Client(f"ipc://{tmp_path}/a") as admin:
            assert any("without CURVE" in sentence for sentence in admin.stats()["warnings"])


def test_the_flag_insecure_tcp_is_that_option(capsys: Say) -> None:
    _, out, _ = check_config(capsys, "--insecure-tcp")
    (row,) = [line.split() for line in out.splitlines() if "insecure_tcp" in line]
    assert row == ["ipc.insecure_tcp", "true", "flag", "--ipc-insecure-tcp"]


def wait_for_keys(admin: Client, num_keys: int) -> None:
    """Wait until a reload by signal has been carried out."""
    give_up_s = time.monotonic() + PATIENCE_S
    while admin.stats()["security"]["num_keys"] != num_keys:
        assert time.monotonic() < give_up_s


def test_the_commands_take_keys(daemon: DaemonProcess, folder: KeyFolder, capsys: Say) -> None:
    def ask(main: Callable[[list[str]], int], *words: str, key: str) -> tuple[int, str, str]:
        folder.pair(key)
        secret = folder.directory / f"{key}.key_secret"
        keys = ("--server-key", str(folder.server.with_suffix(".key")), "--key-file", str(secret))
        code = main(["--endpoint", daemon.endpoint, *keys, *words])
        return (code, *capsys.readouterr())

    assert ask(cli_main, "ping", key="bob")[0] == 0
    code, out, _ = ask(admin_main, "stats", "--json", key="chief")
    assert (code, '"num_keys"' in out) == (0, True)
    code, _, complaint = ask(admin_main, "stats", key="bob")
    assert code == 1
    assert "from administrators' keys only" in complaint
    code, _, complaint = ask(cli_main, "ping", key="stranger")
    assert code == 3
    assert "its key is not in the daemon's list of keys" in complaint
    (folder.directory / "bob.key_secret").chmod(0o644)
    refused = ask_with_open_secret(folder, daemon.endpoint)
    (folder.directory / "bob.key_secret").chmod(0o600)
    assert refused == 2
    assert "others may use the secret in it" in capsys.readouterr().err


def ask_with_open_secret(folder: KeyFolder, endpoint: str) -> int:
    keys = ("--server-key", folder.pair("server").public)
    secret = ("--key-file", str(folder.directory / "bob.key_secret"))
    return cli_main(["--endpoint", endpoint, *keys, *secret, "ping"])


def test_half_of_the_keys_is_a_wrong_command_line(
    folder: KeyFolder, capsys: Say, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RTCACHE_KEY_FILE", str(folder.server))
    assert cli_main(["ping"]) == 2
    sentence = "--server-key and --key-file are given together, or neither"
    assert sentence in capsys.readouterr().err
