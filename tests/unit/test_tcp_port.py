"""TCP ports are asked for before there is anything to serve: free, busy, of another host."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest

from ipc.endpoint import claim_endpoint
from ipc.errors import EndpointBusy, EndpointError


@pytest.fixture
def free_port() -> Iterator[int]:
    """One where nobody listens; the system gives it to no other program meanwhile."""
    with socket.socket() as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind(("127.0.0.1", 0))
        yield holder.getsockname()[1]


@pytest.mark.parametrize("host", ["127.0.0.1", "*", "localhost"])
def test_a_free_port_is_free_after_it_was_asked_for(host: str, free_port: int) -> None:
    endpoint = f"tcp://{host}:{free_port}"
    for _ in range(2):
        assert claim_endpoint(endpoint) is None


@pytest.mark.parametrize("port", ["0", "*"])
def test_the_system_has_a_port_to_choose(port: str) -> None:
    assert claim_endpoint(f"tcp://127.0.0.1:{port}") is None


@pytest.mark.parametrize("host", ["127.0.0.1", "*", "localhost"])
def test_a_busy_port(host: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        endpoint = f"tcp://{host}:{other.getsockname()[1]}"
        with pytest.raises(EndpointBusy) as caught:
            claim_endpoint(endpoint, "ipc.endpoint")
    assert caught.value.message == (
        f"ipc.endpoint: cannot listen on {endpoint}: Address already in use; another program "
        f"listens there: `ss -ltnp` shows which; stop it or choose another address"
    )


def test_a_port_that_was_just_left_is_free() -> None:
    """Connections in TIME_WAIT stop no daemon that starts again."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = server.getsockname()
        with socket.create_connection(address) as client:
            server.accept()[0].close()  # the side that closes first waits
            client.recv(1)
    assert claim_endpoint(f"tcp://127.0.0.1:{address[1]}") is None


@pytest.mark.parametrize("host", ["203.0.113.7", "nosuch0"])
def test_an_address_of_another_host(host: str) -> None:
    with pytest.raises(EndpointError) as caught:
        claim_endpoint(f"tcp://{host}:5555")
    assert not isinstance(caught.value, EndpointBusy)
    assert caught.value.message.startswith(f"cannot listen on tcp://{host}:5555: ")
    assert caught.value.message.endswith(
        "; this host has no such address: `ip address` shows which it has"
    )
