"""What callers of the clients write, in the form that the messages have. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypedDict

import msgspec

from ipc.fields import MAX_LEASE_MS, MIN_LEASE_MS, KeptFilter, SortKey
from ipc.messages import ChatMessage


class SamplingOptions(TypedDict, total=False):
    """Keyword arguments of `generate` and `chat`; `messages.AnswerRequest` says what they mean."""

    max_tokens: int
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    seed: int
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    logit_bias: Mapping[int, float]
    stop: str | Sequence[str]
    stop_token_ids: Sequence[int]
    ignore_eos: bool
    logprobs: int
    stream: bool
    deadline_ms: int
    use_cache: bool
    cache_priority: int


class ListFilters(TypedDict, total=False):
    """Keyword arguments of `list`; `messages.ListEntries` says what they mean."""

    sort: SortKey
    reverse: bool
    min_age_s: float
    min_idle_s: float
    min_bytes: int
    min_hits: int
    max_hits: int
    kept: KeptFilter


class EvictChoice(TypedDict, total=False):
    """Keyword arguments of `evict`, of which exactly one is given; `messages.Evict` has more."""

    max_blocks: int
    max_bytes: int
    min_bytes: int
    all: bool
    digest: str
    idle_s: float
    age_s: float


#: A conversation as callers write it.
Conversation = Sequence[ChatMessage | Mapping[str, str]]


def prompt_fields(
    prompt: str | None, prompt_ids: Iterable[int] | None, prefix_id: str | None
) -> dict[str, Any]:
    """Fields of `generate` besides the sampling options."""
    ids = None if prompt_ids is None else token_ids(prompt_ids)
    return {"prompt": prompt, "prompt_ids": ids, "prefix_id": prefix_id}


def content_fields(
    *,
    text: str | None = None,
    prompt_ids: Iterable[int] | None = None,
    messages: Conversation | None = None,
) -> dict[str, Any]:
    """Fields of `tokenize` and `register`: those that are given."""
    fields: dict[str, Any] = {}
    if text is not None:
        fields["text"] = text
    if prompt_ids is not None:
        fields["prompt_ids"] = token_ids(prompt_ids)
    if messages is not None:
        fields["messages"] = conversation(messages)
    return fields


def explain_fields(
    prompt: str | None,
    prompt_ids: Iterable[int] | None,
    messages: Conversation | None,
    prefix_id: str | None,
    tenant: str,
) -> dict[str, Any]:
    """Fields of `explain`."""
    turns = None if messages is None else conversation(messages)
    fields = prompt_fields(prompt, prompt_ids, prefix_id)
    return fields | {"messages": turns, "tenant": tenant}


def sampling_fields(options: Mapping[str, Any]) -> dict[str, Any]:
    """Sampling options as callers write them, in the form the messages have.

    `stop` may be one string, `logit_bias` has integer keys, sequences become tuples.
    """
    fields = dict(options)
    if isinstance(fields.get("stop"), str):
        fields["stop"] = (fields["stop"],)
    for name in ("stop", "stop_token_ids"):
        if name in fields:
            fields[name] = tuple(fields[name])
    if "logit_bias" in fields:
        fields["logit_bias"] = {str(key): value for key, value in fields["logit_bias"].items()}
    return fields


def lease_ms(lease_s: float | None) -> int | None:
    """A lease as the messages have it.

    Raises:
        ValueError: it is too short or too long.
    """
    if lease_s is None:
        return None
    if not MIN_LEASE_MS <= lease_s * 1000 <= MAX_LEASE_MS:
        raise ValueError(
            f"lease_s must be from {MIN_LEASE_MS / 1000:g} to {MAX_LEASE_MS / 1000:g} seconds, "
            f"got {lease_s:g}"
        )
    return int(lease_s * 1000)


def token_ids(ids: Iterable[int]) -> tuple[int, ...]:
    """Token ids in the form the messages have; numpy's integers are taken too."""
    return tuple(int(token_id) for token_id in ids)


def conversation(messages: Conversation) -> tuple[ChatMessage, ...]:
    """A conversation in the form the messages have.

    Raises:
        ValueError: an entry has no `role` and `content`, or an unknown role.
    """
    try:
        return msgspec.convert(
            [
                message if isinstance(message, ChatMessage) else dict(message)
                for message in messages
            ],
            tuple[ChatMessage, ...],
        )
    except msgspec.ValidationError as error:
        raise ValueError(f"messages: {error}") from error
