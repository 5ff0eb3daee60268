"""From options to numbers: defaults, KV layout, contradictions."""

from __future__ import annotations

from typing import Any

import pytest

from om_models.manifest import KvSpec
from om_models.null_model import NULL_SPEC
from om_models.plan import SIM_SOC_VERSION, ConvertOptions, Plan, make_plan
from om_models.sources import source_defaults
from om_models.spec import ModelSpec
from runtime_cache.aclsim.settings import SimSettings
from runtime_cache.errors import ConversionError
from tests.support.tiny import tiny_spec

#: Llama-2-7B: 512 KiB of KV a token in float16.
LLAMA_7B = tiny_spec(
    vocab_size=32000,
    hidden_size=4096,
    intermediate_size=11008,
    num_layers=32,
    num_heads=32,
    num_kv_heads=32,
    head_dim=128,
    max_position=4096,
)


def plan(spec: ModelSpec = LLAMA_7B, **options: Any) -> Plan:
    return make_plan(spec, ConvertOptions(**{"target": "sim", **options}))


def test_defaults_of_the_software_device():
    made = plan()
    assert (made.dtype, made.index_dtype, made.layout) == ("float32", "int32", "fused")
    assert made.gears.max_model_len == 2048
    assert max(gear.batch for gear in made.gears.decode) == 16


def test_the_default_pool_holds_two_sequences_of_a_large_model():
    # A token takes 1 MiB in float32, so 1 GiB would not hold one sequence of 2048.
    assert plan().kv.num_slots == 2 * (2048 + 64)
    assert plan(kv_bytes=5 << 30).kv.num_slots == 5 * 1024


def test_defaults_of_a_card():
    made = plan(target="ascend", soc_version="Ascend910B2")
    assert (made.dtype, made.soc_version) == ("float16", "Ascend910B2")
    assert made.kv == KvSpec(
        dtype="float16", num_slots=8192, num_groups=2, layers_per_group=16, row_elements=4096
    )
    assert len(made.gears.prefill) + len(made.gears.decode) == 8


@pytest.mark.parametrize(("name", "num_gears"), [("small", 3), ("balanced", 8), ("fine", 60)])
def test_gears_by_name(name: str, num_gears: int):
    made = plan(gears=name, max_batch=8)
    assert len(made.gears.prefill) + len(made.gears.decode) == num_gears
    assert made.gears.max_model_len == 2048


def test_options_of_atc_are_those_of_the_user_and_the_place_of_the_weights():
    assert plan().atc_options == {}
    made = plan(external_weight=1, atc_options={"deterministic": "1"})
    assert made.atc_options == {"external_weight": "1", "deterministic": "1"}


def test_a_card_must_be_named():
    with pytest.raises(ConversionError, match="--target ascend needs --soc-version"):
        plan(target="ascend")


def test_the_default_soc_is_what_the_software_device_plays():
    assert SimSettings().soc_name == SIM_SOC_VERSION


def test_context_defaults_to_the_models_limit_if_that_is_smaller():
    assert plan(tiny_spec(max_position=300)).gears.max_model_len == 300


@pytest.mark.parametrize(
    ("num_kv_heads", "head_dim", "dtype", "row_elements"),
    [
        (2, 8, "float32", 16),
        (1, 8, "float32", 16),
        (3, 8, "float32", 32),
        (2, 8, "float16", 32),
        (4, 8, "float16", 32),
        (1, 34, "float16", 64),
    ],
)
def test_rows_are_padded_to_64_bytes(
    num_kv_heads: int, head_dim: int, dtype: Any, row_elements: int
):
    spec = tiny_spec(num_kv_heads=num_kv_heads, num_heads=12, head_dim=head_dim)
    assert plan(spec, dtype=dtype).kv.row_elements == row_elements


def test_the_null_models_pool_is_small_but_grows_with_the_context():
    slots = [
        make_plan(NULL_SPEC, source_defaults("null", ConvertOptions("sim", context=context)))
        for context in (2048, 1 << 17)
    ]
    assert [made.kv.num_slots for made in slots] == [1 << 16, 2 * ((1 << 17) + 64)]


def test_capacity_in_bytes_is_cut_to_whole_blocks():
    # Tiny spec: 2 (K, V) · 2 layers · 16 elements · 4 bytes = 256 bytes a token.
    slots = [
        plan(tiny_spec(), context=64, kv_bytes=size).kv.num_slots
        for size in (256 * 192, 256 * 256 - 1, 256 * 256)
    ]
    assert slots == [192, 192, 256]


def test_capacity_in_tokens_is_rounded_up_to_whole_blocks():
    slots = [plan(tiny_spec(), context=64, kv_tokens=tokens).kv.num_slots for tokens in (192, 193)]
    assert slots == [192, 256]


def test_groups_keep_every_input_below_the_limit():
    # 2 · 32 layers · 4096 elements = 2^18 a token: 8192 tokens are 2^31 elements.
    groups = [
        plan(kv_tokens=tokens).kv.num_groups for tokens in (8192 - 64, 8192, 16384 - 64, 16384)
    ]
    assert groups == [1, 2, 2, 4]


def test_groups_divide_the_layers():
    spec = tiny_spec(num_layers=3)
    assert plan(spec, num_kv_groups=3).kv.layers_per_group == 1
    with pytest.raises(ConversionError, match="3 layers cannot be cut into 2 groups"):
        plan(spec, num_kv_groups=2)


def test_oms_of_both_layouts():
    fused, split = plan(tiny_spec()), plan(tiny_spec(), layout="split")
    assert [om.path for om in fused.oms] == ["model.om"]
    assert [om.path for om in split.oms] == ["prefill.om", "decode.om"]
    assert (fused.oms[0].prefill, fused.oms[0].decode) == (
        split.oms[0].prefill,
        split.oms[1].decode,
    )
    assert (split.oms[0].decode, split.oms[1].prefill) == ((), ())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kv_tokens": 64, "kv_bytes": 64}, "exclude each other"),
        ({"context": 64, "kv_tokens": 128}, "128 tokens does not hold one sequence of 64"),
        ({"context": 1}, "--context must be at least 2"),
        ({"context": 513}, "513 tokens exceeds the model's 512 positions"),
        ({"gears": "prefill=8@64 decode=1@128"}, "must have the same largest past"),
        ({"gears": "prefill=8@64 decode=1@64", "context": 65}, "--context 65 contradicts"),
        ({"gears": "prefill=8@64 decode=1@64", "max_batch": 2}, "--max-batch 2 contradicts"),
        ({"kv_tokens": 2**36}, "the KV pool is too large"),
    ],
)
def test_contradictions(options: dict[str, Any], message: str):
    with pytest.raises(ConversionError, match=message):
        plan(tiny_spec(), **options)


@pytest.mark.parametrize("scale", [1, 2, 16, 256])
def test_scales_of_the_mlp(scale: int):
    assert plan(dtype="float16", mlp_scale=scale).mlp_scale == scale


@pytest.mark.parametrize("scale", [-2, 0, 3, 255, 257, 512])
def test_scales_that_are_no_power_of_two(scale: int):
    with pytest.raises(ConversionError, match=f"--mlp-scale {scale} is no power of two from 1 to"):
        plan(dtype="float16", mlp_scale=scale)


def test_float32_needs_no_scale():
    with pytest.raises(ConversionError, match="--mlp-scale is for --dtype fp16"):
        plan(dtype="float32", mlp_scale=2)
