"""What a model of a known family is, in numbers. Pure.

Source of the field names: Hugging Face `config.json` of the families in `om_models.families`.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from runtime_cache.errors import ConversionError

FamilyName = Literal["llama", "mistral", "qwen2", "qwen3"]


class RopeScaling(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How rotary frequencies are stretched beyond the trained context.

    Attributes:
        kind: `linear` divides every frequency by `factor`; `llama3` does so by wavelength.
    """

    kind: Literal["linear", "llama3"]
    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int = 8192


class ModelSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Dimensions and constants of one model.

    Attributes:
        num_heads: query heads; a multiple of `num_kv_heads`.
        head_dim: need not equal `hidden_size / num_heads`; even.
        max_position: positions the checkpoint was made for.
        tie_embeddings: the output matrix is the embedding's transpose.
        family: whose checkpoint it is; how the graph computes is said by the fields below.
        qkv_bias: q, k and v have a bias each (Qwen2).
        qk_norm: each head of q and k is normalised before it is rotated (Qwen3).
        sliding_window: a token attends to so many tokens, itself included; None: to all before it.
            The graph always attends to all, so a longer context is refused (`check_context`).
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_eps: float
    rope_theta: float
    max_position: int
    tie_embeddings: bool
    rope_scaling: RopeScaling | None = None
    family: FamilyName = "llama"
    qkv_bias: bool = False
    qk_norm: bool = False
    sliding_window: int | None = None

    @property
    def kv_dim(self) -> int:
        """Elements of one layer's K (or V) of one token."""
        return self.num_kv_heads * self.head_dim

    @property
    def max_context(self) -> int:
        """Tokens up to which the graph computes what the model does."""
        return min(self.max_position, self.sliding_window or self.max_position)

    def identity(self) -> dict[str, Any]:
        """What of the spec decides what a row of KV means, for the bundle's digest.

        The digest of a model must not change with this class: fields that came after the first
        bundles appear only where they are set. So the family, which names a checkpoint's origin, is
        always written as the one there was; a Mistral is the same model from a GGUF, which calls
        it a Llama. The window is no part, since no context exceeds it.
        """
        fields: dict[str, Any] = msgspec.to_builtins(self)
        added = {name: fields.pop(name) for name in ("qkv_bias", "qk_norm", "sliding_window")}
        flags = {name: True for name in ("qkv_bias", "qk_norm") if added[name]}
        return fields | {"family": "llama"} | flags


def check_context(spec: ModelSpec, context: int) -> None:
    """Refuse a context in which the graph would not compute what the model does.

    Args:
        context: the largest number of tokens of a sequence.

    Raises:
        ConversionError: it exceeds the model's positions or its attention window.
    """
    if context > spec.max_position:
        raise ConversionError(
            f"a context of {context} tokens exceeds the model's {spec.max_position} positions"
        )
    if context > spec.max_context:
        raise ConversionError(
            f"a context of {context} tokens exceeds the model's sliding window of"
            f" {spec.max_context}: each token attends to so many tokens only, and the graph attends"
            f" to all; convert with --context {spec.max_context} or less"
        )
