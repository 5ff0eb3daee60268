"""What `rtcached` writes to is full, or may not be written to: it says so, and serves on.

A full disk and a directory that may not be written to are met as an ordinary user: root may write
everywhere.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ipc.sync_client import Client
from tests.support.launched import NOBODY, Launched, as_nobody
from tests.support.needed import need, need_root
from tests.support.rtcached import RawClient


def is_serving(endpoint: str) -> bool:
    """Whether it refuses what is wrong, which it logs, and answers what is right."""
    with RawClient(endpoint) as client, Client(endpoint) as asking:
        for number in range(50):
            assert client.ask(type="nonsense", id=f"{number}")["code"] == "unknown_type"
        answer = asking.generate("hello", max_tokens=5, temperature=0, ignore_eos=True).result()
    return len(answer.token_ids) == 5


def test_a_log_on_a_full_disk(null_bundle: Path, tmp_path: Path):
    full = os.open("/dev/full", os.O_WRONLY)
    try:
        with Launched(null_bundle, f"ipc://{tmp_path}/s", stderr=full) as daemon:
            assert is_serving(daemon.endpoint)
    finally:
        os.close(full)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of its own with room for little."""
    need("mount", "umount")
    need_root()
    directory = tmp_path / "d"  # short, as a socket's path has to be
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


class Place:
    """Where a daemon with a tenant is to live.

    Attributes:
        state: its state directory.
        log: what it says, as JSON lines.
    """

    def __init__(self, directory: Path, state: Path, log: Path) -> None:
        self._run = directory / "r"
        self._run.mkdir()
        self._config = directory / "rtcached.toml"
        self._config.write_text(
            f'[daemon]\nstate_dir = "{state}"\n[[tenants]]\nname = "team-a"\n'
            f'endpoint = "ipc://{self._run}/a"\nshare_percent = 30\n'
        )
        self.log = log
        self.state = state

    def serve_as_nobody(self, bundle: Path) -> list[dict[str, Any]]:
        """Let it serve everybody for a moment; returns what it has said."""
        if os.geteuid() == 0:
            os.chown(self._run, NOBODY, NOBODY)
        with self.log.open("wb") as log:
            daemon = Launched(
                bundle,
                f"ipc://{self._run}/s",
                prefix=as_nobody(),
                stderr=log.fileno(),
                config=str(self._config),
                log_format="json",
            )
            with daemon:
                assert is_serving(daemon.endpoint)
                assert is_serving(f"ipc://{self._run}/a")
        return [json.loads(line) for line in self.log.read_text().splitlines()]


def faults_of_salts(said: list[dict[str, Any]]) -> list[str]:
    return [event["fault"] for event in said if event["event"] == "salt_not_kept"]


def test_a_state_directory_it_may_not_write_to(null_bundle: Path, tmp_path: Path):
    state = tmp_path / "state"
    state.mkdir(mode=0o555)
    place = Place(tmp_path, state, tmp_path / "log")
    (fault,) = faults_of_salts(place.serve_as_nobody(null_bundle))
    assert fault == (
        f"tenant 'team-a' has a salt for this run only: cannot write {state}/salts/team-a: "
        f"Permission denied"
    )
    assert list(state.iterdir()) == []


def test_state_directory_and_sockets_on_a_full_disk(
    null_bundle: Path, tmp_path: Path, small_disk: Path
):
    state = small_disk / "state"
    state.mkdir()
    os.chown(state, NOBODY, NOBODY)
    place = Place(small_disk, state, tmp_path / "log")
    fill(small_disk)
    (fault,) = faults_of_salts(place.serve_as_nobody(null_bundle))
    assert fault.endswith(f"cannot write {state}/salts/team-a: No space left on device")
    assert list((state / "salts").iterdir()) == []
    # With room again, it is kept.
    (small_disk / "ballast").unlink()
    assert faults_of_salts(place.serve_as_nobody(null_bundle)) == []
    assert len((state / "salts" / "team-a").read_bytes()) == 65


def test_the_disk_gets_full_in_service_and_has_room_again(null_bundle: Path, small_disk: Path):
    with (small_disk / "log").open("wb") as log:
        daemon = Launched(
            null_bundle, f"ipc://{small_disk}/s", stderr=log.fileno(), log_format="json"
        )
        with daemon:
            assert is_serving(daemon.endpoint)
            fill(small_disk)
            assert is_serving(daemon.endpoint)
            (small_disk / "ballast").unlink()
            assert is_serving(daemon.endpoint)
    assert b'"event":"stopped"' in (small_disk / "log").read_bytes().splitlines()[-1]
