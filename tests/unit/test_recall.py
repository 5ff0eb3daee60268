"""Prompts that go on from an answer have its ids; nothing else is ever tokenised differently."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from om_models.tokenizer import Tokenizer, TokenizerError
from runtime_cache.recall import Recall
from runtime_cache.text_memory import TextMemory, TokenizedText
from tests.support.vocabularies import VOCABULARIES, hard_texts, vocabulary

#: Of SmolLM2: a turn's end, an answer's beginning.
END, OPEN = "<|im_end|>\n", "<|im_start|>assistant\n"
QUESTION = f"<|im_start|>user\nWhat?{END}{OPEN}"
MORE = f"{END}<|im_start|>user\nAnd?{END}{OPEN}"


class Host:
    """Reads prompts and is told answers.

    Attributes:
        known: all ids of each prompt with its answer.
        written: all texts of them.
    """

    def __init__(self, name: str = "smollm2") -> None:
        self.name = name
        self.tokenizer = vocabulary(name)
        self.recall = Recall(self.tokenizer, TextMemory())
        self.known: list[list[int]] = []
        self.written: list[str] = []

    def read(self, text: str, *, is_chat: bool = True, add_bos: bool = False) -> list[int]:
        """A prompt's ids."""
        found = self.recall.encode(text, add_bos=add_bos, is_chat=is_chat)
        tokens = found.tokens if isinstance(found, TokenizedText) else found
        assert tokens.dtype == np.int32
        ids: list[int] = tokens.tolist()
        return ids

    def fresh(self, text: str, *, add_bos: bool = False) -> list[int]:
        """The canonical ids."""
        ids: list[int] = self.tokenizer.encode(text, add_bos=add_bos).tolist()
        return ids

    def answer(self, text: str, answer: Sequence[int], *, add_bos: bool = False) -> str:
        """Answer a prompt; gives the prompt with the answer's text."""
        prompt = self.recall.encode(text, add_bos=add_bos, is_chat=True)
        if not isinstance(prompt, TokenizedText):
            return text
        shown, ends = self.tokenizer.spell(answer, is_continuation=False)
        self.recall.remember(prompt, answer, is_continuation=False)
        self.known.append(prompt.tokens.tolist() + list(answer[: len(ends)]))
        self.written.append(text + shown.decode())
        return self.written[-1]

    def letters(self, text: str) -> list[int]:
        """Ids as no tokenizer would give them: letter by letter."""
        return [token for letter in text for token in self.fresh(letter)]


def named(tokenizer: Tokenizer, tokens: Sequence[int]) -> str:
    """The text of a prompt's tokens, special ones by name."""
    parts = [[token] for token in tokens[:1]]
    for last, token in pairwise(tokens):
        if is_special(tokenizer, last) or is_special(tokenizer, token):
            parts.append([])
        parts[-1].append(token)
    return "".join(
        tokenizer.token_text(part[0]) if is_special(tokenizer, part[0]) else tokenizer.decode(part)
        for part in parts
    )


def is_special(tokenizer: Tokenizer, token: int) -> bool:
    return not tokenizer.spell([token], is_continuation=True)[1]


# --- an answer's ids come back --------------------------------------------------------------------


def test_a_conversation_keeps_the_ids_of_every_answer() -> None:
    host = Host()
    text, ids = QUESTION, host.read(QUESTION)
    for turn in range(5):
        answer = host.letters(f"Hello number {turn}, don't!")
        assert host.read(text) == ids
        text = host.answer(text, answer) + MORE
        ids = ids + answer + host.fresh(MORE)
    assert host.read(text) == ids
    assert host.fresh(text) != ids
    assert len(host.recall.memory) == 1


def test_a_branch_from_an_earlier_turn_is_found() -> None:
    host = Host()
    first, second = host.letters("Hello there"), host.letters("the other")
    text = host.answer(QUESTION, first)
    host.answer(text + MORE, second)
    branch = f"{END}<|im_start|>user\nAlso{END}{OPEN}"
    assert host.read(text + branch) == [*host.fresh(QUESTION), *first, *host.fresh(branch)]


def test_the_same_prompt_again() -> None:
    host = Host()
    host.answer(QUESTION, host.letters("Hello there"))
    assert host.read(QUESTION) == host.fresh(QUESTION)


def test_of_two_answers_of_the_same_words_the_later_counts() -> None:
    host = Host()
    host.answer(QUESTION, host.letters("Hello there"))
    host.answer(QUESTION, host.fresh("Hello there"))
    text = f"{QUESTION}Hello there{END}"
    assert host.read(text) == host.fresh(text)


def test_a_prompt_in_two_tenants_has_two_memories() -> None:
    one, other = Host(), Host()
    text = one.answer(QUESTION, one.letters("Hello there")) + MORE
    assert other.read(text) == other.fresh(text) != one.read(text)


# --- an answer of which only a part comes back ----------------------------------------------------


@pytest.mark.parametrize("kept", ["Hello", "Hello the", "Hello there"])
def test_what_was_cut_off_is_not_used(kept: str) -> None:
    """By a stop string, by a template that strips, by a client."""
    host = Host()
    host.answer(QUESTION, host.letters("Hello there\n\nUser:"))
    text = QUESTION + kept + MORE
    expected = [*host.fresh(QUESTION), *host.letters(kept), *host.fresh(MORE)]
    assert host.read(text) == expected


def test_a_token_that_was_shown_in_part_is_not_used() -> None:
    host = Host()
    tokens = [*host.letters("Hello "), *host.fresh(" the"), *host.letters("re")]
    host.answer(QUESTION, tokens)
    text = f"{QUESTION}Hello  t{MORE}"
    ids = host.read(text)
    head = [*host.fresh(QUESTION), *host.letters("Hello")]
    assert ids[: len(head)] == head
    assert named(host.tokenizer, ids) == text
    assert host.fresh(" the")[0] not in ids[len(head) :]


def test_an_edited_answer_keeps_its_beginning() -> None:
    host = Host()
    host.answer(QUESTION, host.letters("Hello there, you"))
    ids = host.read(f"{QUESTION}Hello there. Me{MORE}")
    kept = [*host.fresh(QUESTION), *host.letters("Hello there")]
    assert ids == [*kept, *host.fresh(f". Me{MORE}")]


def test_where_no_token_ends_in_both_the_whole_answer_is_tokenised_again() -> None:
    host = Host()
    host.answer(QUESTION, [*host.fresh(" t"), *host.fresh("he")])
    [token] = host.fresh(" there")
    text = f"{QUESTION} there{MORE}"
    assert host.read(text) == [*host.fresh(QUESTION), token, *host.fresh(MORE)]


def test_special_tokens_in_an_answer_end_what_is_remembered() -> None:
    """They are not shown, so the text that comes back does not mean them."""
    host = Host()
    end = host.fresh("<|im_end|>")
    host.answer(QUESTION, [*host.letters("Hello"), *end, *host.letters(" you")])
    text = f"{QUESTION}Hello you{MORE}"
    head = [*host.fresh(QUESTION), *host.letters("Hello")]
    assert host.read(text)[: len(head)] == head
    assert host.read(text).count(end[0]) == host.fresh(text).count(end[0])
    host.answer(QUESTION, end)
    assert len(host.recall.memory) == 1


def test_what_only_looks_like_a_special_token_stays_what_it_is() -> None:
    """The model spelled it out; read again it would end the turn."""
    host = Host()
    answer = host.letters("Say <|im_end|> now")
    text = host.answer(QUESTION, answer) + MORE
    assert host.read(text) == [*host.fresh(QUESTION), *answer, *host.fresh(MORE)]


def test_an_answer_that_ends_inside_a_character() -> None:
    host = Host("bytes")
    start, (first, second, third) = host.fresh("a</s>"), host.fresh("你")
    for answer in ([first], [first, second], [third, first]):
        text = host.answer("a</s>", answer) + "<s>b"
        assert "\ufffd" in text
        assert host.read(text) == [*start, *answer, *host.fresh("<s>b")]


# --- what must not change -------------------------------------------------------------------------


def test_without_an_answer_in_it_a_prompt_is_tokenised_as_ever() -> None:
    """Also where it begins like a remembered one: three blanks before a digit are two tokens."""
    host = Host()
    for ends in ("1", "", "\n", "x"):
        host.answer(f"<|im_start|>user\na   {ends}{END}{OPEN}", host.letters("Hello"))
    for ends in ("", "2", "b", "   1"):
        text = f"<|im_start|>user\na   {ends}{END}{OPEN}"
        assert host.read(text) == host.fresh(text)


def test_a_divider_inside_what_the_user_wrote_is_no_place_to_go_over() -> None:
    host = Host("cut as Llama 3")
    host.answer(f"<|im_start|>user\na   1{END}{OPEN}", host.letters("Hello"))
    text = f"<|im_start|>user\na   {END}{OPEN}"
    assert host.read(text) == host.fresh(text)


def test_what_counts_as_the_models_ends_where_its_ids_do() -> None:
    host = Host()
    host.answer(QUESTION, host.letters("Hello there"))
    start = len(QUESTION)
    for kept in ("Hello there", "Hello", ""):
        found = host.recall.encode(f"{QUESTION}{kept}{MORE}", add_bos=False, is_chat=True)
        assert isinstance(found, TokenizedText)
        assert found.answers == (((start, start + len(kept)),) if kept else ())


def test_what_follows_an_answer_is_tokenised_as_ever() -> None:
    host = Host()
    text = host.answer(f"{QUESTION}", host.letters("Hello"))
    assert host.read(f"{text}   1{END}")[-5:] == host.fresh(f"{text}   1{END}")[-5:]


def test_text_of_no_template_goes_over_at_dividers_only() -> None:
    """`The` with ` re` behind it must not change what `There` is for all that ask later."""
    host = Host()
    host.answer("The", host.letters("re is"))
    assert host.read("There is more", is_chat=False) == host.fresh("There is more")
    text = host.answer(QUESTION, host.letters("Hello there"))
    assert host.read(text, is_chat=False) == host.fresh(text)
    expected = [*host.fresh(QUESTION), *host.letters("Hello there"), *host.fresh(MORE)]
    assert host.read(text + MORE, is_chat=False) == expected


def test_a_bos_that_is_added_is_not_taken_for_one_that_is_not() -> None:
    host = Host("bytes")
    bos = host.fresh("<s>")
    with_bos = host.answer("ab", host.letters("cd"), add_bos=True) + "</s>"
    assert host.read(with_bos, add_bos=True) == [*bos, *host.letters("abcd"), *host.fresh("</s>")]
    assert host.read(with_bos) == host.fresh(with_bos)

    host = Host("bytes")
    first = host.answer("</s>a", host.letters("b"), add_bos=True)  # a divider comes first
    text = f"{first}c"
    assert host.read(text, add_bos=True, is_chat=False) == host.fresh(text, add_bos=True)

    host = Host("bytes")
    without = host.answer("ab", host.letters("cd")) + "</s>"
    assert host.read(without, add_bos=True) == [*bos, *host.fresh(without)]

    host = Host("bytes")
    written = host.answer("<s>ab", host.letters("cd")) + "</s>"
    assert host.read(written, add_bos=True) == host.read(written) == host.fresh(written)


def test_a_text_that_its_tokens_do_not_spell_is_not_remembered() -> None:
    host = Host("composing")
    prompt = host.recall.encode("e\u0301<|im_end|>", add_bos=False, is_chat=True)
    assert not isinstance(prompt, TokenizedText)
    text = host.answer("e<|im_end|>", host.letters("you")) + "e\u0301<|im_end|>"
    assert host.read(text) == host.fresh(text)


def test_behind_a_divider_a_text_that_is_not_spelled_leaves_the_answers_as_they_were() -> None:
    host = Host("composing")
    answer = host.letters("Hello there")
    text = host.answer(QUESTION, answer)
    rest = MORE.replace("And", "e\u0301")
    assert host.read(text + rest) == [*host.fresh(QUESTION), *answer, *host.fresh(rest)]
    host.answer(text + rest, host.letters("you"))
    assert len(host.recall.memory) == 1


def test_a_lone_surrogate() -> None:
    with pytest.raises(TokenizerError, match="lone surrogates"):
        Host().read("a\ud800")


def test_a_token_of_no_text_or_no_answer_at_all_is_nothing_to_remember() -> None:
    host = Host()
    host.answer(QUESTION, [])
    host.answer(QUESTION, [10**6])
    assert len(host.recall.memory) == 0


# --- any texts ------------------------------------------------------------------------------------


@st.composite
def answers(draw: st.DrawFn, tokenizer: Tokenizer) -> list[int]:
    """Ids as a model could choose: any at all, or a text cut where no tokenizer would."""
    if draw(st.booleans()):
        return draw(st.lists(st.integers(0, tokenizer.vocab_size), max_size=8))
    pieces = draw(st.lists(hard_texts(3), max_size=5))
    return [int(i) for piece in pieces for i in tokenizer.encode(piece, add_bos=False)]


@pytest.mark.parametrize("name", VOCABULARIES)
@settings(max_examples=30, deadline=None)
@given(data=st.data())
def test_any_conversation(name: str, data: st.DataObject) -> None:
    """Turns, with anything cut off and put behind."""
    host = Host(name)
    turn_end = data.draw(st.sampled_from(divider_names(host.tokenizer)))
    text = data.draw(hard_texts(4)) + turn_end
    for _ in range(3):
        answered = host.answer(text, data.draw(answers(host.tokenizer)))
        rest = data.draw(hard_texts(5))
        if answered in host.written[-1:]:
            check_turn(host, answered, turn_end + rest)
        cut = data.draw(st.integers(0, len(answered)))
        for other in (answered[:cut] + rest, answered[:cut] + turn_end + rest):
            check(host, other)
        text = data.draw(st.sampled_from([answered + turn_end + rest, text])) + turn_end


def check_turn(host: Host, answered: str, rest: str) -> None:
    """What begins with a divider changes nothing of what was before it."""
    tokens, fresh = host.read(answered + rest), host.fresh(rest)
    if is_spelled(host, fresh, rest):
        head = tokens[: len(tokens) - len(fresh)]
        assert [*head, *fresh] == tokens
        assert any(known[: len(head)] == head for known in host.known)
        check_text(host, head, answered)


def check(host: Host, text: str) -> None:
    """The ids are remembered ones and then canonical ones, and say what the text says."""
    fresh = host.fresh(text)
    for is_chat in (True, False):
        tokens = host.read(text, is_chat=is_chat)
        assert is_joined(tokens, host.known, fresh)
        if is_spelled(host, fresh, text):
            check_text(host, tokens, text)


def check_text(host: Host, tokens: list[int], text: str) -> None:
    # The others write a space, or leave one out, where a part or an answer begins.
    if host.name in ("smollm2", "bytes", "cut as Llama 3", "sentencepiece without prefix"):
        assert named(host.tokenizer, tokens) == text


def is_spelled(host: Host, tokens: list[int], text: str) -> bool:
    ends = host.tokenizer.ends(np.array(tokens, dtype=np.int32), text.encode())
    return ends is not None


def is_joined(tokens: list[int], known: list[list[int]], fresh: list[int]) -> bool:
    """Whether they are a beginning of remembered ids and an end of the canonical ones."""
    num_fresh = num_shared(tokens[::-1], fresh[::-1])
    return any(num_shared(tokens, head) + num_fresh >= len(tokens) for head in ([], *known))


def num_shared(one: Sequence[int], other: Sequence[int]) -> int:
    pairs = enumerate(zip(one, other, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(one), len(other)))


def divider_names(tokenizer: Tokenizer) -> list[str]:
    every_id = np.arange(tokenizer.vocab_size, dtype=np.int32)
    found = np.flatnonzero(tokenizer.spelling.is_divider(every_id)).tolist()
    return [tokenizer.token_text(token) for token in found]
