"""Every message that crosses the socket, as a type: its fields, their units and their limits.

Pure data. `PROTOCOL.md` says the same in prose for people who write clients in other languages; a
test holds the two together. Requests are read strictly (a field nobody knows is refused, so that a
typing error is never silently ignored); replies are read leniently (fields a newer daemon added
are skipped).

A field whose default is None, empty or zero is left out on the wire while it has that value.
"""

from __future__ import annotations

import math
from typing import Annotated, Any, Literal, NewType

import msgspec
from msgspec import Meta, Struct

#: The version of the protocol this module speaks. It changes only when old clients would break.
PROTOCOL_VERSION = 1

#: Names a request among those of one client; chosen by the client, echoed in every reply to it.
MessageId = NewType("MessageId", str)
#: Names a registered prefix; chosen by the daemon.
PrefixName = NewType("PrefixName", str)

# What a field may hold. Characters are Unicode code points. Texts have no limit of their own: the
# limit on the whole message (`codec.Limits.max_message_bytes`) is reached first.
MAX_ID_CHARS = 64
MAX_PREFIX_ID_CHARS = 128
MAX_PROMPT_IDS = 1_048_576
MAX_TOKEN_ID = 2**31 - 1
MAX_CHAT_MESSAGES = 4096
MAX_TOKENS = 1_048_576
MAX_STOP_STRINGS = 16
MAX_STOP_CHARS = 256
MAX_STOP_TOKEN_IDS = 256
MAX_LOGIT_BIAS = 1024
MAX_LOGPROBS = 20
#: The largest integer that a JSON number carries exactly in every language (JavaScript's limit).
MAX_SEED = 2**53 - 1
MAX_DEADLINE_MS = 86_400_000
MAX_LIST_LIMIT = 1000

ID_PATTERN = r"\A[!-~]+\Z"
TOKEN_ID_KEY_PATTERN = r"\A(0|[1-9][0-9]{0,9})\Z"

Id = Annotated[
    MessageId,
    Meta(min_length=1, max_length=MAX_ID_CHARS, pattern=ID_PATTERN),
]
PrefixRef = Annotated[
    PrefixName,
    Meta(min_length=1, max_length=MAX_PREFIX_ID_CHARS, pattern=ID_PATTERN),
]
TokenId = Annotated[int, Meta(ge=0, le=MAX_TOKEN_ID)]
TokenIds = Annotated[tuple[TokenId, ...], Meta(max_length=MAX_PROMPT_IDS)]
StopString = Annotated[str, Meta(min_length=1, max_length=MAX_STOP_CHARS)]
BiasKey = Annotated[str, Meta(pattern=TOKEN_ID_KEY_PATTERN)]
Bias = Annotated[float, Meta(ge=-100, le=100)]
Penalty = Annotated[float, Meta(ge=-2, le=2)]

Role = Literal["system", "user", "assistant", "tool"]
FinishReason = Literal["stop", "length", "cancelled", "deadline"]


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

    def __post_init__(self) -> None:
        """Refuse NaN, which msgpack can carry and which no range check is defined for."""
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
    """

    limit: Annotated[int, Meta(ge=1, le=MAX_LIST_LIMIT)] = 100


class Evict(Request, frozen=True, kw_only=True, tag="evict"):
    """Admin: drop cached blocks, least recently used first; answered by `evicted`.

    Attributes:
        max_blocks: blocks at the most [1 to 2³¹−1].
        all: every block that neither a live request nor a registration holds. Exactly one of the
            two is given.
    """

    max_blocks: Annotated[int, Meta(ge=1, le=MAX_TOKEN_ID)] | None = None
    all: bool = False

    def __post_init__(self) -> None:
        """Check what one field alone cannot show."""
        if self.all == (self.max_blocks is not None):
            raise ValueError("exactly one of `max_blocks` and `all` must be given")


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
    | GetStats
)

#: The messages that only the admin socket accepts.
ADMIN_REQUESTS: tuple[type[Request], ...] = (ListEntries, Evict, GetStats)


class Reply(Struct, frozen=True, omit_defaults=True):
    """What every message from the daemon begins with.

    Attributes:
        id: the request it answers.
    """

    id: MessageId


class TopToken(Struct, frozen=True, array_like=True):
    """One candidate at a position: `[token_id, logprob]` on the wire.

    Attributes:
        token_id: the candidate.
        logprob: its natural log-probability; finite.
    """

    token_id: int
    logprob: float


class Logprobs(Struct, frozen=True):
    """Log-probabilities at one position, before temperature and filters.

    Attributes:
        token_id: the token that was chosen.
        logprob: its natural log-probability; finite.
        top: the most probable tokens, best first; as many as the request's `logprobs`.
    """

    token_id: int
    logprob: float
    top: tuple[TopToken, ...]


class Tokens(Reply, frozen=True, kw_only=True, tag="tokens"):
    """The next piece of a streamed answer.

    An answer is the concatenation of `text` (and `token_ids`, `logprobs`) of its `tokens` messages
    and of its `done`, in that order, whether it was streamed or not.

    Attributes:
        index: how many answer tokens were sent before this message.
        text: what may be shown now; may be empty while a character or a possible stop string is
            incomplete, so it need not be the text of exactly `token_ids`.
        token_ids: the new tokens.
        logprobs: one entry per token, if the request asked for them.
    """

    index: int
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[Logprobs, ...] = ()


class Usage(Struct, frozen=True):
    """What an answer used. Every count is of tokens.

    Attributes:
        prompt_tokens: tokens of the prompt, a registered prefix before it included.
        cached_tokens: those of them whose KV came from the cache.
        prefilled_tokens: tokens computed before the answer could begin, or go on: those of the
            prompt, and again what was lost if the request had to make room for others.
        completion_tokens: answer tokens.
    """

    prompt_tokens: int
    cached_tokens: int
    prefilled_tokens: int
    completion_tokens: int


class Timing(Struct, frozen=True):
    """Where the time went, measured in the daemon.

    Attributes:
        queue_ms: from arrival to the first step [milliseconds].
        ttft_ms: from arrival to the first answer token; null if there was none [milliseconds].
        total_ms: from arrival to the end [milliseconds].
        tokens_per_s: answer tokens after the first, per second since the first; null below two.
    """

    queue_ms: float
    ttft_ms: float | None
    total_ms: float
    tokens_per_s: float | None


class Done(Reply, frozen=True, kw_only=True, tag="done"):
    """The last message of an answer that did not fail.

    Attributes:
        index: how many answer tokens were sent before this message; 0 if it was not streamed.
        text: the text that no `tokens` message carried: all of it if the answer was not streamed,
            the held-back rest (often empty) if it was.
        token_ids: the tokens that no `tokens` message carried.
        finish_reason: `stop` (end token, stop string or stop token), `length` (`max_tokens` or
            the context's end), `cancelled`, `deadline`.
        usage: token counts.
        timing: durations.
        stop: the stop string, or the text of the stop token, that ended the answer.
        logprobs: one entry per token of this message, if the request asked for them.
    """

    index: int
    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    usage: Usage
    timing: Timing
    stop: str | None = None
    logprobs: tuple[Logprobs, ...] = ()


class Error(Struct, frozen=True, kw_only=True, omit_defaults=True, tag="error"):
    """The last message of a request that was refused or failed.

    Attributes:
        id: the request it answers; null if the message was too damaged to show one.
        code: a word to match on; PROTOCOL.md lists them.
        message: a sentence for people; its wording may change.
        retryable: the same request can succeed later.
        retry_after_ms: when a new try is worthwhile [milliseconds], if the daemon knows.
    """

    id: MessageId | None
    code: str
    message: str
    retryable: bool
    retry_after_ms: int | None = None


class Ok(Reply, frozen=True, tag="ok"):
    """The request was carried out and has nothing to report (`cancel`)."""


class Pong(Reply, frozen=True, kw_only=True, tag="pong"):
    """The daemon is alive.

    Attributes:
        version: of the daemon.
        uptime_s: since it started [seconds].
    """

    version: str
    uptime_s: float


class Info(Reply, frozen=True, kw_only=True, tag="info"):
    """What is served here.

    Attributes:
        model: the bundle's name.
        digest: of weights, KV layout and shape [hexadecimal]; equal digests give equal answers.
        device: such as `npu:0`, or `sim:0` for the software device.
        vocab_size: token ids are below it.
        max_model_len: prompt and answer together [tokens].
        block_size: tokens per KV block.
        chat: whether the model has a chat template, so that `chat` works.
        limits: name → value of the limits in force, such as `max_message_bytes`.
        versions: name → version of protocol, daemon and libraries.
    """

    model: str
    digest: str
    device: str
    vocab_size: int
    max_model_len: int
    block_size: int
    chat: bool
    limits: dict[str, int]
    versions: dict[str, str]


class Tokenized(Reply, frozen=True, kw_only=True, tag="tokenized"):
    """Answer to `tokenize`.

    Attributes:
        token_ids: of the whole text or conversation, begin-of-text token included.
    """

    token_ids: tuple[int, ...]


class Registered(Reply, frozen=True, kw_only=True, tag="registered"):
    """A prefix is in the cache and stays there.

    Attributes:
        prefix_id: its name, for `generate` and `release`.
        num_tokens: its length [tokens].
        cached_tokens: those of them that were in the cache already.
        num_bytes: device memory its KV occupies [bytes].
    """

    prefix_id: PrefixName
    num_tokens: int
    cached_tokens: int
    num_bytes: int


class Released(Reply, frozen=True, kw_only=True, tag="released"):
    """A prefix is given up; its KV may be evicted from now on.

    Attributes:
        prefix_id: its former name.
    """

    prefix_id: PrefixName


class Entry(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One prefix in the cache: a chain of blocks from the first token on.

    Attributes:
        digest: of its last block's chain [hexadecimal]; empty if it is shorter than a block, so
            that nothing of it is kept.
        num_tokens: its length [tokens].
        num_blocks: blocks it occupies, shared ones included.
        num_bytes: device memory of those blocks [bytes].
        hits: how often a request reused it or a beginning of it.
        age_s: since it was first committed [seconds].
        idle_s: since it was last used [seconds].
        in_use: a live request holds it; a registration alone does not count here (`prefix_id`
            tells of it).
        prefix_id: its name if it is registered.
    """

    digest: str
    num_tokens: int
    num_blocks: int
    num_bytes: int
    hits: int
    age_s: float
    idle_s: float
    in_use: bool
    prefix_id: PrefixName | None = None


class Listed(Reply, frozen=True, kw_only=True, tag="listed"):
    """Answer to `list`.

    Attributes:
        entries: most recently used first, at most `limit`.
        total: how many there are in all.
    """

    entries: tuple[Entry, ...]
    total: int


class Evicted(Reply, frozen=True, kw_only=True, tag="evicted"):
    """Answer to `evict`.

    Attributes:
        num_blocks: blocks dropped.
        num_bytes: pool memory that became free [bytes].
        in_use_blocks: blocks that stayed because a live request or a registration holds them;
            unlike in an entry's `in_use`, registrations count here.
    """

    num_blocks: int
    num_bytes: int
    in_use_blocks: int


class Stats(Reply, frozen=True, kw_only=True, tag="stats"):
    """Answer to `stats`.

    Attributes:
        stats: section → name → value; names may be added at any time.
    """

    stats: dict[str, Any]


AnyReply = (
    Tokens
    | Done
    | Error
    | Ok
    | Pong
    | Info
    | Tokenized
    | Registered
    | Released
    | Listed
    | Evicted
    | Stats
)


def type_name(message: type[Struct] | Struct) -> str:
    """The word in the field `type`, such as `generate`."""
    tag = message.__struct_config__.tag
    if not isinstance(tag, str):
        raise TypeError(f"{message!r} is a part of messages, not a message")
    return tag


def without_stream(request: AnyRequest) -> AnyRequest:
    """The same request, to be answered by one message (what a REQ client can receive)."""
    if isinstance(request, AnswerRequest) and request.stream:
        return msgspec.structs.replace(request, stream=False)
    return request


def _check_finite(name: str, value: float) -> None:
    if not math.isfinite(value):
        raise ValueError(f"`{name}` must be a finite number, got {value}")


def _check_one_of(message: Struct, *names: str) -> None:
    given = [name for name in names if getattr(message, name) is not None]
    if len(given) != 1:
        listed = ", ".join(f"`{name}`" for name in names[:-1]) + f" and `{names[-1]}`"
        found = " and ".join(f"`{name}`" for name in given) if given else "none"
        raise ValueError(f"exactly one of {listed} must be given, got {found}")
