"""Keys, a list of keys and a configuration for daemons that listen on TCP."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import zmq
from zmq.utils.monitor import recv_monitor_message

from ipc.curve_keys import CurveKeys, KeyPair, make_key_files, read_key_pair
from tools.daemon_process import DaemonProcess

TENANTS = """
[[tenants]]
name = "alice"
endpoint = ""
share_percent = 25

[[tenants]]
name = "bob"
endpoint = ""
share_percent = 25
"""


class KeyFolder:
    """A directory with key files and a list of keys.

    Attributes:
        list: path of the list.
        config: path of the daemon's configuration, to be written by the test.
        server: the daemon's secret file.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.list = directory / "keys.toml"
        self.config = directory / "rtcached.toml"
        _, self.server = make_key_files(directory, "server")

    def pair(self, name: str) -> KeyPair:
        """The pair of this name, which is made if there is none."""
        path = self.directory / f"{name}.key_secret"
        if not path.exists():
            make_key_files(self.directory, name)
        return read_key_pair(path)

    def curve(self, name: str) -> CurveKeys:
        """What a client with this pair needs."""
        return CurveKeys(self.pair("server").public, self.pair(name))

    def write(self, keys: Mapping[str, Mapping[str, Any]]) -> None:
        """Write the list: name → fields besides name and public key."""
        lines = []
        for name, fields in keys.items():
            lines += ["[[keys]]", f'name = "{name}"', f'public_key = "{self.pair(name).public}"']
            lines += [f"{field} = {_toml(value)}" for field, value in fields.items()]
        self.list.write_text("\n".join(lines) + "\n")


def _toml(value: Any) -> str:
    if isinstance(value, Mapping):
        return "{ " + ", ".join(f"{name} = {each}" for name, each in value.items()) + " }"
    return json.dumps(value)


def curve_options(folder: KeyFolder) -> dict[str, str]:
    """Flags of a daemon on a free TCP port, with an ipc socket for administrators."""
    return {
        "ipc_endpoint": "tcp://127.0.0.1:*",
        "ipc_server_key_file": str(folder.server),
        "ipc_keys_file": str(folder.list),
    }


@contextmanager
def keyed_daemon(bundle: Path, folder: KeyFolder, **options: str) -> Iterator[DaemonProcess]:
    """A daemon on TCP with the keys of the folder; its endpoints are those that it has bound."""
    flags = curve_options(folder) | {"config": str(folder.config)} | options
    flags.setdefault("ipc_admin_endpoint", f"ipc://{folder.directory}/admin")
    with DaemonProcess(bundle, "sim:0", **flags) as daemon:
        endpoints = daemon.wait_for("ready")["endpoints"]
        daemon.endpoint, daemon.admin_endpoint = endpoints["user"], endpoints["admin"]
        yield daemon


class CurveSocket:
    """A DEALER of its own that sends what it likes, with keys or without."""

    def __init__(self, endpoint: str, curve: CurveKeys | None, identity: bytes = b"") -> None:
        self._context = zmq.Context(io_threads=1)
        self.socket = self._context.socket(zmq.DEALER)
        self.socket.set(zmq.LINGER, 0)
        if identity:
            self.socket.set(zmq.IDENTITY, identity)
        if curve is not None:
            curve.apply(self.socket)
        self.events = self.socket.get_monitor_socket()
        self.socket.connect(endpoint)

    def __enter__(self) -> CurveSocket:
        return self

    def __exit__(self, *args: object) -> None:
        self.socket.disable_monitor()
        self.events.close(linger=0)
        self._context.destroy(linger=0)

    def send(self, **fields: Any) -> None:
        self.socket.send(json.dumps(fields).encode())

    def receive(self, timeout_s: float = 20.0) -> dict[str, Any]:
        """The next reply."""
        if not self.socket.poll(timeout_s * 1000):
            raise TimeoutError("the daemon sent nothing")
        reply: dict[str, Any] = json.loads(self.socket.recv())
        return reply

    def ask(self, **fields: Any) -> dict[str, Any]:
        """Send one message; its next reply that is no piece of an answer."""
        self.send(**fields)
        while (reply := self.receive())["type"] == "tokens":
            pass
        return reply

    def wait_for_event(self, *wanted: int, timeout_s: float = 20.0) -> int:
        """Wait until libzmq tells one of these of the connection."""
        while self.events.poll(timeout_s * 1000):
            event = int(recv_monitor_message(self.events)["event"])
            if event in wanted:
                return event
        raise TimeoutError("no such event")
