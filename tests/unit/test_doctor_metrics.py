"""What the doctor says of `metrics.listen`."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from runtime_cache.config import Config, MetricsConfig
from tools.doctor.checks_metrics import check_metrics
from tools.doctor.findings import Finding


def finding(listen: str) -> Finding:
    (found,) = check_metrics(Config(metrics=MetricsConfig(listen=listen)))
    return found


@contextmanager
def answering(content: bytes) -> Iterator[str]:
    """Somebody who says this to whoever comes, and his address."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def answer() -> None:
            for _ in range(2):  # whether somebody listens; then the question
                connection, _ = server.accept()
                with connection:
                    connection.recv(1000)
                    connection.sendall(content)

        thread = threading.Thread(target=answer)
        thread.start()
        yield f"127.0.0.1:{server.getsockname()[1]}"
        thread.join()


def page(text: str, status: str = "200 OK") -> bytes:
    return f"HTTP/1.1 {status}\r\nContent-Length: {len(text)}\r\n\r\n{text}".encode()


def test_off_is_nothing_to_say() -> None:
    assert check_metrics(Config()) == []


def test_a_free_address() -> None:
    assert finding("127.0.0.1:0").status == "ok"
    found = finding("0.0.0.0:0")
    assert found.status == "warning"
    assert "no password" in found.text


def test_an_address_of_another_host() -> None:
    found = finding("192.0.2.1:0")
    assert (found.status, found.check) == ("problem", "metrics")
    assert "cannot listen on metrics.listen = 192.0.2.1:0" in found.text


@pytest.mark.parametrize(
    ("content", "status", "text"),
    [
        (page("serving\n"), "ok", "says that it is serving."),
        (page("serving\nwarning: memory is low\n"), "warning", "serving; warning: memory is low"),
        (page("hung\nreason: a step\n", "503 No"), "warning", "says that it is hung; reason:"),
        (page("hello"), "problem", "Another program listens"),
        (b"220 mail\r\n", "problem", "Another program listens"),
        (b"", "problem", "Another program listens"),
    ],
)
def test_somebody_listens(content: bytes, status: str, text: str) -> None:
    with answering(content) as address:
        found = finding(address)
    assert found.status == status
    assert text in found.text
