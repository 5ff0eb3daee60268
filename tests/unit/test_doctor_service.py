"""Where the daemon listens, works and logs."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import zmq

from runtime_cache.config import Config, IpcConfig, TenantConfig
from tests.support.ascend_host import HostMaker
from tools.doctor.checks_service import check_log_directory, check_sockets, check_work_directory
from tools.doctor.findings import Finding
from tools.doctor.host import Host, this_host


@pytest.fixture
def directory(tmp_path: Path) -> Iterator[Path]:
    """One whose name is short: a socket's path has 107 bytes at most."""
    link = Path(f"/tmp/doctor-{os.getpid()}")
    link.symlink_to(tmp_path)
    yield link
    link.unlink()


def about(path: str, host: Host | None = None) -> Finding:
    """The finding of the client socket."""
    config = Config(ipc=IpcConfig(endpoint=f"ipc://{path}"))
    return check_sockets(host or this_host(), config)[0]


def test_every_endpoint_has_a_finding(directory: Path) -> None:
    tenant = TenantConfig("t", "tcp://127.0.0.1:0", 10)
    config = Config(ipc=IpcConfig(endpoint=f"ipc://{directory}/s"), tenants=(tenant,))
    assert [finding.text for finding in check_sockets(this_host(), config)] == [
        f"{directory}/s can be made.",
        f"{directory}/s.admin can be made.",
        "tcp://127.0.0.1:0 is free for the daemon.",
    ]


def about_port(endpoint: str) -> Finding:
    ipc = IpcConfig(endpoint=endpoint, admin_endpoint="ipc://a")
    return check_sockets(this_host(), Config(ipc=ipc))[0]


def test_a_port_that_another_program_has() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        endpoint = f"tcp://127.0.0.1:{other.getsockname()[1]}"
        threading.Thread(target=lambda: other.accept()[0].close()).start()
        finding = about_port(endpoint)
    assert finding.status == "problem"
    assert finding.text == f"Another program listens on {endpoint}: the daemon does not start."
    assert finding.remedy.startswith("`ss -ltnp` shows which")


def test_a_port_that_a_daemon_has() -> None:
    with zmq.Context() as context, context.socket(zmq.ROUTER) as other:
        port = other.bind_to_random_port("tcp://127.0.0.1")
        finding = about_port(f"tcp://127.0.0.1:{port}")
    assert finding.status == "ok"
    assert finding.text.startswith("A program that speaks ZeroMQ listens on tcp://127.0.0.1:")


def test_an_address_of_another_host() -> None:
    finding = about_port("tcp://203.0.113.7:5555")
    assert finding.status == "problem"
    assert "Cannot assign requested address; this host has no such address" in finding.text


@pytest.mark.parametrize(("num_bytes", "status"), [(106, "ok"), (107, "ok"), (108, "problem")])
def test_the_length_of_a_path(directory: Path, num_bytes: int, status: str) -> None:
    path = f"{directory}/"
    path += "x" * (num_bytes - len(path))
    finding = about(path)
    assert finding.status == status
    if status == "problem":
        assert "the path has 108 bytes, the system allows 107" in finding.text


@pytest.mark.parametrize("endpoint", ["ipc://@name", "udp://1.2.3.4:5"])
def test_an_endpoint_that_the_daemon_refuses(endpoint: str) -> None:
    ipc = IpcConfig(endpoint=endpoint, admin_endpoint="tcp://127.0.0.1:1")
    finding = check_sockets(this_host(), Config(ipc=ipc))[0]
    assert finding.status == "problem"
    assert finding.text.startswith(f"Endpoint '{endpoint}': expected")


def test_a_directory_that_is_missing(directory: Path) -> None:
    made = about(f"{directory}/none/s")
    assert (made.status, made.text) == (
        "ok",
        f"{directory}/none/s can be made, and its directory as well.",
    )
    finding = about(f"{directory}/none/none/s")
    assert finding.status == "problem"
    assert finding.text == (
        f"The socket's directory {directory}/none/none does not exist, or this user may not see it."
    )
    assert "RuntimeDirectory=" in finding.remedy


def test_a_directory_that_may_not_be_written(tmp_path: Path) -> None:
    maker = HostMaker(tmp_path)
    maker.close("/run/rtcached")
    (tmp_path / "run/rtcached").mkdir(parents=True)
    finding = about("/run/rtcached/s", maker.host())
    assert finding.status == "problem"
    assert "may not make files in the socket's directory /run/rtcached" in finding.text


def test_a_lock_of_another_user(tmp_path: Path) -> None:
    maker = HostMaker(tmp_path)
    maker.add("/run/rtcached/s.lock")
    assert about("/run/rtcached/s", maker.host()).status == "ok"
    maker.close("/run/rtcached/s.lock")
    finding = about("/run/rtcached/s", maker.host())
    assert finding.status == "problem"
    assert finding.text == "The lock file /run/rtcached/s.lock belongs to another user."


def test_something_else_at_the_path(directory: Path) -> None:
    (directory / "s").write_text("")
    finding = about(f"{directory}/s")
    assert finding.status == "problem"
    assert "exists and is no socket" in finding.text


def test_a_socket_that_is_served_and_one_that_is_left(directory: Path) -> None:
    path = f"{directory}/s"
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(path)
        listener.listen()
        served = about(path)
    assert (served.status, served.text) == (
        "ok",
        f"A process listens on {path}: a daemon that runs; a second one is refused.",
    )
    left = about(path)
    assert left.status == "ok"
    assert "is left from a daemon that has ended; the next one replaces it" in left.text


def test_a_relative_path_starts_at_the_working_directory(directory: Path) -> None:
    host = replace(this_host(), cwd=str(directory))
    assert about("s", host).text == "s can be made."
    assert about("none/none/s", host).status == "problem"


def test_the_working_directory(tmp_path: Path) -> None:
    maker = HostMaker(tmp_path)
    assert check_work_directory(maker.host(), is_sim=False).status == "ok"
    maker.close("/var/lib/rtcache")
    finding = check_work_directory(maker.host(), is_sim=False)
    assert finding.status == "warning"
    assert finding.text.startswith("The working directory /var/lib/rtcache is not writable: CANN")
    assert "WorkingDirectory" in finding.remedy
    assert check_work_directory(maker.host(), is_sim=True).status == "ok"
    assert check_work_directory(maker.host(cwd="/gone"), is_sim=False).status == "warning"


@pytest.mark.parametrize(
    ("env", "status", "text"),
    [
        ({"HOME": "/home/rtcache"}, "ok", "CANN's logs go to /home/rtcache/ascend/log."),
        ({"ASCEND_PROCESS_LOG_PATH": "/var/lib/rtcache"}, "ok", "go to /var/lib/rtcache."),
        ({}, "warning", "Neither HOME nor ASCEND_PROCESS_LOG_PATH is set"),
        ({"HOME": "/nonexistent"}, "warning", "HOME is /nonexistent, which is no writable"),
        (
            {"HOME": "/home/rtcache", "ASCEND_PROCESS_LOG_PATH": "/var/log/x"},
            "warning",
            "ASCEND_PROCESS_LOG_PATH is /var/log/x, which is no writable",
        ),
    ],
)
def test_where_logs_go(tmp_path: Path, env: dict[str, str], status: str, text: str) -> None:
    maker = HostMaker(tmp_path)
    maker.env = env
    finding = check_log_directory(maker.host())
    assert finding.status == status
    assert text in finding.text
