"""The embedded API on the software device: what is reused, how much exactly, what is said of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from runtime_cache.errors import (
    InvalidRequest,
    TooLong,
    UnknownEntry,
    UnknownPrefix,
)
from runtime_cache.llm import LLM, PrefixCachingConfig, Result, SomeFailed
from tests.support.embedded import BLOCK, FOUR, make_talking_bundle, opened_llm, pool_of
from tests.support.served import oracle, random_prompt
from tests.support.tiny import BOS, tiny_reference, tiny_spec

SYSTEM = "You answer in one short sentence. "


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_talking_bundle(tmp_path_factory.mktemp("talking"))


def config(**changes: Any) -> PrefixCachingConfig:
    return PrefixCachingConfig(**{"block_size": BLOCK} | changes)


def counts(result: Result) -> tuple[int, int, int]:
    """Prompt tokens, those from the cache, those that were computed."""
    usage = result.usage
    return usage.prompt_tokens, usage.cached_tokens, usage.prefilled_tokens


def computed(llm: LLM) -> int:
    """Token rows computed since the LLM was opened; one token alone is fed by a decode step."""
    device = llm.stats()["device"]
    return sum(device[role]["rows_appended"] for role in ("prefill", "decode"))


# --- answers -----------------------------------------------------------------------------------


def test_an_answer_is_the_models(bundle: Path) -> None:
    prompt = random_prompt(1, 21)
    tokens, margins = oracle(tiny_reference(tiny_spec(max_position=768)), prompt, 4)
    assert min(margins) > 1e-3
    with opened_llm(bundle) as llm:
        cold = llm.generate(prompt, **FOUR)
        hit = llm.generate(prompt, **FOUR)
        assert cold.token_ids == hit.token_ids == tuple(tokens)
        assert (counts(cold), cold.cache.reason) == ((21, 0, 21), "cold")
        # All but the last token, whose logits are wanted.
        assert (counts(hit), hit.cache.reason) == ((21, 20, 1), "hit")
        assert (hit.finish_reason, hit.usage.completion_tokens) == ("length", 4)
        assert hit.timing.total_ms >= hit.timing.ttft_ms > 0


def test_a_list_of_integers_is_one_prompt_and_a_list_of_prompts_is_many(bundle: Path) -> None:
    with opened_llm(bundle) as llm:
        one = llm.generate([72, 105], **FOUR)
        many = llm.generate([[72, 105], "Hi", [{"role": "user", "content": "Hi"}]], **FOUR)
        assert isinstance(one, Result)
        assert [result.usage.prompt_tokens for result in many] == [2, 3, 1 + 20]
        assert many[0].token_ids == one.token_ids
        assert llm.generate(np.array([72, 105]), **FOUR).token_ids == one.token_ids  # type: ignore[call-overload]
        assert llm.generate(["Hi"], **FOUR) == [many[1]]
        assert llm.generate([], **FOUR) == []


def test_text_ids_and_tokenize_agree(bundle: Path) -> None:
    with opened_llm(bundle) as llm:
        ids = llm.tokenize("Hello")
        assert ids[0] == BOS
        assert len(ids) == 6
        assert llm.generate(ids, **FOUR).token_ids == llm.generate("Hello", **FOUR).token_ids
        turns = [{"role": "user", "content": "Hi"}]
        spelled = llm.tokenize("user: Hi\nassistant: ")
        assert llm.tokenize(turns) == spelled


def test_many_at_once_are_computed_together(bundle: Path) -> None:
    with opened_llm(bundle) as llm:
        alone = [llm.generate(random_prompt(seed, 9), **FOUR).token_ids for seed in range(8)]
        llm.evict(all=True)
        before = llm.stats()["device"]["decode"]["num_steps"]
        many = llm.generate([random_prompt(seed, 9) for seed in range(8)], **FOUR)
        steps = llm.stats()["device"]["decode"]["num_steps"] - before
        assert [result.token_ids for result in many] == alone
        # 8 answers take 3 decode steps each, four of them at a time.
        assert steps < 8 * 3


def test_equal_prompts_at_once_are_computed_once(bundle: Path) -> None:
    with opened_llm(bundle) as llm:
        results = llm.generate([SYSTEM] * 64, max_tokens=1, temperature=0)
        assert len({result.token_ids for result in results}) == 1
        # The one that is computed, and of each of the others the last token.
        assert computed(llm) == len(SYSTEM) + 1 + 63


def test_more_at_once_than_may_wait(bundle: Path) -> None:
    with opened_llm(bundle, engine_max_waiting=3) as llm:
        prompts = [[seed + 1] * 5 for seed in range(20)]
        results = llm.generate(prompts, **FOUR)
        assert [result.usage.completion_tokens for result in results] == [4] * 20
        assert llm.generate(prompts[7], **FOUR).token_ids == results[7].token_ids


def test_long_texts_at_once(bundle: Path) -> None:
    """They are tokenised on a thread of their own, one after the other."""
    texts = [character * 5000 for character in "abc"]
    with opened_llm(bundle) as llm, pytest.raises(SomeFailed) as caught:
        llm.generate([*texts, "d"], **FOUR)
    assert [type(result) for result in caught.value.results] == [TooLong] * 3 + [Result]


def test_a_failing_prompt_does_not_cost_the_others(bundle: Path) -> None:
    with opened_llm(bundle) as llm:
        good = llm.generate("good", **FOUR)
        with pytest.raises(SomeFailed, match=r"2 of 4 prompts failed.*prompt 1: the prompt has"):
            llm.generate(["good", [1] * 800, "good", [9999]], **FOUR)
        with pytest.raises(SomeFailed) as caught:
            llm.generate(["good", [1] * 800, "good", [9999]], **FOUR)
        first, long, third, unknown = caught.value.results
        assert first == third == good
        assert isinstance(long, TooLong)
        assert isinstance(unknown, InvalidRequest)
        # One prompt alone raises its own error; so does what is wrong before anything starts.
        with pytest.raises(TooLong):
            llm.generate([1] * 800, **FOUR)
        with pytest.raises(InvalidRequest, match="`max_tokens`"):
            llm.generate(["good", "good"], max_tokens=0)
        assert llm.stats()["engine"]["num_running"] == 0


def test_an_answer_piece_by_piece(bundle: Path) -> None:
    with opened_llm(bundle) as llm:
        whole = llm.generate("Hello", **FOUR)
        stream = llm.stream("Hello", **FOUR)
        pieces = list(stream)
        assert sum((piece.token_ids for piece in pieces), ()) == whole.token_ids
        assert "".join(piece.text for piece in pieces) == whole
        assert (stream.result(), stream.result().usage.cached_tokens) == (whole, 5)
        assert llm.stream("Hello", **FOUR).result() == whole
        with pytest.raises(InvalidRequest, match="a prompt is text, token ids or messages"):
            llm.stream(["Hello", "you"])  # type: ignore[arg-type]
        with pytest.raises(TooLong):
            llm.stream([1] * 800).result()


def test_options_reach_the_engine(bundle: Path) -> None:
    with opened_llm(bundle) as llm:
        first = llm.generate("a", max_tokens=1, temperature=0, logprobs=2)
        assert (len(first.logprobs), len(first.logprobs[0].top)) == (1, 2)
        token = first.token_ids[0]
        other = llm.generate("a", max_tokens=1, temperature=0, logit_bias={token: -100})
        assert other.token_ids != first.token_ids
        stopped = llm.generate("a", max_tokens=9, temperature=0, stop_token_ids=[token])
        assert (stopped.finish_reason, stopped.usage.completion_tokens) == ("stop", 1)
        assert llm.generate("a", seed=3, **FOUR | {"temperature": 1}) == llm.generate(
            "a", seed=3, **FOUR | {"temperature": 1}
        )
        ended = llm.generate("a", deadline_ms=1, ignore_eos=True)
        assert ended.finish_reason == "deadline"


def test_the_default_length(bundle: Path) -> None:
    with opened_llm(bundle, engine_default_max_tokens=3) as llm:
        assert llm.generate("a", ignore_eos=True).usage.completion_tokens == 3
        assert llm.generate("a", ignore_eos=True, max_tokens=5).usage.completion_tokens == 5


# --- prefixes ----------------------------------------------------------------------------------


def test_a_registered_prefix_is_computed_once(bundle: Path) -> None:
    with opened_llm(bundle) as llm:
        prefix = llm.register_prefix(SYSTEM)
        num_tokens = len(SYSTEM) + 1
        assert (prefix.num_tokens, prefix.cached_tokens) == (num_tokens, 0)
        num_blocks = -(-num_tokens // BLOCK)
        assert prefix.num_bytes == num_blocks * pool_of(llm)["bytes_per_block"]
        assert computed(llm) == num_tokens
        one = llm.generate("Who?", prefix_id=prefix, max_tokens=1)
        assert (counts(one), one.cache.reason) == ((num_tokens + 4, num_tokens, 4), "extended")
        two = llm.generate("Is it?", prefix_id=prefix, max_tokens=1)
        assert (counts(two), two.cache.reason) == ((num_tokens + 6, num_tokens, 6), "extended")
        assert computed(llm) == num_tokens + 4 + 6


def test_prefix_and_text_are_one_prompt(bundle: Path) -> None:
    with opened_llm(bundle) as llm:
        plain = llm.generate(f"{SYSTEM}Who?", **FOUR)
        prefix = llm.register_prefix(SYSTEM)
        assert prefix.cached_tokens == prefix.num_tokens
        joined = llm.generate("Who?", prefix_id=prefix, **FOUR)
        assert joined.token_ids == plain.token_ids
        many = llm.generate(["Who?", "Why?"], prefix_id=prefix, **FOUR)
        assert many[0].token_ids == plain.token_ids


def test_registering_is_idempotent(bundle: Path) -> None:
    with opened_llm(bundle) as llm:
        prefix = llm.register_prefix(SYSTEM)
        again = llm.register_prefix(llm.tokenize(SYSTEM))
        assert again == prefix
        assert (again.num_tokens, again.num_bytes) == (prefix.num_tokens, prefix.num_bytes)
        assert pool_of(llm)["registered_prefixes"] == 1


def test_a_conversations_beginning_can_be_registered(bundle: Path) -> None:
    begin = [{"role": "system", "content": SYSTEM}]
    with opened_llm(bundle) as llm:
        prefix = llm.register_prefix(begin)
        result = llm.chat([*begin, {"role": "user", "content": "Who?"}], **FOUR)
        assert result.usage.cached_tokens == prefix.num_tokens


def test_releasing(bundle: Path) -> None:
    with opened_llm(bundle) as llm:
        prefix = llm.register_prefix(SYSTEM)
        kept = pool_of(llm)["kept_blocks"]
        assert kept == -(-prefix.num_tokens // BLOCK)
        assert llm.evict(all=True).kept_blocks == kept
        llm.release_prefix(prefix)
        assert pool_of(llm)["kept_blocks"] == 0
        assert llm.evict(all=True).num_blocks == kept
        with pytest.raises(UnknownPrefix):
            llm.release_prefix(prefix)
        with pytest.raises(UnknownPrefix):
            llm.generate("Who?", prefix_id=prefix)


# --- the options of the cache ------------------------------------------------------------------


def test_a_common_beginning_is_found(bundle: Path) -> None:
    """As in ATB's example: nobody says where the prefix ends."""
    with opened_llm(bundle, config(auto_detect=True)) as llm:
        first = llm.generate("System: be kind.\nUser: what is CANN?", **FOUR)
        second = llm.generate("System: be kind.\nUser: what is Ascend C?", **FOUR)
        assert counts(first) == (37, 0, 37)
        shared = 1 + len("System: be kind.\nUser: what is ")
        assert counts(second) == (41, shared, 41 - shared)
        assert (second.cache.reason, second.cache.diverged_at) == ("diverged", shared)
        assert second.cache.nearest_tokens == 37 + 3  # the answer's last token has no KV


def test_without_detection_only_registered_prefixes_are_kept(bundle: Path) -> None:
    with opened_llm(bundle, config(auto_detect=False)) as llm:
        assert [llm.generate(SYSTEM, **FOUR).usage.cached_tokens for _ in range(2)] == [0, 0]
        assert pool_of(llm)["cached_blocks"] == 0
        prefix = llm.register_prefix(SYSTEM)
        hits = [llm.generate("Who?", prefix_id=prefix, **FOUR) for _ in range(2)]
        assert [hit.usage.cached_tokens for hit in hits] == [prefix.num_tokens] * 2


def test_without_a_cache(bundle: Path) -> None:
    with opened_llm(bundle, config(enable=False)) as llm:
        results = [llm.generate(SYSTEM, **FOUR) for _ in range(2)]
        assert [result.usage.cached_tokens for result in results] == [0, 0]
        assert results[0].cache.reason == "disabled"
        with pytest.raises(InvalidRequest, match="the prefix cache is off"):
            llm.register_prefix(SYSTEM)


def test_one_request_without_the_cache(bundle: Path) -> None:
    with opened_llm(bundle) as llm:
        llm.generate(SYSTEM, use_cache=False, **FOUR)
        assert pool_of(llm)["cached_blocks"] == 0
        llm.generate(SYSTEM, **FOUR)
        result = llm.generate(SYSTEM, use_cache=False, **FOUR)
        assert (result.usage.cached_tokens, result.cache.reason) == (0, "disabled")


@pytest.mark.parametrize(("num_prefixes", "cached"), [(3, 9), (4, 9), (5, 0)])
def test_how_many_prefixes_are_kept(bundle: Path, num_prefixes: int, cached: int) -> None:
    """The oldest goes when there is one too many."""
    with opened_llm(bundle, config(max_cached_prefixes=4)) as llm:
        for seed in range(num_prefixes):
            llm.generate([seed] * 10, max_tokens=1, temperature=0)
        assert llm.list().total == min(num_prefixes, 4)
        assert llm.generate([0] * 10, max_tokens=1).usage.cached_tokens == cached


@pytest.mark.parametrize(("limit", "cached"), [(19, 19), (20, 20), (21, 20)])
def test_how_much_of_a_prefix_is_kept(bundle: Path, limit: int, cached: int) -> None:
    prompt = random_prompt(1, 21)
    with opened_llm(bundle, config(max_prefix_length=limit)) as llm:
        llm.generate(prompt, max_tokens=1)
        result = llm.generate(prompt, max_tokens=1)
        assert result.usage.cached_tokens == cached
        assert result.cache.reason == ("limit" if cached < 20 else "hit")


def test_a_capacity_below_the_pool(bundle: Path) -> None:
    with opened_llm(bundle) as llm:
        whole = pool_of(llm)
    gigabytes = 10 * whole["bytes_per_block"] / 10**9
    with opened_llm(bundle, config(cache_capacity=gigabytes)) as llm:
        assert pool_of(llm)["num_blocks"] == 9  # one is the null block


def test_a_capacity_above_the_pool_is_told_once_and_capped(
    bundle: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with opened_llm(bundle, config(cache_capacity=48)) as llm:
        assert pool_of(llm)["capacity_tokens"] == 4096 - BLOCK
        llm.generate("a", **FOUR)
    captured = capsys.readouterr()
    assert captured.err.count("cache_capacity_capped") == 1
    assert captured.out == ""


def test_deterministic_hits_are_bit_identical(bundle: Path) -> None:
    prompt = random_prompt(3, 70)
    with opened_llm(bundle, config(deterministic=True)) as llm:
        miss, hit = (llm.generate(prompt, logprobs=1, **FOUR) for _ in range(2))
        assert (miss.token_ids, miss.logprobs) == (hit.token_ids, hit.logprobs)
        assert (miss.usage.cached_tokens, hit.usage.cached_tokens > 0) == (0, True)


# --- conversations -----------------------------------------------------------------------------


def test_a_result_is_taken_as_a_messages_content(bundle: Path) -> None:
    """Every earlier turn is reused: the system prompt, the questions, the answers."""
    messages: list[dict[str, str]] = [
        {"role": "system", "content": SYSTEM},
        {"role": "user", "content": "What is CANN?"},
    ]
    with opened_llm(bundle) as llm:
        first = llm.chat(messages, **FOUR)
        messages.append({"role": "assistant", "content": first})
        messages.append({"role": "user", "content": "And CUDA?"})
        second = llm.chat(messages, **FOUR)
        assert second.usage.cached_tokens >= first.usage.prompt_tokens
        assert llm.chat([messages, messages[:2]], **FOUR) == [second, first]
        with pytest.raises(InvalidRequest, match="a conversation is a list of messages"):
            llm.chat("Hello")  # type: ignore[arg-type]
        with pytest.raises(InvalidRequest, match="`prefix_id` goes before text"):
            llm.generate(messages, prefix_id="p-1")


# --- what the cache holds ----------------------------------------------------------------------


def test_explain_runs_nothing(bundle: Path) -> None:
    with opened_llm(bundle) as llm:
        prefix = llm.register_prefix(SYSTEM)
        before = computed(llm)
        told = llm.explain("Who?", prefix_id=prefix)
        num_tokens = prefix.num_tokens
        assert (told.prompt_tokens, told.cached_tokens) == (num_tokens + 4, num_tokens)
        assert told.cache.reason == "extended"
        other = llm.explain("other").cache
        assert (other.reason, other.diverged_at) == ("diverged", 1)  # the begin-of-text token
        assert computed(llm) == before


def test_pin_and_evict(bundle: Path) -> None:
    with opened_llm(bundle) as llm:
        llm.generate([1] * 9, max_tokens=1)
        llm.generate([2] * 9, max_tokens=1)
        listed = llm.list(limit=1)
        assert (listed.total, listed.entries[0].num_tokens) == (2, 9)
        first, second = (entry.digest for entry in llm.list().entries)
        assert [entry.digest for entry in llm.list(offset=1).entries] == [second] != [first]
        digest = listed.entries[0].digest
        pinned = llm.pin(digest)
        assert (pinned.digest, pinned.num_tokens, pinned.num_blocks) == (digest, 9, 3)
        assert (llm.evict(all=True).num_blocks, llm.list().total) == (3, 1)
        assert llm.unpin(digest[:8]).digest == digest
        assert llm.evict(digest=digest).num_blocks == 3
        with pytest.raises(UnknownEntry):
            llm.pin(digest)
        with pytest.raises(InvalidRequest, match="exactly one of"):
            llm.evict()


def test_info(bundle: Path) -> None:
    with opened_llm(bundle) as llm:
        info = llm.info()
        assert (info.device, info.block_size, info.max_model_len, info.chat) == (
            "sim:0",
            BLOCK,
            768,
            True,
        )
        assert repr(llm) == f"<LLM {bundle} on sim:0: open>"
    assert repr(llm) == f"<LLM {bundle} on sim:0: closed>"
