"""What any client can ask, as types: one struct a message, its fields, their units and limits.

Pure data. Read strictly: a field nobody knows is refused, so that a typing error is never silently
ignored, and so is anything that could change an answer unseen. What only administrators can ask
is in `admin_requests`.
"""

from __future__ import annotations

from typing import Annotated, ClassVar

from msgspec import Meta, Struct

from ipc.checks import check_finite, check_one_of
from ipc.fields import (
    MAX_CHAT_MESSAGES,
    MAX_DEADLINE_MS,
    MAX_LOGIT_BIAS,
    MAX_LOGPROBS,
    MAX_SEED,
    MAX_STOP_STRINGS,
    MAX_STOP_TOKEN_IDS,
    MAX_TOKEN_ID,
    MAX_TOKENS,
    PROTOCOL_VERSION,
    Bias,
    BiasKey,
    CreditAmount,
    Id,
    LeaseMs,
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

    #: Fields of which exactly one is given.
    one_of: ClassVar[tuple[str, ...]] = ()

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
        credit: how many `tokens` messages may come before more is granted by `credit` [1 to
            1000000 messages]; absent: as many as there are. Of no effect without `stream`.
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
    credit: CreditAmount | None = None

    def __post_init__(self) -> None:
        """Check what one field alone cannot show."""
        for name in ("temperature", "top_p", "min_p", "repetition_penalty"):
            check_finite(name, getattr(self, name))
        for name in ("presence_penalty", "frequency_penalty"):
            check_finite(name, getattr(self, name))
        for value in self.logit_bias.values():
            check_finite("logit_bias", value)


class Generate(AnswerRequest, frozen=True, kw_only=True, tag="generate"):
    """Continue a prompt; answered by `tokens`… and `done`, or by `error`.

    Attributes:
        prompt: the prompt as text; the daemon tokenises it.
        prompt_ids: the prompt as token ids [at most 1048576]. Exactly one of the two is given.
        prefix_id: a registered prefix that stands before the prompt.
    """

    one_of: ClassVar[tuple[str, ...]] = ("prompt", "prompt_ids")
    prompt: str | None = None
    prompt_ids: TokenIds | None = None
    prefix_id: PrefixRef | None = None

    def __post_init__(self) -> None:
        """Check what one field alone cannot show."""
        super().__post_init__()
        check_one_of(self, *self.one_of)


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


class Credit(Request, frozen=True, kw_only=True, tag="credit"):
    """Let a streamed answer go on; not answered, unless it is refused.

    Attributes:
        target: the `id` of the answer. If it has ended, or was begun without credit, nothing
            happens.
        credit: how many more `tokens` messages may come [1 to 1000000 messages]; added to what is
            left.
    """

    target: Id
    credit: CreditAmount


class OpenSession(Request, frozen=True, kw_only=True, tag="open"):
    """Promise to be heard of again within a time; answered by `opened`.

    Every message of the connection renews the promise. If none comes in time, its unfinished
    requests are cancelled, with the `finish_reason` "lease_expired", and the session is over.
    Again on the same connection: the new time counts from now on.

    Attributes:
        lease_ms: the time [1000 to 3600000 milliseconds].
    """

    lease_ms: LeaseMs


class CloseSession(Request, frozen=True, tag="close"):
    """Good-bye: cancel all unfinished requests of this connection; answered by `closed`.

    A session ends with it, but it may be sent without one.
    """


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

    one_of: ClassVar[tuple[str, ...]] = ("text", "messages")
    text: str | None = None
    messages: ChatMessages | None = None

    def __post_init__(self) -> None:
        """Check what one field alone cannot show."""
        check_one_of(self, *self.one_of)


class Register(Request, frozen=True, kw_only=True, tag="register"):
    """Compute a prefix once and keep its KV until `release`; answered by `registered`.

    Attributes:
        text: the prefix as text.
        prompt_ids: the prefix as token ids [at most 1048576].
        messages: the beginning of a conversation. Exactly one of the three is given.
    """

    one_of: ClassVar[tuple[str, ...]] = ("text", "prompt_ids", "messages")
    text: str | None = None
    prompt_ids: TokenIds | None = None
    messages: ChatMessages | None = None

    def __post_init__(self) -> None:
        """Check what one field alone cannot show."""
        check_one_of(self, *self.one_of)


class Release(Request, frozen=True, kw_only=True, tag="release"):
    """Give up a registered prefix; answered by `released`.

    Attributes:
        prefix_id: from `registered`.
        tenant: whose prefix, from administrators only [at most 64 visible ASCII characters]; empty
            is the default tenant; absent: of the socket, or key, that asks.
    """

    prefix_id: PrefixRef
    tenant: TenantRef | None = None
