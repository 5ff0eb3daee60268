"""Bundles on disk: sealed with checksums, checked before they are used."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

import msgspec

from om_models.manifest import FORMAT, MANIFEST_NAME, FileEntry, KvSpec, Manifest
from om_models.spec import ModelSpec
from om_models.staging import sync
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


def load_bundle(path: Path, *, verify: bool = True, progress: Progress | None = None) -> Bundle:
    """Read a bundle's manifest and check its files.

    Args:
        verify: compare the SHA-256 of every file (streamed); otherwise only the sizes.

    Raises:
        BundleError: there is no bundle, it is of another format, or a file is missing or damaged.
    """
    manifest = read_manifest(path)
    needed = (*(om.path for om in manifest.oms), TOKENIZER_NAME)
    check_files(path, manifest, needed, verify=verify, progress=progress)
    return Bundle(path, manifest)


def read_manifest(path: Path, name: str = MANIFEST_NAME, kind: str = "a bundle") -> Manifest:
    """Read a bundle's manifest, or the draft of one in an export.

    Args:
        kind: what messages say `path` should be.

    Raises:
        BundleError: there is none, it is damaged, or of another format.
    """
    try:
        if not path.is_dir():
            raise BundleError(f"{path} is not {kind}: no such directory")
        text = (path / name).read_bytes()
    except OSError as error:
        why = f"cannot read {name}: {error.strerror}"
        raise BundleError(f"{path} is not {kind}: {why}") from error
    try:
        found = msgspec.json.decode(text, type=_FormatOnly).format
        if found != FORMAT:
            age = "newer than" if found > FORMAT else "older than"
            raise BundleError(f"{path} has bundle format {found}, {age} {FORMAT}; convert it again")
        return msgspec.json.decode(text, type=Manifest)
    except msgspec.DecodeError as error:
        raise BundleError(f"{path / name} is damaged: {error}") from error


def check_files(
    path: Path,
    manifest: Manifest,
    needed: Iterable[str],
    *,
    verify: bool = True,
    progress: Progress | None = None,
) -> None:
    """Compare a directory with what its manifest says of it.

    Args:
        needed: names without which the manifest is not whole.
        verify: compare the SHA-256 of every file (streamed); otherwise only the sizes.

    Raises:
        BundleError: a file is missing, damaged or not named in the manifest.
    """
    _check_names(path, manifest, needed)
    for name, entry in manifest.files.items():
        _check_size(path / name, entry)
    if verify:
        _check_digests(path, manifest, progress)


def seal(directory: Path, manifest: Manifest, name: str = MANIFEST_NAME) -> Manifest:
    """Write the manifest with size and checksum of every file, all of it on disk on return.

    Args:
        name: of the file that holds the manifest.

    Returns:
        The manifest as written.
    """
    names = sorted(p.relative_to(directory).as_posix() for p in directory.rglob("*") if p.is_file())
    files = {file: _describe(directory / file) for file in names if file != name}
    sealed = msgspec.structs.replace(manifest, files=files)
    text = msgspec.json.format(msgspec.json.encode(sealed), indent=2)
    (directory / name).write_bytes(text + b"\n")
    for file in (*names, name):
        sync(directory / file)
    return sealed


def bundle_digest(weights_digest: str, spec: ModelSpec, kv: KvSpec) -> str:
    """Identity of what a KV row means [hex SHA-256]; the root of every prefix key.

    Covers weights (in the dtype they are used in), the model's constants, and type and layout of
    the KV. Does not cover what leaves the KV of a prefix the same: capacity, gears, context,
    target, file names, tool versions.
    """
    identity = {
        "kv": [kv.dtype, kv.num_groups, kv.layers_per_group, kv.row_elements],
        "model": spec.identity(),
        "version": 1,
        "weights": weights_digest,
    }
    return hashlib.sha256(msgspec.json.encode(identity, order="sorted")).hexdigest()


def _check_names(path: Path, manifest: Manifest, needed: Iterable[str]) -> None:
    for name in manifest.files:
        if PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts:
            raise BundleError(f"{path}: the manifest names {name!r}, outside the bundle")
    for name in needed:
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
