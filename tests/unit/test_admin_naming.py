"""The beginning of a prefix id, where the socket tells of none."""

from __future__ import annotations

from typing import NoReturn

import pytest

from ipc.errors import ServerError
from ipc.messages import Error
from tests.support.admin_answers import ID, WHOLE_ID
from tests.support.admin_client import WideClient, run


class Refusing(WideClient):
    """On a socket where nothing may be listed, or one whose daemon fails at it."""

    def __init__(self, code: str) -> None:
        super().__init__()
        self._code = code

    def list(self, *_: object, **__: object) -> NoReturn:
        raise ServerError(Error(id=ID, code=self._code, message="no", retryable=False))


def test_it_is_not_enough_on_a_tenants_socket() -> None:
    client = Refusing("forbidden")
    with pytest.raises(ValueError, match=r"p-01234567: the beginning .* give the whole id"):
        run(client, "release p-01234567")
    assert run(client, f"release {WHOLE_ID}").out == f"released {WHOLE_ID}\n"


def test_other_refusals_are_told_as_they_are() -> None:
    with pytest.raises(ServerError, match=r"no \(internal\)"):
        run(Refusing("internal"), "release p-01234567")
