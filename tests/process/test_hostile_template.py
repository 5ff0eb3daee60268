"""A daemon whose chat template hangs on some conversations: all others feel nothing of it."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.rtcached import RawClient, copy_of
from tools.daemon_process import DaemonProcess

LOOPS = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
TEMPLATE = "{% if messages[0].content == 'hang' %}" + LOOPS + "{% endif %}{{ messages[0].content }}"


@pytest.fixture(scope="module")
def daemon(null_bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[DaemonProcess]:
    bundle = copy_of(null_bundle, tmp_path_factory.mktemp("t"))
    manifest = bundle / "manifest.json"
    fields = json.loads(manifest.read_text())
    manifest.write_text(json.dumps(fields | {"chat_template": TEMPLATE}))
    with DaemonProcess(bundle, "sim:0") as running:
        yield running


def chat(client: RawClient, message_id: str, text: str) -> None:
    messages = [{"role": "user", "content": text}]
    client.send(type="chat", id=message_id, messages=messages, max_tokens=1, stream=False)


def test_a_conversation_that_hangs_the_template_hangs_nothing_else(daemon: DaemonProcess) -> None:
    with RawClient(daemon.endpoint) as client, RawClient(daemon.endpoint) as other:
        chat(client, "good", "Hello")
        assert client.receive()["usage"]["prompt_tokens"] == 5
        chat(client, "bad", "hang")
        # Answered while the template is at work, or the bad one's reply would be here first.
        for number in range(5):
            assert client.ask(type="ping", id=f"p{number}")["id"] == f"p{number}"
            assert other.ask(type="generate", id="g", prompt="x", max_tokens=1)["type"] == "done"
        chat(other, "later", "Hello")
        refused = client.receive()
        assert (refused["id"], refused["code"]) == ("bad", "invalid_request")
        assert "took longer than 3 s, and was stopped" in refused["message"]
        assert other.receive()["id"] == "later"


def test_one_may_give_a_conversation_up_while_the_template_hangs(daemon: DaemonProcess) -> None:
    with RawClient(daemon.endpoint) as client:
        chat(client, "bad", "hang")
        client.send(type="cancel", id="c", target="bad")
        replies = {(reply := client.receive())["id"]: reply for _ in range(2)}
        assert replies["bad"]["finish_reason"] == "cancelled"
        assert replies["c"]["type"] == "ok"


def test_a_template_whose_process_was_killed_works_again(daemon: DaemonProcess) -> None:
    with RawClient(daemon.endpoint) as client:
        for number in range(2):
            chat(client, f"g{number}", "Hello")
            assert client.receive()["id"] == f"g{number}"
            for pid in children_of(daemon.process.pid):
                os.kill(pid, signal.SIGKILL)
        chat(client, "last", "Hello")
        client.receive()
        chat(client, "really", "Hello")
        assert client.receive()["type"] == "done"


def children_of(pid: int) -> list[int]:
    listed = (path.read_text() for path in Path(f"/proc/{pid}/task").glob("*/children"))
    return [int(child) for line in listed for child in line.split()]
