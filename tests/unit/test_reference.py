"""The numpy oracle equals Hugging Face transformers (stored: tests/data/make_llama_tiny.py)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from om_models.config_json import spec_from_config
from om_models.families import FAMILIES
from om_models.reference import KvCache, ReferenceLlama
from tests.support.tiny import random_weights, tiny_reference

DIRECTORY = Path(__file__).parents[1] / "data" / "llama_tiny"
LLAMAS = ("mha_untied", "gqa_tied", "mqa_odd_vocab", "wide_heads", "llama31_rope", "linear_rope")
CASES = (
    *LLAMAS,
    *("smollm2", "tinyllama", "mistral", "mistral_window"),
    *("qwen2", "qwen2_untied", "qwen2_window", "qwen3", "qwen3_untied"),
)
#: Both sides are float32 and sum in different orders; logits are about 3.
LOGIT_BOUND = 2e-5


@pytest.fixture(params=CASES)
def case(request: pytest.FixtureRequest) -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads((DIRECTORY / f"{request.param}.json").read_text("utf-8"))
    return loaded


@pytest.fixture
def model(case: dict[str, Any]) -> ReferenceLlama:
    spec = spec_from_config(case["config"])
    return ReferenceLlama(spec, random_weights(spec, case["seed"]))


def test_all_stored_cases_are_tested():
    assert sorted(path.stem for path in DIRECTORY.glob("*.json")) == sorted(CASES)


def test_logits_equal_those_of_transformers(case: dict[str, Any], model: ReferenceLlama):
    logits = model.forward(np.array(case["prompt"]), KvCache())
    for position, expected in case["logits"].items():
        np.testing.assert_allclose(logits[int(position)], expected, atol=LOGIT_BOUND, rtol=0)


def test_greedy_tokens_equal_those_of_transformers(case: dict[str, Any], model: ReferenceLlama):
    assert min(case["margins"]) > 2 * LOGIT_BOUND, "a tie would make this test meaningless"
    assert model.greedy(np.array(case["prompt"]), 32) == case["greedy"]


def test_every_family_is_pinned():
    configs = [json.loads((DIRECTORY / f"{name}.json").read_text("utf-8")) for name in CASES]
    assert {spec_from_config(case["config"]).family for case in configs} == set(FAMILIES)


def test_older_and_newer_config_give_the_same_spec(case: dict[str, Any]):
    assert spec_from_config(case["config_as_saved"]) == spec_from_config(case["config"])
    assert "rope_parameters" in case["config_as_saved"]
    assert "rope_parameters" not in case["config"]


def test_chunks_and_single_tokens_give_the_logits_of_the_whole():
    model, tokens = tiny_reference(), np.arange(20)
    whole = model.forward(tokens, KvCache())
    cache = KvCache()
    parts = [model.forward(part, cache) for part in np.split(tokens, [7, 8, 19])]
    np.testing.assert_allclose(np.concatenate(parts), whole, atol=LOGIT_BOUND, rtol=0)
    assert cache.num_tokens == 20


def test_a_copied_cache_grows_on_its_own():
    model = tiny_reference()
    cache = KvCache()
    model.forward(np.arange(5), cache)
    branch = cache.copy()
    model.forward(np.arange(3), branch)
    assert (cache.num_tokens, branch.num_tokens) == (5, 8)
    again = model.forward(np.arange(3), cache)
    np.testing.assert_array_equal(again, model.forward(np.arange(3), _cache_of(model, 5)))


def _cache_of(model: ReferenceLlama, num_tokens: int) -> KvCache:
    cache = KvCache()
    model.forward(np.arange(num_tokens), cache)
    return cache
