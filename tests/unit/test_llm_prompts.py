"""What callers write becomes the request of the wire, or a sentence that says what is wrong."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from ipc import messages as wire
from ipc.messages import ChatMessage, MessageId
from runtime_cache.errors import InvalidRequest
from runtime_cache.llm import prompts

USER = {"role": "user", "content": "hi"}
TURN = ChatMessage("user", "hi")
ID = MessageId("7")


def answer(prompt: Any, prefix_id: str | None = None, **options: Any) -> Any:
    return prompts.answer_request(
        prompt, ID, prefix_id=prefix_id, options=options, is_streamed=False
    )


@pytest.mark.parametrize(
    "prompt",
    [
        "text",
        "",
        [1, 2, 3],
        (1,),
        range(3),
        [0, "x"],  # what it is, the first element decides
        [np.int64(1), 2],
        [USER],
        (TURN, USER),
    ],
)
def test_one_prompt(prompt: Any) -> None:
    assert prompts.each(prompt) == ([prompt], False)


@pytest.mark.parametrize(
    "several",
    [
        ["a", "b"],
        ["a"],
        ("a", "b"),
        [[1, 2], [3]],
        [(1, 2), "a", [USER]],
        [[USER], [TURN]],
        [["a"]],  # refused later: a prompt is no list of texts
        [],
    ],
)
def test_many_prompts(several: Any) -> None:
    assert prompts.each(several) == (list(several), True)


def test_arrays_are_token_ids_a_row_each() -> None:
    assert prompts.each(np.array([1, 2])) == ([[1, 2]], False)
    assert prompts.each(np.array([[1, 2], [3, 4]])) == ([[1, 2], [3, 4]], True)
    assert answer(np.array([1, 2], np.int32)).prompt_ids == (1, 2)


def test_conversations_one_and_many() -> None:
    assert prompts.conversations([USER]) == ([[USER]], False)
    assert prompts.conversations([[USER], [TURN]]) == ([[USER], [TURN]], True)
    assert prompts.conversations([]) == ([], True)


@pytest.mark.parametrize("wrong", ["text", [1, 2], ["a"], [[USER], [1]], [[]], {"role": "user"}])
def test_chat_takes_conversations_only(wrong: Any) -> None:
    with pytest.raises(InvalidRequest, match="a conversation is a list of messages"):
        prompts.conversations(wrong)


@pytest.mark.parametrize(
    ("prompt", "request_"),
    [
        ("hi", wire.Generate(ID, prompt="hi", stream=False)),
        ([1, 2], wire.Generate(ID, prompt_ids=(1, 2), stream=False)),
        ([USER], wire.Chat(ID, messages=(TURN,), stream=False)),
        ([TURN], wire.Chat(ID, messages=(TURN,), stream=False)),
    ],
)
def test_a_prompt_becomes_a_request(prompt: Any, request_: wire.AnyRequest) -> None:
    assert answer(prompt) == request_


def test_a_subclass_of_str_becomes_plain_text() -> None:
    class Answer(str):
        __slots__ = ()

    request = answer([USER, {"role": "assistant", "content": Answer("yes")}])
    assert type(request.messages[1].content) is str
    assert type(answer(Answer("x")).prompt) is str


def test_every_option_arrives() -> None:
    options: dict[str, Any] = {
        "max_tokens": 1,
        "temperature": 0,
        "top_k": 2,
        "top_p": 0.5,
        "min_p": 0.25,
        "seed": 3,
        "repetition_penalty": 1.5,
        "presence_penalty": 0.5,
        "frequency_penalty": -0.5,
        "logit_bias": {5: 1.0},
        "stop": "x",
        "stop_token_ids": [6],
        "ignore_eos": True,
        "logprobs": 2,
        "deadline_ms": 100,
        "use_cache": False,
        "cache_priority": 90,
    }
    in_wire_form = {"logit_bias": {"5": 1.0}, "stop": ("x",), "stop_token_ids": (6,)}
    request = answer("p", "p-1", **options)
    for name, value in (options | in_wire_form).items():
        assert getattr(request, name) == value
    assert request.prefix_id == "p-1"
    names = set(wire.AnswerRequest.__struct_fields__) - {"id", "v", "stream", "credit"}
    assert names == options.keys()


def test_numbers_of_numpy_and_none_for_the_default() -> None:
    request = answer("p", temperature=np.float32(0.5), max_tokens=np.int64(3), seed=None)
    assert (request.temperature, request.max_tokens, request.seed) == (0.5, 3, None)


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("max_token", "did you mean 'max_tokens'"),
        ("n", "there is no option 'n'"),
        ("stream", r"use `stream\(\)`"),
    ],
)
def test_an_unknown_option_is_a_typing_error(name: str, hint: str) -> None:
    with pytest.raises(TypeError, match=hint):
        answer("p", **{name: 1})


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"max_tokens": 0}, "`max_tokens`: expected an integer ≥ 1, got 0"),
        ({"temperature": -1}, "`temperature`: expected a number ≥ 0, got -1"),
        ({"temperature": float("nan")}, "`temperature`: expected a number ≥ 0, got nan"),
        ({"top_p": 0}, "`top_p`: expected a number > 0, got 0"),
        ({"cache_priority": 101}, "`cache_priority`: expected an integer ≤ 100, got 101"),
        ({"stop": [""]}, r"`stop\[0\]`: expected at least 1 characters"),
        ({"ignore_eos": "yes"}, '`ignore_eos`: expected true or false, got "yes"'),
        ({"prefix_id": ""}, "`prefix_id`"),
    ],
)
def test_a_wrong_value_is_named(options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(InvalidRequest, match=sentence):
        answer("p", **options)


@pytest.mark.parametrize(
    ("prompt", "sentence"),
    [
        ([], "not an empty sequence"),
        ([["a"]], "a prompt is text, token ids or messages, not list"),
        (["a"], "not list"),
        (b"bytes", "not bytes"),
        (5, "not int"),
        (None, "not NoneType"),
        ([True], "not list"),
        ([1.5], "not list"),
        ({"role": "user"}, "not dict"),
        ([1, "x"], r'`prompt_ids\[1\]`: expected an integer, got "x"'),
        ([1, True], r"`prompt_ids\[1\]`: expected an integer"),
        ([-1], r"`prompt_ids\[0\]`: expected an integer ≥ 0, got -1"),
        ([USER, "x"], r"`messages\[1\]`: expected an object"),
        ([{"role": "user"}], r"`messages\[0\].content`: missing"),
        ([{"role": "pope", "content": "x"}], r"`messages\[0\].role`: expected one of"),
        ([{"role": "user", "content": 5}], r"`messages\[0\].content`: expected text, got 5"),
        ([USER | {"name": "x"}], r"`messages\[0\].name`: there is no such field"),
    ],
)
def test_a_wrong_prompt_is_named(prompt: Any, sentence: str) -> None:
    with pytest.raises(InvalidRequest, match=sentence):
        answer(prompt)


def test_a_prefix_goes_before_text_and_ids_only() -> None:
    assert answer([1], "p-1").prefix_id == "p-1"
    with pytest.raises(InvalidRequest, match="a conversation whose beginning is registered"):
        answer([USER], "p-1")


def test_the_other_requests() -> None:
    assert prompts.register_request("a", ID) == wire.Register(ID, text="a")
    assert prompts.register_request([1], ID) == wire.Register(ID, prompt_ids=(1,))
    assert prompts.register_request([USER], ID) == wire.Register(ID, messages=(TURN,))
    assert prompts.tokenize_request("a", ID) == wire.Tokenize(ID, text="a")
    assert prompts.tokenize_request([USER], ID) == wire.Tokenize(ID, messages=(TURN,))
    assert prompts.explain_request([1], "p", ID) == wire.Explain(ID, prompt_ids=(1,), prefix_id="p")
    assert prompts.request(wire.Evict, ID, {"all": True}) == wire.Evict(ID, all=True)
    with pytest.raises(InvalidRequest, match="`prompt_ids`: there is no such field"):
        prompts.tokenize_request([1], ID)  # type: ignore[arg-type]
    with pytest.raises(InvalidRequest, match="exactly one of"):
        prompts.request(wire.Evict, ID, {})
