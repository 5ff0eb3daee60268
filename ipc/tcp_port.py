"""Whether a daemon can listen on a TCP endpoint, asked before it has loaded anything.

libzmq says what host or interface is meant, on a port that nobody knows; the port itself is bound
by a plain socket that never listens, so no client comes through to a daemon that is not there yet.
"""

from __future__ import annotations

import errno
import socket
from contextlib import ExitStack

import zmq

from ipc.errors import EndpointBusy, EndpointError

_NO_SUCH_HOST = "this host has no such address: `ip address` shows which it has"
#: What an operator can do about it.
_NEXT_STEPS = {
    errno.EADDRINUSE: (
        "another program listens there: `ss -ltnp` shows which; stop it or choose another address"
    ),
    errno.EADDRNOTAVAIL: _NO_SUCH_HOST,
    errno.ENODEV: _NO_SUCH_HOST,
    errno.EACCES: "ports below 1024 are the system's: choose another one",
}


def check_port(endpoint: str, option: str = "") -> None:
    """Return if a daemon can listen there now; nothing stays open.

    Args:
        endpoint: `tcp://HOST:PORT`, as `ipc.endpoint.parse_endpoint` takes it.
        option: that names it, for people.

    Raises:
        EndpointBusy: another program listens there.
        EndpointError: the system refuses the address.
    """
    host, _, port = endpoint.rpartition(":")
    try:
        bound = _bound_by_libzmq(f"{host}:*")
        if port not in ("0", "*"):
            _bind(bound, int(port))
    except (OSError, zmq.ZMQError) as error:
        raise refusal(endpoint, error.errno or 0, option) from error


def refusal(endpoint: str, number: int, option: str = "") -> EndpointError:
    """Why nobody can listen there, and what to do.

    Args:
        endpoint: `tcp://HOST:PORT`.
        number: the system's, or libzmq's, error.
        option: that names the endpoint.
    """
    kind = EndpointBusy if number == errno.EADDRINUSE else EndpointError
    whose, next_step = f"{option}: " if option else "", _NEXT_STEPS.get(number)
    why = zmq.strerror(number) + (f"; {next_step}" if next_step else "")
    return kind(f"{whose}cannot listen on {endpoint}: {why}")


def _bound_by_libzmq(endpoint: str) -> str:
    """The address, as numbers, that libzmq takes an endpoint for."""
    with ExitStack() as stack:
        context = stack.enter_context(zmq.Context(io_threads=1))
        probe = stack.enter_context(context.socket(zmq.ROUTER))
        probe.set(zmq.LINGER, 0)
        if endpoint.startswith("tcp://["):
            probe.set(zmq.IPV6, 1)
        probe.bind(endpoint)
        bound = probe.get(zmq.LAST_ENDPOINT)
    assert isinstance(bound, bytes)
    return bound.rstrip(b"\0").decode("ascii")


def _bind(bound: str, port: int) -> None:
    """Bind the port, with the options of libzmq's own listeners."""
    host = bound.removeprefix("tcp://").rpartition(":")[0].strip("[]")
    flags = socket.AI_PASSIVE | socket.AI_NUMERICHOST
    (family, kind, *_, address), *_ = socket.getaddrinfo(
        host, port, type=socket.SOCK_STREAM, flags=flags
    )
    with socket.socket(family, kind) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            probe.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        probe.bind(address)
