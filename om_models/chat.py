"""Chat messages to one prompt text, by the model's own Jinja template.

A template comes with a checkpoint, so it is a stranger's program: it runs in Jinja's sandbox, which
keeps it from Python's internals, and with bounds on what it is fed, on each loop and on what it may
produce. Nothing here stops a loop inside a loop: a daemon has its template in `chat_process`, which
bounds time and memory as well.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn, Protocol

import jinja2
from jinja2.ext import Extension, loopcontrols
from jinja2.nodes import Node, Scope
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

ROLES = frozenset({"system", "developer", "user", "assistant", "tool"})
MAX_MESSAGES = 4096
MAX_CHARS = 16 * 1024 * 1024

Message = Mapping[str, Any]


class ChatTemplateError(ValueError):
    """The messages are wrong, or the template is, or it refuses the messages."""


class Renderer(Protocol):
    """Lays conversations out.

    Attributes:
        may_wait: `render` waits for another process, and is not for an event loop.
    """

    @property
    def may_wait(self) -> bool: ...
    def render(self, messages: Sequence[Message], *, add_generation_prompt: bool = True) -> str: ...


class ChatTemplate:
    """One model's chat template, compiled once. May be used from any thread."""

    may_wait = False

    def __init__(
        self,
        source: str,
        bos_token: str = "",
        eos_token: str = "",
        *,
        now: Callable[[str], str] | None = None,
    ) -> None:
        """Compile a template.

        Args:
            source: Jinja text of the model.
            bos_token: text of the model's BOS token, for the template's use; so is `eos_token`.
            now: makes `strftime_now(format)` in the template; without it a template that asks for
                the date fails, or does without it if it is written so. A date in a system prompt
                makes every prefix new each day.

        Raises:
            ChatTemplateError: the source is not a template.
            MemoryError: Jinja, which works out constants here, found no room for one.
        """
        environment = _environment()
        if now is not None:
            environment.globals["strftime_now"] = now
        environment.globals.update(bos_token=bos_token, eos_token=eos_token)
        try:
            self._template = environment.from_string(source)
        except MemoryError:
            raise
        except Exception as error:  # beside Jinja's errors also SyntaxError and RecursionError
            raise ChatTemplateError(f"the chat template is not valid: {error}") from error

    def render(self, messages: Sequence[Message], *, add_generation_prompt: bool = True) -> str:
        """The prompt's text; special tokens in it are meant to be recognised when it is encoded.

        Args:
            messages: each with a `role` out of `ROLES` and a string `content`; more keys are the
                template's business.
            add_generation_prompt: end with the beginning of an answer.

        Raises:
            ChatTemplateError: the messages or their number or size are wrong, the template refuses
                or fails, or the result is too long.
        """
        check_messages(messages)
        try:
            pieces = self._template.generate(
                messages=[dict(message) for message in messages],
                add_generation_prompt=add_generation_prompt,
                # Templates test these against none, so they have to be there.
                tools=None,
                documents=None,
            )
            return _join(pieces)
        except _Refused as error:
            raise ChatTemplateError(f"the chat template refuses the messages: {error}") from error
        except ChatTemplateError:
            raise
        except MemoryError as error:
            raise ChatTemplateError("the chat template took too much memory") from error
        except Exception as error:  # a template can fail in every way a program can
            raise ChatTemplateError(f"the chat template failed: {error}") from error


def with_tokens(source: str, **tokens: str | None) -> str:
    """The template with the named tokens' texts written into it.

    A bundle records BOS only for models that put it before every prompt, while a template may write
    it all the same; so the checkpoint's own texts go along with the template.

    Args:
        tokens: such as `bos_token="<s>"`; names the template does not use, and None, are left out.
    """
    used = [
        # `+%}` keeps a line break at the beginning of the template.
        f"{{% set {name} = {json.dumps(text, ensure_ascii=False)} +%}}"
        for name, text in tokens.items()
        if text is not None and re.search(rf"\b{name}\b", source)
    ]
    return "".join([*used, source])


def check_syntax(source: str) -> None:
    """Read a template, without compiling it or working anything out.

    Raises:
        ChatTemplateError: the source is not a template.
    """
    try:
        _environment().parse(source)
    except Exception as error:  # beside Jinja's errors also RecursionError
        raise ChatTemplateError(f"the chat template is not valid: {error}") from error


class _Refused(Exception):
    """The template called `raise_exception`."""


class _Generation(Extension):
    """`{% generation %}` marks the assistant's words for training; here only they count."""

    tags = {"generation"}  # noqa: RUF012 - an instance variable in Jinja

    def parse(self, parser: Parser) -> Node:
        line = next(parser.stream).lineno
        return Scope(
            parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line
        )


class _Namespace(jinja2.utils.Namespace):
    """Jinja's `namespace` without names that begin with an underscore, a known way out."""

    def __init__(*args: Any, **kwargs: Any) -> None:  # `self` may be a name
        for name in dict(*args[1:], **kwargs):
            _check_name(name)
        jinja2.utils.Namespace.__init__(*args, **kwargs)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


class _Environment(ImmutableSandboxedEnvironment):
    """Jinja's sandbox with bounds on the two operators that make much out of little."""

    intercepted_binops = frozenset({"*", "**"})

    def call_binop(
        self, context: jinja2.runtime.Context, operator: str, left: Any, right: Any
    ) -> Any:
        if operator == "**":
            raise ChatTemplateError("the chat template uses `**`, which is not allowed")
        for sequence, times in ((left, right), (right, left)):
            is_repeat = isinstance(sequence, str | bytes | list | tuple) and isinstance(times, int)
            if is_repeat and len(sequence) * times > MAX_CHARS:
                raise ChatTemplateError("the chat template repeats a text too often")
        return super().call_binop(context, operator, left, right)


def _environment() -> _Environment:
    """As transformers sets it up, so that templates find what they were written for."""
    environment = _Environment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["namespace"] = _Namespace
    environment.globals["dict"] = _new_dict
    del environment.globals["lipsum"]
    return environment


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own filter escapes for HTML, which a prompt is not.
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _raise_exception(message: str) -> NoReturn:
    raise _Refused(message)


def _new_dict(*args: Any, **kwargs: Any) -> dict[Any, Any]:
    # A function in the place of the type, whose attributes a template has no use for.
    return dict(*args, **kwargs)


def _check_name(name: Any) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise jinja2.exceptions.SecurityError(f"a namespace cannot hold {name!r}")


def _join(pieces: Any) -> str:
    texts: list[str] = []
    num_chars = 0
    for piece in pieces:
        num_chars += len(piece)
        if num_chars > MAX_CHARS:
            raise ChatTemplateError(f"the prompt is longer than {MAX_CHARS} characters")
        texts.append(piece)
    return "".join(texts)


def check_messages(messages: Sequence[Message]) -> None:
    """Number, size and form of the messages.

    Raises:
        ChatTemplateError: they are wrong.
    """
    if not messages:
        raise ChatTemplateError("there are no messages")
    if len(messages) > MAX_MESSAGES:
        raise ChatTemplateError(f"there are {len(messages)} messages; at most {MAX_MESSAGES}")
    num_chars = 0
    for index, message in enumerate(messages):
        num_chars += _check_message(index, message)
    if num_chars > MAX_CHARS:
        raise ChatTemplateError(
            f"the messages have {num_chars} characters; at most {MAX_CHARS} are taken"
        )


def _check_message(index: int, message: Message) -> int:
    """Length of one message's content [characters]."""
    role, content = message.get("role"), message.get("content")
    if role not in ROLES:
        raise ChatTemplateError(
            f"message {index} has the role {role!r}; known are {', '.join(sorted(ROLES))}"
        )
    if not isinstance(content, str):
        raise ChatTemplateError(f"message {index} has no text as its `content`")
    return len(content)
