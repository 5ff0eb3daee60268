"""The families of pyACL that the software device does not have: they say so when they are called.

`import acl` gives a program all of them, so that an import does not fail which the program may
never use; the first call raises NotImplementedError, with the reason.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any, NoReturn

from runtime_cache.aclsim.ledger import ledger

#: Family -> what it is for.
FAMILIES = {
    "op": "operators run one by one",
    "media": "decoding and resizing of images and video (DVPP)",
    "himpi": "decoding and resizing of images and video (DVPP, second interface)",
    "blas": "matrix products as library calls",
    "prof": "profiling of a card",
    "fv": "feature vector retrieval",
}


class Family(ModuleType):
    """`acl.<family>`: every public name is a function that raises NotImplementedError."""

    def __getattr__(self, name: str) -> Callable[..., NoReturn]:
        if name.startswith("_"):
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        return _absent(f"{self.__name__}.{name}", FAMILIES[self.__name__.removeprefix("acl.")])


def _absent(full_name: str, purpose: str) -> Callable[..., NoReturn]:
    sentence = f"{full_name} is not in the software device: it runs models, and has no {purpose}"

    def call(*args: Any, **keywords: Any) -> NoReturn:
        ledger.note_misuse(sentence)
        raise NotImplementedError(sentence)

    call.__name__ = call.__qualname__ = full_name
    return call


op, media, himpi, blas, prof, fv = (Family(f"acl.{name}", FAMILIES[name]) for name in FAMILIES)
