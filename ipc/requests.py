"""What a client can ask, as types: one struct a message, its fields, their units and limits.

Pure data. Read strictly: a field nobody knows is refused, so that a typing error is never silently
ignored, and so is anything that could change an answer unseen.
"""

from __future__ import annotations

import math
from typing import Annotated

import msgspec
from msgspec import Meta, Struct

from ipc.fields import (
    MAX_CHAT_MESSAGES,
    MAX_DEADLINE_MS,
    MAX_LIST_LIMIT,
    MAX_LOGIT_BIAS,
    MAX_LOGPROBS,
    MAX_PERIOD_S,
    MAX_SEED,
    MAX_STOP_STRINGS,
    MAX_STOP_TOKEN_IDS,
    MAX_TOKEN_ID,
    MAX_TOKENS,
    PROTOCOL_VERSION,
    Bias,
    BiasKey,
    DigestRef,
    Id,
    Penalty,
    PrefixRef,
    Priority,
    Role,
    StopString,
    TenantRef,
    TokenId,
    TokenIds,
)


class Request(Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """What every message from a client begins with.

    Attributes:
        id: the client's name for this request, unique among its unfinished ones [1 to 64 visible
            ASCII characters].
        v: protocol version; 1.
    """

    id: Id
    v: int = PROTOCOL_VERSION


class ChatMessage(Struct, frozen=True, forbid_unknown_fields=True):
    """One turn of a conversation.

    Attributes:
        role: who speaks.
        content: what is said.
    """

    role: Role
    content: str


ChatMessages = Annotated[
    tuple[ChatMessage, ...],
    Meta(min_length=1, max_length=MAX_CHAT_MESSAGES),
]


class AnswerRequest(Request, frozen=True, kw_only=True):
    """Fields of `generate` and `chat`: how tokens are chosen and when the answer ends.

    Attributes:
        max_tokens: answer tokens at the most [1 to 1048576]; absent: as many as the context
            allows, which ends the answer in any case.
        temperature: 0 is greedy [0 to 100].
        top_k: choose among the k most probable tokens; 0 is off [0 to 2³¹−1].
        top_p: choose among the most probable tokens that together reach this probability; 1 is
            off [above 0, to 1].
        min_p: drop tokens less probable than this part of the most probable one; 0 is off [0 to 1].
        seed: makes the random choices repeatable [0 to 2⁵³−1]; absent: the daemon draws one.
        repetition_penalty: divides the logits of tokens seen in prompt or answer; 1 is off [above
            0, to 100].
        presence_penalty: subtracted once from the logits of tokens in the answer [−2 to 2].
        frequency_penalty: subtracted per occurrence in the answer [−2 to 2].
        logit_bias: token id in decimal → added to its logit [at most 1024 entries, −100 to 100].
        stop: strings that end the answer and are not part of it [at most 16, each 1 to 256
            characters].
        stop_token_ids: tokens that end the answer besides the model's own [at most 256].
        ignore_eos: the model's end tokens do not end the answer.
        logprobs: how many top log-probabilities to report per token [0 to 20]; absent: no report.
        stream: send `tokens` messages as the answer grows. REQ clients get false in any case.
        deadline_ms: the answer ends with `finish_reason` "deadline" this long after it arrived
            [1 to 86400000 milliseconds]; absent: no deadline.
        use_cache: whether what is cached is reused, and what this request computes left behind.
        cache_priority: how much what this request leaves in the cache is worth [0 to 100]; when
            room is needed, what has less goes first.
    """

    max_tokens: Annotated[int, Meta(ge=1, le=MAX_TOKENS)] | None = None
    temperature: Annotated[float, Meta(ge=0, le=100)] = 1.0
    top_k: Annotated[int, Meta(ge=0, le=MAX_TOKEN_ID)] = 0
    top_p: Annotated[float, Meta(gt=0, le=1)] = 1.0
    min_p: Annotated[float, Meta(ge=0, le=1)] = 0.0
    seed: Annotated[int, Meta(ge=0, le=MAX_SEED)] | None = None
    repetition_penalty: Annotated[float, Meta(gt=0, le=100)] = 1.0
    presence_penalty: Penalty = 0.0
    frequency_penalty: Penalty = 0.0
    logit_bias: Annotated[dict[BiasKey, Bias], Meta(max_length=MAX_LOGIT_BIAS)] = {}
    stop: Annotated[tuple[StopString, ...], Meta(max_length=MAX_STOP_STRINGS)] = ()
    stop_token_ids: Annotated[tuple[TokenId, ...], Meta(max_length=MAX_STOP_TOKEN_IDS)] = ()
    ignore_eos: bool = False
    logprobs: Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)] | None = None
    stream: bool = True
    deadline_ms: Annotated[int, Meta(ge=1, le=MAX_DEADLINE_MS)] | None = None
    use_cache: bool = True
    cache_priority: Priority = 50

    def __post_init__(self) -> None:
        """Check what one field alone cannot show."""
        for name in ("temperature", "top_p", "min_p", "repetition_penalty"):
            _check_finite(name, getattr(self, name))
        for name in ("presence_penalty", "frequency_penalty"):
            _check_finite(name, getattr(self, name))
        for value in self.logit_bias.values():
            _check_finite("logit_bias", value)


class Generate(AnswerRequest, frozen=True, kw_only=True, tag="generate"):
    """Continue a prompt; answered by `tokens`… and `done`, or by `error`.

    Attributes:
        prompt: the prompt as text; the daemon tokenises it.
        prompt_ids: the prompt as token ids [at most 1048576]. Exactly one of the two is given.
        prefix_id: a registered prefix that stands before the prompt.
    """

    prompt: str | None = None
    prompt_ids: TokenIds | None = None
    prefix_id: PrefixRef | None = None

    def __post_init__(self) -> None:
        """Check what one field alone cannot show."""
        super().__post_init__()
        _check_one_of(self, "prompt", "prompt_ids")


class Chat(AnswerRequest, frozen=True, kw_only=True, tag="chat"):
    """Answer a conversation, laid out by the model's chat template.

    Attributes:
        messages: the conversation, oldest first [1 to 4096].
    """

    messages: ChatMessages


class Cancel(Request, frozen=True, kw_only=True, tag="cancel"):
    """End one of this client's own requests; answered by `ok`, whether or not it still ran.

    Attributes:
        target: the `id` of the request to end. It still gets its own last message, before or
            after the `ok`.
    """

    target: Id


class Ping(Request, frozen=True, tag="ping"):
    """Is the daemon alive? Answered by `pong`."""


class GetInfo(Request, frozen=True, tag="info"):
    """What is served here? Answered by `info`."""


class Tokenize(Request, frozen=True, kw_only=True, tag="tokenize"):
    """The token ids that `generate` or `chat` would use; answered by `tokenized`.

    Attributes:
        text: as `generate.prompt`.
        messages: as `chat.messages`. Exactly one of the two is given.
    """

    text: str | None = None
    messages: ChatMessages | None = None

    def __post_init__(self) -> None:
        """Check what one field alone cannot show."""
        _check_one_of(self, "text", "messages")


class Register(Request, frozen=True, kw_only=True, tag="register"):
    """Compute a prefix once and keep its KV until `release`; answered by `registered`.

    Attributes:
        text: the prefix as text.
        prompt_ids: the prefix as token ids [at most 1048576].
        messages: the beginning of a conversation. Exactly one of the three is given.
    """

    text: str | None = None
    prompt_ids: TokenIds | None = None
    messages: ChatMessages | None = None

    def __post_init__(self) -> None:
        """Check what one field alone cannot show."""
        _check_one_of(self, "text", "prompt_ids", "messages")


class Release(Request, frozen=True, kw_only=True, tag="release"):
    """Give up a registered prefix; answered by `released`.

    Attributes:
        prefix_id: from `registered`.
    """

    prefix_id: PrefixRef


class ListEntries(Request, frozen=True, kw_only=True, tag="list"):
    """Admin: what the cache holds; answered by `listed`.

    Attributes:
        limit: entries at the most [1 to 1000].
        offset: entries to skip [0 to 2³¹−1].
        tenant: only those of this tenant [at most 64 visible ASCII characters]; empty is the
            default tenant, absent: of all.
    """

    limit: Annotated[int, Meta(ge=1, le=MAX_LIST_LIMIT)] = 100
    offset: Annotated[int, Meta(ge=0, le=MAX_TOKEN_ID)] = 0
    tenant: TenantRef | None = None


class Evict(Request, frozen=True, kw_only=True, tag="evict"):
    """Admin: drop cached blocks; answered by `evicted`.

    What a live request holds, or what is kept (registered, pinned, leased), stays.

    Attributes:
        max_blocks: so many blocks at the most, next to be evicted first [1 to 2³¹−1].
        all: every block.
        digest: the prefix with this digest, or the only one whose digest begins so [8 to 64
            lower-case hexadecimal digits], and all that goes on from it; blocks that other
            prefixes share stay.
        idle_s: every prefix that was not used for this long [0 to 31536000 seconds]. Exactly one
            of the four is given.
        tenant: only of this tenant [at most 64 visible ASCII characters]; empty is the default
            tenant, absent: of all.
    """

    max_blocks: Annotated[int, Meta(ge=1, le=MAX_TOKEN_ID)] | None = None
    all: bool = False
    digest: DigestRef | None = None
    idle_s: Annotated[float, Meta(ge=0, le=MAX_PERIOD_S)] | None = None
    tenant: TenantRef | None = None

    def __post_init__(self) -> None:
        """Check what one field alone cannot show."""
        _check_one_of(self, "max_blocks", "all", "digest", "idle_s")
        _check_finite("idle_s", self.idle_s)


class Pin(Request, frozen=True, kw_only=True, tag="pin"):
    """Admin: keep a cached prefix, until `unpin` or for a time; answered by `pinned`.

    Attributes:
        digest: of the prefix, or the beginning of it that no other has [8 to 64 lower-case
            hexadecimal digits]; `list` tells it.
        ttl_s: for how long [above 0, to 31536000 seconds]; absent: until `unpin`.
        tenant: whose prefix [at most 64 visible ASCII characters]; empty is the default tenant.
    """

    digest: DigestRef
    ttl_s: Annotated[float, Meta(gt=0, le=MAX_PERIOD_S)] | None = None
    tenant: TenantRef = ""

    def __post_init__(self) -> None:
        """Check what one field alone cannot show."""
        _check_finite("ttl_s", self.ttl_s)


class Unpin(Request, frozen=True, kw_only=True, tag="unpin"):
    """Admin: give up a pin or a lease; answered by `unpinned`.

    Attributes:
        digest: as `pin.digest`.
        tenant: as `pin.tenant`.
    """

    digest: DigestRef
    tenant: TenantRef = ""


class Explain(Request, frozen=True, kw_only=True, tag="explain"):
    """Admin: what the cache would do for a prompt, without running it; answered by `explained`.

    Attributes:
        prompt: as `generate.prompt`.
        prompt_ids: as `generate.prompt_ids`.
        messages: as `chat.messages`. Exactly one of the three is given.
        prefix_id: as `generate.prefix_id`; not with `messages`.
        tenant: in whose cache [at most 64 visible ASCII characters]; empty is the default tenant.
    """

    prompt: str | None = None
    prompt_ids: TokenIds | None = None
    messages: ChatMessages | None = None
    prefix_id: PrefixRef | None = None
    tenant: TenantRef = ""

    def __post_init__(self) -> None:
        """Check what one field alone cannot show."""
        _check_one_of(self, "prompt", "prompt_ids", "messages")
        if self.messages is not None and self.prefix_id is not None:
            raise ValueError("`prefix_id` cannot be given together with `messages`")


class Verify(Request, frozen=True, kw_only=True, tag="verify"):
    """Admin: read cached KV from the device once more and compare; answered by `verified`.

    A block whose KV has changed leaves the cache, with all that was computed from it. One request
    reads a part, for about a second; `verified.next_block` says where the next one is to go on.

    Attributes:
        digest: only the blocks of this prefix, or of the only one whose digest begins so [8 to 64
            lower-case hexadecimal digits]; absent: all.
        first_block: leave out the blocks of the pool before this number [0 to 2³¹−1].
        tenant: only of this tenant [at most 64 visible ASCII characters]; empty is the default
            tenant, absent: of all.
    """

    digest: DigestRef | None = None
    first_block: Annotated[int, Meta(ge=0, le=MAX_TOKEN_ID)] = 0
    tenant: TenantRef | None = None


class GetStats(Request, frozen=True, tag="stats"):
    """Admin: counters and gauges; answered by `stats`."""


AnyRequest = (
    Generate
    | Chat
    | Cancel
    | Ping
    | GetInfo
    | Tokenize
    | Register
    | Release
    | ListEntries
    | Evict
    | Pin
    | Unpin
    | Explain
    | Verify
    | GetStats
)

#: The messages that only the admin socket accepts.
ADMIN_REQUESTS: tuple[type[Request], ...] = (
    ListEntries,
    Evict,
    Pin,
    Unpin,
    Explain,
    Verify,
    GetStats,
)


def without_stream(request: AnyRequest) -> AnyRequest:
    """The same request, to be answered by one message (what a REQ client can receive)."""
    if isinstance(request, AnswerRequest) and request.stream:
        return msgspec.structs.replace(request, stream=False)
    return request


def _check_finite(name: str, value: float | None) -> None:
    """Refuse NaN, which msgpack can carry and for which no range check is defined."""
    if value is not None and not math.isfinite(value):
        raise ValueError(f"`{name}` must be a finite number, got {value}")


def _check_one_of(message: Struct, *names: str) -> None:
    values = [(name, getattr(message, name)) for name in names]
    given = [name for name, value in values if value is not None and value is not False]
    if len(given) != 1:
        listed = ", ".join(f"`{name}`" for name in names[:-1]) + f" and `{names[-1]}`"
        found = " and ".join(f"`{name}`" for name in given) if given else "none"
        raise ValueError(f"exactly one of {listed} must be given, got {found}")
