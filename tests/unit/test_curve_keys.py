"""Key files: what is written, with which modes, and what is refused."""

from __future__ import annotations

import os
import re
import stat
from pathlib import Path

import pytest
import zmq

from ipc.curve_keys import (
    CurveKeys,
    KeyPair,
    fault_of_library,
    is_key,
    make_key_files,
    read_key_pair,
    read_public_key,
)
from ipc.errors import KeyFileError

KEY = "Yne@$w-vo<fVvi]a<NY6T1ed:M$fCG*[IaLV{hID"


@pytest.mark.parametrize(
    ("text", "is_one"),
    [
        (KEY, True),
        (KEY[:-1], False),
        (KEY + "x", False),
        ("", False),
        (KEY[:-1] + "é", False),
        (KEY[:-1] + "~", False),
        (KEY[:-1] + '"', False),
        ("#" * 40, False),  # beyond 32 bits
    ],
)
def test_what_a_key_is(text: str, is_one: bool) -> None:
    assert is_key(text) == is_one


def test_a_pair_is_written_and_read_again(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        public_file, secret_file = make_key_files(tmp_path, "a")
    finally:
        os.umask(before)
    assert [path.name for path in (public_file, secret_file)] == ["a.key", "a.key_secret"]
    assert [stat.S_IMODE(p.stat().st_mode) for p in (public_file, secret_file)] == [0o644, 0o600]
    pair = read_key_pair(secret_file)
    assert read_public_key(str(public_file)) == read_public_key(pair.public) == pair.public
    assert pair.secret not in public_file.read_text()
    assert CurveKeys.read(str(public_file), secret_file) == CurveKeys(pair.public, pair)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.key", "a.key_secret"]


def test_a_secret_is_not_shown() -> None:
    pair = KeyPair(KEY, "very secret")
    assert "very secret" not in f"{pair!r} {CurveKeys(KEY, pair)!r}"


@pytest.mark.parametrize("name", ["a.key", "a.key_secret"])
def test_nothing_is_overwritten(tmp_path: Path, name: str) -> None:
    (tmp_path / name).symlink_to(tmp_path / "victim")
    with pytest.raises(KeyFileError, match="exists; it is left as it is"):
        make_key_files(tmp_path, "a")
    assert [path.name for path in tmp_path.iterdir()] == [name]


def test_no_public_key_looks_like_an_option(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pairs = [(b"-" * 40, b"1" * 40), (b"-" + b"2" * 39, b"3" * 40), (b"4" * 40, b"5" * 40)]
    monkeypatch.setattr(zmq, "curve_keypair", lambda: pairs.pop(0))
    public_file, _ = make_key_files(tmp_path, "a")
    assert read_public_key(str(public_file)) == "4" * 40


def test_a_directory_that_is_missing(tmp_path: Path) -> None:
    make_key_files(tmp_path / "new", "a")
    assert stat.S_IMODE((tmp_path / "new").stat().st_mode) == 0o700
    with pytest.raises(KeyFileError, match=r"cannot write keys to .*: No such file"):
        make_key_files(tmp_path / "no" / "way", "a")


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o602, 0o777])
def test_a_secret_that_others_may_use_is_refused(tmp_path: Path, mode: int) -> None:
    _, secret_file = make_key_files(tmp_path, "a")
    secret_file.chmod(mode)
    with pytest.raises(KeyFileError, match=f"has mode {mode:04o}: others may use the secret"):
        read_key_pair(secret_file)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
def test_a_secret_of_another_user_is_refused(tmp_path: Path) -> None:
    _, secret_file = make_key_files(tmp_path, "a")
    os.chown(secret_file, 12345, -1)
    with pytest.raises(KeyFileError, match=r"belongs to another user \(uid 12345\)"):
        read_key_pair(secret_file)


def spoil(path: Path, kind: str) -> None:
    """Turn a secret file into something that holds no pair."""
    text = path.read_text()
    lines = text.splitlines()
    if kind == "public":
        path.write_text("\n".join(line for line in lines if "secret-key" not in line))
    elif kind == "empty":
        path.write_text("")
    elif kind == "short":
        path.write_text(text.replace('-key = "', '-key = "x'))
    elif kind == "mixed":
        path.write_text(text.replace(text.split('"')[1], KEY))
    elif kind == "large":
        path.write_text(text + "\n" * 70_000)
    elif kind == "fifo":
        path.unlink()
        os.mkfifo(path, 0o600)
    else:
        path.unlink()


@pytest.mark.parametrize(
    ("kind", "sentence"),
    [
        ("public", "holds no secret key"),
        ("empty", "no public key is in it"),
        ("short", "is not 40 characters long"),
        ("mixed", "do not belong together"),
        ("large", "is no key file"),
        ("fifo", "is no key file"),
        ("missing", "cannot read the key file .*: No such file"),
    ],
)
def test_a_file_that_holds_no_pair(tmp_path: Path, kind: str, sentence: str) -> None:
    _, secret_file = make_key_files(tmp_path, "a")
    spoil(secret_file, kind)
    with pytest.raises(KeyFileError, match=sentence):
        read_key_pair(secret_file)


def test_the_public_file_in_place_of_the_secret_one_is_named_as_that(tmp_path: Path) -> None:
    public_file, _ = make_key_files(tmp_path, "a")
    with pytest.raises(KeyFileError, match=r"no secret key; name the file \.key_secret of"):
        read_key_pair(public_file)


def test_what_is_neither_a_key_nor_a_file() -> None:
    with pytest.raises(KeyFileError, match=r"is neither a public key .* nor a file"):
        read_public_key("nonsense")


@pytest.mark.parametrize(
    ("version", "has_curve", "sentence"),
    [
        ((4, 3, 3), True, ""),
        ((4, 3, 2), True, r"has flaws that can be used over a network .*: 4\.3\.3 or newer"),
        ((4, 3, 5), False, "was built without CURVE"),
    ],
)
def test_which_library_may_be_used(
    version: tuple[int, int, int],
    has_curve: bool,
    sentence: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(zmq, "zmq_version_info", lambda: version)
    monkeypatch.setattr(zmq, "has", lambda name: has_curve)
    fault = fault_of_library()
    assert re.search(sentence, fault)
    assert bool(fault) == bool(sentence)
