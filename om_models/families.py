"""The model families whose arithmetic the graph computes, and where each writes what. Pure.

Llama 2 and 3, TinyLlama and SmolLM2 are all the family `llama`. A family that is not in this table
is refused by name: a model that only resembles one of these would answer nonsense without a sign.

Source of the differences: transformers 5.24 `models/{llama,mistral,qwen2,qwen3}`; of the names in
GGUF files: llama.cpp `gguf-py/gguf/constants.py` and `convert_hf_to_gguf.py`.
"""

from __future__ import annotations

from dataclasses import dataclass

from om_models.spec import FamilyName


@dataclass(frozen=True, slots=True)
class Family:
    """One family.

    Attributes:
        architecture: in `architectures` of `config.json`.
        gguf: `general.architecture` of its GGUF files; None: they are written as Llama's.
        qkv_bias: q, k and v always have a bias, which `config.json` does not say.
        qk_norm: heads of q and k are normalised before they are rotated.
        head_dim: where `config.json` says none; None: hidden size / query heads.
        permutes_in_gguf: llama.cpp's converter stores q and k for interleaved rotary pairs.
        window_flag: the key of `config.json` that, if set, makes tokens attend to `sliding_window`
            tokens only; None: the family's code knows no windows.
    """

    name: FamilyName
    architecture: str
    gguf: str | None
    qkv_bias: bool = False
    qk_norm: bool = False
    head_dim: int | None = None
    permutes_in_gguf: bool = False
    window_flag: str | None = None


FAMILIES: dict[FamilyName, Family] = {
    "llama": Family("llama", "LlamaForCausalLM", "llama", permutes_in_gguf=True),
    "mistral": Family("mistral", "MistralForCausalLM", None, window_flag="sliding_window"),
    "qwen2": Family(
        "qwen2", "Qwen2ForCausalLM", "qwen2", qkv_bias=True, window_flag="use_sliding_window"
    ),
    "qwen3": Family(
        "qwen3",
        "Qwen3ForCausalLM",
        "qwen3",
        qk_norm=True,
        head_dim=128,
        window_flag="use_sliding_window",
    ),
}
KNOWN_ARCHITECTURES = tuple(family.architecture for family in FAMILIES.values())
KNOWN_GGUF_ARCHITECTURES = tuple(family.gguf for family in FAMILIES.values() if family.gguf)


def family_of_config(name: object) -> Family | None:
    """The family of an architecture or a `model_type` of `config.json`."""
    return next((f for f in FAMILIES.values() if name in (f.architecture, f.name)), None)


def family_of_gguf(architecture: object) -> Family | None:
    """The family of a GGUF's `general.architecture`."""
    known = (family for family in FAMILIES.values() if family.gguf is not None)
    return next((family for family in known if family.gguf == architecture), None)
