"""Llama as a portable ONNX graph with a paged KV pool as input.

Its inputs and outputs are the contract in `docs/design.md`.

One graph serves prefill and decode, every gear and both targets. It is built from elementary ops
only; `docs/kernels.md` says which Ascend kernel each becomes. Shapes in comments: B batch, S fed
tokens, P past slots, T = P + S, H query heads, G key-value heads, D head size.

The graph never writes the pool: it returns the new KV, which the host appends.
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


@dataclass(frozen=True)
class GraphOptions:
    """What of the graph the model does not fix.

    Attributes:
        dtype: of weights and arithmetic outside norms and softmax, which are float32.
        index_dtype: of ids, positions and slots.
        max_model_len: rows of the rotary tables.
    """

    dtype: Literal["float16", "float32"]
    index_dtype: Literal["int32", "int64"]
    kv: KvSpec
    max_model_len: int


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
        _LlamaGraph(writer, source, options).build(progress)
        return writer.weights_digest()


class _LlamaGraph:
    """The state of one build: the writer, and the values every layer uses."""

    def __init__(self, writer: OnnxWriter, source: WeightSource, options: GraphOptions) -> None:
        self._w = writer
        self._source = source
        self._spec: ModelSpec = source.spec
        self._options = options
        self._dtype = np.dtype(options.dtype)
        self._index_dtype = np.dtype(options.index_dtype)

    def build(self, progress: Progress) -> None:
        """Emit the whole graph."""
        w, spec, kv = self._w, self._spec, self._options.kv
        contract = GraphContract(kv, self._options.index_dtype, spec.vocab_size)
        w.inputs(contract.inputs)
        embedding = w.weight(EMBEDDING, self._load(EMBEDDING))
        self._prepare_shared()
        hidden = w.op("Gather", embedding, "input_ids", axis=0)  # [B, S, hidden]
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
        """cos, sin, their scaled twins for q, and the mask: once a graph, not once a layer."""
        w, spec = self._w, self._spec
        cos, sin = rope_tables(spec, self._options.max_model_len)
        # The middle axis broadcasts over heads: [B, S, 1, D/2].
        wide = [
            w.op("Gather", w.table(name, table[:, None, :]), "position_ids", axis=0)
            for name, table in (("rope.cos", cos), ("rope.sin", sin))
        ]
        # Scaling cos and sin scales the rotated q: one Mul a graph instead of one a layer, and QKᵀ
        # stays small enough for float16.
        scale = w.constant(np.array(spec.head_dim**-0.5, dtype=np.float32))
        self._k_cos, self._k_sin = (self._to_model_dtype(table) for table in wide)
        self._q_cos, self._q_sin = (
            self._to_model_dtype(w.op("Mul", table, scale)) for table in wide
        )
        self._mask = self._to_float32("mask")

    def _layer(self, layer: int, hidden: str) -> tuple[str, str, str]:
        """One decoder layer; returns the hidden state and its new K and V [B, S, kv_dim]."""
        w = self._w
        normed = self._rms_norm(hidden, layer_name(layer, "input_layernorm"))
        query = self._rotate(self._heads(self._linear(normed, layer, "self_attn.q_proj")), "q")
        key = self._rotate(self._heads(self._linear(normed, layer, "self_attn.k_proj")), "k")
        key = w.op("Reshape", key, w.ints(0, 0, self._spec.kv_dim))
        value = self._linear(normed, layer, "self_attn.v_proj")
        mixed = self._attention(layer, query, key, value)
        hidden = w.op("Add", hidden, self._linear(mixed, layer, "self_attn.o_proj"))
        normed = self._rms_norm(hidden, layer_name(layer, "post_attention_layernorm"))
        return w.op("Add", hidden, self._mlp(layer, normed)), key, value

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
        scores = w.op("Add", self._to_float32(scores), self._mask)
        shares = self._to_model_dtype(w.op("Softmax", scores, axis=-1))
        shares = w.op("Reshape", shares, w.ints(0, kv_heads, -1, 0))
        mixed = w.op("MatMul", shares, values)  # [B, G, H/G·S, D]
        mixed = w.op("Reshape", mixed, w.ints(0, heads, -1, head_dim))
        mixed = w.op("Transpose", mixed, perm=[0, 2, 1, 3])  # [B, S, H, D]
        return w.op("Reshape", mixed, w.ints(0, 0, heads * head_dim))

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
        asked = self._rms_norm(w.op("Gather", flat, "last", axis=0), FINAL_NORM)
        head = embedding if spec.tie_embeddings else w.weight(LM_HEAD, self._load(LM_HEAD))
        # Gemm multiplies by the transpose, so a tied embedding stays one initializer.
        return self._to_float32(w.op("Gemm", asked, head, transB=1))

    def _mlp(self, layer: int, x: str) -> str:
        w = self._w
        gate = self._linear(x, layer, "mlp.gate_proj")
        silu = w.op("Mul", gate, w.op("Sigmoid", gate))
        gated = w.op("Mul", silu, self._linear(x, layer, "mlp.up_proj"))
        return self._linear(gated, layer, "mlp.down_proj")

    def _linear(self, x: str, layer: int, part: str) -> str:
        name = layer_name(layer, part)
        return self._w.op("MatMul", x, self._w.weight(name, self._load(name), is_transposed=True))

    def _heads(self, x: str) -> str:
        """[B, S, heads·D] → [B, S, heads, D]."""
        return self._w.op("Reshape", x, self._w.ints(0, 0, -1, self._spec.head_dim))

    def _rotate(self, x: str, which: Literal["q", "k"]) -> str:
        """Rotary embedding of x [B, S, heads, D], rotate-half form."""
        w, half = self._w, self._spec.head_dim // 2
        cos, sin = (self._q_cos, self._q_sin) if which == "q" else (self._k_cos, self._k_sin)
        first, second = w.op_outputs("Split", 2, x, w.ints(half, half), axis=3)
        return w.op(
            "Concat",
            w.op("Sub", w.op("Mul", first, cos), w.op("Mul", second, sin)),
            w.op("Add", w.op("Mul", second, cos), w.op("Mul", first, sin)),
            axis=3,
        )

    def _rms_norm(self, x: str, name: str) -> str:
        """x / sqrt(mean(x²) + eps) · weight, in float32 whatever the model's dtype."""
        w = self._w
        wide = self._to_float32(x)
        square = w.op("Pow", wide, w.constant(np.array(2, dtype=np.float32)))
        mean = w.op("ReduceMean", square, axes=[-1], keepdims=1)
        eps = w.constant(np.array(self._spec.rms_eps, dtype=np.float32))
        root = w.op("Sqrt", w.op("Add", mean, eps))
        weight = w.weight(name, self._load(name, np.dtype(np.float32)))
        return self._to_model_dtype(w.op("Mul", w.op("Div", wide, root), weight))

    def _load(self, name: str, dtype: np.dtype[Any] | None = None) -> Array:
        """A weight in the model's dtype, or in another one."""
        dtype = dtype or self._dtype
        stored = self._source.get(name)
        if not np.isfinite(stored).all():
            raise ConversionError(f"{name} holds NaN or infinity: the checkpoint is damaged")
        with np.errstate(over="ignore"):
            weight: Array = stored.astype(dtype, copy=False)
        if weight is not stored and not np.isfinite(weight).all():
            raise ConversionError(
                f"{name} has values that {dtype.name} cannot hold; convert with --dtype fp32"
            )
        return weight

    def _to_float32(self, value: str) -> str:
        return self._cast(value, "float32")

    def _to_model_dtype(self, value: str) -> str:
        return self._cast(value, self._options.dtype)

    def _cast(self, value: str, dtype: Literal["float16", "float32"]) -> str:
        if self._options.dtype == "float32":
            return value
        return self._w.op("Cast", value, to=ONNX_DTYPES[dtype])
