"""Weights from a Hugging Face directory: `config.json` and safetensors, sharded or not."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import ml_dtypes  # noqa: F401  (makes numpy know bfloat16; safetensors hands it over as such)
import numpy as np
from safetensors import SafetensorError, safe_open

from om_models.config_json import read_spec
from om_models.weights import Array, blocks_of
from runtime_cache.errors import ConversionError

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
KNOWN_DTYPES = ("F32", "F16", "BF16", "F64")


class SafetensorsSource:
    """A Hugging Face checkpoint on disk; tensors are read when asked for, one at a time.

    Raises (from the constructor):
        ConversionError: no `config.json`, an unknown architecture, no or damaged safetensors.
    """

    def __init__(self, directory: Path) -> None:
        self.label = directory.resolve().name
        self.spec = read_spec(directory / "config.json")
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._file_of: dict[str, Path] = {}
        for path in _shard_paths(directory):
            self._read_header(path)

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Shape of every tensor, from the headers."""
        return self._shapes

    def get(self, name: str) -> Array:
        """One tensor; bfloat16 comes as float32, which holds it exactly."""
        with self._opened(name) as file:
            return _as_float(file.get_tensor(name))

    def row_blocks(self, name: str) -> Iterator[Array]:
        """Its rows in order, each block read when asked for."""
        self._path_of(name)
        for part in blocks_of(self._shapes[name]):
            # Opened anew each time: what is read of a mapped file counts as memory until then.
            with self._opened(name) as file:
                block = _as_float(file.get_slice(name)[part])
            yield block

    @contextmanager
    def _opened(self, name: str) -> Iterator[Any]:
        """The safetensors handle of the file with this tensor."""
        path = self._path_of(name)
        try:
            with safe_open(path, framework="numpy") as file:
                yield file
        except (SafetensorError, OSError) as error:
            raise ConversionError(f"{path}: cannot read {name}: {error}") from error

    def _path_of(self, name: str) -> Path:
        if name not in self._file_of:
            raise ConversionError(f"{self.label} has no tensor {name}")
        return self._file_of[name]

    def _read_header(self, path: Path) -> None:
        try:
            with safe_open(path, framework="numpy") as file:
                # A safetensors handle is no mapping: keys() is its only way to list tensors.
                for name in file.keys():  # noqa: SIM118
                    header = file.get_slice(name)
                    _check_dtype(header.get_dtype(), f"{path}: {name}")
                    self._shapes[name] = tuple(header.get_shape())
                    self._file_of[name] = path
        except (SafetensorError, OSError) as error:
            raise ConversionError(f"{path} is not a whole safetensors file: {error}") from error


def _as_float(tensor: Array) -> Array:
    # bfloat16 or float64 otherwise; numpy's own arithmetic is float32's and float16's.
    is_known = tensor.dtype in (np.float32, np.float16)
    return tensor if is_known else tensor.astype(np.float32)


def _check_dtype(dtype: str, what: str) -> None:
    """Before a tensor is read: numpy has no name for most of the others."""
    if dtype not in KNOWN_DTYPES:
        raise ConversionError(f"{what} is {dtype}; known: {', '.join(KNOWN_DTYPES)}")


def _shard_paths(directory: Path) -> list[Path]:
    index = directory / INDEX_FILE
    if not index.is_file():
        return [_existing(directory / SINGLE_FILE)]
    try:
        weight_map: dict[str, Any] = json.loads(index.read_text("utf-8"))["weight_map"]
        names = {str(name) for name in weight_map.values()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConversionError(f"{index} is not a safetensors index: {error!r}") from error
    return [_existing(_inside(directory, name)) for name in sorted(names)]


def _inside(directory: Path, name: str) -> Path:
    """A shard's path; an index must not point out of its directory."""
    if Path(name).name != name:
        raise ConversionError(f"{directory / INDEX_FILE} names {name!r}, which is no file name")
    return directory / name


def _existing(path: Path) -> Path:
    try:
        path.open("rb").close()
    except FileNotFoundError as error:
        raise ConversionError(
            f"{path} does not exist; of a Hugging Face directory only safetensors are read"
        ) from error
    except OSError as error:  # of which the library would say that there is no such file
        raise ConversionError(f"{path} cannot be read: {error.strerror}") from error
    return path
