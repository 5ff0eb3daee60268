"""The clients in other languages against a live daemon: each does the same four things.

What such a client needs may be missing here: then its test is skipped and says why. Where
RTCACHE_CLIENTS=required is set, as in CI, that is a failure.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.curve import TENANTS, KeyFolder, keyed_daemon
from tests.support.needed import lacking, need
from tests.support.rtcached import PATIENCE_S
from tools.daemon_process import DaemonProcess

_BROKEN_ZEROMQ = """
export class Dealer {
  closed = false;
  connect() {}
  close() { this.closed = true; }
  async send() {}
  async *[Symbol.asyncIterator]() { throw new Error("broken"); }
}
"""
CLIENTS = Path(__file__).parents[2] / "ipc" / "clients"


def run(*command: str | Path, **env: str) -> str:
    """Standard output of a command that must succeed."""
    ended = subprocess.run(
        [str(word) for word in command],
        env=os.environ | env,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert (ended.returncode, ended.stderr) == (0, ""), ended
    return ended.stdout


def did(output: str) -> dict[str, dict[str, Any]]:
    """What an example says of itself, by what it did."""
    lines = [json.loads(line) for line in output.splitlines()]
    return {line.pop("did"): line for line in lines}


def check(said: dict[str, dict[str, Any]]) -> None:
    """What all examples have in common."""
    assert list(said) == ["stream", "hit", "cancel", "error"]
    stream = said["stream"]
    assert (stream["finish_reason"], stream["usage"]["completion_tokens"]) == ("length", 40)
    assert stream["messages"] > 2
    assert stream["text"] != ""
    assert said["hit"]["cached_tokens"] >= 290
    assert (said["error"]["code"], said["error"]["retryable"]) == ("invalid_request", False)


@pytest.fixture(scope="module")
def daemon(null_bundle: Path) -> Iterator[DaemonProcess]:
    with DaemonProcess(null_bundle, "sim:0") as daemon:
        yield daemon


def has_header(name: str) -> bool:
    command = ["cc", "-E", "-include", name, "-x", "c", os.devnull]
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


def node_example() -> list[str]:
    """How to run the example for Node.js."""
    need("node")
    if not (CLIENTS / "node" / "node_modules" / "zeromq").is_dir():
        lacking("the npm package zeromq is not installed in ipc/clients/node")
    return ["node", str(CLIENTS / "node" / "example.js")]


def c_example(directory: Path) -> list[str]:
    """How to run the example in C, which is built to notice every misuse of memory."""
    need("cc", "make")
    for header in ("zmq.h", "cjson/cJSON.h"):
        if not has_header(header):
            lacking(f"the C header {header} is not installed")
    sanitizers = "CFLAGS=-g -fsanitize=address,undefined -fno-sanitize-recover"
    run("make", "-s", "-C", CLIENTS / "c", f"BUILD={directory}", sanitizers)
    return [str(directory / "example")]


@pytest.fixture(params=["node", "c"])
def example(request: pytest.FixtureRequest, tmp_path: Path) -> list[str]:
    return node_example() if request.param == "node" else c_example(tmp_path)


def test_node_and_c(daemon: DaemonProcess, example: list[str]) -> None:
    said = did(run(*example, daemon.endpoint))
    check(said)
    assert said["cancel"] == {"finish_reason": "cancelled"}


def test_node_and_c_over_tcp(null_bundle: Path, tmp_path: Path, example: list[str]) -> None:
    folder = KeyFolder(tmp_path)
    folder.write({"bob": {}})
    folder.config.write_text(TENANTS)
    keys = folder.curve("bob")
    with keyed_daemon(null_bundle, folder) as daemon:
        said = did(
            run(
                *example,
                daemon.endpoint,
                SERVER_KEY=keys.server_key,
                PUBLIC_KEY=keys.own.public,
                SECRET_KEY=keys.own.secret,
            )
        )
    check(said)


def test_node_without_a_daemon(tmp_path: Path) -> None:
    """On a socket that breaks at once, in place of one where nothing comes for a minute."""
    need("node")
    for name in ("client.js", "example.js", "package.json"):
        shutil.copy(CLIENTS / "node" / name, tmp_path)
    module = tmp_path / "node_modules" / "zeromq"
    module.mkdir(parents=True)
    (module / "package.json").write_text('{"type": "module", "exports": "./index.js"}')
    (module / "index.js").write_text(_BROKEN_ZEROMQ)
    command = ["node", str(tmp_path / "example.js")]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    assert (ended.returncode, ended.stdout) == (3, "")
    assert ended.stderr == "no daemon: what came from the daemon cannot be read: broken\n"


@pytest.mark.long
def test_node_and_c_notice_a_restart(null_bundle: Path, tmp_path: Path, example: list[str]) -> None:
    """An answer that was under way is lost, soon and with a word; the same client goes on."""
    endpoint = f"ipc://{tmp_path}/s"
    command = [*example, endpoint, "lost"]
    with DaemonProcess(null_bundle, "sim:0", ipc_endpoint=endpoint) as first:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None
        assert json.loads(process.stdout.readline()) == {"did": "begin"}
        first.process.kill()
        first.process.wait()
        first.process.returncode = 0  # as wanted here
    with DaemonProcess(null_bundle, "sim:0", ipc_endpoint=endpoint):
        out, _ = process.communicate(timeout=PATIENCE_S)
    assert json.loads(out) == {"did": "lost", "retryable": True, "ping": "pong"}
    assert process.returncode == 0


def test_shell(daemon: DaemonProcess) -> None:
    need("bash", "jq")
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    said = did(run("bash", CLIENTS / "shell" / "example.sh", daemon.endpoint, PATH=path))
    check(said)
    assert said["cancel"] == {"exit_code": 143}
    assert said["error"]["exit_code"] == 1


def test_the_shell_scripts_are_clean() -> None:
    need("shellcheck")
    run("shellcheck", "-x", *sorted((CLIENTS / "shell").glob("*.sh")))
