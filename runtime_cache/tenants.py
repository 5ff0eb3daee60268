"""What each tenant has of its own besides its part of the cache: its intake."""

from __future__ import annotations

from runtime_cache.config import CacheConfig
from runtime_cache.ids import TenantName
from runtime_cache.intake import Intake
from runtime_cache.runtime import Runtime
from runtime_cache.text_memory import TextMemory


def new_intakes(runtime: Runtime) -> dict[TenantName, Intake]:
    """An intake for each tenant of an open runtime.

    What is registered for one tenant, and what is remembered of its texts, is nothing to another.
    """
    return {
        tenant: Intake(
            runtime.tokenizer,
            runtime.chat_template,
            runtime.manifest.model.vocab_size,
            memory=TextMemory() if can_reuse_answers(runtime.config.cache) else None,
        )
        for tenant in runtime.caches
    }


def can_reuse_answers(cache: CacheConfig) -> bool:
    """Whether the KV of an answer can be met again.

    If not, its ids are not remembered either: equal texts then always have equal ids, which is what
    deterministic mode, whose hits never reach into an answer, is for.
    """
    return cache.enable and cache.auto_detect and not cache.deterministic
