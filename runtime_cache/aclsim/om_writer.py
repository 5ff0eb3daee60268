"""Writes the software device's `.om` files, whole or not at all."""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import BinaryIO

import msgspec

from runtime_cache.aclsim.mapping import round_up
from runtime_cache.aclsim.om import (
    FORMAT_VERSION,
    MAGIC,
    PREFIX,
    WEIGHT_ALIGN_BYTES,
    OmHeader,
    Section,
)


def write_om(
    path: Path,
    header: OmHeader,
    graph: bytes,
    weights: Iterable[bytes],
    verify: Callable[[Path], None] = lambda path: None,
) -> OmHeader:
    """Writes a file atomically, streaming the weights.

    Args:
        header: complete but for the checksums, which are filled in; section lengths must be right.
        weights: chunks, together as long as `header.weights.length`.
        verify: called with the finished file before it takes its name; may raise to refuse it.

    Returns:
        The header as written.

    Raises:
        OSError: the directory cannot be written; nothing is left behind.
        ValueError: the weights have another length than the header says.
    """
    draft = _with_digests(header, hashlib.sha256(graph).hexdigest(), "0" * 64)
    weights_offset = round_up(
        PREFIX.size + len(msgspec.json.encode(draft)) + len(graph), WEIGHT_ALIGN_BYTES
    )
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=path.name, suffix=".tmp")
    try:
        with os.fdopen(descriptor, "wb") as file:
            digest = _write_weights(file, weights_offset, weights, header.weights.length)
            final = _with_digests(draft, draft.graph.sha256, digest)
            _write_front(file, msgspec.json.encode(final), graph)
            os.fchmod(file.fileno(), 0o644)
            os.fsync(file.fileno())
        verify(Path(temporary))
        Path(temporary).replace(path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
    return final


def _with_digests(header: OmHeader, graph: str, weights: str) -> OmHeader:
    return msgspec.structs.replace(
        header,
        graph=Section(header.graph.length, graph),
        weights=Section(header.weights.length, weights),
    )


def _write_weights(file: BinaryIO, offset: int, chunks: Iterable[bytes], length: int) -> str:
    """Writes the weights section and returns its SHA-256."""
    digest = hashlib.sha256()
    file.seek(offset)
    for chunk in chunks:
        digest.update(chunk)
        file.write(chunk)
    if file.tell() != offset + length:
        raise ValueError(f"weights are {file.tell() - offset} bytes, not {length}")
    if length == 0:
        file.truncate(offset)
    return digest.hexdigest()


def _write_front(file: BinaryIO, header: bytes, graph: bytes) -> None:
    file.seek(0)
    file.write(PREFIX.pack(MAGIC, FORMAT_VERSION, len(header), hashlib.sha256(header).digest()))
    file.write(header)
    file.write(graph)
