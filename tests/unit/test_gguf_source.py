"""Weights and spec of a GGUF: as llama.cpp reads it, or refused."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import gguf
import msgspec
import numpy as np
import pytest

import om_models.weights
from om_models.gguf_source import GgufSource, interleaved_to_halves
from om_models.spec import RopeScaling
from om_models.weights import EMBEDDING, check_source
from runtime_cache.errors import ConversionError
from tests.support.tiny import FAMILY_SPECS, assert_same_weights, random_weights, tiny_spec
from tests.support.tiny_gguf import write_tiny_gguf

Q8_0, Q4_1 = gguf.GGMLQuantizationType.Q8_0, gguf.GGMLQuantizationType.Q4_1
F16, BF16 = gguf.GGMLQuantizationType.F16, gguf.GGMLQuantizationType.BF16
LLAMA3 = RopeScaling(
    kind="llama3",
    factor=32.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position=8192,
)


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


@pytest.mark.parametrize(
    "kind", ["Q4_0", "Q5_0", "Q5_1", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "IQ4_XS"]
)
def test_every_kind_of_block_is_unpacked(tmp_path: Path, kind: str):
    """Random bytes are valid blocks of every kind, though not always finite numbers."""
    quantisation = gguf.GGMLQuantizationType[kind]
    name = "model.layers.1.mlp.down_proj.weight"
    spec = tiny_spec(hidden_size=32, intermediate_size=512)
    shape = gguf.quant_shape_to_byte_shape((32, 512), quantisation)
    blocks = np.random.default_rng(1).integers(0, 256, shape, dtype=np.uint8)
    path = tmp_path / "m.gguf"
    write_tiny_gguf(path, spec, quantisation=quantisation, packed={name: blocks})
    with np.errstate(all="ignore"):
        expected = gguf.dequantize(blocks, quantisation)
        found = GgufSource(path).get(name)
    assert found.shape == (32, 512)
    np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("kind", [gguf.GGMLQuantizationType.F32, F16, BF16, Q8_0, Q4_1])
def test_blocks_of_rows_are_the_tensor(
    tmp_path: Path, kind: gguf.GGMLQuantizationType, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(om_models.weights, "BLOCK_VALUES", 64 * 100)
    spec = tiny_spec(hidden_size=64, intermediate_size=64)
    source = GgufSource(write_tiny_gguf(tmp_path / "m.gguf", spec, quantisation=kind))
    blocks = list(source.row_blocks(EMBEDDING))
    assert [len(block) for block in blocks] == [100, 100, 58]
    np.testing.assert_array_equal(np.concatenate(blocks), source.get(EMBEDDING))


def resident_bytes(path: Path) -> int:
    """How much of a mapped file counts as this process's memory."""
    resident, is_ours = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if re.match(r"[0-9a-f]+-[0-9a-f]+ ", line):
            is_ours = line.endswith(str(path))
        elif is_ours and line.startswith("Rss:"):
            resident += int(line.split()[1]) * 1024
    return resident


def test_what_was_read_is_given_back(tmp_path: Path):
    """Else a conversion would hold all of a large file in the end."""
    path = write_tiny_gguf(tmp_path / "m.gguf", tiny_spec(vocab_size=50_000))
    source = GgufSource(path)
    table_bytes = 50_000 * 32 * 4
    table = source.get(EMBEDDING)
    total = table.sum()
    assert resident_bytes(path) >= table_bytes
    source.get("model.norm.weight").sum()
    assert resident_bytes(path) < table_bytes / 2
    assert table.sum() == total, "what is still looked at is read again"


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


@pytest.mark.parametrize("num_parts", [0, 1])
def test_a_merged_gguf_may_remember_its_parts(tmp_path: Path, num_parts: int):
    path = write_tiny_gguf(tmp_path / "m.gguf", tiny_spec(), metadata={"split.count": num_parts})
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
    path = write_tiny_gguf(tmp_path / "m.gguf", tiny_spec(), architecture="gemma3")
    with pytest.raises(ConversionError, match=r"'gemma3' is not known; known: llama, qwen2, qwen3"):
        GgufSource(path)


@pytest.mark.parametrize("family", FAMILY_SPECS)
def test_gguf_of_every_family_gives_the_weights_of_the_checkpoint(tmp_path: Path, family: str):
    spec = FAMILY_SPECS[family]
    source = GgufSource(write_tiny_gguf(tmp_path / "m.gguf", spec))
    # llama.cpp has no architecture of its own for Mistral.
    name = "llama" if family == "mistral" else family
    assert source.spec == msgspec.structs.replace(spec, family=name)
    assert source.spec.identity() == spec.identity()
    check_source(source)
    assert_same_weights(source)


@pytest.mark.parametrize(("value", "window"), [(0, None), (64, 64)])
def test_a_window_in_a_gguf(tmp_path: Path, value: int, window: int | None):
    metadata = {"qwen2.attention.sliding_window": value}
    path = write_tiny_gguf(tmp_path / "m.gguf", FAMILY_SPECS["qwen2"], metadata=metadata)
    assert GgufSource(path).spec.sliding_window == window


def test_fields_are_named_after_the_architecture(tmp_path: Path):
    metadata: dict[str, int | float | str] = {"qwen3.rope.dimension_count": 4}
    path = write_tiny_gguf(tmp_path / "m.gguf", FAMILY_SPECS["qwen3"], metadata=metadata)
    with pytest.raises(ConversionError, match=r"qwen3\.rope\.dimension_count is 4, but heads have"):
        GgufSource(path)


def test_a_bias_in_a_gguf_is_refused(tmp_path: Path):
    extra = {"blk.0.attn_q.bias": np.zeros(32, np.float32)}
    source = GgufSource(write_tiny_gguf(tmp_path / "m.gguf", tiny_spec(), extra=extra))
    with pytest.raises(ConversionError, match=r"layers\.0\.self_attn\.q_proj\.bias has no place"):
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
