"""Clients of a daemon whose device fails at random, and who know every right answer.

The daemon serves `tests.support.coded_model`, and may end and be started again. Every client is a
raw socket that keeps all replies to a request: pieces in order without gaps, then exactly one final
reply, then nothing. Only a request that reached no daemon, because one was just ending, may stay
without any word; a later daemon at the same place tells which those are.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter
from collections.abc import Coroutine
from typing import Any

import zmq
import zmq.asyncio

from tests.support.coded_model import answer

#: What a request may be refused with, and why that is all right.
FORGIVEN = {
    "acl": "its step failed twice",
    "device_out_of_memory": "so did this one",
    "step_timeout": "so did this one",
    "queue_full": "many wait behind a hung step",
    "capacity": "registrations hold the pool",
    "device_lost": "the daemon ends",
    "device_hung": "the daemon ends",
    "draining": "the daemon ends",
    "cancelled": "a registration that a later daemon got",
    "unknown_prefix": "the prefix was registered with an earlier daemon",
}
#: After these a client waits for the next daemon.
ENDS = ("device_lost", "device_hung", "draining")
#: Longest answer [tokens].
MAX_ANSWER = 10


class Asked:
    """One request and all that came back.

    Attributes:
        name: its id.
        life: set when the daemon that it was sent to has been followed by another.
        final: done with the one final reply.
        progress: set with the first reply.
    """

    def __init__(self, name: str, life: asyncio.Event) -> None:
        self.name = name
        self.life = life
        self.final: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        self.token_ids: list[int] = []
        self.progress = asyncio.Event()

    def take(self, reply: dict[str, Any]) -> None:
        assert not self.final.done(), f"after the final reply: {reply}"
        if reply["type"] == "tokens":
            assert reply["index"] == len(self.token_ids), "a token came twice, or one is lost"
            self.token_ids += reply["token_ids"]
        else:
            self.token_ids += reply.get("token_ids", ())
            self.final.set_result(reply)
        self.progress.set()


class Talker:
    """One client's socket."""

    def __init__(self, endpoint: str) -> None:
        self._socket = zmq.asyncio.Context.instance().socket(zmq.DEALER)
        self._socket.set(zmq.LINGER, 0)
        self._socket.connect(endpoint)
        self._asked: dict[str, Asked] = {}
        self._reading = asyncio.ensure_future(self._read())

    async def ask(self, life: asyncio.Event, **fields: Any) -> Asked:
        """Send a request."""
        name = str(len(self._asked))
        asked = self._asked[name] = Asked(name, life)
        await self._socket.send(json.dumps({"id": name, **fields}).encode())
        return asked

    async def either(self, *waits: Coroutine[Any, Any, Any] | asyncio.Future[Any]) -> None:
        """Return as soon as one is done; raises what was wrong with a reply."""
        tasks = [asyncio.ensure_future(wait) for wait in waits]
        await asyncio.wait([*tasks, self._reading], return_when=asyncio.FIRST_COMPLETED)
        for task in tasks:
            task.cancel()
        self.check()

    def check(self) -> None:
        """Raises what was wrong with a reply."""
        if self._reading.done():
            self._reading.result()

    def close(self) -> None:
        """Vanish."""
        self.check()
        self._reading.cancel()
        self._socket.close()

    async def _read(self) -> None:
        while True:
            reply = json.loads(await self._socket.recv())
            self._asked[reply["id"]].take(reply)


class Traffic:
    """Everybody who talks to the daemons at some endpoints, one daemon after the other.

    Attributes:
        ends: how requests ended: finish reasons, error codes, kinds of other replies.
        num_unheard: requests that reached no daemon.
        is_alive: whether a daemon is there, as far as is known.
    """

    def __init__(self, endpoints: list[str], seed: int) -> None:
        self.ends: Counter[str] = Counter()
        self.num_unheard = 0
        self.is_alive = asyncio.Event()
        self.life = asyncio.Event()
        self.is_stopping = False
        clients = [
            Client(self, endpoint, random.Random(seed * 1000 + number))
            for number, endpoint in enumerate(endpoints)
        ]
        self._tasks = [asyncio.ensure_future(client.run()) for client in clients]

    def begin_life(self) -> None:
        """A new daemon is ready; the one before is gone."""
        self.life.set()
        self.life = asyncio.Event()
        self.is_alive.set()

    def end_life(self) -> None:
        """The daemon ends."""
        self.is_alive.clear()

    def check(self) -> None:
        """Raises what a client has found wrong."""
        for task in self._tasks:
            if task.done():
                task.result()

    async def stop(self) -> None:
        """Let every client finish what it has asked."""
        self.is_stopping = True
        await asyncio.gather(*self._tasks)


class Client:
    """One who asks, cancels, sets deadlines, registers, and vanishes."""

    def __init__(self, traffic: Traffic, endpoint: str, chance: random.Random) -> None:
        self._traffic = traffic
        self._endpoint = endpoint
        self._chance = chance
        self._talker = Talker(endpoint)
        self._prefixes: dict[str, list[int]] = {}

    async def run(self) -> None:
        """Ask again and again."""
        deeds = (self._answer, self._register, self._release, self._vanish, self._look)
        await self._traffic.is_alive.wait()
        life = self._traffic.life
        while not self._traffic.is_stopping:
            if life is not self._traffic.life:  # a new daemon knows no prefixes
                life = self._traffic.life
                self._prefixes.clear()
            (deed,) = self._chance.choices(deeds, (80, 6, 4, 5, 5))
            await deed()
            await self._traffic.is_alive.wait()
        for name in list(self._prefixes)[1:]:  # one stays
            await self._hear(await self._ask(type="release", prefix_id=name))
        self._talker.close()

    async def _ask(self, **fields: Any) -> Asked:
        return await self._talker.ask(self._traffic.life, **fields)

    def _prompt(self) -> list[int]:
        """Many begin alike, and few are the same."""
        chance = self._chance
        stem = [chance.randrange(3)] * chance.choice((0, 8, 30, 50))
        return stem + [chance.randrange(250) for _ in range(chance.randint(1, 20))]

    def _request(self) -> tuple[dict[str, Any], list[int]]:
        """A request, and all tokens of its prompt."""
        chance, prompt = self._chance, self._prompt()
        tokens = prompt
        fields: dict[str, Any] = {
            "type": "generate",
            "prompt_ids": prompt,
            "max_tokens": chance.randint(1, MAX_ANSWER),
            "temperature": 0,
            "ignore_eos": True,
            "stream": chance.random() < 0.6,
            "use_cache": chance.random() < 0.9,
        }
        if self._prefixes and chance.random() < 0.5:
            fields["prefix_id"] = chance.choice(list(self._prefixes))
            tokens = self._prefixes[fields["prefix_id"]] + prompt
        if chance.random() < 0.1:
            fields["deadline_ms"] = chance.choice((1, 20, 200))
        return fields, tokens

    async def _answer(self) -> None:
        fields, tokens = self._request()
        asked = await self._ask(**fields)
        if self._chance.random() < 0.15:
            await self._talker.either(asked.progress.wait(), asked.life.wait())
            await self._hear(await self._ask(type="cancel", target=asked.name))
        reply = await self._hear(asked)
        right = answer(tokens, fields["max_tokens"])
        assert asked.token_ids == right[: len(asked.token_ids)], (tokens, asked.token_ids)
        if reply is not None and reply.get("finish_reason") == "length":
            assert asked.token_ids == right

    async def _register(self) -> None:
        tokens = [self._chance.randrange(250) for _ in range(self._chance.randint(1, 40))]
        reply = await self._hear(await self._ask(type="register", prompt_ids=tokens))
        if reply is not None and reply["type"] == "registered":
            self._prefixes[reply["prefix_id"]] = tokens

    async def _release(self) -> None:
        if self._prefixes:
            name, _ = self._prefixes.popitem()
            await self._hear(await self._ask(type="release", prefix_id=name))

    async def _vanish(self) -> None:
        for _ in range(self._chance.randint(1, 3)):
            asked = await self._ask(**self._request()[0])
        if self._chance.random() < 0.5:
            await self._talker.either(asked.progress.wait(), asked.life.wait())
        self._talker.close()
        self._talker = Talker(self._endpoint)

    async def _look(self) -> None:
        await self._hear(await self._ask(type="ping"))

    async def _hear(self, asked: Asked) -> dict[str, Any] | None:
        """Its final reply; None if no daemon ever got it."""
        await self._talker.either(asyncio.shield(asked.final), asked.life.wait())
        if not asked.final.done():
            # Either the request is gone, or the new daemon has it: then it answers both.
            cancel = await self._ask(type="cancel", target=asked.name)
            await self._hear(cancel)
        if not asked.final.done():
            assert not asked.progress.is_set(), "a request was begun and never ended"
            self._traffic.num_unheard += 1
            return None
        self._note(asked.final.result(), asked.life)
        return asked.final.result()

    def _note(self, reply: dict[str, Any], life: asyncio.Event) -> None:
        end = reply.get("finish_reason") or reply.get("code") or reply["type"]
        self._traffic.ends[end] += 1
        if reply["type"] == "error":
            assert end in FORGIVEN, reply
        if end in ENDS and not life.is_set():
            self._traffic.end_life()
