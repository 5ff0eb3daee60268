"""The load generator keeps as many requests unfinished as it should, on all its connections."""

from __future__ import annotations

import asyncio
from collections import deque
from pathlib import Path

import numpy as np
import pytest

from ipc.errors import ServerError
from ipc.messages import AnyRequest, Generate
from ipc.server import ClientRef
from tests.support.ipc_daemon import CountingDaemon, run_on
from tools.bench.load import Load, send_all


class HoldingDaemon(CountingDaemon):
    """Answers the oldest request as soon as so many are unfinished, or all have been sent.

    Attributes:
        most: the most that were unfinished.
        clients: those that sent something.
    """

    def __init__(self, at_once: int, num_requests: int) -> None:
        super().__init__()
        self.most = 0
        self.clients: set[ClientRef] = set()
        self._at_once = at_once
        self._num_left = num_requests
        self._unfinished: deque[tuple[ClientRef, Generate]] = deque()

    def _answer(self, client: ClientRef, message: AnyRequest) -> None:
        assert isinstance(message, Generate)
        self.clients.add(client)
        self._unfinished.append((client, message))
        self._num_left -= 1
        self.most = max(self.most, len(self._unfinished))
        if len(self._unfinished) == self._at_once:
            self._finish_oldest()
        while not self._num_left and self._unfinished:
            self._finish_oldest()

    def _finish_oldest(self) -> None:
        client, message = self._unfinished.popleft()
        self._generate(client, Generate(message.id, prompt="count 1"))


@pytest.mark.parametrize(("num_requests", "at_once"), [(1, 1), (7, 7), (7, 3), (3, 7), (40, 10)])
def test_so_many_are_unfinished_to_the_end(tmp_path: Path, num_requests: int, at_once: int):
    daemon = HoldingDaemon(at_once, num_requests)
    prompts = np.arange(num_requests * 5, dtype=np.int32).reshape(num_requests, 5)
    ends: list[int] = []

    async def scene() -> None:
        async with daemon.serve(f"ipc://{tmp_path}/s"):
            load = Load(prompts, at_once=at_once, num_connections=3, max_tokens=2)
            answers = await send_all(f"ipc://{tmp_path}/s", load, ends.append)
        assert [answer.usage.prompt_tokens for answer in answers] == [550] * num_requests
        assert all(answer.ttft_s > 0 for answer in answers)

    run_on("uvloop", scene())
    assert ends == list(range(1, num_requests + 1))
    assert daemon.most == min(at_once, num_requests)
    assert len(daemon.clients) == min(at_once, num_requests, 3)
    sent = [message for message in daemon.requests if isinstance(message, Generate)]
    assert sorted(message.prompt_ids or () for message in sent) == [tuple(row) for row in prompts]
    assert {(m.max_tokens, m.temperature, m.ignore_eos) for m in sent} == {(2, 0.0, True)}


def test_a_refusal_ends_it(tmp_path: Path):
    class Refusing(CountingDaemon):
        def _answer(self, client: ClientRef, message: AnyRequest) -> None:
            self._generate(client, Generate(message.id, prompt="refuse"))

    async def scene() -> None:
        async with Refusing().serve(f"ipc://{tmp_path}/s"):
            load = Load(np.zeros((9, 4), np.int32), at_once=3, num_connections=2, max_tokens=1)
            before = asyncio.all_tasks()
            with pytest.raises(ServerError, match="256 requests are waiting already"):
                await send_all(f"ipc://{tmp_path}/s", load, lambda _: None)
            assert asyncio.all_tasks() == before

    run_on("uvloop", scene())
