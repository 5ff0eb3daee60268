"""Wire messages to token ids and sampling parameters."""

from __future__ import annotations

import json
import re
from typing import Any

import numpy as np
import pytest

from ipc.messages import Chat, ChatMessage, Generate, MessageId, PrefixName, Register, Tokenize
from om_models.chat import ChatTemplate
from runtime_cache.engine.request import SamplingParams
from runtime_cache.errors import InvalidRequest, UnknownPrefix
from runtime_cache.ids import PrefixId
from runtime_cache.intake import Intake, Prompt, Prompted
from tests.support.desk import BOS, TEMPLATE, VOCAB, tokenizer
from tests.support.vocabularies import DATA, vocabulary

ID = MessageId("1")
TURNS = (ChatMessage("system", "a"), ChatMessage("user", "b"))


#: A second turn: what was said before, the answer, the next question.
MISTRAL, SMOLLM2, LLAMA3 = (
    json.loads((DATA / "chat.json").read_text("utf-8"))["templates"][name]
    for name in ("mistral", "smollm2", "llama3")
)
#: As Llama 2's: it strips an answer and puts a space on both sides.
LLAMA2 = (
    "{% for m in messages %}{% if m.role == 'user' %}<s>[INST] {{ m.content.strip() }} [/INST]"
    "{% else %} {{ m.content.strip() }} </s>{% endif %}{% endfor %}"
)


def intake(bos: int | None = BOS, template: str | None = TEMPLATE) -> Intake:
    chat_template = None if template is None else ChatTemplate(template)
    return Intake(tokenizer(bos), chat_template, VOCAB)


def talking(vocabulary_name: str, template: str) -> Intake:
    reader = vocabulary(vocabulary_name)
    return Intake(reader, ChatTemplate(template, "<s>", "</s>"), reader.vocab_size)


def chat(*contents: str, **fields: Any) -> Chat:
    """User and assistant by turns."""
    roles: list[Any] = ["user", "assistant"]
    turns = [ChatMessage(roles[i % 2], text) for i, text in enumerate(contents)]
    return Chat(ID, messages=tuple(turns), **fields)


def letters(reader: Intake, text: str) -> list[int]:
    """Ids as no tokenizer would give them: letter by letter, a space only where one is written."""
    table = {reader.tokenizer.token_text(i): i for i in range(reader.vocab_size)}
    return [table[letter] for letter in text]


def ids_of(text: str) -> list[int]:
    ids: list[int] = tokenizer().encode(text, add_bos=False).tolist()
    return ids


def test_the_alphabet_is_what_these_tests_assume() -> None:
    assert ids_of("!ab<s>") == [0, 64, 65, 256]


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        (Generate(ID, prompt="ab"), [256, 64, 65]),
        (Generate(ID, prompt="<s>ab"), [256, 64, 65]),
        (Generate(ID, prompt_ids=(64, 65)), [64, 65]),
        (Generate(ID, prompt_ids=(0, VOCAB - 1)), [0, 257]),
        (Tokenize(ID, text="ab"), [256, 64, 65]),
        (Register(ID, text="ab"), [256, 64, 65]),
        (Register(ID, prompt_ids=(1, 2)), [1, 2]),
        (Chat(ID, messages=TURNS), ids_of("system:a;user:b;>")),
        (Tokenize(ID, messages=TURNS), ids_of("system:a;user:b;>")),
        # More turns may follow a registered beginning.
        (Register(ID, messages=TURNS), ids_of("system:a;user:b;")),
    ],
)
def test_each_form_of_a_prompt(message: Prompted, expected: list[int]) -> None:
    tokens = intake().read(message).tokens
    assert tokens.dtype == np.int32
    assert tokens.tolist() == expected


def test_a_prefix_stands_before_the_prompt_and_brings_the_only_bos() -> None:
    reader = intake()
    name = PrefixName("p-1")
    reader.prefixes[PrefixId(name)] = reader.read(Register(ID, text="a")).tokens
    for message, expected in [
        (Generate(ID, prompt="b", prefix_id=name), [256, 64, 65]),
        (Generate(ID, prompt="", prefix_id=name), [256, 64]),
        (Generate(ID, prompt_ids=(7,), prefix_id=name), [256, 64, 7]),
        (Generate(ID, prompt_ids=(), prefix_id=name), [256, 64]),
    ]:
        assert reader.read(message).tokens.tolist() == expected


def test_an_unknown_prefix() -> None:
    sentence = "no prefix `p-1` is registered; register it (again) first"
    with pytest.raises(UnknownPrefix, match=re.escape(sentence)):
        intake().read(Generate(ID, prompt="b", prefix_id=PrefixName("p-1")))


@pytest.mark.parametrize(
    "message",
    [Generate(ID, prompt=""), Generate(ID, prompt_ids=()), Register(ID, text="")],
)
def test_a_prompt_without_a_token_is_refused(message: Prompted) -> None:
    with pytest.raises(InvalidRequest, match=r"^the prompt is empty: give at least one token$"):
        intake(bos=None).read(message)


def test_nothing_at_all_can_be_tokenised() -> None:
    assert intake(bos=None).read(Tokenize(ID, text="")).tokens.tolist() == []
    assert intake().read(Generate(ID, prompt="")).tokens.tolist() == [BOS]


@pytest.mark.parametrize("token_id", [VOCAB, 2**31 - 1, -1])
def test_prompt_ids_outside_the_vocabulary(token_id: int) -> None:
    sentence = f"`prompt_ids`: token id {token_id} is outside the vocabulary (0 to 257)"
    for message in (
        Generate(ID, prompt_ids=(1, token_id, 2)),
        Register(ID, prompt_ids=(1, token_id, 2)),
    ):
        with pytest.raises(InvalidRequest) as caught:
            intake().read(message)
        assert caught.value.message == sentence


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        (
            {"logit_bias": {"1": 1.0, "258": 2.0}},
            "a key of `logit_bias`: token id 258 is outside the vocabulary (0 to 257)",
        ),
        (
            {"stop_token_ids": (257, 258)},
            "`stop_token_ids`: token id 258 is outside the vocabulary (0 to 257)",
        ),
    ],
)
def test_sampling_fields_outside_the_vocabulary(fields: dict[str, Any], sentence: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        intake().params(Generate(ID, prompt="a", **fields), seed=1)
    assert caught.value.message == sentence


@pytest.mark.parametrize(
    "message",
    [
        Generate(ID, prompt="a\ud800"),
        Tokenize(ID, text="\udfff"),
        Register(ID, text="\ud800"),
        Chat(ID, messages=(ChatMessage("user", "\ud800"),)),
    ],
)
def test_lone_surrogates(message: Prompted) -> None:
    with pytest.raises(InvalidRequest) as caught:
        intake().read(message)
    assert caught.value.message == "the text is not valid Unicode: it has lone surrogates"


@pytest.mark.parametrize(
    "message",
    [Chat(ID, messages=TURNS), Tokenize(ID, messages=TURNS), Register(ID, messages=TURNS)],
)
def test_a_model_without_a_chat_template(message: Prompted) -> None:
    with pytest.raises(InvalidRequest, match=r"^this model has no chat template; use `generate`$"):
        intake(template=None).read(message)


def test_what_the_template_refuses_is_told() -> None:
    reader = intake(template="{{ raise_exception('roles must alternate') }}")
    with pytest.raises(InvalidRequest) as caught:
        reader.read(Chat(ID, messages=TURNS))
    assert caught.value.message == (
        "messages: the chat template refuses the messages: roles must alternate"
    )


def test_every_sampling_field_arrives() -> None:
    message = Generate(
        ID,
        prompt="a",
        max_tokens=5,
        temperature=0.5,
        top_k=3,
        top_p=0.9,
        min_p=0.1,
        seed=0,
        repetition_penalty=1.1,
        presence_penalty=0.2,
        frequency_penalty=0.3,
        logit_bias={"7": -2.0, "0": 1.0},
        stop=("x", "y"),
        stop_token_ids=(3, 3, 4),
        ignore_eos=True,
        logprobs=0,
    )
    assert intake().params(message, seed=99) == SamplingParams(
        max_tokens=5,
        temperature=0.5,
        top_k=3,
        top_p=0.9,
        min_p=0.1,
        seed=0,
        repetition_penalty=1.1,
        presence_penalty=0.2,
        frequency_penalty=0.3,
        logit_bias=((7, -2.0), (0, 1.0)),
        stop=("x", "y"),
        stop_token_ids=frozenset({3, 4}),
        ignore_eos=True,
        logprobs=0,
    )


def test_the_seed_is_drawn_for_those_that_bring_none() -> None:
    params = intake().params(Generate(ID, prompt="a"), seed=99)
    assert params == SamplingParams(seed=99)


# --- what is remembered ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("vocabulary_name", "template", "answer", "num_kept"),
    [
        ("smollm2", SMOLLM2, "the other", 9),
        ("smollm2", SMOLLM2, " the other\n\n", 12),
        # Its special tokens are none here, so that every seam is between two words.
        ("smollm2", LLAMA3, "the other", 9),
        ("smollm2", LLAMA3, "the other\n\n", 9),  # it strips
        ("smollm2", LLAMA3, "\nthe other", 0),
        # The first word's space is not shown: Llama 2's template writes it, Mistral's does not.
        ("sentencepiece", LLAMA2, " the other", 10),
        ("sentencepiece", MISTRAL, " the other", 10),
        ("sentencepiece", MISTRAL, "the other", 9),
        ("sentencepiece without prefix", MISTRAL, "the other", 9),
    ],
)
def test_the_next_turn_of_a_chat_has_the_ids_of_the_answer(
    vocabulary_name: str, template: str, answer: str, num_kept: int
) -> None:
    reader = talking(vocabulary_name, template)
    first = reader.read(chat("What?"))
    ids = letters(reader, answer)
    shown = reader.tokenizer.decode(ids)
    fresh = reader.read(chat("What?", shown, "And?")).tokens.tolist()
    reader.remember(first, ids)
    second = reader.read(chat("What?", shown, "And?")).tokens.tolist()
    if not num_kept:
        assert second == fresh
        return
    head = first.tokens.tolist() + ids[:num_kept]
    assert second[: len(head)] == head
    assert second != fresh
    # The next question is as it would be without a memory.
    rest = second[len(head) :]
    assert rest == fresh[-len(rest) :]
    assert len(rest) > 5


def test_what_is_said_by_other_means_has_the_same_ids() -> None:
    """`tokenize` tells what `chat` and `generate` would use."""
    reader = talking("smollm2", SMOLLM2)
    reader.remember(reader.read(chat("What?")), letters(reader, "the other"))
    message = chat("What?", "the other", "And?")
    known = reader.read(message).tokens.tolist()
    assert reader.chat_template is not None
    text = reader.chat_template.render(
        [{"role": t.role, "content": t.content} for t in message.messages]
    )
    for same in (
        Tokenize(ID, messages=message.messages),
        Tokenize(ID, text=text),
        Generate(ID, prompt=text),
    ):
        assert reader.read(same).tokens.tolist() == known


def test_what_is_tokenised_afresh() -> None:
    reader = talking("smollm2", SMOLLM2)
    message = chat("What?", "the other", "And?")
    fresh = reader.read(message).tokens.tolist()
    reader.remember(reader.read(chat("What?")), letters(reader, "the other"))
    assert reader.read(message).tokens.tolist() != fresh
    unused = chat("What?", "the other", "And?", use_cache=False)
    assert reader.read(unused).tokens.tolist() == fresh
    registered = reader.read(Register(ID, messages=message.messages)).tokens.tolist()
    assert registered == fresh[: len(registered)]


@pytest.mark.parametrize(
    "message",
    [
        Generate(ID, prompt_ids=(64, 65)),
        Generate(ID, prompt="b", prefix_id=PrefixName("p-1")),
        Generate(ID, prompt="b", use_cache=False),
        Register(ID, text="ab"),
    ],
)
def test_prompts_of_which_nothing_is_remembered(message: Prompted) -> None:
    reader = intake()
    reader.prefixes[PrefixId("p-1")] = np.array([256, 64], dtype=np.int32)
    prompt = reader.read(message)
    assert prompt.spelled is None
    reader.remember(prompt, [66])
    assert reader.memory is not None
    assert len(reader.memory) == 0


def test_what_follows_a_prefix_is_not_taken_for_a_text_of_its_own() -> None:
    reader = talking("smollm2", SMOLLM2)
    reader.prefixes[PrefixId("p-1")] = np.array([1], dtype=np.int32)
    reader.remember(reader.read(Generate(ID, prompt="a<|im_end|>")), letters(reader, "the"))
    text = "a<|im_end|>the<|im_end|>"
    fresh = reader.tokenizer.encode(text, add_bos=False).tolist()
    assert reader.read(Generate(ID, prompt=text)).tokens.tolist() != fresh
    found = reader.read(Generate(ID, prompt=text, prefix_id=PrefixName("p-1")))
    assert found.tokens.tolist() == [1, *fresh]


def test_without_a_memory() -> None:
    reader = Intake(tokenizer(), ChatTemplate(TEMPLATE), VOCAB, memory=None)
    prompt = reader.read(Chat(ID, messages=TURNS))
    assert prompt.spelled is None
    reader.remember(prompt, [64])
    assert reader.read(Chat(ID, messages=TURNS)).tokens.tolist() == prompt.tokens.tolist()


@pytest.mark.parametrize("template", [None, "{{ raise_exception('no') }}"])
def test_a_template_that_cannot_be_asked_for_its_spaces(template: str | None) -> None:
    reader = intake(template=template)
    reader.remember(Prompt(np.array([64], dtype=np.int32), is_chat=True), [65])
    assert reader.memory is not None
    assert len(reader.memory) == 0
