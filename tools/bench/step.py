"""Host time per decode step, with a model that does nothing.

Runs 1, 8 and 16 answers at once through the whole engine (state machine, device
thread, driver, sampler, detokeniser) on the do-nothing bundle; a step's time is
from its start to the next one's. What is left of a real step's time is the
model's. Beside it, as the floor, the same step run again and again without an
engine: device thread, driver and device alone.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import statistics
import time
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import uvloop
from rich.console import Console
from rich.table import Table

from runtime_cache.engine.batch import StepBatch
from runtime_cache.engine.commands import EmitTokens, FailRequest
from runtime_cache.engine.loop import Answer, EngineLoop, Samples
from runtime_cache.engine.request import NewRequest, SamplingParams
from runtime_cache.errors import ConfigError, InternalError
from runtime_cache.ids import RequestId
from runtime_cache.runtime import Runtime
from tools.bench.stage import bench_config, median, null_bundle, positive, spread

BATCHES = (1, 8, 16)
PROMPT_TOKENS = 32


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Flags of this benchmark."""
    parser.add_argument("--device", default="sim:0", help="device (sim:0)")
    parser.add_argument("--tokens", type=positive, default=400, help="answer tokens per run (400)")
    parser.add_argument("--runs", type=positive, default=5, help="runs per batch size (5)")
    parser.add_argument(
        "--temperature", type=_temperature, default=0.0, help="of sampling; 0 is greedy (0)"
    )


def _temperature(text: str) -> float:
    """A flag's value: a number from 0 to 100."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value <= 100:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 0 to 100")
    return value


def run(args: argparse.Namespace, out: Console) -> dict[str, Any]:
    """Measure; keys `batch_N_us` (with the engine) and `floor_N_us` (without)."""
    with null_bundle(out) as bundle:
        times = uvloop.run(_measure(bundle, args, out))
    table = Table("batch", "µs per step: min … median … max", "without the engine")
    result: dict[str, Any] = {"device": args.device, "bundle": "null", "runs": args.runs}
    for batch, (engine_us, floor_us) in times.items():
        table.add_row(str(batch), spread(engine_us), spread(floor_us))
        result[f"batch_{batch}_us"] = median(engine_us)
        result[f"floor_{batch}_us"] = median(floor_us)
    out.print(table)
    return result


async def _measure(
    bundle: Path, args: argparse.Namespace, out: Console
) -> dict[int, tuple[list[float], list[float]]]:
    times: dict[int, tuple[list[float], list[float]]] = {batch: ([], []) for batch in BATCHES}
    runtime = await Runtime.open(bench_config(bundle, args.device))
    try:
        bench = _StepBench(runtime, args.tokens, args.temperature)
        with out.status("measuring"):
            await bench.step_us(max(BATCHES))  # warm-up
            for _ in range(args.runs):
                for batch, (engine_us, floor_us) in times.items():
                    engine_us.append(await bench.step_us(batch))
                    floor_us.append(await bench.floor_us())
    finally:
        await runtime.close()
    return times


class _StepBench:
    """An engine over one runtime whose steps are timed as they start."""

    def __init__(self, runtime: Runtime, num_tokens: int, temperature: float) -> None:
        self._runtime = runtime
        self._num_tokens = num_tokens
        self._params = SamplingParams(
            max_tokens=num_tokens, temperature=temperature, ignore_eos=True
        )
        self._next_id = 1
        self._engine = EngineLoop(runtime.engine.state, self._run_step)
        self._started: list[tuple[float, StepBatch]] = []
        self._full: list[tuple[float, StepBatch]] = []

    async def step_us(self, batch: int) -> float:
        """Median time per decode step with `batch` answers at once [microseconds]."""
        self._started = []
        loop = asyncio.get_running_loop()
        ends = [loop.create_future() for _ in range(batch)]
        for index, end in enumerate(ends):
            self._engine.submit(self._request(index), partial(_note_end, end))
        await asyncio.gather(*ends)
        # The answers begin one after the other, so the first and last steps are not full ones.
        decodes = [(s, step) for s, step in self._started if step.role == "decode"]
        self._full = [(s, step) for s, step in decodes if len(step.rows) == batch]
        if len(self._full) < 2:
            raise ConfigError(
                f"--tokens {self._num_tokens} is too few: {batch} answers were never all being "
                f"written at once"
            )
        return statistics.median(b[0] - a[0] for a, b in pairwise(self._full)) * 1e6

    async def floor_us(self) -> float:
        """Median time of the last full step of `step_us`, repeated alone [microseconds]."""
        times, (_, batch) = [], self._full[-1]
        for _ in range(self._num_tokens):
            start_s = time.perf_counter()
            await self._runtime.run_step(batch)
            times.append(time.perf_counter() - start_s)
        return statistics.median(times) * 1e6

    async def _run_step(self, batch: StepBatch) -> Samples:
        self._started.append((time.perf_counter(), batch))
        return await self._runtime.run_step(batch)

    def _request(self, index: int) -> NewRequest:
        tokenizer = self._runtime.tokenizer
        request_id = RequestId(self._next_id)
        self._next_id += 1
        return NewRequest(
            request_id,
            np.full(PROMPT_TOKENS, index + 1, dtype=np.int32),
            replace(self._params, seed=index),
            eos_token_ids=tokenizer.eos_token_ids,
            detokenizer=tokenizer.detokenizer(),
        )


def _note_end(end: asyncio.Future[None], answer: Answer) -> None:
    if isinstance(answer, FailRequest):
        end.set_exception(InternalError(answer.message))
    elif not isinstance(answer, EmitTokens):
        end.set_result(None)
