"""The cache of plans and bindings."""

from __future__ import annotations

import pytest

from runtime_cache.aclsim.recent import Recent


def test_the_least_recently_used_value_is_forgotten() -> None:
    made: list[str] = []
    recent: Recent[str, str] = Recent(2)

    def get(key: str) -> str:
        def make() -> str:
            made.append(key)
            return key.upper()

        return recent.get(key, make)

    assert [get(key) for key in "abacab"] == list("ABACAB")
    assert made == ["a", "b", "c", "b"]
    recent.clear()
    assert get("a") == "A"
    assert made[-1] == "a"


def test_a_failed_make_is_not_kept() -> None:
    recent: Recent[str, int] = Recent(2)
    with pytest.raises(ZeroDivisionError):
        recent.get("a", lambda: 1 // 0)
    assert recent.get("a", lambda: 1) == 1
