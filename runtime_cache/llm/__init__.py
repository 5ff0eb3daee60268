"""The embedded API: a model in this process, without a daemon. docs/embedded.md tells how."""

from runtime_cache.llm.api import LLM
from runtime_cache.llm.calls import Stream
from runtime_cache.llm.options import PrefixCachingConfig
from runtime_cache.llm.results import Closed, Prefix, Result, SomeFailed

__all__ = ["LLM", "Closed", "Prefix", "PrefixCachingConfig", "Result", "SomeFailed", "Stream"]
