"""CURVE keys: pairs, the files they lie in, and what one side needs of them.

A pair is made by libzmq and written in ZeroMQ's own certificate format, two files a name:
`NAME.key` with the public key, for everybody, and `NAME.key_secret` with both, for its owner
alone. A secret file that others may read is refused, as it is no secret any more.
"""

from __future__ import annotations

import os
import stat
import struct
import tempfile
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import zmq
from zmq import auth
from zmq.utils import z85

from ipc.errors import KeyFileError

#: A key as text (Z85) and as bytes.
KEY_CHARS = 40
_KEY_BYTES = 32
#: Larger files are none of keys.
_MAX_FILE_BYTES = 64 * 1024
#: The first libzmq without flaws that strangers on a network can use.
#: Source: CVE-2020-15166, CVE-2021-20236, CVE-2021-20237.
MIN_LIBZMQ = (4, 3, 3)
PUBLIC_SUFFIX, SECRET_SUFFIX = ".key", ".key_secret"


@dataclass(frozen=True, slots=True)
class KeyPair:
    """A public key and its secret, each as 40 characters of Z85."""

    public: str
    secret: str = field(repr=False)


@dataclass(frozen=True, slots=True)
class CurveKeys:
    """What a client needs to reach a daemon by CURVE: the daemon's public key and its own pair."""

    server_key: str
    own: KeyPair

    def apply(self, socket: zmq.Socket[bytes]) -> None:
        """Make the socket a CURVE client; to be called before it connects."""
        socket.set(zmq.CURVE_SERVERKEY, self.server_key.encode("ascii"))
        socket.set(zmq.CURVE_PUBLICKEY, self.own.public.encode("ascii"))
        socket.set(zmq.CURVE_SECRETKEY, self.own.secret.encode("ascii"))

    @classmethod
    def read(cls, server_key: str, key_file: str | os.PathLike[str]) -> CurveKeys:
        """Of the daemon's public key, or the file that holds it, and the client's secret file.

        Raises:
            KeyFileError: a key is none, or a file cannot be used.
        """
        return cls(read_public_key(server_key), read_key_pair(key_file))


def fault_of_library() -> str:
    """Why this libzmq is not to be used on a network, as a sentence; empty if it may be."""
    if not zmq.has("curve"):
        return "this libzmq was built without CURVE: install the pyzmq of PyPI"
    if zmq.zmq_version_info() < MIN_LIBZMQ:
        return (
            f"libzmq {zmq.zmq_version()} has flaws that can be used over a network "
            f"(CVE-2021-20236): {'.'.join(map(str, MIN_LIBZMQ))} or newer is needed"
        )
    return ""


def is_key(text: str) -> bool:
    """Whether the text is a key as Z85."""
    if len(text) != KEY_CHARS or not text.isascii():
        return False
    with suppress(ValueError, KeyError, struct.error):
        return len(z85.decode(text.encode("ascii"))) == _KEY_BYTES
    return False


def read_public_key(text_or_path: str) -> str:
    """A public key that is written out, or that the named file holds.

    Raises:
        KeyFileError: it is neither.
    """
    if is_key(text_or_path):
        return text_or_path
    if not os.path.exists(text_or_path):
        raise KeyFileError(
            f"{text_or_path!r} is neither a public key ({KEY_CHARS} characters of Z85) nor a file"
        )
    return _load(text_or_path)[0]


def read_key_pair(path: str | os.PathLike[str]) -> KeyPair:
    """The pair that a secret file holds.

    Raises:
        KeyFileError: the file cannot be read, holds no pair, belongs to another user, or others
            may read it.
    """
    name = os.fspath(path)
    public, secret = _load(name)
    if secret is None:
        raise KeyFileError(f"{name} holds no secret key; name the file {SECRET_SUFFIX} of the pair")
    _check_private(name)
    if zmq.curve_public(secret.encode("ascii")).decode("ascii") != public:
        raise KeyFileError(f"the two keys in {name} do not belong together")
    return KeyPair(public, secret)


def make_key_files(directory: str | os.PathLike[str], name: str) -> tuple[Path, Path]:
    """Draw a pair and write its two files, the secret one with mode 0600; never over others.

    A directory that is missing is made, for its owner alone; not those above it.

    Returns:
        The file of the public key, and that of both.

    Raises:
        KeyFileError: a file of this name exists, or the directory cannot be written.
    """
    targets = tuple(
        Path(directory) / f"{name}{suffix}" for suffix in (PUBLIC_SUFFIX, SECRET_SUFFIX)
    )
    for target in targets:
        if os.path.lexists(target):
            raise KeyFileError(f"{target} exists; it is left as it is: choose another name")
    try:
        Path(directory).mkdir(mode=0o700, exist_ok=True)
        _write_pair(Path(directory), name, targets)
    except OSError as error:
        raise KeyFileError(f"cannot write keys to {directory}: {error.strerror}") from error
    return targets[0], targets[1]


def _write_pair(directory: Path, name: str, targets: tuple[Path, ...]) -> None:
    # In a directory nobody else can look into, and from there into place: no moment at which the
    # secret can be read, and no file of another that is overwritten.
    with tempfile.TemporaryDirectory(prefix=".keys-", dir=directory) as private:
        made = auth.create_certificates(private, name)
        while _load(made[0])[0].startswith("-"):  # a command line would take it for an option
            made = auth.create_certificates(private, name)
        for path, target, mode in zip(made, targets, (0o644, 0o600), strict=True):
            os.chmod(path, mode)
            os.link(path, target)


def _check_private(path: str) -> None:
    try:
        status = os.stat(path)
    except OSError as error:
        raise KeyFileError(f"cannot read the key file {path}: {error.strerror}") from error
    if status.st_uid not in (0, os.geteuid()):
        raise KeyFileError(f"the key file {path} belongs to another user (uid {status.st_uid})")
    if status.st_mode & 0o077:
        raise KeyFileError(
            f"the key file {path} has mode {stat.S_IMODE(status.st_mode):04o}: others may use the "
            f"secret in it. Make a new pair, or, if nobody has read it yet, chmod 0600 {path}"
        )


def _load(path: str) -> tuple[str, str | None]:
    """Public and, if there is one, secret key of a file."""
    try:
        if os.stat(path).st_size > _MAX_FILE_BYTES or not os.path.isfile(path):
            raise KeyFileError(f"{path} is no key file")
        public, secret = auth.load_certificate(path)
    except OSError as error:
        raise KeyFileError(f"cannot read the key file {path}: {error.strerror}") from error
    except ValueError as error:
        raise KeyFileError(f"{path} is no key file: no public key is in it") from error
    return _text(path, public), None if secret is None else _text(path, secret)


def _text(path: str, key: bytes) -> str:
    text = key.decode("ascii", "replace")
    if not is_key(text):
        raise KeyFileError(f"{path} is no key file: a key in it is not {KEY_CHARS} characters long")
    return text
