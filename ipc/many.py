"""Many answers from one call: what callers write, what they get, when to try again. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ipc.answers import Result
from ipc.arguments import conversation, prompt_fields, sampling_fields
from ipc.errors import ConnectionLost, IpcError, ServerError
from ipc.messages import Chat, Generate

#: A text, token ids, or the keyword arguments of `generate` or (with `messages`) of `chat`.
Prompt = str | Sequence[int] | Mapping[str, Any]

#: How many requests of `generate_many` are under way.
DEFAULT_AT_ONCE = 32
#: Pause before the second try if the daemon names none; doubled for every further one [seconds].
_FIRST_PAUSE_S = 0.1
_LONGEST_PAUSE_S = 5.0


@dataclass(frozen=True, slots=True)
class Outcome:
    """How one of many requests ended.

    Attributes:
        index: of its prompt, counted from 0.
        result: the answer; None if there is an error.
        error: why there is none.
    """

    index: int
    result: Result | None
    error: IpcError | None = None

    def get(self) -> Result:
        """The answer, or the error as an exception."""
        if self.result is None:
            raise self.error or IpcError("neither answer nor error")
        return self.result


def request_of(
    prompt: Prompt, sampling: Mapping[str, Any]
) -> tuple[type[Generate] | type[Chat], dict[str, Any]]:
    """The request for one prompt; what it says itself comes before what is said for all.

    Raises:
        TypeError, ValueError: the prompt is none.
    """
    if isinstance(prompt, str):
        return Generate, prompt_fields(prompt, None, None) | sampling_fields(sampling)
    if not isinstance(prompt, Mapping):
        return Generate, prompt_fields(None, prompt, None) | sampling_fields(sampling)
    own = dict(prompt)
    if "messages" in own:
        turns = conversation(own.pop("messages"))
        return Chat, {"messages": turns} | sampling_fields({**sampling, **own})
    what = prompt_fields(
        own.pop("prompt", None), own.pop("prompt_ids", None), own.pop("prefix_id", None)
    )
    return Generate, what | sampling_fields({**sampling, **own})


def pause_s(error: IpcError, num_tries: int) -> float | None:
    """How long to wait before the next try; None: another would end the same way.

    Args:
        error: how the last one ended.
        num_tries: so far, at least 1.
    """
    if isinstance(error, ServerError) and error.retry_after_ms is not None and error.retryable:
        return error.retry_after_ms / 1000
    if isinstance(error, ConnectionLost) or (isinstance(error, ServerError) and error.retryable):
        return min(_FIRST_PAUSE_S * 2.0 ** (num_tries - 1), _LONGEST_PAUSE_S)
    return None
