"""Where the daemon listens, works and logs."""

from __future__ import annotations

import os
import socket
import stat

from ipc.endpoint import IpcAddress, TcpAddress, parse_endpoint
from ipc.errors import EndpointBusy, EndpointError
from ipc.tcp_port import check_port
from runtime_cache.config import Config, endpoints_of
from tools.doctor.findings import Finding, ok, problem, sentence, warning
from tools.doctor.host import Host

_CONNECT_LIMIT_S = 2.0


def check_sockets(host: Host, config: Config) -> list[Finding]:
    """One finding for each endpoint of the configuration."""
    return [_check_endpoint(host, endpoint) for endpoint in endpoints_of(config)]


def check_work_directory(host: Host, *, is_sim: bool) -> Finding:
    """GE writes into the directory a process runs in.

    Source: vllm-ascend#2748 (a read-only working directory ended the start).
    """
    if host.is_dir(host.cwd) and host.may(host.cwd, os.W_OK | os.X_OK):
        return ok("directory", f"The working directory {host.cwd} is writable.")
    text = f"The working directory {host.cwd} is not writable"
    if is_sim:
        return ok("directory", f"{text}; the software device needs no such.")
    return warning(
        "directory",
        f"{text}: CANN writes its debug and kernel files there.",
        "Set WorkingDirectory in the systemd unit to a directory of the daemon's own.",
    )


def check_log_directory(host: Host) -> Finding:
    """Where CANN writes its logs: ASCEND_PROCESS_LOG_PATH, or ascend/log in the home directory."""
    named = host.env.get("ASCEND_PROCESS_LOG_PATH")
    path = named or host.env.get("HOME", "")
    if not path:
        return warning(
            "logs",
            "Neither HOME nor ASCEND_PROCESS_LOG_PATH is set: CANN has no place for its logs.",
            "Set ASCEND_PROCESS_LOG_PATH in the systemd unit to a directory of the daemon's own.",
        )
    if host.is_dir(path) and host.may(path, os.W_OK | os.X_OK):
        return ok(
            "logs", f"CANN's logs go to {path if named else os.path.join(path, 'ascend/log')}."
        )
    variable = "ASCEND_PROCESS_LOG_PATH" if named else "HOME"
    return warning(
        "logs",
        f"CANN cannot write its logs: {variable} is {path}, which is no writable directory.",
        f"Make the directory, or set {variable} to another.",
    )


def _check_endpoint(host: Host, endpoint: str) -> Finding:
    try:
        address = parse_endpoint(endpoint)
    except EndpointError as error:
        return problem("socket", sentence(str(error)), "Change it in the configuration.")
    if isinstance(address, IpcAddress):
        return _check_path(host, address.path)
    return _check_port(endpoint, address)


def _check_port(endpoint: str, address: TcpAddress) -> Finding:
    try:
        check_port(endpoint)
    except EndpointBusy:
        if _speaks_zeromq(address):
            text = f"A program that speaks ZeroMQ listens on {endpoint}: a daemon that runs"
            return ok("socket", f"{text}, it seems; a second one is refused.")
        return problem(
            "socket",
            f"Another program listens on {endpoint}: the daemon does not start.",
            "`ss -ltnp` shows which; stop it, or choose another address.",
        )
    except EndpointError as error:
        return problem("socket", sentence(str(error)), "Choose an address of this host.")
    return ok("socket", f"{endpoint} is free for the daemon.")


def _speaks_zeromq(address: TcpAddress) -> bool:
    """Whether who listens there greets as libzmq does; nothing is said to him.

    Source: ZMTP 3.1, greeting: ten bytes, 0xFF the first and 0x7F the last.
    """
    host = "127.0.0.1" if address.host == "*" else address.host.strip("[]")
    try:
        with socket.create_connection((host, int(address.port)), _CONNECT_LIMIT_S) as client:
            greeting = client.recv(10, socket.MSG_WAITALL)
    except OSError:  # it says nothing, or is at an interface of another name
        return False
    return greeting[:1] == b"\xff" and greeting[9:] == b"\x7f"


def _check_path(host: Host, path: str) -> Finding:
    directory = os.path.dirname(path) or "."
    if not host.exists(directory) and _can_make(host, directory):
        return ok("socket", f"{path} can be made, and its directory as well.")
    if not host.is_dir(directory):
        return problem(
            "socket",
            f"The socket's directory {directory} does not exist, or this user may not see it.",
            f"Make it (in a systemd unit: RuntimeDirectory=), or choose another than {path}.",
        )
    if not host.may(directory, os.W_OK | os.X_OK):
        return problem(
            "socket",
            f"This user may not make files in the socket's directory {directory}.",
            "Give it to the daemon's user, or start the doctor as that user.",
        )
    lock = f"{path}.lock"
    if host.exists(lock) and not host.may(lock, os.R_OK | os.W_OK):
        return problem(
            "socket",
            f"The lock file {lock} belongs to another user.",
            "If no daemon of that user runs, remove it.",
        )
    return _check_file(host, path)


def _can_make(host: Host, directory: str) -> bool:
    """Whether the daemon can make the socket's directory, as it does with the last part only."""
    parent = os.path.dirname(directory) or "."
    return host.is_dir(parent) and host.may(parent, os.W_OK | os.X_OK)


def _check_file(host: Host, path: str) -> Finding:
    try:
        mode = os.lstat(host.at(path)).st_mode
    except OSError:
        return ok("socket", f"{path} can be made.")
    if not stat.S_ISSOCK(mode):
        return problem(
            "socket",
            f"{path} exists and is no socket; the daemon leaves it alone and does not start.",
            "Move it away, or choose another path.",
        )
    if _is_served(str(host.at(path))):
        text = f"A process listens on {path}: a daemon that runs; a second one is refused."
        return ok("socket", text)
    return ok("socket", f"{path} is left from a daemon that has ended; the next one replaces it.")


def _is_served(path: str) -> bool:
    """Whether somebody listens; the connection is closed at once, before a word is said."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client:
        client.settimeout(_CONNECT_LIMIT_S)
        try:
            client.connect(path)
        except (ConnectionRefusedError, FileNotFoundError):
            return False
        except OSError:  # not allowed, or its queue is full
            return True
    return True
