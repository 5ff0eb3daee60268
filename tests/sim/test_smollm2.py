"""The demo's real model answers as Hugging Face transformers does on the same weights.

`tests/data/smollm2.json` holds prompts, greedy answers and margins, made by
`tests.data.make_smollm2`. Hits are held against the same answers.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ipc.messages import Chat, ChatMessage, MessageId, Tokenize
from om_models.bundle import load_bundle
from runtime_cache.intake import Intake
from tests.support.served import Comparison, Served, served

pytestmark = [
    pytest.mark.smollm2,
    pytest.mark.timeout(900),  # the first run fetches and converts the model
    pytest.mark.asyncio(loop_factories=["uvloop"]),
]

STORED: dict[str, Any] = json.loads(
    (Path(__file__).parents[1] / "data/smollm2.json").read_text("utf-8")
)["answers"]
#: fp32 on both sides, 30 layers, logits up to 20.
BOUND = 2e-4


def prompt_of(host: Served, messages: list[dict[str, str]]) -> list[int]:
    """Token ids of a conversation, by the service's own way."""
    runtime = host.runtime
    intake = Intake(runtime.tokenizer, runtime.chat_template, runtime.manifest.model.vocab_size)
    turns = tuple(ChatMessage(**message) for message in messages)  # type: ignore[arg-type]
    asked = intake.read(Chat(MessageId("1"), messages=turns)).tokens.tolist()
    assert asked == intake.read(Tokenize(MessageId("1"), messages=turns)).tokens.tolist()
    return [int(token) for token in asked]


async def test_chats_equal_transformers_cold_and_as_hits(
    smollm2_bundle: Path, record_property: Any
) -> None:
    bundle = load_bundle(smollm2_bundle, verify=False)
    comparison = Comparison(BOUND)
    async with served(bundle, memory="8GiB", threads=2) as host:
        for answer in STORED.values():
            prompt = prompt_of(host, answer["messages"])
            assert prompt == answer["prompt"]
            expected = answer["greedy"]
            cold = await host.cold(prompt, len(expected))
            comparison.check(cold.token_ids, expected, answer["margins"])
            text = host.runtime.tokenizer.decode(expected)
            assert text == answer["text"]
            before = host.rows_appended()
            hit = await host.greedy(prompt, len(expected))
            assert hit.cached == len(prompt) - 1
            num_rows = host.rows_appended() - before
            assert num_rows == len(prompt) - hit.cached + len(expected) - 1
            comparison.check_runs(hit, cold)
    assert comparison.num_equal > 250
    comparison.report(record_property)
