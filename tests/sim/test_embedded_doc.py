"""`docs/embedded.md` against the code: its programs run, its names exist."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from ipc.arguments import SamplingOptions
from runtime_cache.cache.manager import CacheManager
from runtime_cache.llm import LLM, PrefixCachingConfig, Result
from tests.support.embedded import fresh_device, make_brief_bundle

TEXT = (Path(__file__).parents[2] / "docs" / "embedded.md").read_text("utf-8")
BLOCKS = re.findall(r"^```python\n(.*?)^```$", TEXT, re.MULTILINE | re.DOTALL)


def test_every_piece_of_code_runs(tmp_path: Path) -> None:
    bundle = make_brief_bundle(tmp_path)
    assert len(BLOCKS) == 6
    found: dict[str, Any] = {}
    with fresh_device():
        for block in BLOCKS:
            exec(block.replace("bundles/llama", str(bundle)), found)
        assert found["result"].usage.cached_tokens == found["prefix_id"].num_tokens
        found["model"].close()


def test_the_names_of_the_tables_exist() -> None:
    rows = re.findall(r"^\| .* \|$", TEXT, re.MULTILINE)
    called = {name for row in rows for name in re.findall(r"`(\w+)\(", row)}
    known = {"LLM", "hash", "lookup", "insert", "extend"}
    owners = (LLM, CacheManager)
    unknown = {name for name in called - known if not any(hasattr(o, name) for o in owners)}
    assert unknown == set()
    options = PrefixCachingConfig.__struct_fields__
    atb = ("enable", "auto_detect", "eviction_policy", "max_prefix_length", "cache_capacity")
    assert all(name in options and f"`{name}" in TEXT for name in (*atb, "max_cached_prefixes"))


def test_every_option_and_every_attribute_is_named() -> None:
    names = {*SamplingOptions.__annotations__} - {"stream"} | {*Result.__slots__}
    assert [name for name in sorted(names) if f"`{name}`" not in TEXT] == []
