"""Which tenants remember texts."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest

from om_models.chat import ChatTemplate
from runtime_cache.config import CacheConfig
from runtime_cache.ids import DEFAULT_TENANT, TenantName
from runtime_cache.runtime import Runtime
from runtime_cache.tenants import new_intakes
from tests.support.desk import TEMPLATE, VOCAB, tokenizer

ALICE = TenantName("alice")


def runtime(**cache: Any) -> Runtime:
    """What the intakes need of one."""
    config = SimpleNamespace(cache=msgspec.structs.replace(CacheConfig(), **cache))
    return cast(
        "Runtime",
        SimpleNamespace(
            config=config,
            tokenizer=tokenizer(),
            chat_template=ChatTemplate(TEMPLATE),
            manifest=SimpleNamespace(model=SimpleNamespace(vocab_size=VOCAB)),
            caches={DEFAULT_TENANT: None, ALICE: None},
        ),
    )


def test_each_tenant_has_its_own() -> None:
    intakes = new_intakes(runtime())
    assert list(intakes) == [DEFAULT_TENANT, ALICE]
    one, other = intakes.values()
    assert one.memory is not None
    assert one.memory is not other.memory
    assert one.prefixes is not other.prefixes
    assert (one.vocab_size, one.chat_template is None) == (VOCAB, False)


@pytest.mark.parametrize(
    "off", [{"enable": False}, {"auto_detect": False}, {"deterministic": True}]
)
def test_without_answers_in_the_cache_nothing_is_remembered(off: dict[str, bool]) -> None:
    assert [intake.memory for intake in new_intakes(runtime(**off)).values()] == [None, None]
