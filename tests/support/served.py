"""A tiny Llama served in process: bundle, software device, `Runtime`; and how answers are compared.

Greedy answers of two computations must be equal wherever the best two candidates are further apart
than both computations' errors together. Where they are closer it is a tie: it is counted, and if
the answers part there, the rest of them is not compared.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np

from om_models.bundle import Bundle
from om_models.reference import KvCache, ReferenceLlama
from runtime_cache.aclsim import faults, inspect
from runtime_cache.cache import invariants
from runtime_cache.cache.results import CacheReport
from runtime_cache.config import Config
from runtime_cache.engine.batch import StepBatch
from runtime_cache.engine.commands import EmitTokens, FailRequest, FinishRequest
from runtime_cache.engine.loop import Answer, EngineLoop
from runtime_cache.engine.request import NewRequest, Sampled, SamplingParams, TokenLogprobs
from runtime_cache.ids import PrefixId, RequestId
from runtime_cache.runtime import Runtime
from tests.support.devices import num_leaked

BLOCK = 4
#: How far a logit may be from the same one computed another way: fp32, summed in other orders.
LOGIT_BOUND = 1e-4


@dataclass(frozen=True)
class Greedy:
    """A greedy answer.

    Attributes:
        margins: how far the second candidate was behind, at each token.
        cached: prompt tokens from the cache.
        report: why so many.
    """

    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...]
    cached: int
    prefilled: int
    report: CacheReport | None = None

    @property
    def margins(self) -> tuple[float, ...]:
        return tuple(entry.top[0][1] - entry.top[1][1] for entry in self.logprobs)


class Comparison:
    """Counts what was compared.

    Attributes:
        bound: how far a logit may be from the same one computed another way.
        num_equal: positions that were equal, as they had to be.
        num_ties: positions where either token would have been right.
    """

    def __init__(self, bound: float = LOGIT_BOUND) -> None:
        self.num_equal = self.num_ties = 0
        self.bound = bound

    def check(
        self, found: Sequence[int], expected: Sequence[int], margins: Sequence[float]
    ) -> None:
        """Compare two answers; `margins` are those of either."""
        assert len(found) == len(expected) == len(margins)
        for place, (one, other, margin) in enumerate(zip(found, expected, margins, strict=True)):
            # Both candidates may be off, in opposite directions, in both computations' difference.
            is_tie = margin <= 2 * self.bound
            self.num_ties += is_tie
            if one != other:
                assert is_tie, f"token {place}: {one} instead of {other}, margin {margin}"
                return
            self.num_equal += not is_tie

    def check_runs(self, found: Greedy, expected: Greedy) -> None:
        """Compare two answers of the device, log-probabilities included."""
        self.check(found.token_ids, expected.token_ids, expected.margins)
        for one, other in zip(found.logprobs, expected.logprobs, strict=True):
            if one.token_id != other.token_id:
                return
            assert abs(one.logprob - other.logprob) <= 2 * self.bound

    def report(self, record_property: Any) -> None:
        """Put the counts into the test's report; `conftest` adds them up at the end of the run."""
        record_property("equal_tokens", self.num_equal)
        record_property("ties_within_the_bound", self.num_ties)


class Ear:
    """The sink of one request: remembers, and can be awaited."""

    def __init__(self) -> None:
        self.emitted: list[EmitTokens] = []
        self.final: asyncio.Future[FinishRequest | FailRequest]
        self.final = asyncio.get_running_loop().create_future()

    def __call__(self, answer: Answer) -> None:
        if isinstance(answer, EmitTokens):
            self.emitted.append(answer)
        else:
            self.final.set_result(answer)


class Served:
    """An open runtime, asked without sockets.

    Attributes:
        batches: every step that ran.
    """

    def __init__(self, runtime: Runtime) -> None:
        self.runtime = runtime
        self.batches: list[StepBatch] = []
        self.engine = EngineLoop(runtime.engine.state, self._run_step, recovery=runtime.recovery)
        self._next_id = 1

    def submit(self, prompt: Sequence[int], max_tokens: int = 6, **request: Any) -> Ear:
        """Ask for a greedy answer of exactly `max_tokens` tokens.

        Args:
            request: further fields of `NewRequest`.
        """
        ear = Ear()
        params = SamplingParams(max_tokens=max_tokens, temperature=0.0, logprobs=2, ignore_eos=True)
        self.engine.submit(NewRequest(self._new_id(), _array(prompt), params, **request), ear)
        return ear

    async def greedy(self, prompt: Sequence[int], max_tokens: int = 6, **request: Any) -> Greedy:
        """The greedy answer of exactly `max_tokens` tokens; `request` as for `submit`."""
        ear = self.submit(prompt, max_tokens, **request)
        final = await ear.final
        assert isinstance(final, FinishRequest), final
        return Greedy(
            token_ids=tuple(token for piece in ear.emitted for token in piece.token_ids),
            logprobs=tuple(entry for piece in ear.emitted for entry in piece.logprobs),
            cached=final.usage.cached_tokens,
            prefilled=final.usage.prefilled_tokens,
            report=final.usage.cache,
        )

    async def cold(self, prompt: Sequence[int], max_tokens: int = 6) -> Greedy:
        """The same with nothing in the cache."""
        self.engine.evict(None)
        answer = await self.greedy(prompt, max_tokens)
        assert answer.cached == 0
        return answer

    async def register(self, name: str, prompt: Sequence[int], **request: Any) -> None:
        """Register a prefix; `request` as for `submit`."""
        ear = Ear()
        request = NewRequest(
            self._new_id(),
            _array(prompt),
            SamplingParams(temperature=0.0),
            kind="register",
            prefix_id=PrefixId(name),
            **request,
        )
        self.engine.submit(request, ear)
        final = await ear.final
        assert isinstance(final, FinishRequest), final

    def rows_appended(self) -> int:
        """Token rows the device has put into the pool, by whatever kind of step."""
        return sum(counters.rows_appended for counters in self.runtime.executor.counters.values())

    def check_idle(self) -> None:
        """Nothing is left behind: no work, no held block, and the gauges add up."""
        check_idle(self.runtime)
        assert self.engine.num_unanswered == 0

    def _run_step(self, batch: StepBatch) -> Awaitable[tuple[Sampled, ...]]:
        self.batches.append(batch)
        return self.runtime.run_step(batch)

    def _new_id(self) -> RequestId:
        self._next_id += 1
        return RequestId(self._next_id - 1)


def check_idle(runtime: Runtime) -> None:
    """No request, no live block but those of kept prefixes, and the gauges add up."""
    snapshot = runtime.engine.state.snapshot()
    assert (snapshot.num_waiting, snapshot.num_running) == (0, 0)
    assert not snapshot.is_step_in_flight
    for cache in runtime.caches.values():
        assert cache.num_live == cache.keeps.num_blocks
        assert cache.num_live + cache.num_evictable + cache.num_free == cache.num_usable
        invariants.check(cache, [])


def config_for(
    bundle: Bundle,
    *,
    num_blocks: int | None = None,
    is_cached: bool = True,
    memory: str = "1GiB",
    threads: int = 1,
    cache: Mapping[str, Any] | None = None,
    device: Mapping[str, Any] | None = None,
    tenants: Mapping[str, float] | None = None,
    **engine: Any,
) -> Config:
    """A configuration for the software device, with blocks of four tokens.

    Args:
        num_blocks: blocks to use of the pool, the null block included; None for all.
        memory: of the device.
        threads: of ONNX Runtime.
        cache: changes of the section `cache`.
        device: changes of the section `device`.
        tenants: name → share in percent.
        engine: changes of the section `engine`.
    """
    section = {"enable": is_cached, "block_size": BLOCK, "low_watermark_mb": 0.0}
    if num_blocks is not None:
        section["cache_capacity"] = (num_blocks + 0.5) * BLOCK * _token_bytes(bundle) / 10**9
    raw = {
        "model": {"bundle": str(bundle.path)},
        "device": {"device": "sim:0"} | dict(device or {}),
        "cache": section | dict(cache or {}),
        "engine": engine,
        "sim": {"memory": memory, "threads": threads},
        "tenants": [
            {"name": name, "endpoint": f"ipc://{name}", "share_percent": share}
            for name, share in (tenants or {}).items()
        ],
    }
    return msgspec.convert(raw, Config)


def _token_bytes(bundle: Bundle) -> int:
    kv = bundle.manifest.kv
    row_bytes = kv.row_elements * np.dtype(kv.dtype).itemsize
    return int(2 * kv.num_groups * kv.layers_per_group * row_bytes)


@asynccontextmanager
async def opened_runtime(config: Config) -> AsyncIterator[Runtime]:
    """A runtime on a fresh software device; at the end nothing is left on it."""
    inspect.reset()
    runtime = await Runtime.open(config)
    try:
        yield runtime
        await runtime.engine.drain(0)
    finally:
        faults.clear()
        await runtime.close()
    assert num_leaked() == -2
    assert [text for text in inspect.report().misuses if "injected fault" not in text] == []


@asynccontextmanager
async def served(bundle: Bundle, **changes: Any) -> AsyncIterator[Served]:
    """A runtime to ask, configured by `config_for`; it is idle when the block ends."""
    async with opened_runtime(config_for(bundle, **changes)) as runtime:
        host = Served(runtime)
        yield host
        host.check_idle()


def random_prompt(seed: int, num_tokens: int) -> list[int]:
    """Token ids of the byte-level vocabulary."""
    return [int(token) for token in np.random.RandomState(seed).randint(0, 256, num_tokens)]


def oracle(
    model: ReferenceLlama, prompt: Sequence[int], num_tokens: int
) -> tuple[list[int], list[float]]:
    """The oracle's greedy tokens, and how far each second candidate was behind."""
    cache, fed = KvCache(), np.asarray(prompt)
    tokens: list[int] = []
    margins: list[float] = []
    for _ in range(num_tokens):
        logits = model.forward(fed, cache)[-1]
        second, first = np.sort(logits)[-2:]
        tokens.append(int(logits.argmax()))
        margins.append(float(first - second))
        fed = np.array(tokens[-1:])
    return tokens, margins


def _array(prompt: Sequence[int]) -> Any:
    return np.asarray(prompt, dtype=np.int32)
