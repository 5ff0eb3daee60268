"""What /health and /ready answer: a state, and why. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

#: What follows from a state; `{n}` is the number of unfinished requests.
_REASONS = {
    "loading": "the bundle is being loaded, nothing is answered yet",
    "draining": "new requests are refused, {n} are unfinished",
    "recovering": "a step has failed, the device is being asked whether it works",
    "hung": "a step goes on for longer than device.step_timeout_ms",
    "lost": "the device cannot be used any more, the process ends",
    "broken": "the engine has failed, the process ends; its log has the details",
    "unresponsive": "the daemon does not answer its own question in time",
}
#: States of a process that it is no use to end.
_HEALTHY = frozenset({"loading", "serving", "draining", "recovering"})


class Health(NamedTuple):
    """How it goes.

    Attributes:
        state: one of `snapshot.STATES`, or `unresponsive`.
        num_unfinished: requests without a final answer.
        warnings: sentences for operators.
    """

    state: str
    num_unfinished: int = 0
    warnings: tuple[str, ...] = ()


class HealthPage(NamedTuple):
    """An answer: HTTP status and text."""

    status: int
    text: str


def health_page(health: Health) -> HealthPage:
    """/health: 200 unless ending the process would be right."""
    return HealthPage(200 if health.state in _HEALTHY else 503, _text(health))


def ready_page(health: Health) -> HealthPage:
    """/ready: 200 if a new request would be served."""
    return HealthPage(200 if health.state == "serving" else 503, _text(health))


def _text(health: Health) -> str:
    return "".join(f"{line}\n" for line in _lines(health))


def _lines(health: Health) -> Iterable[str]:
    yield health.state
    if health.state in _REASONS:
        yield "reason: " + _REASONS[health.state].format(n=health.num_unfinished)
    for warning in health.warnings:
        yield f"warning: {warning}"
