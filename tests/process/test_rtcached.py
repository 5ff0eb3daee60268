"""`rtcached` as a process: from start to stop, signals, sockets. See also test_rtcached_refuses."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from ipc.sync_client import Client
from tests.support.rtcached import PATIENCE_S, RawClient, background, run, wait_for_input
from tools.daemon_process import DaemonProcess

LONG = {"type": "generate", "prompt": "x", "temperature": 0, "ignore_eos": True}


def begin_long_answer(client: RawClient, max_tokens: int = 100) -> None:
    """Ask for an answer that takes a second at 10 ms a step; returns when it is being written."""
    client.send(id="long", max_tokens=max_tokens, **LONG)
    assert client.receive()["type"] == "tokens"


def left_in(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def test_ready_serve_stop(null_bundle: Path, tmp_path: Path):
    daemon = DaemonProcess(null_bundle, "sim:0", ipc_endpoint=f"ipc://{tmp_path}/s")
    with daemon:
        assert stat.S_IMODE(daemon.socket.stat().st_mode) == 0o660
        assert stat.S_IMODE(Path(f"{daemon.socket}.admin").stat().st_mode) == 0o600
        with Client(daemon.endpoint) as client:
            answer = client.generate("hello", max_tokens=5, temperature=0).result()
        assert (answer.finish_reason, answer.usage.completion_tokens) == ("length", 5)
    # Lock files stay: removing them would let two daemons lock two different files.
    assert left_in(tmp_path) == ["s.admin.lock", "s.lock"]
    names = [event["event"] for event in daemon.events]
    ends = ["ready", "request_done", "signal", "draining", "drained", "stopped"]
    assert names[names.index("ready") :] == ends
    assert daemon.process.returncode == 0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_running_answers_end_before_the_daemon_does(
    null_bundle: Path, slow_steps: None, number: signal.Signals
):
    with (
        DaemonProcess(null_bundle, "sim:0") as daemon,
        RawClient(daemon.endpoint) as client,
        RawClient(daemon.endpoint) as late,
    ):
        assert late.ask(type="ping", id="p")["type"] == "pong"
        begin_long_answer(client)
        daemon.process.send_signal(number)
        assert daemon.wait_for("signal")["name"] == number.name
        assert daemon.wait_for("draining")["unfinished"] == 1
        refusal = late.ask(type="generate", id="late", prompt="x")
        assert (refusal["code"], refusal["retryable"]) == ("draining", True)
        done = client.last_reply()
        assert daemon.wait() == 0
        assert (done["type"], done["finish_reason"]) == ("done", "length")
        assert done["usage"]["completion_tokens"] == 100
        assert client.rest() == []
        assert daemon.wait_for("drained")["cancelled"] == 0


def test_without_drain_time_answers_are_cancelled(null_bundle: Path, slow_steps: None):
    with (
        DaemonProcess(null_bundle, "sim:0", ipc_drain_timeout_s="0") as daemon,
        RawClient(daemon.endpoint) as client,
    ):
        begin_long_answer(client, max_tokens=4000)
        daemon.process.send_signal(signal.SIGTERM)
        done = client.last_reply()
        assert daemon.wait() == 0
        assert (done["type"], done["finish_reason"]) == ("done", "shutdown")
        assert done["usage"]["completion_tokens"] < 4000
        assert client.rest() == []
        assert daemon.wait_for("drained")["cancelled"] == 1


def test_a_text_that_is_still_being_read_gets_its_last_message(null_bundle: Path):
    with DaemonProcess(null_bundle, "sim:0") as daemon, RawClient(daemon.endpoint) as client:
        client.send(type="generate", id="long", prompt="x" * 3_000_000)  # takes seconds
        assert client.ask(type="ping", id="p")["id"] == "p"
        daemon.process.send_signal(signal.SIGTERM)
        refusal = client.last_reply()
        assert daemon.wait() == 0
        assert (refusal["id"], refusal["code"]) == ("long", "draining")
        assert client.rest() == []


def test_a_second_signal_ends_it_at_once_and_the_next_daemon_takes_over(
    null_bundle: Path, tmp_path: Path, slow_steps: None
):
    endpoint = f"ipc://{tmp_path}/s"
    with (
        DaemonProcess(null_bundle, "sim:0", ipc_endpoint=endpoint) as daemon,
        RawClient(endpoint) as client,
    ):
        begin_long_answer(client, max_tokens=4000)
        daemon.process.send_signal(signal.SIGTERM)
        daemon.wait_for("draining")
        daemon.process.send_signal(signal.SIGTERM)
        assert daemon.wait() == 128 + signal.SIGTERM
        assert daemon.socket.exists()
        daemon.process.returncode = 0  # as wanted here
    with DaemonProcess(null_bundle, "sim:0", ipc_endpoint=endpoint), Client(endpoint) as client:
        assert client.ping().uptime_s >= 0


def test_a_killed_daemons_socket_is_taken_over(null_bundle: Path, tmp_path: Path):
    endpoint = f"ipc://{tmp_path}/s"
    killed = DaemonProcess(null_bundle, "sim:0", ipc_endpoint=endpoint)
    with killed:
        killed.kill()
        assert left_in(tmp_path) == ["s", "s.admin", "s.admin.lock", "s.lock"]
        killed.process.returncode = 0  # as wanted here
    with DaemonProcess(null_bundle, "sim:0", ipc_endpoint=endpoint), Client(endpoint) as client:
        assert client.ping().uptime_s >= 0


def test_nobody_reads_its_log_any_more(null_bundle: Path, tmp_path: Path):
    endpoint = f"ipc://{tmp_path}/s"
    flags = ("--model-bundle", str(null_bundle), "--device", "sim:0", "--ipc-endpoint", endpoint)
    with background("runtime_cache.daemon", *flags) as process:
        assert process.stderr is not None
        wait_for_input(process.stderr)
        while '"ready"' not in (line := process.stderr.readline()):
            assert line, "it has ended"
        process.stderr.close()
        with RawClient(endpoint) as client:
            assert client.ask(type="nonsense", id="n")["code"] == "unknown_type"
            begin_long_answer(client, max_tokens=100)
            process.send_signal(signal.SIGTERM)
            assert client.last_reply()["finish_reason"] == "length"
        assert process.wait(PATIENCE_S) == 0
    assert left_in(tmp_path) == ["s.admin.lock", "s.lock"]


def test_a_second_daemon_is_refused_before_it_reads_the_bundle(null_bundle: Path):
    with DaemonProcess(null_bundle, "sim:0") as daemon:
        second = run(
            "runtime_cache.daemon",
            *("--model-bundle", "/nowhere", "--device", "sim:0"),
            *("--ipc-endpoint", daemon.endpoint),
        )
        assert (second.code, second.out) == (2, "")
        assert second.complaint == (
            f"rtcached: another daemon (process {daemon.process.pid}) already serves at "
            f"{daemon.socket}"
        )
        with Client(daemon.endpoint) as client:
            assert client.ping().uptime_s >= 0


def test_environment_gives_options(null_bundle: Path, tmp_path: Path):
    env = {"RTCACHE_CACHE_BLOCK_SIZE": "32", "RTCACHE_DEVICE_DEVICE": "sim:0"}
    ended = run("runtime_cache.daemon", "--check-config", "--cache-enable", "false", env=env)
    rows = [line.split() for line in ended.out.splitlines()]
    assert ended.code == 0
    assert ["cache.block_size", "32", "environment", "RTCACHE_CACHE_BLOCK_SIZE"] in rows
    assert ["device.device", '"sim:0"', "environment", "RTCACHE_DEVICE_DEVICE"] in rows
    assert ["cache.enable", "false", "flag", "--cache-enable"] in rows
    assert ["cache.cache_capacity", '""', "default"] in rows


def test_a_reader_of_the_configuration_may_leave():
    program = [sys.executable, "-m", "runtime_cache.daemon", "--check-config"]
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing) as pipe:
        ended = subprocess.run(program, stdout=pipe, stderr=subprocess.PIPE, check=False)
    assert (ended.returncode, ended.stderr) == (0, b"")


def test_a_cap_above_the_pool_and_too_little_device_memory_are_warned_of(null_bundle: Path):
    options = {"cache_cache_capacity": "1.5", "device_low_memory_mb": "8193"}
    options["sim_memory"] = "8GiB"
    with DaemonProcess(null_bundle, "sim:0", **options) as daemon:
        warning = daemon.wait_for("cache_capacity_capped")
        assert (warning["level"], warning["asked_gb"]) == ("warning", 1.5)
        assert daemon.wait_for("device_memory_low")["low_mib"] == 8193
        with Client(daemon.admin_endpoint) as admin:
            stats = admin.stats()
        assert stats["pool"]["num_blocks"] == 127
        assert stats["device"]["memory"]["is_low"]
        assert [text.partition(" MiB ")[2] for text in stats["warnings"]] == [
            "of device memory are free, less than device.low_memory_mb = 8193: the KV pool is not "
            "what grows, another process may be"
        ]
