"""The async and the blocking client are one interface, with and without await."""

from __future__ import annotations

import inspect

import pytest

from ipc import client, sync_client

#: What only the async client has: making its socket needs a running loop, `aclosing` a method.
ASYNC_ONLY = {client.Client: {"open"}, client.AnswerStream: {"aclose"}}
PAIRS = [
    (client.Client, sync_client.Client),
    (client.AnswerStream, sync_client.AnswerStream),
]


def signatures(cls: type) -> dict[str, inspect.Signature]:
    """Of the constructor and of every public method; `async` does not show in them."""
    return {
        name: inspect.signature(method)
        for name, method in inspect.getmembers(cls, inspect.isfunction)
        if name == "__init__" or not name.startswith("_")
    }


@pytest.mark.parametrize(("with_await", "without"), PAIRS)
def test_both_have_the_same_methods(with_await: type, without: type) -> None:
    assert signatures(with_await).keys() - ASYNC_ONLY[with_await] == signatures(without).keys()


@pytest.mark.parametrize(
    ("with_await", "without", "name"),
    [(one, other, name) for one, other in PAIRS for name in signatures(other)],
)
def test_a_method_takes_and_returns_the_same(with_await: type, without: type, name: str) -> None:
    assert signatures(with_await)[name] == signatures(without)[name]
