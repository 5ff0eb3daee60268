"""The memory plan: exact where the graph decides, and honest where only an `.om` knows."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import onnx
import pytest

from om_models.graph import GraphOptions, write_llama
from om_models.manifest import Gear, KvSpec
from om_models.memory_plan import (
    NULL_SLOTS,
    MemoryPlan,
    gear_name,
    plan_memory,
    rows,
    size,
    token_bytes,
    warnings,
    weights_bytes,
    workspace_bytes,
)
from om_models.plan import ConvertOptions, make_plan
from om_models.spec import ModelSpec
from tests.support.tiny import FAMILY_SPECS, tiny_source, tiny_spec

GIB = 1 << 30

LLAMA_7B = tiny_spec(
    vocab_size=32000,
    hidden_size=4096,
    intermediate_size=11008,
    num_layers=32,
    num_heads=32,
    num_kv_heads=32,
    head_dim=128,
    max_position=8192,
    tie_embeddings=False,
)


def planned(
    spec: ModelSpec = LLAMA_7B, *, total_bytes: int | None = None, **options: Any
) -> MemoryPlan:
    wanted = {"target": "ascend", "soc_version": "Ascend310P3", **options}
    plan = make_plan(spec, ConvertOptions(**wanted))
    return plan_memory(plan, spec, total_bytes=total_bytes)


# --- the parts ------------------------------------------------------------------------------------


def test_kv_of_a_token():
    spec = KvSpec("float16", num_slots=64, num_groups=2, layers_per_group=16, row_elements=4096)
    assert token_bytes(spec) == 512 << 10, "Llama-2-7B: 512 KiB (docs/design.md)"


def test_weights_are_those_of_the_checkpoint_and_the_rotary_tables():
    # 6 738 415 616 parameters, of which 65 norms of 4096 stay float32.
    tables = 4 * 2048 * 64
    assert weights_bytes(LLAMA_7B, "float16", 2048) == (
        2 * 6_738_415_616 + 2 * 65 * 4096 + 2 * tables
    )
    assert weights_bytes(LLAMA_7B, "float32", 2048) == 4 * (6_738_415_616 + tables)


@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize("spec", [tiny_spec(tie_embeddings=False), *FAMILY_SPECS.values()])
def test_weights_are_what_the_graph_holds(tmp_path: Path, spec: ModelSpec, dtype: Any):
    kv = KvSpec(dtype, 64, 1, spec.num_layers, spec.kv_dim)
    options = GraphOptions(dtype, "int32", kv, max_model_len=96)
    write_llama(tiny_source(spec), options, tmp_path / "m.onnx", lambda *_: None)
    graph = onnx.load(tmp_path / "m.onnx", load_external_data=False).graph
    stored = [{e.key: e.value for e in t.external_data} for t in graph.initializer]
    held = sum(int(entry.get("length", 0)) for entry in stored)
    assert weights_bytes(spec, dtype, 96) == held


def test_a_tied_embedding_is_held_once():
    tied, untied = (
        weights_bytes(tiny_spec(tie_embeddings=t), "float32", 64) for t in (True, False)
    )
    assert untied - tied == 258 * 32 * 4


def test_split_models_hold_the_weights_twice():
    fused, split = planned(), planned(layout="split")
    assert split.weights_bytes == 2 * fused.weights_bytes
    assert split.num_subgraphs == fused.num_subgraphs == 8


def test_the_pool_counts_the_null_block_and_its_tokens_do_not():
    plan = planned(kv_tokens=4096 + 64)
    assert plan.kv_bytes == (4096 + 64) * (512 << 10)
    assert (plan.kv_tokens, plan.prefixes_of_4096, plan.concurrent_requests) == (4096, 1, 2)
    less = planned(kv_tokens=4096)
    assert (less.kv_tokens, less.prefixes_of_4096, less.concurrent_requests) == (4032, 0, 1)


def test_a_fused_model_holds_the_work_memory_of_its_largest_gear_alone():
    plan = planned()
    assert plan.workspace_bytes == max(found for _, found in plan.workspace)
    assert [gear for gear, _ in plan.workspace] == [
        Gear(1, 64, 512),
        Gear(1, 64, 2048),
        Gear(1, 256, 512),
        Gear(1, 256, 2048),
        Gear(1, 1, 512),
        Gear(1, 1, 2048),
        Gear(8, 1, 512),
        Gear(8, 1, 2048),
    ]


def test_two_models_hold_one_each():
    plan = planned(layout="split")
    prefill = max(found for gear, found in plan.workspace if gear.chunk > 1)
    decode = max(found for gear, found in plan.workspace if gear.chunk == 1)
    assert plan.workspace_bytes == prefill + decode


def test_a_gear_that_serves_both_roles_counts_once():
    assert planned(gears="prefill=1,8@64 decode=1,2@64").num_subgraphs == 3


def test_work_memory_by_hand():
    """Every term of one small gear, written out."""
    spec, kv = tiny_spec(), KvSpec("float16", 64, 1, 2, 32)
    gear = Gear(batch=2, chunk=3, past=10)
    hidden = 2 * 3 * 32 * (2 + 4)
    new_kv = 2 * 3 * 2 * 2 * 32 * 2
    mask = 2 * 3 * 13 * 4
    attention = 4 * 2 * 13 * 32 * 2 + 2 * 3 * 4 * 13 * (2 + 4 + 4)
    assert workspace_bytes(spec, "float16", kv, gear) == hidden + new_kv + mask + attention


@pytest.mark.parametrize("field", ["batch", "chunk", "past"])
def test_a_larger_gear_never_takes_less(field: str):
    kv = KvSpec("float16", 8192, 2, 16, 4096)
    small = Gear(batch=2, chunk=16, past=128)
    large = Gear(
        **{name: getattr(small, name) * (1 + (name == field)) for name in small.__struct_fields__}
    )
    sizes = [workspace_bytes(LLAMA_7B, "float16", kv, gear) for gear in (small, large)]
    assert sizes[0] < sizes[1]


def test_staging_is_what_the_driver_allocates_or_a_little_more():
    plan = planned(tiny_spec(), kv_tokens=256, gears="prefill=8@64 decode=2@64", dtype="float16")
    inputs = 8 * 4 + 8 * 4 + 2 * 64 * 4 + 8 * 72 * 2 + 2 * 4
    outputs = 2 * 258 * 4 + 8 * 2 * 2 * 32 * 2
    assert inputs + outputs <= plan.staging_bytes <= inputs + outputs + 7 * 128


def test_a_board_holds_the_host_side_too():
    options: dict[str, Any] = {"gears": "prefill=8@64 decode=2@64", "kv_tokens": 256}
    card = planned(tiny_spec(), **options)
    board = planned(tiny_spec(), soc_version="Ascend310B4", **options)
    assert (card.is_board, board.is_board) == (False, True)
    assert board.staging_bytes == 2 * card.staging_bytes


# --- the whole ------------------------------------------------------------------------------------


def test_the_sum():
    plan = planned()
    parts = (
        plan.system_bytes,
        plan.weights_bytes,
        plan.kv_bytes,
        plan.workspace_bytes,
        plan.staging_bytes,
    )
    assert plan.needed_bytes == sum(parts)
    assert plan.free_bytes == 24 * GIB - sum(parts)


@pytest.mark.parametrize(
    ("soc", "given", "total"),
    [
        ("Ascend310P3", None, 24 * GIB),
        ("Ascend310P3", 48 * GIB, 48 * GIB),
        ("Ascend310B1", None, None),
        ("Ascend310B1", 16 * GIB, 16 * GIB),
        ("Ascend999", None, None),
    ],
)
def test_the_devices_size(soc: str, given: int | None, total: int | None):
    plan = planned(soc_version=soc, total_bytes=given)
    assert plan.total_bytes == total
    assert (plan.free_bytes is None) == (total is None)


def test_rows_for_people():
    table = dict(rows(planned()))
    assert list(table) == [
        "device",
        "system",
        "weights",
        "KV pool",
        "workspace",
        "staging",
        "together",
        "left",
    ]
    assert table["device"] == "Ascend310P3, 24.00 GiB"
    assert table["KV pool"] == "4.00 GiB: 8128 tokens, 1 prefixes of 4096, 3 requests of 2048"
    assert "an estimate; largest gear 8 x 1 @ 2048" in table["workspace"]


def test_rows_of_a_device_that_is_not_known():
    table = dict(rows(planned(soc_version="Ascend310B1")))
    assert (table["device"], table["left"]) == ("Ascend310B1, memory not known", "not known")


# --- warnings -------------------------------------------------------------------------------------


def fits_exactly() -> MemoryPlan:
    plan = planned()
    return replace(plan, total_bytes=plan.needed_bytes)


def test_to_the_byte():
    plan = fits_exactly()
    assert (plan.free_bytes, dict(rows(plan))["left"]) == (0, "0 KiB")
    assert not any("too much" in warning for warning in warnings(plan))
    short = replace(plan, total_bytes=plan.needed_bytes - 1)
    assert short.free_bytes == -1
    assert dict(rows(short))["left"].startswith("nothing: ")
    assert "too much for Ascend310P3: --kv-capacity 4095MiB would fit" in warnings(short)[0]


def test_the_capacity_that_is_advised_fits():
    short = planned(kv_bytes=16 * GIB)
    advised = warnings(short)[0].split("--kv-capacity ")[1].split("MiB")[0]
    free = planned(kv_bytes=int(advised) << 20).free_bytes
    assert free is not None
    assert 0 <= free < 2 * 64 * (512 << 10), "at most a block and a MiB are left over"


def test_a_pool_below_one_sequence_is_not_advised():
    plan = fits_exactly()
    smallest = (2048 + 2 * NULL_SLOTS) * (512 << 10)
    pool_left = replace(plan, total_bytes=plan.needed_bytes - plan.kv_bytes + smallest)
    assert "--kv-capacity" in warnings(pool_left)[0]
    assert pool_left.total_bytes is not None
    less = replace(pool_left, total_bytes=pool_left.total_bytes - 1)
    assert "one sequence of 2048 tokens does not fit" in warnings(less)[0]


def test_weights_that_do_not_fit_alone():
    plan = planned(soc_version="Ascend310B4", total_bytes=4 * GIB)
    assert "the weights alone do not fit" in warnings(plan)[0]


def test_what_is_not_counted_is_said():
    board = " ".join(warnings(planned(soc_version="Ascend310B1")))
    assert "give --device-memory" in board
    assert "its own needs are not counted" in board
    assert warnings(planned()) == []
    assert "no SoC Ascend999 is known here" in warnings(planned(soc_version="Ascend999"))[0]


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [
        (0, "0 KiB"),
        ((1 << 20) - 1024, "1023 KiB"),
        (1 << 20, "1 MiB"),
        (GIB - (1 << 20), "1023 MiB"),
        (GIB, "1.00 GiB"),
    ],
)
def test_sizes_for_people(num_bytes: int, text: str):
    assert size(num_bytes) == text


def test_gears_for_people():
    assert gear_name(Gear(8, 1, 2048)) == "8 x 1 @ 2048"
