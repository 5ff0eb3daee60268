"""What the daemon answers, as types: one struct a message, its fields and their units.

Pure data. Read leniently: fields that a newer daemon added are skipped. A field with a default is
left out on the wire while it has that value. What only administrators are answered is in
`admin_replies`.
"""

from __future__ import annotations

from msgspec import Struct

from ipc.fields import MessageId, PrefixName


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
        prompt_tokens: tokens of the prompt, a registered prefix before it included; 0 if it ended
            before it was read.
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


class CacheReport(Struct, frozen=True, omit_defaults=True):
    """What the cache did for a prompt, and why not more.

    Attributes:
        reason: `hit` (all that can be reused was), `cold` (nothing cached begins like the prompt),
            `evicted` (what comes next was cached and had to go), `diverged` (the nearest cached
            prefix goes on differently), `extended` (the nearest cached prefix ends, the prompt
            goes on), `too_short` (nothing of so short a prompt can be reused), `limit` (the prompt
            goes on behind the longest prefix that is kept), `disabled` (see `detail`). Words may
            be added.
        diverged_at: tokens that prompt and nearest cached prefix have in common; absent: none.
        nearest_tokens: length of that prefix [tokens].
        detail: for `disabled`: because of what; for people.
    """

    reason: str
    diverged_at: int | None = None
    nearest_tokens: int | None = None
    detail: str = ""


class Done(Reply, frozen=True, kw_only=True, tag="done"):
    """The last message of an answer that did not fail.

    Attributes:
        index: how many answer tokens were sent before this message; 0 if it was not streamed.
        text: the text that no `tokens` message carried: all of it if the answer was not streamed,
            the held-back rest (often empty) if it was.
        token_ids: the tokens that no `tokens` message carried.
        finish_reason: `stop` (end token, stop string or stop token), `length` (`max_tokens` or
            the context's end), `cancelled`, `deadline`, `slow_reader` (the client did not read, or
            gave no credit, for too long), `lease_expired`, `shutdown` (the daemon stopped). Words
            may be added.
        usage: token counts.
        timing: durations.
        stop: the stop string, or the text of the stop token, that ended the answer.
        logprobs: one entry per token of this message, if the request asked for them.
        cache: why so many of `usage.cached_tokens`, and not more; absent if the request ended
            before it was admitted.
    """

    index: int
    text: str
    token_ids: tuple[int, ...]
    finish_reason: str
    usage: Usage
    timing: Timing
    stop: str | None = None
    logprobs: tuple[Logprobs, ...] = ()
    cache: CacheReport | None = None


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


class Opened(Reply, frozen=True, kw_only=True, tag="opened"):
    """A session is open.

    Attributes:
        lease_ms: it ends when nothing comes for so long [milliseconds]; as asked for.
        incarnation: as `pong.incarnation`.
    """

    lease_ms: int
    incarnation: str


class SessionClosed(Reply, frozen=True, kw_only=True, tag="closed"):
    """Answer to `close`: the session is over.

    Attributes:
        num_cancelled: requests that were unfinished. Each gets its own last message, before or
            after this one.
    """

    num_cancelled: int


class Pong(Reply, frozen=True, kw_only=True, tag="pong"):
    """The daemon is alive.

    Attributes:
        version: of the daemon.
        uptime_s: since it started [seconds].
        state: `serving`; `draining` (no new requests are taken); `recovering` (a step has failed,
            and the device is asked whether it works); `hung` (work on the device does not end:
            requests wait, and the daemon exits if it goes on); `lost` or `broken` (it exits).
            Words may be added.
        incarnation: drawn when the daemon starts [16 hexadecimal digits]: if it differs from the
            last one, the daemon has restarted, and knows nothing of earlier requests, sessions and
            registrations. Empty: an older daemon.
    """

    version: str
    uptime_s: float
    state: str = "serving"
    incarnation: str = ""


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
        incarnation: as `pong.incarnation`.
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
    incarnation: str = ""


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
        num_bytes: device memory of the blocks that hold what is kept of it [bytes].
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
