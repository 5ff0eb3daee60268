"""Where weights come from, under which names, and what shapes they must have. Pure.

Names are those of Hugging Face `LlamaForCausalLM` and its kin; every source translates to them.
Files are read in `safetensors_source` and `gguf_source`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Literal, Protocol

import numpy.typing as npt

from om_models.spec import ModelSpec
from runtime_cache.errors import ConversionError

Array = npt.NDArray[Any]

EMBEDDING = "model.embed_tokens.weight"
FINAL_NORM = "model.norm.weight"
LM_HEAD = "lm_head.weight"
#: What of a large table is held at a time: 64 MiB in float32.
BLOCK_VALUES = 1 << 24


class WeightSource(Protocol):
    """A checkpoint: its spec, and its tensors one at a time."""

    @property
    def label(self) -> str:
        """What messages call it: the file or directory name."""

    @property
    def spec(self) -> ModelSpec:
        """The model's dimensions and constants."""

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Shape of every tensor, by Hugging Face name; reads no weights."""

    def get(self, name: str) -> Array:
        """One tensor, float32 or float16, Hugging Face orientation [out, in].

        Raises:
            ConversionError: the tensor is missing or its bytes cannot be read.
        """

    def row_blocks(self, name: str) -> Iterator[Array]:
        """The rows of `get`, in order, in blocks (`blocks_of`); for tables too large to hold.

        Raises:
            ConversionError: as `get`.
        """


def blocks_of(shape: tuple[int, ...]) -> Iterator[slice]:
    """Rows of a matrix in slices of at most `BLOCK_VALUES`, or of one row if that has more."""
    num_rows, row_values = shape
    step = max(1, BLOCK_VALUES // row_values)
    return (slice(first, min(first + step, num_rows)) for first in range(0, num_rows, step))


def layer_name(layer: int, part: str, kind: Literal["weight", "bias"] = "weight") -> str:
    """Name of a layer's tensor: `layer_name(3, "self_attn.q_proj")`."""
    return f"model.layers.{layer}.{part}.{kind}"


def layer_shapes(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    """Shape of each tensor of one layer, by its name after the layer number, canonical order."""
    hidden, inner = spec.hidden_size, spec.intermediate_size
    q_dim, kv_dim = spec.num_heads * spec.head_dim, spec.kv_dim
    shapes: dict[str, tuple[int, ...]] = {
        "input_layernorm.weight": (hidden,),
        "self_attn.q_proj.weight": (q_dim, hidden),
        "self_attn.k_proj.weight": (kv_dim, hidden),
        "self_attn.v_proj.weight": (kv_dim, hidden),
    }
    if spec.qkv_bias:
        for part, size in (("q", q_dim), ("k", kv_dim), ("v", kv_dim)):
            shapes[f"self_attn.{part}_proj.bias"] = (size,)
    if spec.qk_norm:
        for part in "qk":
            shapes[f"self_attn.{part}_norm.weight"] = (spec.head_dim,)
    return shapes | {
        "self_attn.o_proj.weight": (hidden, q_dim),
        "post_attention_layernorm.weight": (hidden,),
        "mlp.gate_proj.weight": (inner, hidden),
        "mlp.up_proj.weight": (inner, hidden),
        "mlp.down_proj.weight": (hidden, inner),
    }


def expected_shapes(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    """Every tensor the model consists of, in canonical order, with its shape."""
    shapes: dict[str, tuple[int, ...]] = {EMBEDDING: (spec.vocab_size, spec.hidden_size)}
    per_layer = layer_shapes(spec)
    for layer in range(spec.num_layers):
        shapes.update({f"model.layers.{layer}.{name}": s for name, s in per_layer.items()})
    shapes[FINAL_NORM] = (spec.hidden_size,)
    if not spec.tie_embeddings:
        shapes[LM_HEAD] = (spec.vocab_size, spec.hidden_size)
    return shapes


def check_source(source: WeightSource) -> None:
    """Compare what a checkpoint holds with what its spec needs, before anything is computed.

    Raises:
        ConversionError: tensors are missing, of another shape, or would be ignored (biases,
            adapters); all faults are named together.
    """
    faults = list(_faults(source))
    if faults:
        shown = "; ".join(faults[:8]) + (f"; and {len(faults) - 8} more" if faults[8:] else "")
        raise ConversionError(
            f"{source.label} does not hold a plain {source.spec.family} model: {shown}"
        )


def _faults(source: WeightSource) -> Iterator[str]:
    found, expected = source.shapes(), expected_shapes(source.spec)
    for name, shape in expected.items():
        if name not in found:
            yield f"{name} is missing"
        elif found[name] != shape:
            yield f"{name} is {list(found[name])}, expected {list(shape)}"
    for name in found:
        if name not in expected and not _may_be_ignored(name, source.spec):
            yield f"{name} has no place in the model"


def _may_be_ignored(name: str, spec: ModelSpec) -> bool:
    """Tensors that repeat what the spec says: old rotary buffers, a stored copy of a tied head."""
    return name.endswith("rotary_emb.inv_freq") or (name == LM_HEAD and spec.tie_embeddings)
