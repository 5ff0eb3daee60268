"""Makes `llama_tiny/*.json`: what Hugging Face transformers computes for tiny seeded models.

Run in an environment of its own, from the project's root:

    python -m venv ../hf-venv && ../hf-venv/bin/pip install torch==2.13.0 transformers==5.24.0 \
        --extra-index-url https://download.pytorch.org/whl/cpu
    ../hf-venv/bin/pip install -e '.[convert]'
    ../hf-venv/bin/python -m tests.data.make_llama_tiny

The weights are not stored: `tests.support.tiny.random_weights(spec, seed)` makes the same bits on
every machine. All is float32 with the plain ("eager") attention.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

from om_models.spec import ModelSpec, RopeScaling
from tests.support.tiny import FAMILY_SPECS, config_json, random_weights, tiny_spec

DIRECTORY = Path(__file__).with_name("llama_tiny")
PROMPT_TOKENS = 48
LOGIT_POSITIONS = (0, 17, PROMPT_TOKENS - 1)
NUM_GREEDY = 32

CASES: dict[str, tuple[int, ModelSpec]] = {
    "mha_untied": (1, tiny_spec(num_kv_heads=4, tie_embeddings=False)),
    "gqa_tied": (2, tiny_spec(num_layers=3)),
    "mqa_odd_vocab": (
        3,
        tiny_spec(hidden_size=33, num_heads=3, num_kv_heads=1, head_dim=10, vocab_size=263),
    ),
    "wide_heads": (4, tiny_spec(head_dim=16, tie_embeddings=False, rms_eps=1e-6)),
    "llama31_rope": (
        5,
        tiny_spec(
            head_dim=16,
            rope_theta=500000.0,
            # Small numbers, so that 80 tokens reach every branch of the formula.
            rope_scaling=RopeScaling(
                kind="llama3",
                factor=8.0,
                low_freq_factor=1.0,
                high_freq_factor=4.0,
                original_max_position=32,
            ),
        ),
    ),
    "linear_rope": (6, tiny_spec(rope_scaling=RopeScaling(kind="linear", factor=4.0))),
    # Shapes in small of SmolLM2 (three query heads a key-value head, tied) and TinyLlama.
    "smollm2": (
        7,
        tiny_spec(hidden_size=48, num_heads=6, num_kv_heads=2, rope_theta=100000.0),
    ),
    "tinyllama": (8, tiny_spec(num_heads=8, num_kv_heads=1, head_dim=4, tie_embeddings=False)),
    "mistral": (9, FAMILY_SPECS["mistral"]),
    # As many tokens as the window holds: up to there it makes no difference.
    "mistral_window": (
        14,
        tiny_spec(family="mistral", sliding_window=PROMPT_TOKENS + NUM_GREEDY),
    ),
    "qwen2": (10, FAMILY_SPECS["qwen2"]),
    "qwen2_untied": (
        11,
        tiny_spec(family="qwen2", qkv_bias=True, num_kv_heads=4, tie_embeddings=False),
    ),
    "qwen2_window": (
        15,
        tiny_spec(family="qwen2", qkv_bias=True, sliding_window=PROMPT_TOKENS + NUM_GREEDY),
    ),
    "qwen3": (12, FAMILY_SPECS["qwen3"]),
    "qwen3_untied": (
        13,
        tiny_spec(family="qwen3", qk_norm=True, num_kv_heads=1, tie_embeddings=False),
    ),
}


def main() -> None:
    """Write every case."""
    DIRECTORY.mkdir(exist_ok=True)
    for name, (seed, spec) in CASES.items():
        text = json.dumps(make_case(seed, spec), separators=(",", ":"))
        (DIRECTORY / f"{name}.json").write_text(text + "\n", "utf-8")


@torch.no_grad()
def make_case(seed: int, spec: ModelSpec) -> dict[str, Any]:
    """Logits at a few positions of a random prompt, and the greedy continuation."""
    model = load(spec, seed)
    prompt = np.random.RandomState(seed).randint(0, spec.vocab_size, PROMPT_TOKENS)
    logits = model(torch.tensor(prompt[None])).logits[0]
    tokens, margins = greedy(model, prompt.tolist(), NUM_GREEDY)
    return {
        "made_by": {"torch": torch.__version__, "transformers": transformers.__version__},
        "seed": seed,
        "config": config_json(spec),
        "config_as_saved": saved_config(model),
        "prompt": prompt.tolist(),
        "logits": {str(i): rounded(logits[i]) for i in LOGIT_POSITIONS},
        "greedy": tokens,
        "margins": margins,
    }


def load(spec: ModelSpec, seed: int) -> transformers.PreTrainedModel:
    """The model of transformers with our seeded weights."""
    config = transformers.AutoConfig.for_model(**config_json(spec))
    make = transformers.AutoModelForCausalLM.from_config
    model = make(config, attn_implementation="eager").eval()
    weights = {name: torch.tensor(value) for name, value in random_weights(spec, seed).items()}
    if spec.tie_embeddings:
        weights["lm_head.weight"] = weights["model.embed_tokens.weight"]
    model.load_state_dict(weights)
    return model


@torch.no_grad()
def greedy(
    model: transformers.PreTrainedModel, prompt: list[int], count: int
) -> tuple[list[int], list[float]]:
    """Greedy tokens and the lead of each over the second best, with the model's own KV cache."""
    tokens: list[int] = []
    margins: list[float] = []
    cache, fed = None, prompt
    for _ in range(count):
        output = model(torch.tensor([fed]), past_key_values=cache, use_cache=True)
        cache = output.past_key_values
        best = output.logits[0, -1].topk(2)
        tokens.append(int(best.indices[0]))
        margins.append(round(float(best.values[0] - best.values[1]), 5))
        fed = tokens[-1:]
    return tokens, margins


def saved_config(model: transformers.PreTrainedModel) -> dict[str, Any]:
    """`config.json` as transformers itself writes it (the newer form, `rope_parameters`)."""
    with tempfile.TemporaryDirectory() as directory:
        model.config.save_pretrained(directory)
        saved: dict[str, Any] = json.loads((Path(directory) / "config.json").read_text("utf-8"))
    return saved


def rounded(values: torch.Tensor) -> list[float]:
    """Six decimals: well below the bound of the test."""
    return [round(float(value), 6) for value in values]


if __name__ == "__main__":
    main()
