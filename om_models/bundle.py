"""Bundles on disk: written whole or not at all, checked before they are used."""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

import msgspec

from om_models.manifest import FORMAT, MANIFEST_NAME, FileEntry, KvSpec, Manifest, OmFile
from om_models.spec import ModelSpec
from runtime_cache.errors import BundleError

TOKENIZER_NAME = "tokenizer.json"
_CHUNK_BYTES = 1 << 20

#: Called with (bytes checked, bytes in all).
Progress = Callable[[int, int], None]


class _FormatOnly(msgspec.Struct):
    format: int


@dataclass(frozen=True)
class Bundle:
    """A bundle whose manifest has been read.

    Attributes:
        path: its directory.
    """

    path: Path
    manifest: Manifest

    def om_path(self, om: OmFile) -> Path:
        """Where one of the manifest's `.om` files lies."""
        return self.path / om.path

    @property
    def tokenizer_path(self) -> Path:
        """Where `tokenizer.json` lies."""
        return self.path / TOKENIZER_NAME


def load_bundle(path: Path, *, verify: bool = True, progress: Progress | None = None) -> Bundle:
    """Read a bundle's manifest and check its files.

    Args:
        verify: compare the SHA-256 of every file (streamed); otherwise only the sizes.

    Raises:
        BundleError: there is no bundle, it is of another format, or a file is missing or damaged.
    """
    manifest = _read_manifest(path)
    _check_names(path, manifest)
    for name, entry in manifest.files.items():
        _check_size(path / name, entry)
    if verify:
        _check_digests(path, manifest, progress)
    return Bundle(path, manifest)


@contextmanager
def staged_directory(output: Path, marker: str = MANIFEST_NAME) -> Iterator[Path]:
    """A directory beside `output` that takes its place when the block ends without an error.

    Args:
        marker: the file by which something that may be replaced is known.

    Raises:
        BundleError: `output` exists and has no marker; it is left as it is.
    """
    output = output.resolve()  # a link stays; what it points at is replaced
    check_replaceable(output, marker)
    output.parent.mkdir(parents=True, exist_ok=True)
    staging = Path(tempfile.mkdtemp(prefix=f".{output.name}.", dir=output.parent))
    try:
        yield staging
        staging.chmod(0o755)
        _publish(staging, output)
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def check_replaceable(output: Path, marker: str = MANIFEST_NAME) -> None:
    """Refuse to replace anything but a directory with the marker, or an empty one.

    Raises:
        BundleError: `output` holds something else.
    """
    if not output.exists():
        return
    if not output.is_dir():
        raise BundleError(f"{output} exists and is not a directory")
    if any(output.iterdir()) and not (output / marker).is_file():
        raise BundleError(f"{output} exists and holds no {marker}; it is not overwritten")


def seal(directory: Path, manifest: Manifest) -> Manifest:
    """Write the manifest with size and checksum of every file, all of it on disk on return.

    Returns:
        The manifest as written.
    """
    names = sorted(p.relative_to(directory).as_posix() for p in directory.rglob("*") if p.is_file())
    files = {name: _describe(directory / name) for name in names if name != MANIFEST_NAME}
    sealed = msgspec.structs.replace(manifest, files=files)
    text = msgspec.json.format(msgspec.json.encode(sealed), indent=2)
    (directory / MANIFEST_NAME).write_bytes(text + b"\n")
    for name in (*names, MANIFEST_NAME):
        _sync(directory / name)
    return sealed


def bundle_digest(weights_digest: str, spec: ModelSpec, kv: KvSpec) -> str:
    """Identity of what a KV row means [hex SHA-256]; the root of every prefix key.

    Covers weights (in the dtype they are used in), the model's constants, and type and layout of
    the KV. Does not cover what leaves the KV of a prefix the same: capacity, gears, context,
    target, file names, tool versions.
    """
    identity = {
        "kv": [kv.dtype, kv.num_groups, kv.layers_per_group, kv.row_elements],
        "model": msgspec.to_builtins(spec),
        "version": 1,
        "weights": weights_digest,
    }
    return hashlib.sha256(msgspec.json.encode(identity, order="sorted")).hexdigest()


def _read_manifest(path: Path) -> Manifest:
    if not path.is_dir():
        raise BundleError(f"{path} is not a bundle: no such directory")
    manifest_path = path / MANIFEST_NAME
    try:
        text = manifest_path.read_bytes()
    except OSError as error:
        raise BundleError(
            f"{path} is not a bundle: cannot read {MANIFEST_NAME}: {error}"
        ) from error
    try:
        found = msgspec.json.decode(text, type=_FormatOnly).format
        if found != FORMAT:
            age = "newer than" if found > FORMAT else "older than"
            raise BundleError(f"{path} has bundle format {found}, {age} {FORMAT}; convert it again")
        return msgspec.json.decode(text, type=Manifest)
    except msgspec.DecodeError as error:
        raise BundleError(f"{manifest_path} is damaged: {error}") from error


def _check_names(path: Path, manifest: Manifest) -> None:
    for name in manifest.files:
        if PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts:
            raise BundleError(f"{path}: the manifest names {name!r}, outside the bundle")
    for name in (*(om.path for om in manifest.oms), TOKENIZER_NAME):
        if name not in manifest.files:
            raise BundleError(f"{path}: the manifest gives no checksum for {name}")


def _check_size(path: Path, entry: FileEntry) -> None:
    try:
        num_bytes = path.stat().st_size
    except OSError as error:
        raise BundleError(f"{path} is missing: {error.strerror}") from error
    if num_bytes != entry.num_bytes:
        raise BundleError(f"{path} has {num_bytes} bytes, the manifest says {entry.num_bytes}")


def _check_digests(path: Path, manifest: Manifest, progress: Progress | None) -> None:
    total, checked = sum(entry.num_bytes for entry in manifest.files.values()), 0
    for name, entry in manifest.files.items():
        digest = hashlib.sha256()
        for chunk in _chunks(path / name):
            digest.update(chunk)
            checked += len(chunk)
            if progress is not None:
                progress(checked, total)
        if digest.hexdigest() != entry.sha256:
            raise BundleError(f"{path / name} is damaged: its checksum differs from the manifest's")


def _chunks(path: Path) -> Iterator[bytes]:
    try:
        with path.open("rb") as file:
            while chunk := file.read(_CHUNK_BYTES):
                yield chunk
    except OSError as error:
        raise BundleError(f"{path} cannot be read: {error.strerror}") from error


def _describe(path: Path) -> FileEntry:
    digest = hashlib.sha256()
    for chunk in _chunks(path):
        digest.update(chunk)
    return FileEntry(num_bytes=path.stat().st_size, sha256=digest.hexdigest())


def _publish(staging: Path, output: Path) -> None:
    """Put the finished directory in place; the old bundle survives if that fails."""
    _sync(staging)
    retired: Path | None = None
    if output.exists():
        retired = Path(tempfile.mkdtemp(prefix=f".{output.name}.old.", dir=output.parent))
        output.replace(retired)
    try:
        staging.rename(output)
    except OSError:
        if retired is not None:
            retired.rename(output)
        raise
    _sync(output.parent)
    if retired is not None:
        shutil.rmtree(retired, ignore_errors=True)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
