"""Server, service and runtime in one process, with a gate before the device and a clock to turn."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from ipc.client import Client
from ipc.messages import AnyRequest, MessageId, Tokens
from ipc.outbox import ParkingLimits
from ipc.server import ClientRef, Server
from om_models.bundle import Bundle
from runtime_cache.engine.batch import StepBatch
from runtime_cache.engine.loop import EngineLoop
from runtime_cache.engine.request import Sampled
from runtime_cache.facts import DaemonFacts
from runtime_cache.ids import DEFAULT_TENANT
from runtime_cache.intake import Intake
from runtime_cache.runtime import Runtime
from runtime_cache.service import Defaults, Service
from tests.support.loop_rig import Clock
from tests.support.served import check_idle, config_for, opened_runtime, oracle
from tests.support.tiny import tiny_reference

QUESTION = "Once upon a time"
NUM_TOKENS = 8


class House:
    """A daemon without a process.

    Attributes:
        clock: of service and engine; stands still.
        seen: the clients of all requests, in order.
    """

    def __init__(self, runtime: Runtime, endpoint: str, **server: Any) -> None:
        self.runtime = runtime
        self.clock = Clock()
        self.seen: list[ClientRef] = []
        self.engine = EngineLoop(runtime.engine.state, self._run_step, self.clock, runtime.recovery)
        self.server = Server(endpoint, self, role="admin", **server)
        self.service = Service(
            self.engine,
            {DEFAULT_TENANT: Intake(runtime.tokenizer, None, runtime.manifest.model.vocab_size)},
            DaemonFacts(runtime, [self.server]),
            Defaults(),
            self.server.send,
            self.clock,
        )
        self._is_stop: Callable[[StepBatch], bool] | None = None
        self._reached: asyncio.Future[StepBatch]
        self._may_go = asyncio.Event()

    # --- the gate ------------------------------------------------------------------------------

    def pause_at(self, is_stop: Callable[[StepBatch], bool]) -> None:
        """Hold the next step for which this is true, before it reaches the device."""
        self._is_stop = is_stop
        self._reached = asyncio.get_running_loop().create_future()
        self._may_go.clear()

    async def paused(self) -> StepBatch:
        """The step that is held, as soon as one is."""
        return await self._reached

    def resume(self) -> None:
        """Let it go."""
        self._may_go.set()

    async def _run_step(self, batch: StepBatch) -> tuple[Sampled, ...]:
        if self._is_stop is not None and self._is_stop(batch):
            self._is_stop = None
            self._reached.set_result(batch)
            await self._may_go.wait()
        return await self.runtime.run_step(batch)

    # --- what the server calls -----------------------------------------------------------------

    def on_message(self, client: ClientRef, message: AnyRequest) -> None:
        self.seen.append(client)
        self.service.on_message(client, message)

    def on_client_gone(self, client: ClientRef) -> None:
        self.service.on_client_gone(client)

    def on_slow_reader(self, client: ClientRef) -> None:
        self.service.on_slow_reader(client)

    async def send_until_it_fails(
        self, client: ClientRef, text: str = "", *, pause_s: float = 0.0
    ) -> None:
        """Send to a client until libzmq, which works in its own thread, takes no more.

        Args:
            pause_s: between two sends, so that on a busy machine libzmq hears that a client has
                gone before its queue is full.
        """
        piece = Tokens(MessageId("probe"), index=0, text=text, token_ids=())
        while self.server.send(client, piece):  # noqa: ASYNC110
            await asyncio.sleep(pause_s)
        await asyncio.sleep(0)  # the handler is told from the loop

    # --- what must hold afterwards -------------------------------------------------------------

    async def check(self, client: Client) -> None:
        """The next answer is right, nothing is left behind, and the gauges add up."""
        prompt = self.runtime.tokenizer.encode(QUESTION, add_bos=True).tolist()
        tokens, margins = oracle(tiny_reference(), prompt, NUM_TOKENS)
        assert min(margins) > 1e-3
        answer = await ask(client)
        assert answer.token_ids == tuple(tokens)
        assert answer.text == self.runtime.tokenizer.decode(tokens)
        check_idle(self.runtime)
        assert (self.service.num_unfinished, self.engine.num_unanswered) == (0, 0)
        pool = (await client.stats())["pool"]
        blocks = [pool[f"{kind}_blocks"] for kind in ("live", "cached", "free")]
        assert (blocks[0], sum(blocks)) == (0, pool["num_blocks"])


async def ask(client: Client, prompt: str = QUESTION, **options: Any) -> Any:
    """A greedy answer of `NUM_TOKENS` tokens."""
    settings = {"max_tokens": NUM_TOKENS, "temperature": 0, "ignore_eos": True} | options
    return await client.generate(prompt, **settings).result()


@asynccontextmanager
async def open_house(
    bundle: Bundle,
    path: Path,
    *,
    max_queued_replies: int = 4096,
    parking: ParkingLimits | None = None,
    **changes: Any,
) -> AsyncIterator[House]:
    """A house that serves at `ipc://<path>/s`, configured by `config_for`.

    Args:
        max_queued_replies: replies that a client may leave unread before they are parked.
        parking: what may be parked before it is a slow reader.
    """
    async with opened_runtime(config_for(bundle, **changes)) as runtime:
        options = {"max_queued_replies": max_queued_replies, "parking": parking}
        house = House(runtime, f"ipc://{path}/s", **options)
        async with house.server:
            yield house
            await house.service.close()


def is_prefill(num_past: int = 0) -> Callable[[StepBatch], bool]:
    """Of a prefill step with so many tokens before it."""
    return lambda batch: batch.role == "prefill" and batch.rows[0].num_past == num_past


def is_decode(num_past: int = 0) -> Callable[[StepBatch], bool]:
    """Of a decode step whose first row has at least so many tokens before it."""
    return lambda batch: batch.role == "decode" and batch.rows[0].num_past >= num_past
