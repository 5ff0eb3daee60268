"""Weights from a GGUF file of llama.cpp, dequantised tensor by tensor.

Two things differ from Hugging Face and are undone here: Llama's q and k rows are stored for
interleaved rotary pairs, and Llama 3 rope scaling is stored as divisors instead of parameters.
A Mistral is written as a Llama and read as one.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import gguf
import msgspec
import numpy as np

from om_models.config_json import DEFAULT_ROPE_THETA, check_spec
from om_models.families import KNOWN_GGUF_ARCHITECTURES, Family, family_of_gguf
from om_models.rope import inverse_frequencies, scaling_divisors
from om_models.spec import ModelSpec, RopeScaling
from om_models.weights import EMBEDDING, FINAL_NORM, LM_HEAD, Array, blocks_of, layer_name
from runtime_cache.errors import ConversionError

ROPE_DIVISORS = "rope_freqs.weight"

_TOP_NAMES = {
    "token_embd.weight": EMBEDDING,
    "output_norm.weight": FINAL_NORM,
    "output.weight": LM_HEAD,
}
_LAYER_PARTS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


class GgufSource:
    """A GGUF file, memory-mapped.

    Raises (from the constructor):
        ConversionError: not a GGUF, truncated, of an unknown family, or metadata the graph cannot
            honour.
    """

    def __init__(self, path: Path) -> None:
        self.label = path.name
        self._path = path
        self._reader = open_gguf(path)
        self._tensors = {_canonical_name(t.name): t for t in self._reader.tensors}
        try:
            self._family = self._read_family()
            self.spec = self._read_spec(self._family)
        except ConversionError as error:
            raise ConversionError(f"{path}: {error.message}") from error

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Shape of every tensor (GGUF lists dimensions fastest first; here slowest first)."""
        return {
            name: tuple(int(size) for size in reversed(tensor.shape))
            for name, tensor in self._tensors.items()
            if name != ROPE_DIVISORS
        }

    def get(self, name: str) -> Array:
        """One tensor as float32, or float16 if it is stored so; q and k in rotate-half order."""
        tensor = self._dequantised(name)
        if not self._family.permutes_in_gguf:
            return tensor
        if name.endswith("self_attn.q_proj.weight"):
            return interleaved_to_halves(tensor, self.spec.num_heads)
        if name.endswith("self_attn.k_proj.weight"):
            return interleaved_to_halves(tensor, self.spec.num_kv_heads)
        return tensor

    def _read_spec(self, family: Family) -> ModelSpec:
        hidden_size, num_heads = self._size("embedding_length"), self._size("attention.head_count")
        spec = ModelSpec(
            vocab_size=self._vocab_size(),
            hidden_size=hidden_size,
            intermediate_size=self._size("feed_forward_length"),
            num_layers=self._size("block_count"),
            num_heads=num_heads,
            num_kv_heads=self._size("attention.head_count_kv", num_heads),
            head_dim=self._size("attention.key_length", hidden_size // num_heads),
            rms_eps=self._number("attention.layer_norm_rms_epsilon", 1e-5),
            rope_theta=self._number("rope.freq_base", DEFAULT_ROPE_THETA),
            max_position=self._size("context_length"),
            tie_embeddings=LM_HEAD not in self._tensors,
            family=family.name,
            qkv_bias=family.qkv_bias,
            qk_norm=family.qk_norm,
            sliding_window=self._window(),
        )
        self._check_heads(spec)
        check_spec(spec)
        scaled = msgspec.structs.replace(spec, rope_scaling=self._scaling(spec))
        check_spec(scaled)
        return scaled

    def row_blocks(self, name: str) -> Iterator[Array]:
        """Its rows in order, each block dequantised when asked for."""
        for part in blocks_of(self.shapes()[name]):
            yield self._dequantised(name, part)

    def _dequantised(self, name: str, rows: slice = slice(None)) -> Array:
        if name not in self._tensors:
            raise ConversionError(f"{self._path} has no tensor {name}")
        self._give_back()
        try:
            return _dequantise(self._tensors[name], rows)
        except ConversionError as error:
            raise ConversionError(f"{self._path}: {error.message}") from error

    def _give_back(self) -> None:
        """Let go of the pages read so far; else all of a large file would count as memory."""
        mapped = self._reader.data.base
        if isinstance(mapped, mmap.mmap):
            mapped.madvise(mmap.MADV_DONTNEED)  # they are read again from the file if need be

    def _read_family(self) -> Family:
        num_parts = self._field("split.count", 0)
        if num_parts not in (0, 1):  # 0 is what llama.cpp's own merging leaves
            raise ConversionError(
                f"one of the {num_parts} parts of a split GGUF; merge them first:"
                " llama-gguf-split --merge FIRST-PART MERGED.gguf"
            )
        architecture = self._field("general.architecture", None)
        family = family_of_gguf(architecture)
        if family is None:
            raise ConversionError(
                f"architecture {architecture!r} is not known;"
                f" known: {', '.join(KNOWN_GGUF_ARCHITECTURES)}"
            )
        if self._field(f"{family.gguf}.expert_count", 0):
            raise ConversionError("mixture-of-experts models are not supported")
        return family

    def _check_heads(self, spec: ModelSpec) -> None:
        for name in ("attention.value_length", "rope.dimension_count"):
            if (size := self._size(name, spec.head_dim)) != spec.head_dim:
                raise ConversionError(
                    f"{self._key(name)} is {size}, but heads have {spec.head_dim} elements"
                )

    def _scaling(self, spec: ModelSpec) -> RopeScaling | None:
        linear = self._linear_scaling()
        if ROPE_DIVISORS not in self._tensors:
            return linear
        by_frequency = llama3_scaling(spec, _dequantise(self._tensors[ROPE_DIVISORS]))
        if linear is not None and by_frequency is not None:
            raise ConversionError(f"rope scaling both linear and by {ROPE_DIVISORS}")
        return linear or by_frequency

    def _linear_scaling(self) -> RopeScaling | None:
        """What llama.cpp's loader makes of the metadata: a factor without a type is linear."""
        kind = self._field(self._key("rope.scaling.type"), "linear")
        if kind == "none":
            return None
        if kind != "linear":
            raise ConversionError(f"rope scaling {kind!r} is not known; known: linear")
        older = self._number("rope.scale_linear", 0.0)
        factor = self._number("rope.scaling.factor", older)
        return None if factor in (0, 1) else RopeScaling(kind="linear", factor=factor)

    def _window(self) -> int | None:
        """llama.cpp writes 0, or nothing, where tokens attend to all before them."""
        name = "attention.sliding_window"
        return self._size(name) if self._field(self._key(name), 0) != 0 else None

    def _vocab_size(self) -> int:
        if EMBEDDING not in self._tensors:
            raise ConversionError("there is no tensor token_embd.weight")
        return int(self._tensors[EMBEDDING].shape[-1])

    def _size(self, name: str, default: int | None = None) -> int:
        value = self._field(self._key(name), default)
        if not isinstance(value, int) or value < 1:
            raise ConversionError(f"{self._key(name)} is {value!r}, expected one number above 0")
        return value

    def _number(self, name: str, default: float) -> float:
        value = self._field(self._key(name), default)
        if not isinstance(value, int | float):
            raise ConversionError(f"{self._key(name)} is {value!r}, expected one number")
        # GGUF stores float32; its shortest decimal is the number that stood in config.json.
        return float(str(np.float32(value)))

    def _key(self, name: str) -> str:
        """Metadata of the model is named after its architecture."""
        return f"{self._family.gguf}.{name}"

    def _field(self, name: str, default: Any) -> Any:
        field = self._reader.get_field(name)
        return default if field is None else field.contents()


def open_gguf(path: Path) -> gguf.GGUFReader:
    """Map a GGUF file and check that all of it is there.

    Raises:
        ConversionError: naming the file.
    """
    try:
        reader = gguf.GGUFReader(path)
    except FileNotFoundError as error:
        raise ConversionError(f"{path} does not exist") from error
    # The reader has no error type of its own: a short or foreign file shows as any of these.
    except (ValueError, IndexError, KeyError, OverflowError, OSError) as error:
        raise ConversionError(f"{path} is not a GGUF file or is truncated: {error}") from error
    end = max((t.data_offset + t.n_bytes for t in reader.tensors), default=0)
    if end > path.stat().st_size:
        raise ConversionError(f"{path} is truncated: it should hold {end} bytes at least")
    return reader


def interleaved_to_halves(weight: Array, num_heads: int) -> Array:
    """Rows (2i, 2i + 1) of each head → rows (i, i + head_dim / 2) [heads · head_dim, in].

    Source: `LlamaModel.permute` of llama.cpp's convert_hf_to_gguf.py, inverted.
    """
    out_size, in_size = weight.shape
    pairs = weight.reshape(num_heads, out_size // num_heads // 2, 2, in_size)
    halves: Array = pairs.swapaxes(1, 2).reshape(out_size, in_size)
    return halves


def llama3_scaling(spec: ModelSpec, divisors: Array) -> RopeScaling | None:
    """Find the Llama 3 parameters whose divisors are the stored ones.

    llama.cpp writes only the divisors; every public model uses low 1, high 4, and a power of two
    as original context. Deriving the parameters keeps the spec, and so the bundle's digest, equal
    to that of the Hugging Face checkpoint.

    Raises:
        ConversionError: no such parameters give these divisors.
    """
    if divisors.shape != (spec.head_dim // 2,):
        raise ConversionError(f"{ROPE_DIVISORS} has shape {list(divisors.shape)}")
    if np.all(divisors == 1):
        return None
    frequencies = inverse_frequencies(spec)
    for exponent in range(9, 21):
        scaling = RopeScaling(
            kind="llama3",
            factor=float(divisors.max()),
            low_freq_factor=1.0,
            high_freq_factor=4.0,
            original_max_position=2**exponent,
        )
        if np.allclose(scaling_divisors(scaling, frequencies), divisors, rtol=1e-4, atol=0):
            return scaling
    raise ConversionError(f"{ROPE_DIVISORS} is no Llama 3 rope scaling that is known")


def _canonical_name(name: str) -> str:
    if name in _TOP_NAMES:
        return _TOP_NAMES[name]
    match name.split("."):
        case ["blk", number, part, ("weight" | "bias") as kind] if number.isdigit():
            known = _LAYER_PARTS.get(part)
            return layer_name(int(number), known, kind) if known else name
    return name


def _dequantise(tensor: gguf.ReaderTensor, rows: slice = slice(None)) -> Array:
    stored = tensor.data[rows]  # of a quantised matrix, too, the first axis is the rows
    try:
        if tensor.tensor_type in (gguf.GGMLQuantizationType.F32, gguf.GGMLQuantizationType.F16):
            return np.asarray(stored)
        return np.asarray(gguf.dequantize(stored, tensor.tensor_type), dtype=np.float32)
    except (NotImplementedError, ValueError) as error:
        raise ConversionError(
            f"cannot read {tensor.name} ({tensor.tensor_type.name}): {error}"
        ) from error
