"""runtime-cache: prefix-cache and inference daemon for Huawei Ascend NPUs.

The package holds the daemon, the cache, the engine and the device driver. Wire messages and
clients live in `ipc`, model conversion in `om_models`, command-line tools in `tools`.

`LLM` and `PrefixCachingConfig`, the model in one's own process, are imported when they are asked
for: they bring all the rest with them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ipc.version import __version__

if TYPE_CHECKING:
    from runtime_cache.llm import LLM, PrefixCachingConfig

__all__ = ["LLM", "PrefixCachingConfig", "__version__"]


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from runtime_cache import llm

    return getattr(llm, name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
