"""How the software device's compiler refuses. Pure."""

from __future__ import annotations


class AtcError(Exception):
    """The compiler refuses.

    Attributes:
        code: ATC's code, such as E10016.
        reason: for a person.
    """

    def __init__(self, code: str, reason: str) -> None:
        super().__init__(f"{code}: {reason}")
        self.code = code
        self.reason = reason
