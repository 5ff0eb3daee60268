"""The table of families: who is known, what each adds, and windows that the graph cannot honour."""

from __future__ import annotations

from pathlib import Path
from typing import Any, get_args

import msgspec
import pytest

from om_models.bundle import bundle_digest
from om_models.config_json import spec_from_config
from om_models.families import FAMILIES, KNOWN_ARCHITECTURES, family_of_config, family_of_gguf
from om_models.gguf_source import GgufSource
from om_models.graph import GraphOptions, write_llama
from om_models.manifest import KvSpec
from om_models.plan import ConvertOptions, make_plan
from om_models.safetensors_source import SafetensorsSource
from om_models.spec import FamilyName, ModelSpec, check_context
from om_models.weights import check_source, expected_shapes
from runtime_cache.errors import ConversionError
from tests.support.tiny import (
    BASE_SPEC,
    FAMILY_SPECS,
    assert_same_weights,
    config_json,
    tiny_spec,
    write_checkpoint,
)
from tests.support.tiny_gguf import write_tiny_gguf

KV = KvSpec(dtype="float32", num_slots=128, num_groups=1, layers_per_group=2, row_elements=16)
MISTRAL, QWEN2, QWEN3 = (FAMILY_SPECS[name] for name in ("mistral", "qwen2", "qwen3"))


def with_window(spec: ModelSpec, window: int) -> ModelSpec:
    return msgspec.structs.replace(spec, sliding_window=window)


def test_the_documentation_names_every_family():
    text = (Path(__file__).parents[2] / "docs/kernels.md").read_text("utf-8")
    rows = {row[2]: row for line in text.splitlines() if len(row := line.split("|")) == 6}
    for family in FAMILIES.values():
        in_gguf = f"`{family.gguf}`" if family.gguf else "as Llama's"
        assert in_gguf in rows[f" `{family.architecture}` "][3]
    assert len([name for name in rows if name.endswith("ForCausalLM` ")]) == len(FAMILIES)


def test_every_family_of_the_type_is_in_the_table():
    assert tuple(FAMILIES) == get_args(FamilyName)
    assert all(name == family.name for name, family in FAMILIES.items())
    assert {*FAMILY_SPECS, "llama"} == set(FAMILIES)


def test_families_by_the_names_that_files_use():
    for name, family in FAMILIES.items():
        assert family_of_config(name) is family_of_config(family.architecture) is family
    assert family_of_gguf("llama") is FAMILIES["llama"]
    assert family_of_gguf("mistral") is None
    assert family_of_config(None) is family_of_gguf(None) is None


@pytest.mark.parametrize(
    "names",
    [
        ["GemmaForCausalLM"],
        ["Qwen2MoeForCausalLM"],
        ["LlamaForCausalLM", "MistralForCausalLM"],
        ["LlamaForCausalLM", "X"],
    ],
)
def test_an_unknown_family_is_refused_with_the_known_ones(names: list[str]):
    with pytest.raises(ConversionError) as caught:
        spec_from_config({**config_json(BASE_SPEC), "architectures": names})
    assert caught.value.message == (
        f"architecture {', '.join(names)} is not known; known: {', '.join(KNOWN_ARCHITECTURES)}"
    )
    assert KNOWN_ARCHITECTURES == (
        "LlamaForCausalLM",
        "MistralForCausalLM",
        "Qwen2ForCausalLM",
        "Qwen3ForCausalLM",
    )


@pytest.mark.parametrize("name", FAMILIES)
def test_a_config_without_architectures_is_known_by_its_model_type(name: str):
    spec = FAMILY_SPECS.get(name, BASE_SPEC)
    config = config_json(spec)
    del config["architectures"]
    assert spec_from_config(config) == spec


@pytest.mark.parametrize("family", FAMILY_SPECS)
@pytest.mark.parametrize("num_shards", [1, 3])
def test_a_checkpoint_of_every_family(tmp_path: Path, family: str, num_shards: int):
    spec = FAMILY_SPECS[family]
    source = SafetensorsSource(write_checkpoint(tmp_path / "m", spec, num_shards=num_shards))
    assert source.spec == spec
    check_source(source)
    assert_same_weights(source)


def test_what_each_family_adds_to_a_layer():
    assert {n for n in expected_shapes(QWEN2) if ".1." in n and n.endswith(".bias")} == {
        f"model.layers.1.self_attn.{part}_proj.bias" for part in "qkv"
    }
    assert expected_shapes(QWEN2)["model.layers.0.self_attn.k_proj.bias"] == (8,)
    assert expected_shapes(QWEN3)["model.layers.0.self_attn.q_norm.weight"] == (16,)
    assert expected_shapes(QWEN3)["model.layers.0.self_attn.k_norm.weight"] == (16,)
    assert len(expected_shapes(MISTRAL)) == len(expected_shapes(tiny_spec(tie_embeddings=False)))


def test_biases_where_a_family_has_none_are_refused():
    with pytest.raises(ConversionError, match="attention_bias is set"):
        spec_from_config({**config_json(QWEN3), "attention_bias": True})


@pytest.mark.parametrize("spec", [MISTRAL, QWEN2, QWEN3])
def test_defaults_that_differ_between_families(spec: ModelSpec):
    config = config_json(spec)
    del config["head_dim"]
    expected = 128 if spec.family == "qwen3" else spec.hidden_size // spec.num_heads
    assert spec_from_config(config).head_dim == expected
    del config["num_key_value_heads"]
    with pytest.raises(ConversionError, match="num_key_value_heads is None"):
        spec_from_config(config)


@pytest.mark.parametrize("family", FAMILY_SPECS)
def test_both_sources_make_the_same_bundle(tmp_path: Path, family: str):
    """To the digest, which is the root of every prefix key."""
    spec = FAMILY_SPECS[family]
    sources = (
        SafetensorsSource(write_checkpoint(tmp_path / "m", spec, num_shards=2)),
        GgufSource(write_tiny_gguf(tmp_path / "m.gguf", spec)),
    )
    kv = KvSpec("float16", 128, 1, spec.num_layers, spec.kv_dim)
    options = GraphOptions("float16", "int32", kv, max_model_len=64)
    digests, graphs = set(), set()
    for number, source in enumerate(sources):
        path = tmp_path / str(number) / "model.onnx"
        path.parent.mkdir()
        weights = write_llama(source, options, path, lambda done, total: None)
        digests.add(bundle_digest(weights, source.spec, kv))
        graphs.add((path.read_bytes(), path.with_name("model.onnx.data").read_bytes()))
    assert (len(digests), len(graphs)) == (1, 1)


# --- sliding windows ------------------------------------------------------------------------------


@pytest.mark.parametrize("spec", [MISTRAL, QWEN2, QWEN3])
def test_the_window_that_a_config_switches_on(spec: ModelSpec):
    assert spec_from_config(config_json(spec)).sliding_window is None
    slides = with_window(spec, 96)
    assert spec_from_config(config_json(slides)) == slides


@pytest.mark.parametrize(
    ("changes", "window"),
    [
        ({"layer_types": ["full_attention"] * 2}, None),
        ({"layer_types": ["full_attention", "sliding_attention"]}, 96),
        ({"layer_types": None}, 96),
    ],
)
def test_newer_configs_say_it_of_each_layer(changes: dict[str, Any], window: int | None):
    config = {**config_json(with_window(QWEN2, 96)), **changes}
    assert spec_from_config(config).sliding_window == window


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layer_types": ["chunked_attention"]}, r"layer_types is \['chunked_attention'\]; known"),
        ({"layer_types": "full_attention"}, "layer_types is 'full_attention'; known in it: full"),
        ({"use_sliding_window": True, "sliding_window": None}, "sliding_window is None"),
    ],
)
def test_windows_that_are_refused(changes: dict[str, Any], message: str):
    with pytest.raises(ConversionError, match=message):
        spec_from_config({**config_json(QWEN2), **changes})


def test_llama_knows_no_windows():
    config = {**config_json(BASE_SPEC), "sliding_window": 4, "layer_types": ["x"]}
    assert spec_from_config(config) == BASE_SPEC


def test_a_context_up_to_the_window_is_the_same_model():
    spec = with_window(MISTRAL, 128)
    check_context(spec, 128)
    with pytest.raises(ConversionError) as caught:
        check_context(spec, 129)
    assert caught.value.message == (
        "a context of 129 tokens exceeds the model's sliding window of 128: each token attends to"
        " so many tokens only, and the graph attends to all; convert with --context 128 or less"
    )
    check_context(MISTRAL, 512)
    with pytest.raises(ConversionError, match="513 tokens exceeds the model's 512 positions"):
        check_context(with_window(MISTRAL, 4096), 513)


def test_the_default_context_is_the_window():
    assert make_plan(with_window(MISTRAL, 128), ConvertOptions("sim")).gears.max_model_len == 128
    assert make_plan(MISTRAL, ConvertOptions("sim")).gears.max_model_len == 512


# --- identity -------------------------------------------------------------------------------------


def test_the_identity_of_a_llama_is_what_it_always_was():
    """Its keys; `test_bundle` pins the digest that follows from it."""
    assert sorted(BASE_SPEC.identity()) == [
        *("family", "head_dim", "hidden_size", "intermediate_size", "max_position", "num_heads"),
        *("num_kv_heads", "num_layers", "rms_eps", "rope_scaling", "rope_theta"),
        *("tie_embeddings", "vocab_size"),
    ]
    assert BASE_SPEC.identity()["family"] == "llama"


def test_what_is_computed_otherwise_has_another_identity():
    specs = [tiny_spec(), tiny_spec(qkv_bias=True), tiny_spec(qk_norm=True)]
    assert len({bundle_digest("00" * 32, spec, KV) for spec in specs}) == 3


def test_names_and_windows_do_not_change_the_identity():
    """A Mistral's GGUF is a Llama's, and says nothing of the window."""
    assert tiny_spec(family="mistral", sliding_window=64).identity() == BASE_SPEC.identity()
