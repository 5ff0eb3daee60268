"""A checkpoint of any size that nobody trained: Llama 3.2 in its shapes, written in a stream.

The file is larger than the memory that writing it takes: one block of random values, turned by a
little for each tensor, is written as often as a tensor needs.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from math import prod
from pathlib import Path
from typing import Any, BinaryIO, Literal

import numpy as np
import numpy.typing as npt

from om_models.null_model import byte_level_library
from om_models.spec import ModelSpec, RopeScaling
from om_models.weights import expected_shapes
from runtime_cache.errors import ConfigError

Dtype = Literal["bf16", "fp16"]
#: Safetensors' names of the types; both take two bytes a value.
DTYPES: dict[Dtype, str] = {"bf16": "BF16", "fp16": "F16"}
VALUE_BYTES = 2
#: Values of the block that is repeated.
BLOCK_VALUES = 1 << 22
WEIGHT_FILE = "model.safetensors"

#: Called with (bytes written, bytes in all).
Note = Callable[[int, int], None]


def llama_spec(max_params: int) -> ModelSpec:
    """Llama-3.2-1B if so many parameters allow it, else the widest model of its proportions.

    Raises:
        ConfigError: not even the narrowest is small enough.
    """
    for num_heads in range(32, 0, -1):
        spec = _proportioned(num_heads)
        if num_params(spec) <= max_params:
            return spec
    raise ConfigError(f"the smallest model has {num_params(_proportioned(1)):,} parameters")


def num_params(spec: ModelSpec) -> int:
    """Parameters, a tied embedding counted once."""
    return sum(prod(shape) for shape in expected_shapes(spec).values())


def write_checkpoint(directory: Path, spec: ModelSpec, dtype: Dtype, note: Note) -> Path:
    """Write `config.json`, one safetensors file and a byte-level tokenizer.

    Returns:
        The safetensors file, on the way to disk.
    """
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(_config(spec)), "utf-8")
    tokenizer = byte_level_library(["<s>", "</s>"])
    tokenizer.save(str(directory / "tokenizer.json"))
    settings = {"bos_token": "<s>", "eos_token": "</s>", "add_bos_token": True}
    (directory / "tokenizer_config.json").write_text(json.dumps(settings), "utf-8")
    path = directory / WEIGHT_FILE
    with path.open("wb") as file:
        _write_weights(file, expected_shapes(spec), dtype, note)
    return path


def _proportioned(num_heads: int) -> ModelSpec:
    """The shapes of Llama-3.2-1B (its `config.json`), which has 32 heads, made narrower."""
    return ModelSpec(
        vocab_size=128256 * num_heads // 32,
        hidden_size=64 * num_heads,
        intermediate_size=256 * num_heads,
        num_layers=16,
        num_heads=num_heads,
        num_kv_heads=num_heads // 4 if num_heads % 4 == 0 else 1,
        head_dim=64,
        rms_eps=1e-5,
        rope_theta=500000.0,
        max_position=131072,
        tie_embeddings=True,
        rope_scaling=RopeScaling(kind="llama3", factor=32.0),
    )


def _config(spec: ModelSpec) -> dict[str, Any]:
    scaling = spec.rope_scaling
    assert scaling is not None
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "vocab_size": spec.vocab_size,
        "hidden_size": spec.hidden_size,
        "intermediate_size": spec.intermediate_size,
        "num_hidden_layers": spec.num_layers,
        "num_attention_heads": spec.num_heads,
        "num_key_value_heads": spec.num_kv_heads,
        "head_dim": spec.head_dim,
        "rms_norm_eps": spec.rms_eps,
        "rope_theta": spec.rope_theta,
        "rope_scaling": {
            "rope_type": scaling.kind,
            "factor": scaling.factor,
            "low_freq_factor": scaling.low_freq_factor,
            "high_freq_factor": scaling.high_freq_factor,
            "original_max_position_embeddings": scaling.original_max_position,
        },
        "max_position_embeddings": spec.max_position,
        "tie_word_embeddings": spec.tie_embeddings,
    }


def _write_weights(
    file: BinaryIO, shapes: dict[str, tuple[int, ...]], dtype: Dtype, note: Note
) -> None:
    """Source of the format: safetensors README, length [u64], JSON header, data."""
    header: dict[str, Any] = {}
    end = 0
    for name, shape in shapes.items():
        start, end = end, end + VALUE_BYTES * prod(shape)
        header[name] = {"dtype": DTYPES[dtype], "shape": shape, "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    file.write(len(text).to_bytes(8, "little") + text)
    block = _values(dtype)
    for number, (name, shape) in enumerate(shapes.items()):
        _write_tensor(file, np.roll(block, 4099 * number), prod(shape))
        note(header[name]["data_offsets"][1], end)


def _write_tensor(file: BinaryIO, block: npt.NDArray[np.uint16], count: int) -> None:
    while count > 0:
        file.write(block[:count].data)
        count -= len(block)


def _values(dtype: Dtype) -> npt.NDArray[np.uint16]:
    """A block of values about 0 with a deviation of 0.02, as their bits."""
    values = np.random.default_rng(0).standard_normal(BLOCK_VALUES, dtype=np.float32) * 0.02
    if dtype == "fp16":
        return values.astype(np.float16).view(np.uint16)
    # bfloat16 is the upper half of float32.
    return (values.view(np.uint32) >> 16).astype(np.uint16)
