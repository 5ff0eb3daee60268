"""What a Llama-type model is, in numbers. Pure.

Source of the field names: Hugging Face `config.json` of `LlamaForCausalLM`.
"""

from __future__ import annotations

from typing import Literal

import msgspec


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
        family: the architecture; only `llama` so far.
        num_heads: query heads; a multiple of `num_kv_heads`.
        head_dim: need not equal `hidden_size / num_heads`; even.
        max_position: positions the checkpoint was made for.
        tie_embeddings: the output matrix is the embedding's transpose.
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
    family: Literal["llama"] = "llama"

    @property
    def kv_dim(self) -> int:
        """Elements of one layer's K (or V) of one token."""
        return self.num_kv_heads * self.head_dim
