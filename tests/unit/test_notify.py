"""What is sent to the service manager's socket, byte by byte, and which managers there are."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from runtime_cache import notify
from runtime_cache.errors import ConfigError
from runtime_cache.notify import Notifier
from tests.support.service_manager import ServiceManager


@pytest.fixture(params=["path", "abstract"])
def manager(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[ServiceManager]:
    with ServiceManager(tmp_path if request.param == "path" else None) as manager:
        yield manager


@pytest.fixture
def notifier(manager: ServiceManager) -> Iterator[Notifier]:
    notifier = Notifier(manager.address)
    yield notifier
    notifier.close()


def test_every_message(manager: ServiceManager, notifier: Notifier) -> None:
    notifier.status("Loading", 1.5)
    notifier.status("Loaded")
    notifier.ready("Serving")
    notifier.alive()
    notifier.stopping("Draining", 90)
    assert manager.rest() == [
        {"STATUS": "Loading", "EXTEND_TIMEOUT_USEC": "1500000"},
        {"STATUS": "Loaded"},
        {"READY": "1", "STATUS": "Serving"},
        {"WATCHDOG": "1"},
        {"STOPPING": "1", "STATUS": "Draining", "EXTEND_TIMEOUT_USEC": "90000000"},
    ]


def test_a_status_is_one_line(manager: ServiceManager, notifier: Notifier) -> None:
    """Or what an error says could be taken for another message."""
    notifier.status("it failed:\nREADY=1\n\ud800")
    assert manager.next() == {"STATUS": "it failed: READY=1 ?"}


def test_nobody_is_told_after_the_end(manager: ServiceManager, notifier: Notifier) -> None:
    notifier.close()
    notifier.close()
    notifier.alive()
    assert not notifier.has_manager
    assert manager.rest() == []


def test_without_a_manager_nothing_happens() -> None:
    notifier = Notifier.from_env({"WATCHDOG_USEC": "5000000"})
    notifier.ready("Serving")
    assert (notifier.has_manager, notifier.watchdog_s) == (False, None)


@pytest.mark.parametrize(
    ("variables", "watchdog_s"),
    [
        ({}, None),
        ({"WATCHDOG_USEC": "2500000"}, 2.5),
        ({"WATCHDOG_USEC": "2500000", "WATCHDOG_PID": str(os.getpid())}, 2.5),
        ({"WATCHDOG_USEC": "2500000", "WATCHDOG_PID": "1"}, None),  # of the process before exec
    ],
)
def test_how_often_it_is_to_say_that_it_lives(
    variables: dict[str, str], watchdog_s: float | None
) -> None:
    notifier = Notifier.from_env({"NOTIFY_SOCKET": "@nobody", **variables})
    assert notifier.watchdog_s == watchdog_s
    notifier.close()


@pytest.mark.parametrize("address", ["run/notify", "vsock:2:1", "@", "/"])
def test_an_address_that_is_none_stops_the_start(address: str) -> None:
    with pytest.raises(ConfigError, match=r"NOTIFY_SOCKET is .*: the path of a socket"):
        Notifier.from_env({"NOTIFY_SOCKET": address})


@pytest.mark.parametrize("text", ["0", "-1", "1.5", "soon", "٣"])
def test_a_watchdog_that_is_none_stops_the_start(text: str) -> None:
    with pytest.raises(ConfigError, match=r"WATCHDOG_USEC is .*: a number of microseconds"):
        Notifier.from_env({"NOTIFY_SOCKET": "@nobody", "WATCHDOG_USEC": text})


def test_a_manager_that_has_gone_is_complained_of_once(tmp_path: Path) -> None:
    notifier = Notifier(str(tmp_path / "gone"))
    with capture_logs() as lines:
        notifier.ready("Serving")
        notifier.alive()
    assert [(line["event"], line["error"]) for line in lines] == [
        ("notify_failed", "[Errno 2] No such file or directory")
    ]
    notifier.close()


def test_a_manager_that_does_not_read_is_waited_for_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(notify, "SEND_TIMEOUT_S", 0.001)
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as unread, capture_logs() as lines:
        unread.bind(str(tmp_path / "n"))
        notifier = Notifier(str(tmp_path / "n"))
        while not lines:  # until its queue is full
            notifier.alive()
        assert notifier._socket is not None
        assert notifier._socket.gettimeout() == 0
        notifier.alive()
    assert [(line["event"], line["error"]) for line in lines] == [
        ("notify_failed", "the service manager does not read")
    ]
    notifier.close()
