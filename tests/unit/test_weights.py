"""Weights and specs of Hugging Face checkpoints, what any model must hold, what is refused."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import om_models.weights
from om_models.config_json import spec_from_config
from om_models.safetensors_source import SafetensorsSource
from om_models.spec import RopeScaling
from om_models.weights import EMBEDDING, LM_HEAD, blocks_of, check_source
from runtime_cache.errors import ConversionError
from tests.support.tiny import (
    assert_same_weights,
    config_json,
    random_weights,
    tiny_spec,
    write_checkpoint,
)
from tests.support.weights import MemorySource

LLAMA3 = RopeScaling(
    kind="llama3",
    factor=32.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position=8192,
)
NEWER = {"rope_type": "llama3", "factor": 8, "low_freq_factor": 1, "high_freq_factor": 4}
UP = "model.layers.0.mlp.up_proj.weight"


# --- Hugging Face ---------------------------------------------------------------------------------


@pytest.mark.parametrize("num_shards", [1, 3])
@pytest.mark.parametrize("is_tied", [True, False])
def test_safetensors_whole_and_sharded(tmp_path: Path, num_shards: int, is_tied: bool):
    spec = tiny_spec(tie_embeddings=is_tied)
    source = SafetensorsSource(write_checkpoint(tmp_path / "m", spec, num_shards=num_shards))
    assert source.spec == spec
    assert source.label == "m"
    check_source(source)
    assert_same_weights(source)


@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float16])
def test_half_precision_is_read_exactly(tmp_path: Path, dtype: Any):
    directory = write_checkpoint(tmp_path / "m")
    narrow = {k: v.astype(dtype) for k, v in random_weights(tiny_spec()).items()}
    save_file(narrow, directory / "model.safetensors")
    source = SafetensorsSource(directory)
    for name, tensor in narrow.items():
        np.testing.assert_array_equal(source.get(name), tensor.astype(np.float32))
    assert source.get(UP).dtype == (np.float16 if dtype is np.float16 else np.float32)


@pytest.mark.parametrize(("dtype", "name"), [(np.int8, "I8"), (ml_dtypes.float8_e4m3fn, "F8_E4M3")])
def test_weights_of_another_type_are_refused(tmp_path: Path, dtype: Any, name: str):
    directory = write_checkpoint(tmp_path / "m")
    weights: dict[str, Any] = dict(random_weights(tiny_spec()))
    weights[UP] = weights[UP].astype(dtype)
    save_file(weights, directory / "model.safetensors")
    with pytest.raises(ConversionError, match=rf"up_proj.weight is {name}; known: F32, F16"):
        SafetensorsSource(directory)


def test_the_working_directory_has_a_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(write_checkpoint(tmp_path / "tiny-llama"))
    assert SafetensorsSource(Path(".")).label == "tiny-llama"


def test_truncated_safetensors_name_the_file(tmp_path: Path):
    directory = write_checkpoint(tmp_path / "m")
    path = directory / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(ConversionError, match=r"model\.safetensors is not a whole safetensors"):
        SafetensorsSource(directory)


def test_missing_files_are_named(tmp_path: Path):
    with pytest.raises(ConversionError, match=r"config\.json does not exist"):
        SafetensorsSource(tmp_path)
    directory = write_checkpoint(tmp_path / "m", num_shards=2)
    (directory / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(ConversionError, match=r"model-00002-of-00002\.safetensors does not exist"):
        SafetensorsSource(directory)


def test_weights_that_cannot_be_opened(tmp_path: Path):
    directory = write_checkpoint(tmp_path / "m")
    (directory / "model.safetensors").unlink()
    (directory / "model.safetensors").mkdir()
    with pytest.raises(ConversionError, match=r"safetensors cannot be read: Is a directory"):
        SafetensorsSource(directory)


@pytest.mark.parametrize("text", ["[]", "{", '{"weight_map": {"a": "../x"}}'])
def test_a_damaged_index_is_refused(tmp_path: Path, text: str):
    directory = write_checkpoint(tmp_path / "m", num_shards=2)
    (directory / "model.safetensors.index.json").write_text(text)
    with pytest.raises(ConversionError, match=r"model\.safetensors\.index\.json"):
        SafetensorsSource(directory)


def test_stored_shards_hold_what_the_index_says(tmp_path: Path):
    directory = write_checkpoint(tmp_path / "m", num_shards=3)
    index = json.loads((directory / "model.safetensors.index.json").read_text())["weight_map"]
    for name, shard in index.items():
        assert name in load_file(directory / shard)


@pytest.mark.parametrize("num_rows", [1, 7, 8, 9, 16, 17])
def test_rows_come_in_blocks(num_rows: int, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(om_models.weights, "BLOCK_VALUES", 24)
    parts = list(blocks_of((num_rows, 3)))
    assert [row for part in parts for row in range(num_rows)[part]] == list(range(num_rows))
    assert [part.stop - part.start for part in parts[:-1]] == [8] * (len(parts) - 1)
    assert [part.stop for part in blocks_of((2, 25))] == [1, 2]


@pytest.mark.parametrize("dtype", ["F32", "BF16"])
def test_blocks_of_rows_are_the_tensor(tmp_path: Path, dtype: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(om_models.weights, "BLOCK_VALUES", 32 * 100)
    directory = write_checkpoint(tmp_path / "m")
    if dtype == "BF16":
        path = directory / "model.safetensors"
        tensors = {n: t.astype(ml_dtypes.bfloat16) for n, t in load_file(path).items()}
        save_file(tensors, path)
    source = SafetensorsSource(directory)
    blocks = list(source.row_blocks(EMBEDDING))
    assert [len(block) for block in blocks] == [100, 100, 58]
    assert {block.dtype for block in blocks} == {np.dtype(np.float32)}
    np.testing.assert_array_equal(np.concatenate(blocks), source.get(EMBEDDING))
    with pytest.raises(ConversionError, match=r"m has no tensor x"):
        next(source.row_blocks("x"))


# --- config.json ----------------------------------------------------------------------------------


def test_newer_config_with_rope_parameters():
    spec = tiny_spec(rope_theta=500000.0, rope_scaling=LLAMA3)
    config = config_json(spec)
    scaling, theta = config.pop("rope_scaling"), config.pop("rope_theta")
    config["rope_parameters"] = {**scaling, "rope_theta": theta}
    assert spec_from_config(config) == spec
    assert spec_from_config(config_json(spec)) == spec


def test_config_defaults():
    config = config_json(tiny_spec(num_kv_heads=4))
    for name in ("num_key_value_heads", "head_dim", "rope_theta", "rope_scaling"):
        del config[name]
    del config["tie_word_embeddings"]
    assert spec_from_config(config) == tiny_spec(num_kv_heads=4, tie_embeddings=False)


def test_older_rope_type_key_is_known():
    config = {**config_json(tiny_spec()), "rope_scaling": {"type": "linear", "factor": 2}}
    assert spec_from_config(config).rope_scaling == RopeScaling(kind="linear", factor=2.0)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ({"attention_bias": True}, "attention_bias is set"),
        ({"mlp_bias": True}, "mlp_bias is set"),
        ({"quantization_config": {"bits": 4}}, "quantised"),
        ({"hidden_size": None}, "hidden_size is None"),
        ({"vocab_size": 0}, "vocab_size is 0"),
        ({"num_hidden_layers": True}, "num_hidden_layers is True"),
        ({"num_key_value_heads": 3}, "4 query heads cannot share 3"),
        ({"head_dim": 7}, "head_dim 7 is odd"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 2}}, "'yarn' is not known"),
        ({"rope_scaling": {"rope_type": "llama3"}}, "factor is None, expected a finite number"),
        ({"rope_scaling": 3}, "rope section is 3"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1.0}}}, "own for full_attention"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor is 0.5"),
        ({"rope_scaling": {"type": "linear", "factor": None}}, "factor is None"),
        ({"rope_scaling": {"type": "linear", "factor": "2x"}}, "factor is '2x'"),
        ({"rope_scaling": {"type": "linear", "factor": True}}, "factor is True"),
        ({"rope_scaling": {"type": "linear", "factor": 0}}, "factor is 0.0, expected a finite"),
        ({"rope_scaling": {**NEWER, "high_freq_factor": 1}}, "low_freq_factor 1.0 is not below"),
        ({"rope_scaling": {**NEWER, "low_freq_factor": 0}}, "low_freq_factor is 0.0"),
        (
            {"rope_scaling": {**NEWER, "original_max_position_embeddings": "x"}},
            "original_max_position_embeddings is 'x'",
        ),
        ({"rope_theta": 0}, "rope_theta is 0.0"),
        ({"rope_theta": math.inf}, "rope_theta is inf"),
        ({"rope_theta": math.nan}, "rope_theta is nan"),
        ({"rope_theta": 10**400}, "rope_theta is 1000"),
        ({"rms_norm_eps": None}, "rms_norm_eps is None, expected a finite number"),
        ({"rms_norm_eps": -1.0}, "rms_eps is -1.0"),
        ({"architectures": "LlamaForCausalLM"}, "architectures is 'LlamaForCausalLM', expected a"),
        ({"architectures": [{}]}, "architecture {} is not known"),
    ],
)
def test_configs_that_are_refused(changes: dict[str, Any], message: str):
    with pytest.raises(ConversionError, match=message):
        spec_from_config({**config_json(tiny_spec()), **changes})


def test_a_config_that_is_not_json_is_named(tmp_path: Path):
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ConversionError, match=r"config\.json is not JSON"):
        SafetensorsSource(tmp_path)


# --- what a model must hold -----------------------------------------------------------------------


def test_faults_are_named_together():
    weights = random_weights(tiny_spec())
    del weights["model.norm.weight"]
    weights[UP] = weights[UP][:-1]
    weights["model.layers.1.self_attn.q_proj.bias"] = np.zeros(32, np.float32)
    with pytest.raises(ConversionError) as caught:
        check_source(MemorySource(tiny_spec(), weights, label="here"))
    assert caught.value.message == (
        "here does not hold a plain llama model: "
        "model.layers.0.mlp.up_proj.weight is [47, 32], expected [48, 32]; "
        "model.norm.weight is missing; "
        "model.layers.1.self_attn.q_proj.bias has no place in the model"
    )


def test_many_faults_are_cut_short():
    with pytest.raises(ConversionError, match=r"; and 12 more$"):
        check_source(MemorySource(tiny_spec(), {}))


def test_repeated_information_is_ignored():
    weights = random_weights(tiny_spec())
    weights[LM_HEAD] = weights[EMBEDDING]
    weights["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.zeros(4, np.float32)
    check_source(MemorySource(tiny_spec(), weights))
