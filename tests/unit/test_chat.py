"""Chat templates: equal to transformers' rendering, and harmless."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import om_models.chat
from om_models.chat import MAX_MESSAGES, ChatTemplate, ChatTemplateError, with_tokens

DATA = json.loads(
    (Path(__file__).parents[1] / "data" / "tokenizers" / "chat.json").read_text("utf-8")
)
USER = {"role": "user", "content": "hi"}


def render(source: str, *messages: dict[str, Any]) -> str:
    return ChatTemplate(source).render(messages or [USER])


@pytest.mark.parametrize("name", DATA["templates"])
def test_equals_transformers(name: str) -> None:
    template = ChatTemplate(DATA["templates"][name], "<s>", "</s>")
    cases = [case for case in DATA["cases"] if case["template"] == name]
    assert len(cases) == 10
    for case in cases:
        if case["text"] is None:
            with pytest.raises(ChatTemplateError, match="refuses the messages: "):
                template.render(case["messages"], add_generation_prompt=case["open"])
        else:
            text = template.render(case["messages"], add_generation_prompt=case["open"])
            assert text == case["text"]


def test_a_turn_extends_the_text_of_the_conversation_before() -> None:
    template = ChatTemplate(DATA["templates"]["smollm2"])
    before = template.render([USER])
    after = template.render([USER, {"role": "assistant", "content": "yes"}, USER])
    assert after.startswith(before + "yes<|im_end|>\n")


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([], "there are no messages"),
        ([USER, {"role": "robot", "content": ""}], "message 1 has the role 'robot'; known are"),
        ([{"content": "x"}], "message 0 has the role None"),
        ([{"role": "user"}], "message 0 has no text"),
        ([{"role": "user", "content": ["x"]}], "message 0 has no text"),
        ([USER] * (MAX_MESSAGES + 1), "there are 4097 messages; at most 4096"),
    ],
)
def test_wrong_messages(messages: list[dict[str, Any]], message: str) -> None:
    with pytest.raises(ChatTemplateError, match=message):
        ChatTemplate("x").render(messages)


def test_as_many_messages_as_allowed() -> None:
    assert ChatTemplate("{{ messages | length }}").render([USER] * MAX_MESSAGES) == "4096"


def test_size_of_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(om_models.chat, "MAX_CHARS", 3)
    two = {"role": "user", "content": "ab"}
    assert render("x", two, {"role": "user", "content": "c"}) == "x"
    with pytest.raises(ChatTemplateError, match="4 characters; at most 3"):
        render("x", two, two)


def test_size_of_the_result(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(om_models.chat, "MAX_CHARS", 100)
    source = "{% for i in range(NUM) %}x{% endfor %}"
    assert render(source.replace("NUM", "100")) == "x" * 100
    with pytest.raises(ChatTemplateError, match="longer than 100 characters"):
        render(source.replace("NUM", "101"))


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("{{ (1).__class__.__mro__ }}", "unsafe"),
        ("{{ ''.__class__.__base__ }}", "unsafe"),
        ("{{ messages.__class__.__subclasses__() }}", "unsafe"),
        ("{{ messages.append(1) }}", "unsafe"),
        ("{{ messages[0].update(a=1) }}", "unsafe"),
        ("{{ raise_exception.__globals__.json }}", "unsafe"),
        ("{{ namespace.__init__.__globals__ }}", "unsafe"),
        ("{{ '{0.__class__.__base__}'.format(1) }}", "unsafe"),
        ("{{ ''['__class__'].mro() }}", "unsafe|undefined"),
        ("{% set n = namespace(_x=1) %}", "cannot hold '_x'"),
        ("{% set n = namespace() %}{% set n.__x = 1 %}", "cannot hold '__x'"),
        ("{% for i in range(1000000000) %}{% endfor %}", "Range too big"),
        ("{{ 10 ** 9 }}", r"uses `\*\*`"),
        ("{{ 'ab' * 10000000 }}", "repeats a text too often"),
        ("{{ 10000000 * [1, 2] }}", "repeats a text too often"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "recursion"),
        ("{{ lipsum() }}", "'lipsum' is undefined"),
        ("{{ strftime_now('%Y') }}", "'strftime_now' is undefined"),
        ("{{ messages[0].name.first }}", "no attribute 'name'"),
        ("{{ 1 / 0 }}", "division by zero"),
        ("{% include 'x' %}", "no loader"),
    ],
)
def test_what_a_template_cannot_do(source: str, message: str) -> None:
    with pytest.raises(ChatTemplateError, match=message):
        render(source)


@pytest.mark.parametrize(
    "source",
    ["{{ ''.__class__ }}", "{{ namespace.__globals__ }}", "{{ '{0.__class__}'.format(1) }}"],
)
def test_what_is_unsafe_shows_as_nothing(source: str) -> None:
    assert render(source) == ""


@pytest.mark.parametrize("source", ["{% if %}", "{{ x", "{% nothing %}", "{% for x in y %}"])
def test_not_a_template(source: str) -> None:
    with pytest.raises(ChatTemplateError, match="the chat template is not valid"):
        ChatTemplate(source)


def test_the_messages_of_the_caller_are_not_changed() -> None:
    message = {"role": "user", "content": "x", "extra": 1}
    assert render("{{ messages[0].extra }}", message) == "1"
    assert message == {"role": "user", "content": "x", "extra": 1}


@pytest.mark.parametrize("text", ["<s>", "</s>\\n", "a\"b'", "<｜end▁of▁sentence｜>", "👍"])
def test_tokens_written_into_a_template(text: str) -> None:
    source = with_tokens("\n{{ eos_token }}\n\n", eos_token=text, bos_token="unused")
    assert "bos_token" not in source
    assert ChatTemplate(source, eos_token="other").render([USER]) == f"\n{text}\n"


def test_no_tokens_to_write() -> None:
    assert with_tokens("{{ bos_token }}", bos_token=None) == "{{ bos_token }}"


def test_a_clock_only_if_given() -> None:
    source = "{% if strftime_now is defined %}{{ strftime_now('%Y') }}{% else %}no{% endif %}"
    assert ChatTemplate(source).render([USER]) == "no"
    clock = ChatTemplate(source, now=lambda form: f"<{form}>")
    assert clock.render([USER]) == "<%Y>"


def test_undefined_names_and_loop_controls() -> None:
    source = "{% for m in messages %}{% if tools %}t{% endif %}{{ m.x }}-{% break %}{% endfor %}"
    assert render(source, USER, USER) == "-"


def test_json_is_not_escaped_for_html() -> None:
    content = {"role": "user", "content": "<é&'>"}
    assert render("{{ messages[0] | tojson }}", content) == (
        '{"role": "user", "content": "<é&\'>"}'
    )
