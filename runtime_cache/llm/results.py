"""What an embedded model gives back: answers, prefixes, errors. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ipc import answers
from ipc.messages import CacheReport, Done, Error, Logprobs, Registered, Timing, Usage
from runtime_cache.errors import AclError, DeviceError, RequestError, RuntimeCacheError


class Result(str):
    """An answer: its text, and what is known of it.

    It is a `str`, so it goes wherever text goes: into a message's `content`, a file, JSON.

    Attributes:
        text: the text alone, as a plain `str`.
        token_ids: all answer tokens.
        finish_reason: why it ended: `stop`, `length`, `cancelled`, `deadline`.
        stop: the stop string or token text that ended it, if one did.
        usage: token counts, `cached_tokens` among them.
        cache: what the cache did for the prompt, and why not more; None if the request ended
            before it was looked at.
        timing: durations [milliseconds].
        logprobs: one entry per token, if asked for.
    """

    __slots__ = ("cache", "finish_reason", "logprobs", "stop", "timing", "token_ids", "usage")

    token_ids: tuple[int, ...]
    finish_reason: str
    stop: str | None
    usage: Usage
    cache: CacheReport | None
    timing: Timing
    logprobs: tuple[Logprobs, ...]

    @classmethod
    def of(cls, done: Done | answers.Result) -> Result:
        """The answer that came as one message, or was put together from several."""
        result = cls(done.text)
        for name in cls.__slots__:
            setattr(result, name, getattr(done, name))
        return result

    @property
    def text(self) -> str:
        return str(self)

    def __repr__(self) -> str:
        """The text, and what people look at first."""
        return (
            f"Result({self.text!r}, finish_reason={self.finish_reason!r}, "
            f"completion_tokens={self.usage.completion_tokens}, "
            f"cached_tokens={self.usage.cached_tokens})"
        )


class Prefix(str):
    """The id of a registered prefix.

    Attributes:
        num_tokens: its length [tokens].
        cached_tokens: those of them that were in the cache already.
        num_bytes: device memory its KV occupies [bytes].
    """

    __slots__ = ("cached_tokens", "num_bytes", "num_tokens")

    num_tokens: int
    cached_tokens: int
    num_bytes: int

    @classmethod
    def of(cls, registered: Registered) -> Prefix:
        """The prefix that was registered."""
        prefix = cls(registered.prefix_id)
        for name in cls.__slots__:
            setattr(prefix, name, getattr(registered, name))
        return prefix


class Closed(RequestError):
    """What was called is over: the LLM is closed or another process's, the stream was given up."""

    code = "closed"


class SomeFailed(RequestError):
    """Some of many prompts failed; the others were answered.

    Attributes:
        results: in the order of the prompts: the answer, or the error instead of it.
    """

    code = "some_failed"

    def __init__(self, results: Sequence[Result | RuntimeCacheError]) -> None:
        failed = [
            (index, result)
            for index, result in enumerate(results)
            if isinstance(result, RuntimeCacheError)
        ]
        index, first = failed[0]
        super().__init__(
            f"{len(failed)} of {len(results)} prompts failed, `results` has the answers to the "
            f"others; prompt {index}: {first}"
        )
        self.results = list(results)
        self.retryable = all(error.retryable for _, error in failed)


def error_of(reply: Error) -> RuntimeCacheError:
    """The error that a reply stands for, with its code.

    A driver's error is a `DeviceError` here: which call it was, the message alone says.
    """
    kind = _KINDS.get(reply.code, RequestError)
    error = kind.__new__(kind)  # what some constructors want besides is set below
    RuntimeCacheError.__init__(error, reply.message)
    error.code, error.retryable = reply.code, reply.retryable
    error.retry_after_ms = reply.retry_after_ms
    return error


def _kinds(kind: type[RuntimeCacheError]) -> Iterator[type[RuntimeCacheError]]:
    yield kind
    for narrower in kind.__subclasses__():
        yield from _kinds(narrower)


_KINDS: dict[str, type[RuntimeCacheError]] = {
    kind.code: DeviceError if issubclass(kind, AclError) else kind
    for kind in _kinds(RuntimeCacheError)
}
