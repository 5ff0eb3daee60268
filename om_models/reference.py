"""The model in numpy, float32: the oracle the ONNX graph is tested against. Pure.

Written to be read beside the paper, not to be fast: one sequence at a time, a growing KV cache, no
padding, no paging. It is itself pinned to Hugging Face transformers by `tests/data/llama_tiny`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from om_models.rope import rope_tables
from om_models.spec import ModelSpec
from om_models.weights import EMBEDDING, FINAL_NORM, LM_HEAD, layer_name

FloatArray = npt.NDArray[np.float32]
Ids = npt.NDArray[np.integer]


@dataclass
class KvCache:
    """KV of one sequence: per layer K (rotated) and V, float32 [num_tokens, kv_heads, head_dim]."""

    keys: list[FloatArray] = field(default_factory=list)
    values: list[FloatArray] = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        """Tokens already computed; the position of the next one."""
        return len(self.keys[0]) if self.keys else 0

    def append(self, layer: int, key: FloatArray, value: FloatArray) -> None:
        """Add the KV of newly fed tokens to one layer."""
        if layer == len(self.keys):
            self.keys.append(key)
            self.values.append(value)
            return
        self.keys[layer] = np.concatenate([self.keys[layer], key])
        self.values[layer] = np.concatenate([self.values[layer], value])

    def copy(self) -> KvCache:
        """A cache that grows on its own from here."""
        return KvCache(list(self.keys), list(self.values))


class ReferenceLlama:
    """The model: `forward` is all there is to it."""

    def __init__(self, spec: ModelSpec, weights: Mapping[str, FloatArray]) -> None:
        self.spec = spec
        self._weights = weights

    def forward(self, token_ids: Ids, cache: KvCache) -> FloatArray:
        """Logits after each fed token [num_fed, vocab]; the cache grows by the fed tokens."""
        first = cache.num_tokens
        cos, sin = rope_tables(self.spec, first + len(token_ids))
        hidden = self._weights[EMBEDDING][token_ids]
        for layer in range(self.spec.num_layers):
            normed = self._rms_norm(hidden, layer_name(layer, "input_layernorm"))
            hidden = hidden + self._attention(normed, layer, cache, cos[first:], sin[first:])
            normed = self._rms_norm(hidden, layer_name(layer, "post_attention_layernorm"))
            hidden = hidden + self._mlp(normed, layer)
        head = EMBEDDING if self.spec.tie_embeddings else LM_HEAD
        return self._linear(self._rms_norm(hidden, FINAL_NORM), head)

    def greedy(self, prompt: Ids, num_tokens: int) -> list[int]:
        """The `num_tokens` most probable continuations, one after the other."""
        cache, answer = KvCache(), []
        fed = np.asarray(prompt)
        for _ in range(num_tokens):
            answer.append(int(self.forward(fed, cache)[-1].argmax()))
            fed = np.array(answer[-1:])
        return answer

    def _attention(
        self, x: FloatArray, layer: int, cache: KvCache, cos: FloatArray, sin: FloatArray
    ) -> FloatArray:
        spec, num_fed = self.spec, len(x)
        q, k, v = (self._heads(x, layer, part) for part in "qkv")
        cache.append(layer, rotate(k, cos, sin), v)
        group = spec.num_heads // spec.num_kv_heads
        keys = cache.keys[layer].repeat(group, axis=1)
        values = cache.values[layer].repeat(group, axis=1)
        scores = np.einsum("shd,thd->hst", rotate(q, cos, sin), keys) / np.sqrt(
            np.float32(spec.head_dim)
        )
        position = len(keys) - num_fed + np.arange(num_fed)
        future = np.arange(len(keys)) > position[:, None]
        scores = softmax(np.where(future, np.float32(-np.inf), scores))
        mixed = np.einsum("hst,thd->shd", scores, values).reshape(num_fed, -1)
        return self._linear(mixed, layer_name(layer, "self_attn.o_proj"))

    def _heads(self, x: FloatArray, layer: int, part: str) -> FloatArray:
        """q, k or v of the fed tokens before rotation [num_fed, heads, head_dim]."""
        heads = self._linear(x, layer_name(layer, f"self_attn.{part}_proj"))
        if self.spec.qkv_bias:
            heads = heads + self._weights[layer_name(layer, f"self_attn.{part}_proj", "bias")]
        heads = heads.reshape(len(x), -1, self.spec.head_dim)
        if self.spec.qk_norm and part != "v":
            heads = self._rms_norm(heads, layer_name(layer, f"self_attn.{part}_norm"))
        return heads

    def _mlp(self, x: FloatArray, layer: int) -> FloatArray:
        gate = self._linear(x, layer_name(layer, "mlp.gate_proj"))
        up = self._linear(x, layer_name(layer, "mlp.up_proj"))
        return self._linear(silu(gate) * up, layer_name(layer, "mlp.down_proj"))

    def _linear(self, x: FloatArray, name: str) -> FloatArray:
        product: FloatArray = x @ self._weights[name].T
        return product

    def _rms_norm(self, x: FloatArray, name: str) -> FloatArray:
        variance = np.mean(x * x, axis=-1, keepdims=True)
        normed: FloatArray = x / np.sqrt(variance + np.float32(self.spec.rms_eps))
        return normed * self._weights[name]


def rotate(x: FloatArray, cos: FloatArray, sin: FloatArray) -> FloatArray:
    """Rotary embedding, rotate-half form: x [n, heads, head_dim], cos/sin [n, head_dim / 2]."""
    first, second = np.split(x, 2, axis=-1)
    cos, sin = cos[:, None], sin[:, None]
    return np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


def silu(x: FloatArray) -> FloatArray:
    """x · sigmoid(x), written with tanh so that no exponential overflows."""
    silued: FloatArray = x * (np.float32(0.5) * (1 + np.tanh(np.float32(0.5) * x)))
    return silued


def softmax(x: FloatArray) -> FloatArray:
    """Softmax over the last axis."""
    exponentials = np.exp(x - x.max(axis=-1, keepdims=True))
    shares: FloatArray = exponentials / exponentials.sum(axis=-1, keepdims=True)
    return shares
