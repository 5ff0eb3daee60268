"""What an `.om` must be for its manifest, and the sentence for each difference."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from om_models.contract import GraphContract
from om_models.manifest import Gear, KvSpec
from runtime_cache.device.acl_api import GEAR_INPUT, DataType
from runtime_cache.device.om_contract import OmDesc, TensorDesc, check_desc
from runtime_cache.errors import BundleError

KV = KvSpec(num_slots=8, num_groups=2, layers_per_group=1, row_elements=32, dtype="float16")
CONTRACT = GraphContract(KV, index_dtype="int32", vocab_size=10)
GEARS = (Gear(1, 4, 8), Gear(2, 1, 8))
POOL = TensorDesc("kv_pool_0", DataType.FLOAT16, (16, 32), 1024)


def good_desc() -> OmDesc:
    """As ATC would describe a model of both gears."""
    index, half = DataType.INT32, DataType.FLOAT16
    return OmDesc(
        inputs=(
            TensorDesc("input_ids", index, (-1, -1), 16),
            TensorDesc("position_ids", index, (-1, -1), 16),
            TensorDesc("past_rows", index, (-1, 8), 64),
            TensorDesc("mask", half, (-1, 1, -1, -1), 96),
            TensorDesc("last", index, (-1,), 8),
            POOL,
            replace(POOL, name="kv_pool_1"),
            TensorDesc(GEAR_INPUT, DataType.INT32, (16,), 64),
        ),
        outputs=(
            TensorDesc("Gather_9:0:logits", DataType.FLOAT, (2, 10), 80),
            TensorDesc("Concat_1:0:new_kv_0", half, (1, 4, 2, 32), 512),
            TensorDesc("Concat_2:0:new_kv_1", half, (1, 4, 2, 32), 512),
        ),
        gears=(
            (1, 4, 1, 4, 1, 8, 1, 1, 4, 12, 1, 16, 32, 16, 32),
            (2, 1, 2, 1, 2, 8, 2, 1, 1, 9, 2, 16, 32, 16, 32),
        ),
    )


def with_input(name: str, /, **changes: Any) -> OmDesc:
    desc = good_desc()
    return replace(
        desc,
        inputs=tuple(replace(t, **changes) if t.name == name else t for t in desc.inputs),
    )


def with_output(index: int, /, **changes: Any) -> OmDesc:
    outputs = list(good_desc().outputs)
    outputs[index] = replace(outputs[index], **changes)
    return replace(good_desc(), outputs=tuple(outputs))


def test_shapes_of_a_gear() -> None:
    gear = Gear(2, 3, 5)
    assert {name: (t.dtype, t.shape(gear)) for name, t in CONTRACT.inputs.items()} == {
        "input_ids": ("int32", (2, 3)),
        "position_ids": ("int32", (2, 3)),
        "past_rows": ("int32", (2, 5)),
        "mask": ("float16", (2, 1, 3, 8)),
        "last": ("int32", (2,)),
        "kv_pool_0": ("float16", (16, 32)),
        "kv_pool_1": ("float16", (16, 32)),
    }
    assert {name: (t.dtype, t.shape(gear)) for name, t in CONTRACT.outputs.items()} == {
        "logits": ("float32", (2, 10)),
        "new_kv_0": ("float16", (2, 3, 2, 32)),
        "new_kv_1": ("float16", (2, 3, 2, 32)),
    }
    assert CONTRACT.inputs["mask"].num_bytes(gear) == 96
    assert CONTRACT.outputs["logits"].num_bytes(gear) == 80
    assert list(CONTRACT.inputs)[:5] == list(CONTRACT.step_inputs)


def test_the_model_of_the_manifest_passes() -> None:
    check_desc("model.om", good_desc(), CONTRACT, GEARS)


def test_inputs_and_outputs_may_come_in_any_order() -> None:
    desc = good_desc()
    order = [7, 5, 6, 0, 2, 1, 3, 4]
    gears = (
        (16, 32, 16, 32, 1, 4, 1, 8, 1, 4, 1, 1, 4, 12, 1),
        (16, 32, 16, 32, 2, 1, 2, 8, 2, 1, 2, 1, 1, 9, 2),
    )
    moved = replace(
        desc,
        inputs=tuple(desc.inputs[i] for i in order),
        outputs=desc.outputs[::-1],
        gears=gears,
    )
    check_desc("model.om", moved, CONTRACT, GEARS)


def test_a_model_of_one_fixed_shape_has_no_gear_input() -> None:
    desc = good_desc()
    fixed = tuple(
        replace(t, dims=CONTRACT.inputs[t.name].shape(GEARS[0])) for t in desc.inputs[:-1]
    )
    outputs = (replace(desc.outputs[0], dims=(1, 10)), *desc.outputs[1:])
    one_shape = OmDesc(inputs=fixed, outputs=outputs, gears=())
    check_desc("model.om", one_shape, CONTRACT, GEARS[:1])
    with pytest.raises(BundleError, match=r"model\.om: "):
        check_desc("model.om", one_shape, CONTRACT, GEARS)


@pytest.mark.parametrize(
    ("desc", "message"),
    [
        (with_input("mask", name="attn_mask"), "missing: mask; unknown: attn_mask"),
        (replace(good_desc(), inputs=good_desc().inputs[:-1]), f"missing: {GEAR_INPUT}"),
        (with_input("past_rows", data_type=DataType.INT64), "'past_rows' is int64; the manifest"),
        (with_input("mask", data_type=27), "'mask' is aclDataType 27; the manifest says float16"),
        (with_input("last", dims=(-1, 1)), r"'last' has shape \[-1, 1\]"),
        (with_input("past_rows", dims=(-1, 16)), r"'past_rows' has shape \[-1, 16\]"),
        (with_input("kv_pool_1", dims=(18, 32)), r"'kv_pool_1' has shape \[18, 32\]"),
        (with_input("mask", num_bytes=95), "room for 95 bytes; the largest gear takes 96"),
        (with_input("kv_pool_0", num_bytes=1025), "takes 1025 bytes; the manifest's pool"),
        (
            with_output(1, name="logits"),
            "the outputs are logits, logits, new_kv_1; missing: new_kv_0",
        ),
        (with_output(0, name="scores"), "missing: logits; unknown: scores"),
        (with_output(0, data_type=DataType.FLOAT16), "'logits' is float16; the manifest"),
        (with_output(0, dims=(2, 11)), r"'logits' has shape \[2, 11\]"),
        (with_output(0, num_bytes=79), "room for 79 bytes"),
        (with_output(2, dims=(1, 4, 4, 32)), r"'new_kv_1' has shape \[1, 4, 4, 32\]"),
        (
            replace(good_desc(), outputs=good_desc().outputs[:2]),
            "missing: new_kv_1; unknown: none",
        ),
        (replace(good_desc(), gears=good_desc().gears[:1]), "not compiled for batch 2, chunk 1"),
    ],
)
def test_each_difference_is_named(desc: OmDesc, message: str) -> None:
    with pytest.raises(BundleError, match=message) as caught:
        check_desc("decode.om", desc, CONTRACT, GEARS)
    assert caught.value.message.startswith("decode.om: ")
