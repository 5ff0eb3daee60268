"""A conversation through service, engine and device: a turn computes what is new in it, no more.

The answers are words that the model spells letter by letter, so that a tokenizer always gives other
ids for them.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest
import pytest_asyncio

from ipc import messages as wire
from ipc.codec import Encoding
from ipc.server import ClientRef
from om_models.bundle import Bundle
from om_models.convert import convert
from runtime_cache.engine.batch import StepBatch
from runtime_cache.engine.loop import EngineLoop
from runtime_cache.engine.request import BadLogits, Sampled
from runtime_cache.facts import DaemonFacts
from runtime_cache.ids import DEFAULT_TENANT
from runtime_cache.intake import Intake
from runtime_cache.runtime import Runtime
from runtime_cache.service import Defaults, Service
from runtime_cache.text_memory import TextMemory
from tests.support.served import BLOCK, check_idle, config_for, opened_runtime
from tests.support.tiny import TINY_OPTIONS, Silent, tiny_spec, write_checkpoint
from tests.support.vocabularies import gguf_library

CLIENT = ClientRef(b"c", "user", Encoding.MSGPACK, is_delimited=False)
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{{ m.content | trim }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
#: What the model may answer with; canonically they are joined: `the`, `her`, `re`…
LETTERS = "ethrn"
USER = wire.ChatMessage("user", "What is it?")


@pytest.fixture(scope="module")
def chat_bundle(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    """A tiny Llama with SmolLM2's way to tokenise, and a chat template that strips."""
    directory = tmp_path_factory.mktemp("chat")
    library = gguf_library("smollm2_1k")
    spec = tiny_spec(vocab_size=library.get_vocab_size(), tie_embeddings=False)
    checkpoint = write_checkpoint(directory / "checkpoint", spec)
    library.save(str(checkpoint / "tokenizer.json"))
    settings = {"eos_token": "<|im_end|>", "chat_template": TEMPLATE}
    (checkpoint / "tokenizer_config.json").write_text(json.dumps(settings), "utf-8")
    return convert(str(checkpoint), directory / "bundle", TINY_OPTIONS, Silent())


class Counter:
    """A service over a runtime, asked without sockets, with a gate before the device."""

    def __init__(self, runtime: Runtime, memory: TextMemory | None) -> None:
        self.runtime = runtime
        self._stops_at: int | None = None
        self._has_stopped, self._may_go = asyncio.Event(), asyncio.Event()
        self.engine = EngineLoop(runtime.engine.state, self._run_step)
        vocab_size = runtime.manifest.model.vocab_size
        self.intake = Intake(runtime.tokenizer, runtime.chat_template, vocab_size, memory=memory)
        self.service = Service(
            self.engine,
            {DEFAULT_TENANT: self.intake},
            DaemonFacts(runtime, ()),
            Defaults(),
            lambda _, reply: self._replies.put_nowait(reply),
        )
        self._replies: asyncio.Queue[wire.AnyReply] = asyncio.Queue()
        self._num_asked = 0

    def ask(self, turns: Sequence[wire.ChatMessage], **options: Any) -> None:
        """A greedy answer in `LETTERS`."""
        self._num_asked += 1
        settings: dict[str, Any] = {
            "temperature": 0.0,
            "stream": False,
            "logit_bias": self.bias(LETTERS),
            "frequency_penalty": 2.0,  # or it says one letter all the time
        }
        name = wire.MessageId(str(self._num_asked))
        message = wire.Chat(name, messages=tuple(turns), **settings | options)
        self.service.on_message(CLIENT, message)

    def cancel(self) -> None:
        """The last request."""
        target = wire.MessageId(str(self._num_asked))
        self.service.on_message(CLIENT, wire.Cancel(wire.MessageId("c"), target=target))

    async def done(self) -> wire.Done:
        """The next answer."""
        while not isinstance(reply := await self._replies.get(), wire.Done):
            assert isinstance(reply, wire.Ok | wire.Tokens), reply
        return reply

    async def chat(self, turns: Sequence[wire.ChatMessage], **options: Any) -> wire.Done:
        self.ask(turns, **options)
        return await self.done()

    def ids(self, text: str) -> list[int]:
        """As the tokenizer has them."""
        ids: list[int] = self.runtime.tokenizer.encode(text, add_bos=False).tolist()
        return ids

    def prompt(self, turns: Sequence[wire.ChatMessage]) -> list[int]:
        """A conversation as the tokenizer has it."""
        assert self.runtime.chat_template is not None
        plain = [{"role": turn.role, "content": turn.content} for turn in turns]
        return self.ids(self.runtime.chat_template.render(plain))

    def bias(self, text: str) -> dict[str, float]:
        """Only the tokens of these letters can be chosen."""
        return {str(self.ids(letter)[0]): 100.0 for letter in text}

    # --- the gate --------------------------------------------------------------------------------

    def stop_at(self, num_past: int) -> None:
        """Hold the step that has so many tokens behind it, before it reaches the device."""
        self._stops_at = num_past

    async def has_stopped(self) -> None:
        await self._has_stopped.wait()

    def go_on(self) -> None:
        self._may_go.set()

    async def _run_step(self, batch: StepBatch) -> tuple[Sampled | BadLogits, ...]:
        if batch.rows[0].num_past == self._stops_at:
            self._stops_at = None
            self._has_stopped.set()
            await self._may_go.wait()
        return await self.runtime.run_step(batch)


@asynccontextmanager
async def opened(bundle: Bundle, memory: TextMemory | None) -> AsyncIterator[Counter]:
    async with opened_runtime(config_for(bundle)) as runtime:
        counter = Counter(runtime, memory)
        yield counter
        await counter.service.close()
        check_idle(runtime)


@pytest_asyncio.fixture
async def counter(chat_bundle: Bundle) -> AsyncIterator[Counter]:
    async with opened(chat_bundle, TextMemory()) as counter:
        yield counter


def replied(turns: Sequence[wire.ChatMessage], text: str) -> list[wire.ChatMessage]:
    """The conversation with the answer and the next question."""
    return [*turns, wire.ChatMessage("assistant", text), wire.ChatMessage("user", "And then?")]


async def check_next_turn(
    counter: Counter, turns: Sequence[wire.ChatMessage], first: wire.Done, num_cached: int
) -> wire.Done:
    """The next turn computes what is behind `num_cached` tokens, and answers as without a cache."""
    question = replied(turns, first.text)
    second = await counter.chat(question, max_tokens=5)
    assert second.usage.cached_tokens == num_cached
    assert second.usage.prefilled_tokens == second.usage.prompt_tokens - num_cached
    counter.engine.evict(None)
    cold = await counter.chat(question, max_tokens=5)
    assert cold.usage.cached_tokens == 0
    assert cold.token_ids == second.token_ids
    return second


# --- every way an answer can end ------------------------------------------------------------------


@pytest.mark.parametrize("num_tokens", [1, 2, BLOCK, BLOCK + 1, 11])
async def test_an_answer_of_full_length(counter: Counter, num_tokens: int) -> None:
    first = await counter.chat([USER], max_tokens=num_tokens)
    assert (first.finish_reason, len(first.token_ids)) == ("length", num_tokens)
    assert num_tokens < BLOCK or counter.ids(first.text) != list(first.token_ids)
    # The KV of the last token was not computed: it was never fed.
    num_cached = first.usage.prompt_tokens + num_tokens - 1
    await check_next_turn(counter, [USER], first, num_cached)


async def test_every_turn_of_a_conversation(counter: Counter) -> None:
    turns, num_cached = [USER], 0
    for _ in range(4):
        done = await counter.chat(turns, max_tokens=7)
        assert done.usage.cached_tokens == num_cached
        assert done.cache is not None
        assert done.cache.reason == ("extended" if num_cached else "cold")
        num_cached = done.usage.prompt_tokens + 7 - 1
        turns = replied(turns, done.text)
    assert done.usage.prompt_tokens > len(counter.prompt(turns[:-2]))


async def test_an_answer_that_the_model_ends(counter: Counter) -> None:
    [end] = counter.ids("<|im_end|>")
    bias = counter.bias(LETTERS) | {str(end): 95.0}
    first = await counter.chat([USER], max_tokens=30, logit_bias=bias)
    assert (first.finish_reason, first.stop) == ("stop", "<|im_end|>")
    num_cached = first.usage.prompt_tokens + len(first.token_ids) - 1
    await check_next_turn(counter, [USER], first, num_cached)


async def test_an_answer_that_ends_with_a_token_of_unshown_text(counter: Counter) -> None:
    probe = await counter.chat([USER], max_tokens=12, use_cache=False)
    [stop] = counter.ids("t")
    place = probe.token_ids.index(stop)
    first = await counter.chat([USER], max_tokens=12, stop_token_ids=(stop,))
    assert (first.text, first.token_ids[-1]) == (probe.text[:place], stop)
    await check_next_turn(counter, [USER], first, first.usage.prompt_tokens + place)


@pytest.mark.parametrize("size", [1, 3])
async def test_an_answer_that_a_string_ends(counter: Counter, size: int) -> None:
    """The tokens of the stop string are in the cache, but not in the next prompt."""
    probe = await counter.chat([USER], max_tokens=12, use_cache=False)
    stop = probe.text[7 : 7 + size]
    place = probe.text.index(stop)
    first = await counter.chat([USER], max_tokens=12, stop=(stop,))
    assert (first.text, len(first.token_ids)) == (probe.text[:place], place + size)
    await check_next_turn(counter, [USER], first, first.usage.prompt_tokens + place)


async def test_an_answer_that_is_cancelled(counter: Counter) -> None:
    num_prompt = len(counter.prompt([USER]))
    counter.stop_at(num_prompt + 6)
    counter.ask([USER], max_tokens=50)
    await counter.has_stopped()
    counter.cancel()
    counter.go_on()
    first = await counter.done()
    # Seven tokens were sampled, and the step that was in flight computes the KV of the last one.
    assert (first.finish_reason, len(first.token_ids)) == ("cancelled", 7)
    await check_next_turn(counter, [USER], first, num_prompt + 7)


async def test_a_branch_from_an_earlier_turn(counter: Counter) -> None:
    first = await counter.chat([USER], max_tokens=9)
    turns = replied([USER], first.text)
    await counter.chat(turns, max_tokens=9)
    branch = [*turns[:-1], wire.ChatMessage("user", "No, the other one!")]
    done = await counter.chat(branch, max_tokens=9)
    # What is before the other question, which begins `<|im_start|>user` and a line break.
    shared = counter.ids("<|im_end|>\n<|im_start|>user\n")
    assert done.usage.cached_tokens == first.usage.prompt_tokens + 9 + len(shared)


# --- without a memory -----------------------------------------------------------------------------


async def test_without_a_memory_the_report_says_where_the_ids_part(chat_bundle: Bundle) -> None:
    async with opened(chat_bundle, None) as counter:
        first = await counter.chat([USER], max_tokens=9)
        question = replied([USER], first.text)
        second = await counter.chat(question, max_tokens=5)
        known = [*counter.prompt([USER]), *first.token_ids]
        asked = counter.prompt(question)
        place = next(i for i, (a, b) in enumerate(zip(known, asked, strict=False)) if a != b)
        assert place < len(known) - 1
        assert second.usage.prompt_tokens == len(asked)
        assert second.usage.cached_tokens == place
        assert second.cache is not None
        assert second.cache.reason == "diverged"
        assert second.cache.diverged_at == place
        assert second.cache.nearest_tokens == len(known) - 1


async def test_a_request_that_does_not_use_the_cache_is_tokenised_afresh(counter: Counter) -> None:
    first = await counter.chat([USER], max_tokens=9)
    question = replied([USER], first.text)
    second = await counter.chat(question, max_tokens=5, use_cache=False)
    assert second.usage.prompt_tokens == len(counter.prompt(question))
