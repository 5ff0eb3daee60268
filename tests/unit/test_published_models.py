"""Published models by their `config.json`: family, numbers, and parameters to the last one.

Source: `config.json` and number of parameters of each model as published on huggingface.co; of the
former, what says how the model computes.
"""

from __future__ import annotations

from math import prod
from typing import Any

import pytest

from om_models.config_json import spec_from_config
from om_models.plan import ConvertOptions, make_plan
from om_models.weights import expected_shapes
from runtime_cache.errors import ConversionError

LLAMA3_ROPE = {
    "factor": 32.0,
    "high_freq_factor": 4.0,
    "low_freq_factor": 1.0,
    "original_max_position_embeddings": 8192,
    "rope_type": "llama3",
}


def config(
    architecture: str, sizes: tuple[int, ...], eps: float = 1e-5, **others: Any
) -> dict[str, Any]:
    """Sizes: vocabulary, hidden, intermediate, layers, query heads, key-value heads, positions."""
    names = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers")
    names += ("num_attention_heads", "num_key_value_heads", "max_position_embeddings")
    fields = {"architectures": [f"{architecture}ForCausalLM"], "hidden_act": "silu"}
    return fields | dict(zip(names, sizes, strict=True)) | {"rms_norm_eps": eps} | others


def qwen(architecture: str, sizes: tuple[int, ...], **others: Any) -> dict[str, Any]:
    fields = {"rope_theta": 1e6, "use_sliding_window": False, **others}
    return config(architecture, (151936, *sizes), 1e-6, **fields)


LLAMA_2 = (32000, 4096, 11008, 32, 32, 32, 4096)
LLAMA_3 = (128256, 4096, 14336, 32, 32, 8, 8192)
LLAMA_32 = (128256, 2048, 8192, 16, 32, 8, 131072)
MISTRAL = (4096, 14336, 32, 32, 8, 32768)
QWEN3_06 = (1024, 3072, 28, 16, 8, 40960)
#: Name → what `config.json` says, parameters.
MODELS: dict[str, tuple[dict[str, Any], int]] = {
    "Llama-2-7b": (config("Llama", LLAMA_2, rope_scaling=None), 6_738_415_616),
    "Meta-Llama-3-8B": (config("Llama", LLAMA_3, rope_theta=500000.0), 8_030_261_248),
    "Llama-3.2-1B": (
        config(
            "Llama",
            LLAMA_32,
            head_dim=64,
            rope_theta=500000.0,
            rope_scaling=LLAMA3_ROPE,
            tie_word_embeddings=True,
        ),
        1_235_814_400,
    ),
    "TinyLlama-1.1B": (
        config("Llama", (32000, 2048, 5632, 22, 32, 4, 2048), rope_theta=10000.0),
        1_100_048_384,
    ),
    "SmolLM2-135M": (
        config(
            "Llama",
            (49152, 576, 1536, 30, 9, 3, 8192),
            rope_theta=100000,
            rope_interleaved=False,
            tie_word_embeddings=True,
        ),
        134_515_008,
    ),
    "Mistral-7B-v0.1": (
        config("Mistral", (32000, *MISTRAL), sliding_window=4096, rope_theta=10000.0),
        7_241_732_096,
    ),
    "Mistral-7B-v0.3": (
        config("Mistral", (32768, *MISTRAL), sliding_window=None, rope_theta=1e6),
        7_248_023_552,
    ),
    "Qwen2.5-0.5B": (
        qwen(
            "Qwen2",
            (896, 4864, 24, 14, 2, 32768),
            sliding_window=32768,
            max_window_layers=24,
            tie_word_embeddings=True,
        ),
        494_032_768,
    ),
    "Qwen2.5-7B": (
        qwen(
            "Qwen2",
            (3584, 18944, 28, 28, 4, 131072),
            sliding_window=131072,
            max_window_layers=28,
            vocab_size=152064,
        ),
        7_615_616_512,
    ),
    "Qwen3-0.6B": (
        qwen(
            "Qwen3",
            QWEN3_06,
            head_dim=128,
            attention_bias=False,
            sliding_window=None,
            max_window_layers=28,
            tie_word_embeddings=True,
        ),
        596_049_920,
    ),
}


@pytest.mark.parametrize("name", MODELS)
def test_a_published_model_is_known_to_its_last_parameter(name: str):
    fields, params = MODELS[name]
    spec = spec_from_config(fields)
    assert sum(prod(shape) for shape in expected_shapes(spec).values()) == params
    assert spec.max_context == (4096 if name == "Mistral-7B-v0.1" else spec.max_position)
    assert make_plan(spec, ConvertOptions("ascend", "Ascend310P3")).gears.max_model_len == 2048


def test_the_first_mistral_only_up_to_its_window():
    spec = spec_from_config(MODELS["Mistral-7B-v0.1"][0])
    options = {"target": "ascend", "soc_version": "Ascend910B2"}
    assert make_plan(spec, ConvertOptions(**options, context=4096)).gears.max_model_len == 4096
    with pytest.raises(ConversionError, match=r"sliding window of 4096: .* --context 4096 or less"):
        make_plan(spec, ConvertOptions(**options, context=8192))


@pytest.mark.parametrize(
    "name", ["Gemma2", "Phi3", "Qwen2Moe", "Qwen3Moe", "Mixtral", "Cohere", "SmolLM3", "Olmo2"]
)
def test_kin_that_computes_otherwise_is_refused(name: str):
    with pytest.raises(ConversionError, match=f"architecture {name}ForCausalLM is not known"):
        spec_from_config(config(name, LLAMA_3))
