"""From what a caller writes to the request the daemon would get. Pure.

A prompt is text, a sequence of token ids, or a conversation; a sequence of those is many prompts.
What a sequence is, its first element decides: an integer, a message, or else a prompt. So
`[1, 2, 3]` is one prompt, `["a", "b"]` and `[[1, 2], [3]]` are two, and `[]` is none at all.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from numbers import Integral
from typing import Any, TypeVar

import msgspec
import numpy as np

from ipc import sentences
from ipc.arguments import SamplingOptions, sampling_fields
from ipc.messages import (
    AnyRequest,
    Chat,
    ChatMessage,
    Explain,
    Generate,
    MessageId,
    Register,
    Tokenize,
)
from runtime_cache.errors import InvalidRequest

Message = ChatMessage | Mapping[str, str]
#: One prompt. An array of integers is one as well.
Prompt = str | Sequence[int] | Sequence[Message]
Prompts = Prompt | Sequence[Prompt]

R = TypeVar("R", bound=AnyRequest)

#: How an answer travels is a matter of the method that asks for it.
_OPTIONS = sorted(SamplingOptions.__annotations__.keys() - {"stream"})


def each(prompts: Prompts) -> tuple[list[Prompt], bool]:
    """The prompts one by one, and whether they are many (a sequence of prompts).

    Raises:
        InvalidRequest: neither a prompt nor a sequence.
    """
    plain: Any = _plain(prompts)
    if isinstance(plain, str) or not _is_sequence(plain):
        return [plain], False
    if plain and (_is_token(plain[0]) or _is_message(plain[0])):
        return [plain], False
    return list(plain), True


def conversations(messages: Prompts) -> tuple[list[Prompt], bool]:
    """As `each`, of nothing but conversations.

    Raises:
        InvalidRequest: something is none.
    """
    items, is_many = each(messages)
    for item in items:
        if not (_is_sequence(item) and item and _is_message(item[0])):
            raise InvalidRequest(f"a conversation is a list of messages, not {_shown(item)}")
    return items, is_many or not items


def answer_request(
    prompt: Prompt,
    message_id: MessageId,
    *,
    prefix_id: str | None,
    options: Mapping[str, Any],
    is_streamed: bool,
) -> Generate | Chat:
    """What is asked for one prompt.

    Raises:
        InvalidRequest: a value is wrong.
        TypeError: there is no such option.
    """
    fields = _content(prompt) | _sampling(options) | {"stream": is_streamed}
    if "messages" not in fields:
        return request(Generate, message_id, fields | {"prefix_id": prefix_id})
    if prefix_id is not None:
        raise InvalidRequest(
            "`prefix_id` goes before text or token ids; a conversation whose beginning is "
            "registered reuses it without"
        )
    return request(Chat, message_id, fields)


def register_request(prefix: Prompt, message_id: MessageId) -> Register:
    """What `register_prefix` asks.

    Raises:
        InvalidRequest: a value is wrong.
    """
    return request(Register, message_id, _as_text(_content(prefix)))


def tokenize_request(prompt: Prompt, message_id: MessageId) -> Tokenize:
    """What `tokenize` asks.

    Raises:
        InvalidRequest: a value is wrong.
    """
    return request(Tokenize, message_id, _as_text(_content(prompt)))


def explain_request(prompt: Prompt, prefix_id: str | None, message_id: MessageId) -> Explain:
    """What `explain` asks.

    Raises:
        InvalidRequest: a value is wrong.
    """
    return request(Explain, message_id, _content(prompt) | {"prefix_id": prefix_id})


def request(kind: type[R], message_id: MessageId, fields: Mapping[str, Any]) -> R:
    """A request, checked as the daemon checks it: against the limits of every field.

    Raises:
        InvalidRequest: a value is wrong.
    """
    raw = {"id": message_id, **fields}
    try:
        return msgspec.convert(raw, kind)
    except msgspec.ValidationError as error:
        raise InvalidRequest(sentences.explain(str(error), raw)) from error


def _content(prompt: Prompt) -> dict[str, Any]:
    """The one field of the request that holds the prompt."""
    plain: Any = _plain(prompt)
    if isinstance(plain, str):
        return {"prompt": str(plain)}
    if _is_sequence(plain) and plain:
        if _is_token(plain[0]):
            return {"prompt_ids": [int(token) if _is_token(token) else token for token in plain]}
        if _is_message(plain[0]):
            return {"messages": [_message(message) for message in plain]}
    raise InvalidRequest(f"a prompt is text, token ids or messages, not {_shown(prompt)}")


def _as_text(fields: dict[str, Any]) -> dict[str, Any]:
    """The same for requests that call the prompt `text`."""
    return {"text" if name == "prompt" else name: value for name, value in fields.items()}


def _message(message: object) -> object:
    """A message with plain text; whatever is no message is left to the check."""
    if isinstance(message, ChatMessage):
        return {"role": message.role, "content": message.content}
    if not isinstance(message, Mapping):
        return message
    return {key: str(text) if isinstance(text, str) else text for key, text in message.items()}


def _sampling(options: Mapping[str, Any]) -> dict[str, Any]:
    """The sampling fields of a request; None stands for the default.

    Raises:
        TypeError: there is no such option.
    """
    for name in options:
        if name not in _OPTIONS:
            close = get_close_matches(name, _OPTIONS, n=1)
            hint = f"; did you mean {close[0]!r}?" if close else ""
            hint = "; for an answer piece by piece use `stream()`" if name == "stream" else hint
            raise TypeError(f"there is no option {name!r}{hint}")
    given = {name: _plain(value) for name, value in options.items() if value is not None}
    return sampling_fields(given)


def _plain(value: Any) -> Any:
    """Arrays and numbers of numpy as Python's own."""
    return value.tolist() if isinstance(value, np.ndarray | np.generic) else value


def _is_sequence(value: object) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str | bytes | bytearray)


def _is_token(value: object) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)


def _is_message(value: object) -> bool:
    return isinstance(value, Mapping | ChatMessage)


def _shown(prompt: object) -> str:
    return "an empty sequence" if _is_sequence(prompt) and not prompt else type(prompt).__name__
