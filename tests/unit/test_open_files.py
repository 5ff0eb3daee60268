"""The soft limit of open files is raised to the hard one, as far as that makes sense."""

from __future__ import annotations

import resource

import pytest

from runtime_cache import open_files
from runtime_cache.open_files import MAX_FILES

NONE = resource.RLIM_INFINITY


class Limits:
    """The process's limits, or what a test takes for them."""

    def __init__(self, soft: int, hard: int, *, is_fixed: bool = False) -> None:
        self.now = (soft, hard)
        self._is_fixed = is_fixed

    def get(self, which: int) -> tuple[int, int]:
        assert which == resource.RLIMIT_NOFILE
        return self.now

    def set(self, which: int, limits: tuple[int, int]) -> None:
        if self._is_fixed:
            raise ValueError("not allowed to raise maximum limit")
        self.now = limits


@pytest.mark.parametrize(
    ("soft", "hard", "allowed"),
    [
        (1024, 65536, 65536),
        (1024, MAX_FILES + 1, MAX_FILES),
        (1024, NONE, MAX_FILES),
        (NONE, NONE, NONE),
        (4096, 4096, 4096),
        (MAX_FILES + 1, NONE, MAX_FILES + 1),
    ],
)
def test_what_is_allowed_in_the_end(
    monkeypatch: pytest.MonkeyPatch, soft: int, hard: int, allowed: int
) -> None:
    limits = Limits(soft, hard)
    monkeypatch.setattr(resource, "getrlimit", limits.get)
    monkeypatch.setattr(resource, "setrlimit", limits.set)
    assert open_files.allow_many() == allowed
    assert limits.now == (allowed, hard)


def test_a_limit_that_cannot_be_raised_is_no_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    limits = Limits(1024, 4096, is_fixed=True)
    monkeypatch.setattr(resource, "getrlimit", limits.get)
    monkeypatch.setattr(resource, "setrlimit", limits.set)
    assert open_files.allow_many() == 1024
