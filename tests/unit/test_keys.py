"""The list of keys: what is read, and every way to be wrong."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import zmq

from ipc.auth import Principal, domain_of, may_use
from runtime_cache.errors import ConfigError
from runtime_cache.keys import Key, Keyring, read_keys
from runtime_cache.quota import Quota
from tests.support.process_state import open_below

A, B = (zmq.curve_keypair()[0].decode() for _ in range(2))
WHOLE = f"""
[[keys]]
name = "front"
public_key = "{A}"
tenant = "alice"
quota = {{ max_requests = 2, tokens_per_minute = 100 }}

[[keys]]
name = "ops"
public_key = "{B}"
role = "admin"
"""


def write(directory: Path, text: str) -> str:
    path = directory / "keys.toml"
    path.write_text(text)
    return str(path)


def faults(directory: Path, text: str) -> str:
    with pytest.raises(ConfigError) as caught:
        read_keys(write(directory, text), {"alice"})
    return caught.value.message


def test_a_list(tmp_path: Path) -> None:
    keys = read_keys(write(tmp_path, WHOLE), {"alice"})
    assert keys == (Key("front", A, "user", "alice", Quota(2, 100)), Key("ops", B, "admin"))
    ring = Keyring(keys)
    assert ring.find(A) == Principal(A, "front", "user", "alice")
    assert ring.find(B) == Principal(B, "ops", "admin")
    assert (ring.quota("front"), ring.quota("ops")) == (Quota(2, 100), Quota())
    ring.replace(keys[1:])
    assert ring.find(A) is None
    assert ring.quota("front") == Quota()


def test_an_empty_list_is_one(tmp_path: Path) -> None:
    assert read_keys(write(tmp_path, ""), ()) == ()


@pytest.mark.parametrize(
    ("old", "new", "sentence"),
    [
        ('name = "ops"', 'name = "front"', "the name 'front' is given to 2 keys"),
        pytest.param(B, A, "2 names have the same public key", id="same key"),
        pytest.param(A, A[:-1], "front: public_key is not 40 characters of Z85", id="short key"),
        ('"alice"', '"alcie"', "front: there is no tenant 'alcie' in the configuration"),
        (
            '"admin"',
            '"root"',
            "at `$.keys[1].role` (a role is user or admin)",
        ),
        ('name = "ops"', 'name = "o ps"', "Expected `str` matching regex"),
        ('role = "admin"', 'rolle = "admin"', "unknown field `rolle`"),
        ("max_requests = 2", "max_requests = 0", "Expected `int` >= 1"),
        ("max_requests = 2", "requests = 2", "unknown field `requests`"),
        ("[[keys]]", "[[key]]", "unknown field `key`"),
        ('name = "ops"', "", "missing required field `name`"),
        ("[[keys]]", "[[keys]", "is not valid TOML"),
    ],
)
def test_what_is_wrong_is_said(tmp_path: Path, old: str, new: str, sentence: str) -> None:
    assert sentence in faults(tmp_path, WHOLE.replace(old, new))


def test_all_faults_are_reported_together(tmp_path: Path) -> None:
    text = faults(tmp_path, WHOLE.replace('"alice"', '"alcie"').replace(A, "x"))
    assert text.count("\n  - front: ") == 2


def test_a_file_that_everybody_may_write_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path, WHOLE)
    os.chmod(path, 0o646)
    with pytest.raises(ConfigError, match="everybody may write the list of keys"):
        read_keys(path, {"alice"})
    os.chmod(path, 0o664)
    assert len(read_keys(path, {"alice"})) == 2


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
def test_a_file_of_another_user_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path, WHOLE)
    os.chown(path, 12345, -1)
    with pytest.raises(ConfigError, match="belongs to another user"):
        read_keys(path, {"alice"})


@pytest.mark.parametrize(
    ("kind", "sentence"),
    [
        (
            "missing",
            "cannot read the list of keys .*: No such file.*; make it, .*`rtcache-admin keygen",
        ),
        ("fifo", "is no list of keys"),
        ("directory", "cannot read the list of keys .*: Is a directory$"),
        ("latin-1", "is not UTF-8"),
    ],
)
def test_a_file_that_cannot_be_read(tmp_path: Path, kind: str, sentence: str) -> None:
    path = tmp_path / "keys.toml"
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "directory":
        path.mkdir()
    elif kind == "latin-1":
        path.write_bytes(b"# \xe9")
    with pytest.raises(ConfigError, match=sentence):
        read_keys(str(path), ())
    assert open_below(tmp_path) == []


@pytest.mark.parametrize(
    ("role", "tenant", "welcome"),
    [
        ("user", "", {"user", "alice", "admin"}),
        ("user", "alice", {"alice", "admin"}),
        ("admin", "", {"admin"}),
    ],
)
def test_which_socket_takes_which_key(role: str, tenant: str, welcome: set[str]) -> None:
    keys = {
        "user": Principal("k", "user", "user"),
        "alice": Principal("k", "alice", "user", "alice"),
        "admin": Principal("k", "admin", "admin"),
    }
    found = {name for name, key in keys.items() if may_use(key, role, tenant)}  # type: ignore[arg-type]
    assert found == welcome
    assert domain_of(role, tenant).isascii()  # type: ignore[arg-type]
