"""Weights on their way from the ONNX model into the `.om`, or into files beside it."""

from __future__ import annotations

import hashlib
import itertools
import os
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import onnx
from onnx import numpy_helper
from onnx.external_data_helper import (
    ExternalDataInfo,
    load_external_data_for_tensor,
    uses_external_data,
)

from runtime_cache.aclsim.atc.error import AtcError
from runtime_cache.aclsim.external_data import all_initializers, all_nodes, refer_to
from runtime_cache.aclsim.mapping import round_up
from runtime_cache.aclsim.om import SECTION_NAME, WEIGHT_ALIGN_BYTES, ExternalFile

# Small constants steer shape inference and stay in the graph.
KEEP_INLINE_BYTES = 1024
#: Alignment in a combined file (page of --external_weight).
COMBINED_ALIGN_BYTES = 512
_CHUNK_BYTES = 4 << 20


@dataclass(frozen=True, slots=True)
class Weight:
    """One tensor to be moved, still at its source.

    Attributes:
        tensor: in the graph, to be pointed at where the bytes go.
        position: of the tensor among all initializers of the model.
        data: the bytes, or None if they are at `path`[`start`:].
    """

    tensor: onnx.TensorProto
    position: int
    length: int
    data: bytes | None
    path: Path
    start: int

    def chunks(self) -> Iterator[bytes]:
        """The bytes, at most 4 MiB at once."""
        if self.data is not None:
            yield self.data
            return
        with self.path.open("rb") as file:
            file.seek(self.start)
            for done in itertools.count(0, _CHUNK_BYTES):
                if done >= self.length:
                    return
                yield file.read(min(_CHUNK_BYTES, self.length - done))


def find_weights(model: onnx.ModelProto, directory: Path) -> list[Weight]:
    """The initializers to be moved out of the graph, those of subgraphs included.

    Args:
        directory: where the model's own external data lie. External tensors in attributes are
            loaded into the graph.

    Raises:
        AtcError: E10014 if external data are missing or short.
    """
    _load_attributes(model, directory)
    tensors = enumerate(all_initializers(model.graph))
    found = (_source(tensor, position, directory) for position, tensor in tensors)
    return [weight for weight in found if weight is not None]


def _source(tensor: onnx.TensorProto, position: int, directory: Path) -> Weight | None:
    """A tensor to move, or None for one that stays."""
    if uses_external_data(tensor):
        info = ExternalDataInfo(tensor)
        path, start = directory / info.location, info.offset or 0
        size = path.stat().st_size if path.is_file() else 0
        length = info.length or size - start
        if length <= 0 or start + length > size:
            raise _missing(tensor, path)
        return Weight(tensor, position, length, None, path, start)
    if tensor.data_type == onnx.TensorProto.STRING:
        return None
    data = tensor.raw_data or numpy_helper.to_array(tensor).tobytes()
    if len(data) < KEEP_INLINE_BYTES:
        return None
    return Weight(tensor, position, len(data), data, directory, 0)


def _load_attributes(model: onnx.ModelProto, directory: Path) -> None:
    for node in all_nodes(model.graph):
        for attribute in node.attribute:
            if uses_external_data(attribute.t):
                try:
                    load_external_data_for_tensor(attribute.t, str(directory))
                except (OSError, onnx.checker.ValidationError, ValueError) as error:
                    raise _missing(attribute.t, directory) from error
                attribute.t.data_location = onnx.TensorProto.DEFAULT
                del attribute.t.external_data[:]


def _missing(tensor: onnx.TensorProto, path: Path) -> AtcError:
    return AtcError("E10014", f"external data of [{tensor.name}] are not in [{path}]")


def place_in_section(weights: Iterable[Weight]) -> tuple[list[tuple[int, Weight]], int]:
    """Points the tensors into the weights section of the `.om`.

    Returns:
        (offset in the section, weight) in order, and the section's length in bytes.
    """
    placed, end = [], 0
    for weight in weights:
        offset = round_up(end, WEIGHT_ALIGN_BYTES)
        placed.append((offset, weight))
        end = offset + weight.length
        refer_to(weight.tensor, SECTION_NAME, offset, weight.length)
    return placed, end


def section_chunks(placed: Iterable[tuple[int, Weight]]) -> Iterator[bytes]:
    """The weights section in chunks of at most 4 MiB, padding included."""
    end = 0
    for offset, weight in placed:
        yield bytes(offset - end)
        yield from weight.chunks()
        end = offset + weight.length


class ExternalWeights:
    """Files of weights beside an `.om`: all kept, or all as before.

    Args:
        directory: of the `.om`.
        name: of the `.om`, without suffix.
    """

    def __init__(self, directory: Path, name: str) -> None:
        self._directory = directory
        self._name = name
        self._made: list[Path] = []
        self._replaced: dict[Path, Path] = {}
        self.files: dict[str, ExternalFile] = {}

    def write_each(self, weights: Iterable[Weight]) -> None:
        """`--external_weight=1`: one file a tensor, named after its contents; equal ones share.

        Raises:
            OSError: the directory cannot be written.
        """
        folder = self._directory / "weight"
        if not folder.exists():
            folder.mkdir()
            self._made.append(folder)
        for weight in weights:
            digest, temporary = _write(folder, [weight.chunks()])
            path = folder / f"weight_{digest}"
            self._publish(temporary, path)
            name = f"{folder.name}/{path.name}"
            self.files[name] = ExternalFile(name, weight.length)
            refer_to(weight.tensor, name, 0, weight.length)

    def write_combined(self, weights: Iterable[Weight]) -> None:
        """`--external_weight=2`: one file for all, each tensor 512-byte aligned.

        Raises:
            OSError: the directory cannot be written.
        """
        name = f"{self._name}_weight_combined"
        parts: list[Iterable[bytes]] = []
        end = 0
        for weight in weights:
            offset = round_up(end, COMBINED_ALIGN_BYTES)
            parts += [[bytes(offset - end)], weight.chunks()]
            end = offset + weight.length
            refer_to(weight.tensor, name, offset, weight.length)
        if parts:
            _, temporary = _write(self._directory, parts)
            self._publish(temporary, self._directory / name)
            self.files[name] = ExternalFile(name, end)

    def _publish(self, temporary: Path, path: Path) -> None:
        """Gives a new file its name; an older one waits until it is known which of both stays."""
        if path in self._made or path in self._replaced:  # the same contents, a moment ago
            temporary.unlink()
            return
        if path.exists():
            self._replaced[path] = path.rename(temporary.with_suffix(".old"))
        else:
            self._made.append(path)
        temporary.rename(path)

    def keep(self) -> None:
        """The new files stay."""
        for old in self._replaced.values():
            old.unlink()

    def undo(self) -> None:
        """All is as before."""
        for path, old in self._replaced.items():
            old.replace(path)
        for path in reversed(self._made):
            if path.is_dir():
                path.rmdir()
            else:
                path.unlink()


@contextmanager
def external_weights(output: Path) -> Iterator[ExternalWeights]:
    """Files of weights beside an `.om`, which stay if the block ends well."""
    external = ExternalWeights(output.parent, output.name)
    try:
        yield external
    except BaseException:
        external.undo()
        raise
    external.keep()


@contextmanager
def made_directory(directory: Path) -> Iterator[None]:
    """Makes the directory of the output, as ATC does; it goes again if the block fails.

    Raises:
        OSError: it cannot be made.
    """
    missing = [each for each in (directory, *directory.parents) if not each.exists()]
    directory.mkdir(parents=True, exist_ok=True)
    try:
        yield
    except BaseException:
        for each in missing:
            with suppress(OSError):  # others may have put something there
                each.rmdir()
        raise


def _write(directory: Path, parts: Iterable[Iterable[bytes]]) -> tuple[str, Path]:
    """Writes chunks to a new file; returns their SHA-256 and the path."""
    digest = hashlib.sha256()
    descriptor, temporary = tempfile.mkstemp(dir=directory, suffix=".tmp")
    try:
        with os.fdopen(descriptor, "wb") as file:
            for chunk in itertools.chain.from_iterable(parts):
                digest.update(chunk)
                file.write(chunk)
            os.fchmod(file.fileno(), 0o644)
            os.fsync(file.fileno())
    except BaseException:
        Path(temporary).unlink()
        raise
    return digest.hexdigest(), Path(temporary)
