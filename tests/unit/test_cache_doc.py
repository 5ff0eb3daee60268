"""`docs/cache.md` against the code: every option, reason, counter and figure it has to have."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import get_args

import msgspec
import pytest

from om_models.manifest import KvSpec
from runtime_cache.cache.results import CacheCounters, CacheReason
from runtime_cache.config import CacheConfig, TenantConfig
from runtime_cache.device.kv_layout import KvLayout
from runtime_cache.options import toml

TEXT = (Path(__file__).parents[2] / "docs" / "cache.md").read_text("utf-8")
ROW = re.compile(r"^\| (.*) \|$", re.MULTILINE)
CELLS = [row.split(" | ") for row in ROW.findall(TEXT)]
SIZES = [cells for cells in CELLS if len(cells) == 7 and cells[1].isdigit()]


def rows_of(name: str) -> list[list[str]]:
    return [cells for cells in CELLS if cells[0] == f"`{name}`"]


@pytest.mark.parametrize("field", msgspec.structs.fields(CacheConfig), ids=lambda f: f.name)
def test_every_option_is_there_with_its_default(field: msgspec.structs.FieldInfo) -> None:
    ((_, default, _),) = rows_of(field.name)
    if field.default is None:
        assert not default.startswith("`")
    else:
        shown = toml(field.default).removesuffix(".0")
        assert default == f"`{shown}`"


def test_every_reason_is_there() -> None:
    assert all(len(rows_of(reason)) == 1 for reason in get_args(CacheReason))


def test_every_counter_and_every_field_of_a_tenant_is_there() -> None:
    names = [field.name for field in dataclasses.fields(CacheCounters)]
    names += TenantConfig.__struct_fields__
    assert [name for name in names if f"`{name}`" not in TEXT] == []


@pytest.mark.parametrize("cells", SIZES, ids=lambda cells: f"{cells[0]}-{cells[4]}")
def test_tokens_per_gib(cells: list[str]) -> None:
    _, layers, heads, size, dtype, token_bytes, tokens = cells
    element = {"float16": 2, "float32": 4}[dtype]
    row_bytes = -(-int(heads) * int(size) * element // 64) * 64
    kv = KvSpec(dtype, 1024, 1, int(layers), row_bytes // element)  # type: ignore[arg-type]
    found = KvLayout.from_spec(kv, 64).token_bytes
    assert (found, 2**30 // found) == (int(token_bytes), int(tokens))


def test_the_table_of_sizes_was_found() -> None:
    assert len(SIZES) == 5


def test_a_hit_rate_of_zero_is_explained() -> None:
    answer = " ".join(TEXT.partition("### Why is my hit rate zero?")[2].split())
    assert "the time of day" in answer
    assert "`diverged` at a small `diverged_at` names the very token" in answer
