"""What `rtcached` writes to is full, or may not be written to: it says so, and serves on."""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from ipc.sync_client import Client
from tests.support.launched import Launched, needs
from tests.support.rtcached import RawClient


def is_serving(daemon: Launched) -> bool:
    """Whether it refuses what is wrong, which it logs, and answers what is right."""
    with RawClient(daemon.endpoint) as client, Client(daemon.endpoint) as asking:
        for number in range(50):
            assert client.ask(type="nonsense", id=f"{number}")["code"] == "unknown_type"
        answer = asking.generate("hello", max_tokens=5, temperature=0, ignore_eos=True).result()
    return len(answer.token_ids) == 5


def test_a_log_on_a_full_disk(null_bundle: Path, tmp_path: Path):
    full = os.open("/dev/full", os.O_WRONLY)
    try:
        with Launched(null_bundle, f"ipc://{tmp_path}/s", stderr=full) as daemon:
            assert is_serving(daemon)
    finally:
        os.close(full)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of its own with room for little."""
    needs("mount", "umount", root=True)
    directory = tmp_path / "disk"
    directory.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(directory)],
        capture_output=True,
        text=True,
        check=False,
    )
    if mounted.returncode != 0:
        pytest.skip(f"no file system can be mounted here: {mounted.stderr.strip()}")
    try:
        yield directory
    finally:
        subprocess.run(["umount", str(directory)], check=True)


def fill(directory: Path) -> None:
    """Leave not a byte; files can be made there all the same, and stay empty."""
    with (
        contextlib.suppress(OSError),
        (directory / "ballast").open("wb", buffering=0) as ballast,
    ):
        while True:
            ballast.write(bytes(4096))


def test_all_it_writes_to_is_full(null_bundle: Path, small_disk: Path):
    fill(small_disk)
    with (small_disk / "log").open("wb") as log:
        daemon = Launched(null_bundle, f"ipc://{small_disk}/s", stderr=log.fileno())
        with daemon:
            assert is_serving(daemon)
    assert (small_disk / "log").stat().st_size == 0


def test_the_disk_gets_full_in_service_and_has_room_again(null_bundle: Path, small_disk: Path):
    with (small_disk / "log").open("wb") as log:
        daemon = Launched(
            null_bundle, f"ipc://{small_disk}/s", stderr=log.fileno(), log_format="json"
        )
        with daemon:
            assert is_serving(daemon)
            fill(small_disk)
            assert is_serving(daemon)
            (small_disk / "ballast").unlink()
            assert is_serving(daemon)
    assert b'"event":"stopped"' in (small_disk / "log").read_bytes().splitlines()[-1]
