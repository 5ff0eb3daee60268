"""The model in one object: what programs for ATB's prefix caching call, and what the daemon offers.

Each call is a request as the daemon gets it, given to the daemon's own service and engine in this
process. So what it may hold, what it answers and what it refuses is said once, in PROTOCOL.md.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeVar, overload

import structlog

from ipc.arguments import SamplingOptions
from ipc.messages import (
    AnyRequest,
    Evict,
    Evicted,
    Explained,
    GetInfo,
    GetStats,
    Info,
    Listed,
    ListEntries,
    Pin,
    Pinned,
    Registered,
    Release,
    Released,
    Reply,
    Stats,
    Tokenized,
    Unpin,
    Unpinned,
    type_name,
)
from runtime_cache import log
from runtime_cache.config import CacheConfig
from runtime_cache.errors import DeviceError, InternalError, RuntimeCacheError
from runtime_cache.llm import calls, prompts
from runtime_cache.llm.calls import Stream
from runtime_cache.llm.host import Host
from runtime_cache.llm.options import embedded_config
from runtime_cache.llm.prompts import Message, Prompt, Prompts
from runtime_cache.llm.results import Prefix, Result, SomeFailed

if TYPE_CHECKING:
    from typing_extensions import Unpack

R = TypeVar("R", bound=Reply)
Results = list[Result]


class LLM:
    """A model on a device, with its prefix cache.

    May be used from several threads at once, and inside a running event loop, which it blocks. It
    is closed by `close`, at the end of a `with` block, when nothing refers to it any more, or when
    the interpreter ends; the device is free when `close` has returned.

    Every method raises:
        InvalidRequest: an argument is wrong; nothing was started.
        RuntimeCacheError: the engine refused the request, or failed at it; see `errors`.
        Closed: the LLM is closed, or belongs to the process that this one was forked from.
    """

    def __init__(
        self,
        bundle: str | os.PathLike[str],
        device: str | None = None,
        prefix_caching: CacheConfig | None = None,
        **options: object,
    ) -> None:
        """Open a bundle; returns when it can be asked.

        Args:
            bundle: directory made by rtcache-convert.
            device: `npu:N` for Ascend device N, `sim:0` for the software device. None: what the
                environment variable RTCACHE_DEVICE_DEVICE says, else `npu:0`.
            prefix_caching: a `PrefixCachingConfig`; None for its defaults.
            **options: those of rtcached.toml's sections model, device, engine, sim and log, as
                `section_key`, such as `engine_max_running=4`, `sim_threads=2`, `log_level="info"`.

        Raises:
            ConfigError: a value, the bundle, or the device's name is wrong, or there is no such
                device here. Nothing is left open.
            DeviceError: the device failed, or has too little memory. Nothing is left open.
            TypeError: there is no such option.
        """
        config = embedded_config(bundle, device, prefix_caching, options)
        if not structlog.is_configured():  # the program's own log, if it has one, stays as it is
            log.configure(config.log)
        self._host = Host.open(config)
        finalizer = weakref.finalize(self, self._host.ask_to_close)
        finalizer.atexit = False  # then the host closes by itself, and waits for it

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        try:
            self.close()
        except DeviceError:
            if exc is None:  # else the block's own error is the cause, and has the answers so far
                raise

    def __repr__(self) -> str:
        config = self._host.config
        state = "closed" if self._host.is_closed else "open"
        return f"<LLM {config.model.bundle} on {config.device.device}: {state}>"

    def close(self) -> None:
        """Cancel what is unfinished, give device and memory back. May be called twice.

        Raises:
            DeviceError: the device did not take everything back; everything was tried.
        """
        self._host.close()

    # --- answers -------------------------------------------------------------------------------

    # A text is a sequence of texts to the type checker; here it is one prompt.
    @overload
    def generate(  # type: ignore[overload-overlap]
        self, prompt: Prompt, *, prefix_id: str | None = ..., **options: Unpack[SamplingOptions]
    ) -> Result: ...

    @overload
    def generate(
        self,
        prompt: Sequence[Prompt],
        *,
        prefix_id: str | None = ...,
        **options: Unpack[SamplingOptions],
    ) -> Results: ...

    def generate(
        self, prompt: Prompts, *, prefix_id: str | None = None, **options: Unpack[SamplingOptions]
    ) -> Result | Results:
        """Answer one prompt, or many at once, which are computed together.

        Args:
            prompt: text, token ids, or messages (as `chat`); or a sequence of those. What a
                sequence is, its first element decides: `[1, 2]` is one prompt, `["a", "b"]` and
                `[[1, 2], [3]]` are two, `[]` is none.
            prefix_id: a registered prefix that stands before each of them (text or token ids).
            **options: as in `PROTOCOL.md`: max_tokens (512), temperature (0 is greedy; 1 if nothing
                is said), top_p, top_k, min_p, seed, stop, stop_token_ids, ignore_eos, penalties,
                logit_bias, logprobs, deadline_ms, use_cache, cache_priority.

        Returns:
            The answer, or for a sequence of prompts the answers in their order.

        Raises:
            SomeFailed: of many prompts some failed; all have ended, and it has the others' answers.
            TypeError: there is no such option.
        """
        items, is_many = prompts.each(prompt)
        return self._answers(items, is_many=is_many, prefix_id=prefix_id, options=options)

    @overload
    def chat(self, messages: Sequence[Message], **options: Unpack[SamplingOptions]) -> Result: ...

    @overload
    def chat(
        self, messages: Sequence[Sequence[Message]], **options: Unpack[SamplingOptions]
    ) -> Results: ...

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        **options: Unpack[SamplingOptions],
    ) -> Result | Results:
        """Answer a conversation of `{"role": …, "content": …}`, oldest first, or many of them.

        Every earlier turn is reused, the answers included. An earlier answer may be appended as
        it is: `{"role": "assistant", "content": result}`.

        Args:
            messages: the conversation, or a sequence of conversations.
            **options: as of `generate`.

        Raises:
            SomeFailed, TypeError: as `generate`.
        """
        items, is_many = prompts.conversations(messages)
        return self._answers(items, is_many=is_many, prefix_id=None, options=options)

    def stream(
        self, prompt: Prompt, *, prefix_id: str | None = None, **options: Unpack[SamplingOptions]
    ) -> Stream:
        """Answer one prompt piece by piece: `for piece in llm.stream(...): print(piece.text)`.

        Args:
            prompt: text, token ids or messages.
            prefix_id: as of `generate`; so are the options.

        Raises:
            TypeError: there is no such option.
        """
        request = prompts.answer_request(
            prompt, self._host.new_id(), prefix_id=prefix_id, options=options, is_streamed=True
        )
        return Stream(self._host, request, self)

    # --- prefixes ------------------------------------------------------------------------------

    def register_prefix(self, prefix: Prompt) -> Prefix:
        """Compute a prefix once and keep its KV until `release_prefix`.

        Idempotent: the same tokens have the same id, and are kept once.

        Args:
            prefix: text, token ids, or the messages a conversation begins with.

        Returns:
            Its id, with its size in tokens and bytes.
        """
        request = prompts.register_request(prefix, self._host.new_id())
        return Prefix.of(self._ask(request, Registered))

    def release_prefix(self, prefix_id: str) -> None:
        """Give up a registered prefix: its KV may be evicted from now on.

        Raises:
            UnknownPrefix: it is not registered.
        """
        self._do(Release, {"prefix_id": prefix_id}, Released)

    # --- what the cache holds ------------------------------------------------------------------

    def explain(self, prompt: Prompt, *, prefix_id: str | None = None) -> Explained:
        """What the cache would do for a prompt, and why not more; runs and changes nothing."""
        request = prompts.explain_request(prompt, prefix_id, self._host.new_id())
        return self._ask(request, Explained)

    def tokenize(self, prompt: str | Sequence[Message]) -> tuple[int, ...]:
        """The token ids that `generate` or `chat` would use."""
        return self._ask(prompts.tokenize_request(prompt, self._host.new_id()), Tokenized).token_ids

    def list(self, *, limit: int = 100, offset: int = 0) -> Listed:
        """The cached prefixes, most recently used first."""
        return self._do(ListEntries, {"limit": limit, "offset": offset}, Listed)

    def evict(
        self,
        *,
        max_blocks: int | None = None,
        all: bool = False,
        digest: str | None = None,
        idle_s: float | None = None,
    ) -> Evicted:
        """Drop cached blocks: exactly one of the four says which. What is kept or in use stays."""
        which = {"max_blocks": max_blocks, "all": all, "digest": digest, "idle_s": idle_s}
        return self._do(Evict, which, Evicted)

    def pin(self, digest: str, *, ttl_s: float | None = None) -> Pinned:
        """Keep a cached prefix until `unpin`, or for `ttl_s` seconds; `list` tells its digest."""
        return self._do(Pin, {"digest": digest, "ttl_s": ttl_s}, Pinned)

    def unpin(self, digest: str) -> Unpinned:
        """Give up a pin."""
        return self._do(Unpin, {"digest": digest}, Unpinned)

    def stats(self) -> dict[str, Any]:
        """Counters and gauges: section → name → value."""
        return self._do(GetStats, {}, Stats).stats

    def info(self) -> Info:
        """What is served, on what, within which limits."""
        return self._do(GetInfo, {}, Info)

    # -------------------------------------------------------------------------------------------

    def _answers(
        self,
        items: Sequence[Prompt],
        *,
        is_many: bool,
        prefix_id: str | None,
        options: Mapping[str, Any],
    ) -> Result | Results:
        requests = [
            prompts.answer_request(
                item, self._host.new_id(), prefix_id=prefix_id, options=options, is_streamed=False
            )
            for item in items
        ]
        found = calls.answers(self._host, requests)
        results = [result for result in found if isinstance(result, Result)]
        if len(results) == len(found):
            return results if is_many else results[0]
        if not is_many and isinstance(found[0], RuntimeCacheError):
            raise found[0]
        raise SomeFailed(found)

    def _do(self, kind: type[AnyRequest], fields: Mapping[str, Any], expected: type[R]) -> R:
        return self._ask(prompts.request(kind, self._host.new_id(), fields), expected)

    def _ask(self, request: AnyRequest, expected: type[R]) -> R:
        reply = calls.ask_one(self._host, request)
        if not isinstance(reply, expected):
            raise InternalError(f"`{type_name(request)}` was answered by `{type_name(reply)}`")
        return reply
