"""What the doctor says of keys, ports, modes and salts."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from ipc.curve_keys import make_key_files
from runtime_cache.config import Config, DaemonConfig, IpcConfig, TenantConfig
from runtime_cache.ids import TenantName
from runtime_cache.salts import load_salts
from tests.support.ascend_host import HostMaker
from tests.support.curve import KeyFolder
from tools.doctor.checks_security import check_security
from tools.doctor.findings import Finding
from tools.doctor.host import Host, this_host

TCP = {"endpoint": "tcp://0.0.0.0:5555", "admin_endpoint": "ipc:///none/a"}
ALICE = TenantConfig("alice", "", 10)


@pytest.fixture
def directory(tmp_path: Path) -> Iterator[Path]:
    """One whose name is short: a socket's path has 107 bytes at most."""
    link = Path(f"/tmp/security-{os.getpid()}")
    link.symlink_to(tmp_path)
    yield link
    link.unlink()


def findings(host: Host | None = None, **ipc: str | bool) -> list[Finding]:
    return check_security(host or this_host(), Config(ipc=IpcConfig(**ipc)))  # type: ignore[arg-type]


def test_without_tcp_tenants_and_open_modes_there_is_nothing_to_say() -> None:
    assert findings(endpoint="ipc:///none/s") == []


@pytest.mark.parametrize(
    ("more", "status", "text"),
    [
        ({}, "problem", "TCP needs CURVE, so the daemon does not start"),
        ({"insecure_tcp": True}, "warning", "open without CURVE"),
        ({"server_key_file": "/none/x", "keys_file": "/none/y"}, "ok", "uses CURVE"),
    ],
)
def test_tcp(more: dict[str, str | bool], status: str, text: str) -> None:
    finding = findings(**TCP, **more)[0]
    assert (finding.check, finding.status) == ("tcp", status)
    assert finding.text.startswith("tcp://0.0.0.0:5555")
    assert text in finding.text


def test_keys(tmp_path: Path) -> None:
    folder = KeyFolder(tmp_path)
    folder.write({"a": {"role": "admin"}, "b": {}})
    ipc = {**TCP, "server_key_file": str(folder.server), "keys_file": str(folder.list)}
    _, own, keys = findings(**ipc)
    assert own.text == f"The daemon's public key is {folder.pair('server').public}"
    assert keys.text == f"{folder.list} lists 2 keys, 1 of administrators."
    folder.write({})
    assert findings(**ipc)[2].status == "warning"
    folder.write({"a": {"tenant": "carol"}})
    folder.server.chmod(0o640)
    _, own, keys = findings(**ipc)
    assert (own.status, keys.status) == ("problem", "problem")
    assert "has mode 0640: others may use the secret in it" in own.text
    assert "a: there is no tenant 'carol' in the configuration" in keys.text


def test_keys_that_are_missing(tmp_path: Path) -> None:
    found = findings(**TCP, server_key_file=f"{tmp_path}/x", keys_file=f"{tmp_path}/y")
    assert [finding.status for finding in found] == ["ok", "problem", "problem"]
    assert "keygen" in found[1].remedy


def test_modes(directory: Path) -> None:
    path = f"{directory}/s.admin"
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(path)
        os.chmod(path, 0o600)
        assert findings(endpoint=f"ipc://{directory}/s") == []
        os.chmod(path, 0o660)
        (finding,) = findings(endpoint=f"ipc://{directory}/s")
    assert finding.status == "problem"
    assert "has mode 0660; the daemon makes it 0600" in finding.text
    (finding,) = findings(endpoint="ipc:///none/s", socket_mode="0666")
    assert finding.status == "warning"
    assert "everybody on this host may use the daemon" in finding.text


def test_a_directory_that_everybody_may_write(tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    host = replace(this_host(), root=tmp_path)
    for mode, is_open in ((0o750, False), (0o1777, False), (0o777, True)):
        run.chmod(mode)
        found = findings(host, endpoint="ipc:///run/s")
        assert [finding.status for finding in found] == ["problem"] * is_open


def about_salts(host: Host, state: str) -> list[tuple[str, str]]:
    config = Config(daemon=DaemonConfig(state_dir=state), tenants=(ALICE,))
    found = check_security(host, config)
    return [(finding.status, finding.text) for finding in found if finding.check == "salts"]


def test_salts(tmp_path: Path) -> None:
    host = this_host()
    state = str(tmp_path / "state")
    kept = ("ok", f"Salts are kept in {state}.")
    assert about_salts(host, state) == [kept]
    load_salts(state, [TenantName("alice")])
    assert about_salts(host, state) == [kept]
    salt = Path(state, "salts", "alice")
    salt.chmod(0o644)
    (status, text), last = about_salts(host, state)
    assert (status, last) == ("warning", kept)
    assert text.startswith(f"Tenant 'alice': {salt} is not the daemon's alone")
    (missing,) = about_salts(host, str(tmp_path / "no" / "state"))
    assert missing[0] == "warning"
    (none,) = about_salts(replace(host, env={}), "")
    assert none[1].startswith("There is no state directory")
    from_systemd = replace(host, env={"STATE_DIRECTORY": str(tmp_path / "other")})
    assert about_salts(from_systemd, "")[0][0] == "ok"


def test_a_state_directory_of_another_user(tmp_path: Path) -> None:
    maker = HostMaker(tmp_path)
    (tmp_path / "var/lib/rtcached").mkdir(parents=True)
    maker.close("/var/lib/rtcached")
    (finding,) = about_salts(maker.host(), "/var/lib/rtcached")
    assert finding == ("warning", "This user may not write the state directory /var/lib/rtcached.")


def test_a_key_file_is_looked_at_on_the_host_that_is_examined(tmp_path: Path) -> None:
    make_key_files(tmp_path, "server")
    host = replace(this_host(), root=tmp_path)
    found = findings(host, **TCP, server_key_file="/server.key_secret", keys_file="/none")
    assert [finding.status for finding in found] == ["ok", "ok", "problem"]
