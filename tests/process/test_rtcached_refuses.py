"""What stops `rtcached` at its start: one sentence that says what to do, the documented exit code.

Codes: 1 the device failed, 2 wrong configuration, bundle or endpoint, 6 too little device memory.
"""

from __future__ import annotations

import json
import os
import socket
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import structlog

from runtime_cache import daemon
from tests.support.rtcached import Ended, copy_of, flip_byte, run


@pytest.fixture
def socket_path(tmp_path: Path) -> Path:
    return tmp_path / "s"


def start(bundle: Path, socket_path: Path, *flags: str, device: str = "sim:0") -> Ended:
    """Start on a bundle; nothing may be left where it would have listened."""
    ended = run(
        "runtime_cache.daemon",
        *("--model-bundle", str(bundle), "--device", device),
        *("--ipc-endpoint", f"ipc://{socket_path}"),
        *flags,
    )
    assert not any(path.is_socket() for path in socket_path.parent.glob("*"))
    assert ended.out == ""
    return ended


# --- where it listens -----------------------------------------------------------------------------


def test_a_file_in_the_way_is_left_alone_and_named(null_bundle: Path, socket_path: Path):
    socket_path.write_text("precious")
    ended = start(null_bundle, socket_path)
    assert (ended.code, ended.complaint) == (
        2,
        f"rtcached: {socket_path} exists and is not a socket; it is left as it is",
    )
    assert socket_path.read_text() == "precious"


def test_a_path_of_108_bytes(null_bundle: Path, tmp_path: Path):
    # The administrators' socket, with ".admin" at its end, is the longer one.
    path = tmp_path / "x"
    path = path.with_name("x" * (108 - len(f"{path}.admin") + 1))
    ended = start(null_bundle, path)
    assert (ended.code, ended.complaint) == (
        2,
        f"rtcached: endpoint 'ipc://{path}.admin': the path has 108 bytes, the system allows 107; "
        f"choose a shorter directory",
    )


def test_a_missing_directory(null_bundle: Path, tmp_path: Path):
    ended = start(null_bundle, tmp_path / "run" / "a" / "s")
    assert (ended.code, ended.complaint) == (
        2,
        f"rtcached: cannot serve at {tmp_path}/run/a/s: there is no directory {tmp_path}/run/a, "
        f"and it cannot be made: No such file or directory",
    )


@pytest.mark.parametrize(
    "option", ["ipc.endpoint", "ipc.admin_endpoint", "ipc.tcp_endpoint", "tenants: 'a': endpoint"]
)
def test_a_busy_port_is_found_before_the_bundle(socket_path: Path, tmp_path: Path, option: str):
    with socket.create_server(("127.0.0.1", 0)) as other:
        busy = f"tcp://127.0.0.1:{other.getsockname()[1]}"
        flags = ["--insecure-tcp", f"--ipc-admin-endpoint=ipc://{socket_path}.admin"]
        if option.startswith("ipc."):
            flags.append(f"--{option.replace('.', '-').replace('_', '-')}={busy}")
        else:
            file = tmp_path / "rtcached.toml"
            file.write_text(f'[[tenants]]\nname = "a"\nendpoint = "{busy}"\nshare_percent = 10\n')
            flags.append(f"--config={file}")
        ended = start(tmp_path / "no_such_bundle", socket_path, *flags)
    assert (ended.code, ended.complaint) == (
        2,
        f"rtcached: {option}: cannot listen on {busy}: Address already in use; another program "
        f"listens there: `ss -ltnp` shows which; stop it or choose another address",
    )


@pytest.fixture
def own_log() -> Iterator[None]:
    """`main` sets up the log of this whole process; later tests get it back as it was."""
    yield
    structlog.reset_defaults()


@pytest.mark.usefixtures("own_log")
def test_a_directory_one_may_not_write_to(capsys: pytest.CaptureFixture[str]):
    with tempfile.TemporaryDirectory() as directory:
        os.chmod(directory, 0o555)
        with without_root():
            code = daemon.main(["--ipc-endpoint", f"ipc://{directory}/s"])
    assert (code, capsys.readouterr().err) == (
        2,
        f"rtcached: cannot open the lock file {directory}/s.lock: Permission denied\n",
    )


@contextmanager
def without_root() -> Iterator[None]:
    """Root may write everywhere; this process gives that up for a while."""
    was = os.geteuid()
    os.seteuid(65534 if was == 0 else was)
    try:
        yield
    finally:
        os.seteuid(was)


# --- what it runs on ------------------------------------------------------------------------------


def test_no_device_is_named(null_bundle: Path, socket_path: Path):
    ended = start(null_bundle, socket_path, device="")
    assert (ended.code, ended.complaint) == (
        2,
        'rtcached: device.device is not set: "npu:0" for Ascend device 0, "sim:0" for the '
        "software device",
    )


def test_an_unknown_device(null_bundle: Path, socket_path: Path):
    ended = start(null_bundle, socket_path, device="gpu:0")
    assert (ended.code, ended.complaint) == (
        2,
        "rtcached: device 'gpu:0' is unknown; it is sim:N or npu:N, such as npu:0",
    )


def test_no_room_on_the_device(null_bundle: Path, socket_path: Path):
    ended = start(null_bundle, socket_path, "--sim-memory", "301MiB")
    assert ended.code == 6
    said, *table = ended.complaint.splitlines()
    assert said.startswith("rtcached: acl.")
    assert (
        "device memory is too small for this bundle: convert with a smaller --kv-capacity, or stop "
        "what else uses the device. The driver says: acl."
    ) in said
    assert " bytes wanted, " in said
    assert [row.split("  ")[1] for row in table] == [
        *("device", "system", "weights", "KV pool", "workspace", "staging", "together", "left"),
        "free now",
    ]
    assert table[-1].endswith(" of 301 MiB")


def test_a_device_with_less_memory_than_its_system_takes(null_bundle: Path, socket_path: Path):
    ended = start(null_bundle, socket_path, "--sim-memory", "1MiB")
    assert (ended.code, ended.complaint) == (
        2,
        "rtcached: settings of the software device: memory_bytes 1048576 must exceed "
        "initial_use_bytes 314572800, which the system takes first and must not be < 0",
    )


# --- the bundle -----------------------------------------------------------------------------------


def test_no_bundle_is_named(socket_path: Path):
    ended = run(
        "runtime_cache.daemon", "--device", "sim:0", "--ipc-endpoint", f"ipc://{socket_path}"
    )
    assert (ended.code, ended.complaint) == (
        2,
        "rtcached: model.bundle is not set: name a directory made by rtcache-convert",
    )


def test_no_bundle_is_there(tmp_path: Path, socket_path: Path):
    ended = start(tmp_path / "none", socket_path)
    assert (ended.code, ended.complaint) == (
        2,
        f"rtcached: {tmp_path}/none is not a bundle: no such directory",
    )


def test_a_bundle_for_the_card(null_bundle: Path, tmp_path: Path, socket_path: Path):
    bundle = copy_of(null_bundle, tmp_path)
    manifest = json.loads((bundle / "manifest.json").read_text())
    (bundle / "manifest.json").write_text(json.dumps(manifest | {"target": "ascend"}))
    ended = start(bundle, socket_path)
    assert (ended.code, ended.complaint) == (
        2,
        "rtcached: the bundle was made with --target ascend, device sim:0 needs --target sim: "
        "convert again",
    )


def test_a_bundle_for_the_software_device_on_a_card(null_bundle: Path, socket_path: Path):
    ended = start(null_bundle, socket_path, device="npu:0")
    assert (ended.code, ended.complaint) == (
        2,
        "rtcached: the bundle was made with --target sim, device npu:0 needs --target ascend: "
        "convert again",
    )


@pytest.mark.parametrize("name", ["model.om", "tokenizer.json"])
def test_a_flipped_byte(null_bundle: Path, tmp_path: Path, socket_path: Path, name: str):
    bundle = copy_of(null_bundle, tmp_path)
    flip_byte(bundle / name, -100)
    ended = start(bundle, socket_path)
    assert (ended.code, ended.complaint) == (
        2,
        f"rtcached: {bundle}/{name} is damaged: its checksum differs from the manifest's",
    )


def test_a_flipped_byte_in_the_manifest(null_bundle: Path, tmp_path: Path, socket_path: Path):
    bundle = copy_of(null_bundle, tmp_path)
    flip_byte(bundle / "manifest.json", 0)
    ended = start(bundle, socket_path)
    assert ended.code == 2
    assert ended.complaint.startswith(f"rtcached: {bundle}/manifest.json is damaged: ")


@pytest.mark.parametrize(("name", "code"), [("model.om", 1), ("tokenizer.json", 2)])
def test_a_flipped_byte_that_nobody_looked_for(
    null_bundle: Path, tmp_path: Path, socket_path: Path, name: str, code: int
):
    bundle = copy_of(null_bundle, tmp_path)
    flip_byte(bundle / name, 0)
    ended = start(bundle, socket_path, "--model-verify", "false")
    assert ended.code == code
    assert str(bundle) in ended.complaint


def test_a_truncated_model(null_bundle: Path, tmp_path: Path, socket_path: Path):
    bundle = copy_of(null_bundle, tmp_path)
    whole = (bundle / "model.om").read_bytes()
    (bundle / "model.om").write_bytes(whole[:-1])
    ended = start(bundle, socket_path)
    assert (ended.code, ended.complaint) == (
        2,
        f"rtcached: {bundle}/model.om has {len(whole) - 1} bytes, the manifest says {len(whole)}",
    )


# --- the configuration ----------------------------------------------------------------------------


def test_all_faults_of_a_configuration_are_listed(tmp_path: Path):
    path = tmp_path / "rtcached.toml"
    path.write_text(
        '[cahce]\nblock_size = 64\n[cache]\nblok_size = 16\nenable = "yes"\n[engine]\nmax_waiting=0'
    )
    ended = run(
        "runtime_cache.daemon",
        *("--config", str(path), "--check-config", "--sim-memory", "much"),
        env={"RTCACHE_CACHE_BLOCK_SIZ": "8"},
    )
    assert (ended.code, ended.out) == (2, "")
    assert ended.complaint.splitlines() == [
        "rtcached: configuration is wrong:",
        f"  - {path}: unknown section [cahce]; known: model, device, ipc, cache, engine, sim, "
        "metrics, log, daemon, tenants",
        f"  - {path}: unknown key cache.blok_size; did you mean cache.block_size?",
        "  - environment RTCACHE_CACHE_BLOCK_SIZ: no such option",
        f"  - {path}: cache.enable = 'yes': Expected `bool`, got `str`",
        f"  - {path}: engine.max_waiting = 0: Expected `int` >= 1",
        '  - sim.memory: "much" is not a size; write for example "4GiB" or "512MB"',
    ]


def test_no_such_configuration(tmp_path: Path):
    ended = run("runtime_cache.daemon", "--config", str(tmp_path / "none.toml"))
    assert (ended.code, ended.complaint) == (
        2,
        f"rtcached: cannot read configuration {tmp_path}/none.toml: No such file or directory",
    )


def test_blocks_larger_than_the_pool(null_bundle: Path, tmp_path: Path, socket_path: Path):
    bundle = copy_of(null_bundle, tmp_path)
    manifest = (bundle / "manifest.json").read_text()
    (bundle / "manifest.json").write_text(manifest.replace("8192", "2048"))
    ended = start(bundle, socket_path, "--cache-block-size", "4096")
    assert ended.code == 2
    assert ended.complaint == (
        "rtcached: the bundle's 2048 KV slots hold 0 blocks of 4096 tokens; at least 2 are needed "
        "(block 0 is the null block)"
    )


def test_a_pool_smaller_than_two_blocks(null_bundle: Path, socket_path: Path):
    ended = start(null_bundle, socket_path, "--cache-cache-capacity", "0.00001")
    assert (ended.code, ended.complaint) == (
        2,
        "rtcached: cache.cache_capacity = 1e-05 GB is too small: one block of 64 tokens takes "
        "0.01 MiB, and two are the least",
    )


def test_an_unknown_soc(null_bundle: Path, socket_path: Path):
    ended = start(null_bundle, socket_path, "--sim-soc", "Ascend999")
    assert ended.code == 1
    assert "compiled for Ascend310P3, the device is Ascend999" in ended.complaint
