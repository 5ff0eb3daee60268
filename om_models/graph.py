"""The model as a portable ONNX graph with a paged KV pool as input.

Its inputs and outputs are the contract in `docs/design.md`.

One graph serves prefill and decode, every gear and both targets. It is built from elementary ops
only; `docs/kernels.md` says which Ascend kernel each becomes. Shapes in comments: B batch, S fed
tokens, P past slots, T = P + S, H query heads, G key-value heads, D head size.

The graph never writes the pool: it returns the new KV, which the host appends.

A float16 graph computes in float32 what float16 cannot hold or add up: the residual stream, norms,
softmax. Nodes of these islands have the island in their names; `docs/kernels.md` says what each
protects from, `tests/unit/test_half_graph.py` that none can be left out.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from om_models.contract import GraphContract
from om_models.manifest import KvSpec
from om_models.onnx_writer import ONNX_DTYPES, OnnxWriter, open_onnx
from om_models.rope import rope_tables
from om_models.spec import ModelSpec
from om_models.weights import EMBEDDING, FINAL_NORM, LM_HEAD, Array, WeightSource, layer_name
from runtime_cache.errors import ConversionError

Progress = Callable[[int, int], None]
_OUTPUT, _MLP_NORM = "self_attn.o_proj", "post_attention_layernorm"


@dataclass(frozen=True)
class GraphOptions:
    """What of the graph the model does not fix.

    Attributes:
        dtype: of weights and arithmetic outside residual stream, norms and softmax, which are
            float32.
        index_dtype: of ids, positions and slots.
        max_model_len: rows of the rotary tables.
        mlp_scale: a power of two by which up_proj, and so all that follows up to the residual
            stream, is kept smaller: room for activations that float16 cannot hold.
    """

    dtype: Literal["float16", "float32"]
    index_dtype: Literal["int32", "int64"]
    kv: KvSpec
    max_model_len: int
    mlp_scale: int = 1


def write_llama(
    source: WeightSource, options: GraphOptions, onnx_path: Path, progress: Progress
) -> str:
    """Write the `.onnx` and its data file; weights are read, converted and written one by one.

    Args:
        progress: called with (layers done, layers in all).

    Returns:
        The weights' digest [hex SHA-256], the same for every graph of these weights and dtype.

    Raises:
        ConversionError: a tensor cannot be read or does not fit the dtype.
    """
    with open_onnx(onnx_path) as writer:
        _ModelGraph(writer, source, options).build(progress)
        return writer.weights_digest()


class _ModelGraph:
    """The state of one build: the writer, and the values every layer uses."""

    def __init__(self, writer: OnnxWriter, source: WeightSource, options: GraphOptions) -> None:
        self._w = writer
        self._source = source
        self._spec: ModelSpec = source.spec
        self._head_dim = source.spec.head_dim
        self._options = options
        self._dtype = np.dtype(options.dtype)
        self._index_dtype = np.dtype(options.index_dtype)

    def build(self, progress: Progress) -> None:
        """Emit the whole graph."""
        w, spec, kv = self._w, self._spec, self._options.kv
        contract = GraphContract(kv, self._options.index_dtype, spec.vocab_size)
        w.inputs(contract.inputs)
        embedding = self._by_rows(EMBEDDING)
        self._prepare_shared()
        hidden = w.op("Gather", embedding, "input_ids", axis=0)  # [B, S, hidden]
        hidden = self._to_float32(hidden)
        new_rows: list[str] = []
        new_kv: list[str] = []
        for layer in range(spec.num_layers):
            with w.scope(f"layer{layer}"):
                hidden, key, value = self._layer(layer, hidden)
            new_rows += [key, value]
            if len(new_rows) == 2 * kv.layers_per_group:
                new_kv.append(self._stack(new_rows))
                new_rows = []
            progress(layer + 1, spec.num_layers)
        w.outputs([self._logits(hidden, embedding), *new_kv], contract.outputs)

    def _prepare_shared(self) -> None:
        """cos, sin and their scaled twins for q: once a graph, not once a layer."""
        cos, sin = rope_tables(self._spec, self._options.max_model_len)
        # Scaling cos and sin scales the rotated q: no Mul a layer, and QKᵀ stays small enough for
        # float16.
        scale = np.float32(self._spec.head_dim**-0.5)
        self._rotations = {
            "q": (self._positions("q_cos", cos * scale), self._positions("q_sin", sin * scale)),
            "k": (self._positions("k_cos", cos), self._positions("k_sin", sin)),
        }

    def _positions(self, name: str, table: Array) -> str:
        """A rotary table's rows of the fed tokens [B, S, 1, D/2]; the 1 broadcasts over heads."""
        stored = self._w.table(f"rope.{name}", table[:, None, :].astype(self._dtype))
        return self._w.op("Gather", stored, "position_ids", axis=0)

    def _layer(self, layer: int, hidden: str) -> tuple[str, str, str]:
        """One decoder layer; returns the hidden state and its new K and V [B, S, kv_dim]."""
        w = self._w
        normed = self._rms_norm("input_norm", hidden, layer_name(layer, "input_layernorm"))
        query = self._rotate(self._heads(normed, layer, "q"), "q")
        key = self._rotate(self._heads(normed, layer, "k"), "k")
        key = w.op("Reshape", key, w.ints(0, 0, self._spec.kv_dim))
        value = self._projected(normed, layer, "v")
        mixed = self._attention(layer, query, key, value)
        hidden = self._add_to("attention_sum", hidden, self._linear(mixed, layer, _OUTPUT))
        normed = self._rms_norm("mlp_norm", hidden, layer_name(layer, _MLP_NORM))
        mlp, scale = self._mlp(layer, normed), self._options.mlp_scale
        return self._add_to("mlp_sum", hidden, mlp, scale), key, value

    def _add_to(self, island: str, hidden: str, addend: str, scale: int = 1) -> str:
        """The residual stream, float32 in every graph, with `scale` times a part's result added."""
        w, addend = self._w, self._to_float32(addend)
        with w.scope(island):
            if scale != 1:
                addend = w.op("Mul", addend, w.constant(np.array(scale, dtype=np.float32)))
            return w.op("Add", hidden, addend)

    def _attention(self, layer: int, query: str, key: str, value: str) -> str:
        """Fed tokens attend to past and fed ones: q [B, S, H, D] → [B, S, H·D].

        The H / G query heads that share a key-value head are folded into the rows of one product,
        so that K and V are never repeated.
        """
        w, spec = self._w, self._spec
        heads, kv_heads, head_dim = spec.num_heads, spec.num_kv_heads, spec.head_dim
        keys = self._with_past(layer, 0, key)
        keys = w.op("Transpose", keys, perm=[0, 2, 3, 1])  # [B, G, D, T]
        values = self._with_past(layer, 1, value)
        values = w.op("Transpose", values, perm=[0, 2, 1, 3])  # [B, G, T, D]
        query = w.op("Transpose", query, perm=[0, 2, 1, 3])  # [B, H, S, D]
        query = w.op("Reshape", query, w.ints(0, kv_heads, -1, head_dim))  # [B, G, H/G·S, D]
        scores = w.op("MatMul", query, keys)  # [B, G, H/G·S, T]
        scores = w.op("Reshape", scores, w.ints(0, heads, -1, 0))  # [B, H, S, T]
        shares = w.op("Reshape", self._softmax(scores), w.ints(0, kv_heads, -1, 0))
        mixed = w.op("MatMul", shares, values)  # [B, G, H/G·S, D]
        mixed = w.op("Reshape", mixed, w.ints(0, heads, -1, head_dim))
        mixed = w.op("Transpose", mixed, perm=[0, 2, 1, 3])  # [B, S, H, D]
        return w.op("Reshape", mixed, w.ints(0, 0, heads * head_dim))

    def _softmax(self, scores: str) -> str:
        """Shares of the scores under the mask, along the last axis.

        The mask is added in the model's dtype: it is 0 where it matters.
        """
        scores = self._to_float32(self._w.op("Add", scores, "mask"))
        with self._w.scope("softmax"):
            shares = self._w.op("Softmax", scores, axis=-1)
        return self._to_model_dtype(shares)

    def _with_past(self, layer: int, is_value: int, new: str) -> str:
        """The past's K or V from the pool, then the fed tokens' [B, T, G, D]."""
        w, spec, kv = self._w, self._spec, self._options.kv
        group, layer_in_group = divmod(layer, kv.layers_per_group)
        rows = "past_rows"
        if row_offset := 2 * layer_in_group + is_value:
            offset = w.constant(np.array(row_offset, dtype=self._index_dtype))
            rows = w.op("Add", rows, offset)
        past = w.op("Gather", f"kv_pool_{group}", rows, axis=0)  # [B, P, row]
        if padding := kv.row_elements - spec.kv_dim:
            past = w.op_outputs("Split", 2, past, w.ints(spec.kv_dim, padding), axis=2)[0]
        both = w.op("Concat", past, new, axis=1)
        return w.op("Reshape", both, w.ints(0, 0, spec.num_kv_heads, spec.head_dim))

    def _stack(self, rows: list[str]) -> str:
        """K and V of a group's layers, interleaved as in the pool [B, S, 2·layers, row]."""
        w, spec = self._w, self._spec
        stacked = w.op("Concat", *rows, axis=2)
        stacked = w.op("Reshape", stacked, w.ints(0, 0, len(rows), spec.kv_dim))
        if padding := self._options.kv.row_elements - spec.kv_dim:
            stacked = w.op("Pad", stacked, w.ints(0, 0, 0, 0, 0, 0, 0, padding))
        return stacked

    def _logits(self, hidden: str, embedding: str) -> str:
        """Final norm and output matrix for the asked rows only: float32 [B, vocab]."""
        w, spec = self._w, self._spec
        flat = w.op("Reshape", hidden, w.ints(-1, spec.hidden_size))  # [B·S, hidden]
        asked = w.op("Gather", flat, "last", axis=0)
        asked = self._rms_norm("final_norm", asked, FINAL_NORM)
        head = embedding if spec.tie_embeddings else self._by_rows(LM_HEAD)
        # Gemm multiplies by the transpose, so a tied embedding stays one initializer.
        return self._to_float32(w.op("Gemm", asked, head, transB=1))

    def _mlp(self, layer: int, x: str) -> str:
        w = self._w
        gate = self._linear(x, layer, "mlp.gate_proj")
        silu = w.op("Mul", gate, w.op("Sigmoid", gate))
        up = self._linear(x, layer, "mlp.up_proj", factor=1 / self._options.mlp_scale)
        gated = w.op("Mul", silu, up)
        return self._linear(gated, layer, "mlp.down_proj")

    def _linear(self, x: str, layer: int, part: str, *, factor: float = 1) -> str:
        """A projection, its weights multiplied by a power of two."""
        name = layer_name(layer, part)
        stored = self._w.weight(name, self._load(name), is_transposed=True, factor=factor)
        return self._w.op("MatMul", x, stored)

    def _projected(self, x: str, layer: int, which: Literal["q", "k", "v"]) -> str:
        """q, k or v of every head, before rotation [B, S, heads·D]."""
        part = f"self_attn.{which}_proj"
        product = self._linear(x, layer, part)
        if not self._spec.qkv_bias:
            return product
        name = layer_name(layer, part, "bias")
        return self._w.op("Add", product, self._w.weight(name, self._load(name)))

    def _heads(self, x: str, layer: int, which: Literal["q", "k"]) -> str:
        """q or k by heads, normalised if the model does so [B, S, heads, D]."""
        w = self._w
        heads = w.op("Reshape", self._projected(x, layer, which), w.ints(0, 0, -1, self._head_dim))
        if not self._spec.qk_norm:
            return heads
        name = layer_name(layer, f"self_attn.{which}_norm")
        return self._rms_norm(f"{which}_norm", self._to_float32(heads), name)

    def _rotate(self, x: str, which: Literal["q", "k"]) -> str:
        """Rotary embedding of x [B, S, heads, D], rotate-half form."""
        w, half = self._w, self._head_dim // 2
        cos, sin = self._rotations[which]
        first, second = w.op_outputs("Split", 2, x, w.ints(half, half), axis=3)
        return w.op(
            "Concat",
            w.op("Sub", w.op("Mul", first, cos), w.op("Mul", second, sin)),
            w.op("Add", w.op("Mul", second, cos), w.op("Mul", first, sin)),
            axis=3,
        )

    def _rms_norm(self, island: str, x: str, name: str) -> str:
        """x / sqrt(mean(x²) + eps) · weight of a float32 x; the result has the model's dtype."""
        w = self._w
        weight = w.weight(name, self._load(name, np.dtype(np.float32)))
        with w.scope(island):
            square = w.op("Pow", x, w.constant(np.array(2, dtype=np.float32)))
            mean = w.op("ReduceMean", square, axes=[-1], keepdims=1)
            eps = w.constant(np.array(self._spec.rms_eps, dtype=np.float32))
            root = w.op("Sqrt", w.op("Add", mean, eps))
            normed = w.op("Mul", w.op("Div", x, root), weight)
        return self._to_model_dtype(normed)

    def _by_rows(self, name: str) -> str:
        """A table with a row for each token: by far the largest tensors, so never held whole."""
        shape = (self._spec.vocab_size, self._spec.hidden_size)
        blocks = (_converted(name, rows, self._dtype) for rows in self._source.row_blocks(name))
        return self._w.weight_rows(name, self._dtype, shape, blocks)

    def _load(self, name: str, dtype: np.dtype[Any] | None = None) -> Array:
        """A weight in the model's dtype, or in another one."""
        return _converted(name, self._source.get(name), dtype or self._dtype)

    def _to_float32(self, value: str) -> str:
        return self._cast(value, "float32")

    def _to_model_dtype(self, value: str) -> str:
        return self._cast(value, self._options.dtype)

    def _cast(self, value: str, dtype: Literal["float16", "float32"]) -> str:
        if self._options.dtype == "float32":
            return value
        return self._w.op("Cast", value, to=ONNX_DTYPES[dtype])


def _converted(name: str, stored: Array, dtype: np.dtype[Any]) -> Array:
    """The values in `dtype`.

    Raises:
        ConversionError: they are no numbers, or `dtype` cannot hold them.
    """
    if not np.isfinite(stored).all():
        raise ConversionError(f"{name} holds NaN or infinity: the checkpoint is damaged")
    with np.errstate(over="ignore"):
        weight: Array = stored.astype(dtype, copy=False)
    if weight is not stored and not np.isfinite(weight).all():
        raise ConversionError(
            f"{name} has values that {dtype.name} cannot hold; convert with --dtype fp32"
        )
    return weight
