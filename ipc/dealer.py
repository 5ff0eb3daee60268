"""The socket both clients use: a DEALER that never keeps a program from ending."""

from __future__ import annotations

import zmq

from ipc.errors import EndpointError

#: How long a call waits for the next message [seconds].
DEFAULT_TIMEOUT_S = 60.0


def dealer_socket(
    endpoint: str, context: zmq.Context[zmq.Socket[bytes]] | None
) -> zmq.Socket[bytes]:
    """A connected DEALER; libzmq connects in the background, as often as it takes.

    Raises:
        EndpointError: libzmq does not understand the endpoint.
    """
    if context is None:
        context = zmq.Context.instance()
    socket = context.socket(zmq.DEALER)
    # Closing drops what is unsent; a daemon that is away must not keep the program alive.
    socket.set(zmq.LINGER, 0)
    # Requests wait in memory while the daemon is away; their calls time out.
    socket.set(zmq.SNDHWM, 0)
    if "://[" in endpoint:
        socket.set(zmq.IPV6, 1)
    try:
        socket.connect(endpoint)
    except zmq.ZMQError as error:
        socket.close()
        raise EndpointError(
            f"cannot connect to {endpoint!r}: expected ipc://PATH or tcp://HOST:PORT"
        ) from error
    return socket
