"""`rtcached` on a device that hangs, gets lost or is full: what clients and operators see."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ipc.sync_client import Client
from om_models.plan import ConvertOptions
from tests.support import scrape
from tests.support.coded_model import answer, make_coded_bundle
from tests.support.rtcached import PATIENCE_S, RawClient, wait_until_idle
from tools import daemon_process
from tools.daemon_process import DaemonFailed, DaemonProcess

EXECUTE = "acl.mdl.execute_async"
#: 12 blocks of 16 tokens, the null block being one; contexts of 64.
OPTIONS = ConvertOptions(
    "sim", kv_tokens=192, dtype="float32", gears="prefill=8,32@32,64 decode=1,2,4@32,64"
)
PROMPT = list(range(100, 120))
NEVER_MS = 10**8
#: Steps that a daemon runs before it is ready.
WARM_UP = 2


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_coded_bundle(tmp_path_factory.mktemp("faults"), OPTIONS).path


Script = Callable[..., None]


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Script:
    """Scripts one fault of the daemons that are started after it."""

    def write(**fault: Any) -> None:
        path = tmp_path / "faults.json"
        path.write_text(json.dumps({"faults": [fault]}))
        monkeypatch.setenv("RTCACHE_ACLSIM_FAULTS", str(path))

    return write


def serve(bundle: Path, **options: str) -> DaemonProcess:
    return DaemonProcess(
        bundle, "sim:0", cache_block_size="16", cache_low_watermark_mb="0", **options
    )


def ask(client: RawClient, name: str, prompt: list[int] = PROMPT, **fields: Any) -> None:
    settings = {"max_tokens": 4, "temperature": 0, "ignore_eos": True, "stream": True} | fields
    client.send(type="generate", id=name, prompt_ids=prompt, **settings)


def until(condition: Callable[[], bool]) -> None:
    give_up_s = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < give_up_s


def end_with(daemon: DaemonProcess, code: int) -> None:
    assert daemon.wait() == code, daemon.log_text()
    daemon.process.returncode = 0  # as wanted here


# --- a device that hangs --------------------------------------------------------------------------


def test_while_a_step_hangs_the_daemon_answers_and_can_be_ended(bundle: Path, script: Script):
    script(function=EXECUTE, when="run", call=WARM_UP + 2, hang_ms=NEVER_MS)
    hours = {"device_step_timeout_ms": "2000", "device_hang_limit_ms": "36000000"}
    with (
        serve(bundle, ipc_drain_timeout_s="0", metrics_listen="127.0.0.1:0", **hours) as daemon,
        RawClient(daemon.endpoint) as client,
        Client(daemon.admin_endpoint) as admin,
    ):
        ask(client, "hangs")
        assert client.receive()["type"] == "tokens"
        until(lambda: admin.ping().state == "hung")
        health = scrape.get(daemon.wait_for("metrics_listening")["address"], "/health")
        assert (health.status, health.text.splitlines()[0]) == (503, "hung")
        ask(client, "waits", list(range(20)))
        ask(client, "doomed", list(range(20)))
        client.send(type="cancel", id="c", target="doomed")
        assert {client.receive()["id"] for _ in range(2)} == {"doomed", "c"}
        stats = admin.stats()
        assert stats["daemon"]["state"] == "hung"
        assert (stats["engine"]["hung_steps"], stats["engine"]["failed_steps"]) == (1, 0)
        assert stats["engine"]["num_waiting"] == 1
        assert stats["pool"]["live_blocks"] == 2
        assert admin.evict(all=True).num_blocks == 0
        daemon.process.send_signal(signal.SIGTERM)
        finals = [client.receive() for _ in range(2)]
        assert {reply["id"]: reply["finish_reason"] for reply in finals} == {
            "hangs": "shutdown",
            "waits": "shutdown",
        }
        end_with(daemon, 5)


def test_a_hang_beyond_its_limit_ends_the_daemon(bundle: Path, script: Script):
    script(function=EXECUTE, when="run", call=WARM_UP + 2, hang_ms=NEVER_MS)
    limits = {"device_step_timeout_ms": "100", "device_hang_limit_ms": "300"}
    with serve(bundle, **limits) as daemon, RawClient(daemon.endpoint) as client:
        ask(client, "hangs")
        reply = client.last_reply()
        assert (reply["id"], reply["code"]) == ("hangs", "device_hung")
        end_with(daemon, 5)
        assert client.rest() == []
        broken = daemon.wait_for("engine_broken")
        assert broken["error"].endswith("work on the device does not end")


def test_who_waits_for_a_daemon_in_vain_is_shown_where_it_is(
    bundle: Path, script: Script, monkeypatch: pytest.MonkeyPatch
):
    """What a test says of a daemon that does not end, and that it does not outlive the test."""
    script(function=EXECUTE, when="call", call=WARM_UP + 1, hang_ms=NEVER_MS)
    with serve(bundle) as daemon:
        with RawClient(daemon.endpoint) as client:
            ask(client, "hangs")
            assert client.ask(type="ping", id="p")["type"] == "pong"
        daemon.process.send_signal(signal.SIGTERM)
        monkeypatch.setattr(daemon_process, "STOP_TIMEOUT_S", 0.5)
        with pytest.raises(DaemonFailed, match="did not end:") as caught:
            daemon.wait()
        assert "executor.py" in str(caught.value)  # the stacks of its threads
        assert daemon.process.returncode == -signal.SIGABRT
        daemon.process.returncode = 0  # as wanted here


def test_a_hang_that_ends_is_noticed_by_its_time_alone(bundle: Path, script: Script):
    script(function=EXECUTE, when="run", call=WARM_UP + 3, hang_ms=1500)
    with serve(bundle, device_step_timeout_ms="1000") as daemon:
        with RawClient(daemon.endpoint) as client:
            ask(client, "a")
            tokens: list[int] = []
            while (reply := client.receive())["type"] == "tokens":
                tokens += reply["token_ids"]
            assert (reply["finish_reason"], tokens) == ("length", answer(PROMPT, 4))
        hung = daemon.wait_for("step_hung")
        assert hung["requests"] == [daemon.wait_for("request_done")["request"]]
        assert daemon.wait_for("device_recovered")["after"] == "hung"


# --- a device that is lost ------------------------------------------------------------------------


def test_a_lost_device_answers_everybody_once(bundle: Path, script: Script):
    script(function=EXECUTE, when="run", call=WARM_UP + 3, code=507054)
    with serve(bundle) as daemon, RawClient(daemon.endpoint) as client:
        ask(client, "a")
        ask(client, "b", list(range(20)))
        client.send(type="register", id="r", prompt_ids=[1, 2, 3])
        codes = [client.last_reply() for _ in range(3)]
        assert {reply["id"]: reply["code"] for reply in codes} == dict.fromkeys(
            "abr", "device_lost"
        )
        end_with(daemon, 4)
        assert client.rest() == []


def test_an_idle_daemon_notices_a_lost_device(bundle: Path, script: Script):
    script(function="acl.rt.get_mem_info", call=21, code=507010)
    with serve(bundle, device_memory_check_s="0.01") as daemon:
        end_with(daemon, 4)


def test_a_question_that_fails_once_is_no_loss(bundle: Path, script: Script):
    """The same call says that the device is lost, and the device works when asked again."""
    script(function="acl.rt.get_mem_info", call=21, code=500004)
    with serve(bundle, device_memory_check_s="0.01") as daemon:
        daemon.wait_for("device_memory_unknown")
        with RawClient(daemon.endpoint) as client:
            ask(client, "a")
            assert client.last_reply()["finish_reason"] == "length"


# --- a pool that is full --------------------------------------------------------------------------


def test_a_full_pool_evicts_then_queues_then_refuses(bundle: Path):
    with (
        serve(bundle, cache_max_kept_percent="100") as daemon,
        RawClient(daemon.endpoint) as client,
        Client(daemon.admin_endpoint) as admin,
    ):
        for start in range(0, 200, 20):  # evicts
            ask(client, f"e{start}", list(range(start, start + 20)))
            assert client.last_reply()["finish_reason"] == "length"
        assert admin.stats()["cache"]["evicted_by"] == {"need": 9}
        for number in range(8):  # each takes three blocks of the eleven: most of them wait
            ask(client, f"q{number}", list(range(number, number + 40)), stream=False)
        answers = {reply["id"]: reply for reply in (client.last_reply() for _ in range(8))}
        for number in range(8):
            expected = answer(list(range(number, number + 40)), 4)
            assert answers[f"q{number}"]["token_ids"] == expected
        for number in range(11):  # kept, one block each
            client.send(type="register", id=f"r{number}", prompt_ids=[number] * 16)
            kept = client.last_reply()
            assert kept["type"] == "registered"
        client.send(type="register", id="r", prompt_ids=[11] * 16)
        ask(client, "x")
        refused = [client.last_reply() for _ in range(2)]
        assert {(reply["id"], reply["code"]) for reply in refused} == {
            ("r", "capacity"),
            ("x", "capacity"),
        }
        assert all(reply["retryable"] and reply["retry_after_ms"] >= 10 for reply in refused)
        for name in ("l0", "l1"):
            client.send(type="release", id=name, prefix_id=kept["prefix_id"])
            assert client.receive()["type"] in ("released", "error")
        wait_until_idle(admin)
        pool = admin.stats()["pool"]
        assert (pool["live_blocks"], pool["kept_blocks"]) == (10, 10)
        ask(client, "y", [1, 2, 3])
        assert client.last_reply()["finish_reason"] == "length"
