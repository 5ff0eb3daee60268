"""A tiny model with the large activations of models trained in bfloat16, and a long past for it.

Such models carry values of thousands in a few channels of the residual stream, the same for every
token, and learn norm weights that bring the other channels back to about 1. Here channel `CHANNEL`
is 10 000 from the embedding on, and each attention adds 60 000 to it: beyond float16 after the
first. Everything is arranged so that each protection of the float16 graph is needed in each layer:

- the query heads of key-value head 0 look at one token of the past alone, with a product of q and
  k that float16 holds only because q is scaled before;
- those of key-value head 1 look at 4096 tokens alike, whose float16 sum of exponentials would stop
  at 2048;
- where q and k are normalised, they are so large before that their squares leave float16.
"""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from om_models.reference import KvCache
from om_models.spec import ModelSpec
from om_models.weights import EMBEDDING, FINAL_NORM
from tests.support.tiny import random_weights, tiny_spec

FloatArray = npt.NDArray[np.float32]

CHANNEL = 5
EMBEDDED, ADDED = 10_000.0, 60_000.0
NUM_PAST = 4096
#: The slowest rotary pair of a head: turned by less than 0.01 within the context.
SLOWEST, SLOWEST_PARTNER = 7, 15
#: The channel after each norm, and what the other channels are in the stream.
NORMED, OTHERS = 4.0, 11.0
SINK_QUERY, SINK_KEY = 80.0, 1000.0

_BASE = tiny_spec(head_dim=16, tie_embeddings=False, rope_theta=1e7, max_position=2 * NUM_PAST)
SPECS = {
    "llama": _BASE,
    "qwen2": msgspec.structs.replace(_BASE, family="qwen2", qkv_bias=True),
    "qwen3": msgspec.structs.replace(_BASE, family="qwen3", qk_norm=True),
}


def outlier_weights(spec: ModelSpec, seed: int = 0) -> dict[str, FloatArray]:
    """Weights that float16 holds exactly, but for the norms', which the graph keeps in float32."""
    weights = random_weights(spec, seed)
    weights[EMBEDDING] *= OTHERS * np.sqrt(spec.hidden_size)
    weights[EMBEDDING][:, CHANNEL] = EMBEDDED
    outlier = EMBEDDED
    for layer in range(spec.num_layers):
        names = {n.split(".", 3)[3]: n for n in weights if n.startswith(f"model.layers.{layer}.")}
        parts = {part: weights[name] for part, name in names.items()}
        _set_norm(parts["input_layernorm.weight"], outlier)
        _shape_attention(parts, spec)
        outlier += ADDED
        _set_norm(parts["post_attention_layernorm.weight"], outlier)
        _shape_mlp(parts)
    _set_norm(weights[FINAL_NORM], outlier)
    weights["lm_head.weight"][:, CHANNEL] = 0
    rounded = {n: w.astype(np.float16).astype(np.float32) for n, w in weights.items()}
    return {name: weights[name] if "norm" in name else rounded[name] for name in weights}


def _set_norm(weight: FloatArray, outlier: float) -> None:
    """So that the channel becomes `NORMED` and the others about 1."""
    root = outlier / np.sqrt(len(weight))
    weight *= root / OTHERS
    weight[CHANNEL] = NORMED * root / outlier


def _shape_attention(parts: dict[str, FloatArray], spec: ModelSpec) -> None:
    query, key = parts["self_attn.q_proj.weight"], parts["self_attn.k_proj.weight"]
    value, output = parts["self_attn.v_proj.weight"], parts["self_attn.o_proj.weight"]
    for weight in (query, key, value):
        weight[:, CHANNEL] = 0
    _look_at_the_sink(parts, spec)
    # The first element of every value is the same for all tokens, and is what is added.
    value[:: spec.head_dim] = 0
    value[:: spec.head_dim, CHANNEL] = 2
    if spec.qkv_bias:
        parts["self_attn.v_proj.bias"][:: spec.head_dim] = 0
    output *= OTHERS
    output[CHANNEL] = 0
    output[:, :: spec.head_dim] = 0
    output[CHANNEL, :: spec.head_dim] = ADDED / (2 * NORMED) / spec.num_heads


def _look_at_the_sink(parts: dict[str, FloatArray], spec: ModelSpec) -> None:
    """The queries of key-value head 0 are `SINK_QUERY` in the slowest pair's first element."""
    query = parts["self_attn.q_proj.weight"]
    raw = SINK_QUERY
    if spec.qk_norm:
        raw = 2000.0  # then normalised to the root of the head's size
        query *= 500
        parts["self_attn.k_proj.weight"][...] *= 500
        parts["self_attn.q_norm.weight"][SLOWEST] = SINK_QUERY / np.sqrt(spec.head_dim)
    for head in range(spec.num_heads // spec.num_kv_heads):
        rows = query[head * spec.head_dim :][: spec.head_dim]
        rows[[SLOWEST, SLOWEST_PARTNER]] = 0
        rows[SLOWEST, CHANNEL] = raw / NORMED
        if spec.qk_norm:
            rows[:SLOWEST] /= 100
            rows[SLOWEST + 1 : SLOWEST_PARTNER] /= 100
        if spec.qkv_bias:
            parts["self_attn.q_proj.bias"][head * spec.head_dim :][: spec.head_dim] = 0


def _shape_mlp(parts: dict[str, FloatArray]) -> None:
    for part in ("gate", "up"):
        parts[f"mlp.{part}_proj.weight"][:, CHANNEL] = 0
    parts["mlp.down_proj.weight"][...] *= OTHERS
    parts["mlp.down_proj.weight"][CHANNEL] = 0


def long_past(spec: ModelSpec, seed: int = 0) -> KvCache:
    """The KV of `NUM_PAST` tokens that nobody computed; float16 holds it exactly."""
    random = np.random.RandomState(seed)
    shape = (NUM_PAST, spec.num_kv_heads, spec.head_dim)
    keys = [_half(random.standard_normal(shape) / 16) for _ in range(spec.num_layers)]
    values = [_half(random.standard_normal(shape) + 1) for _ in range(spec.num_layers)]
    for key, value in zip(keys, values, strict=True):
        key[NUM_PAST // 2, 0, SLOWEST] = SINK_KEY
        value[:, :, 0] = 2 * NORMED
    return KvCache(keys, values)


def _half(values: npt.NDArray[Any]) -> FloatArray:
    return values.astype(np.float16).astype(np.float32)
