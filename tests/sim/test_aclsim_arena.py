"""Addresses for the host: in order, poisoned, used again only when all others were."""

from __future__ import annotations

import ctypes
import signal
import subprocess
import sys

import pytest

from runtime_cache.aclsim import arena, mapping
from runtime_cache.aclsim.arena import Arena
from runtime_cache.aclsim.mapping import PAGE_BYTES
from tests.support.aclsim import POISON

SMALL = 16 * PAGE_BYTES


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> Arena:
    """An arena of 16 pages that keeps four pages of what was given back."""
    monkeypatch.setattr(arena, "RESERVED_BYTES", SMALL)
    monkeypatch.setattr(arena, "LEAST_RESERVED_BYTES", SMALL)
    monkeypatch.setattr(arena, "MAX_POISONED_BYTES", 4 * PAGE_BYTES)
    return Arena()


def test_it_takes_no_address_space_before_it_is_used() -> None:
    assert (Arena().base, Arena().end) == (0, 0)


def test_each_place_lies_behind_the_last_with_a_page_between(small: Arena) -> None:
    places = [small.take(size) for size in (1, PAGE_BYTES, PAGE_BYTES + 1, 1)]
    assert [place - small.base for place in places] == [
        0,
        2 * PAGE_BYTES,
        4 * PAGE_BYTES,
        7 * PAGE_BYTES,
    ]
    assert small.end - small.base == SMALL


def test_what_is_taken_and_what_was_given_back_holds_poison(small: Arena) -> None:
    place = small.take(8)
    assert ctypes.string_at(place, 8) == POISON * 2
    ctypes.memset(place, 7, 8)
    small.give_back(place, 8)
    assert ctypes.string_at(place, 8) == POISON * 2


def test_a_place_is_used_again_only_when_all_others_were(small: Arena) -> None:
    first = small.take(1)
    kept = small.take(1)
    small.give_back(first, 1)
    later = [small.take(1) for _ in range(6)]  # eight pages with their guards
    assert first not in later
    assert small.take(1) == first
    small.give_back(later[0], 1)
    assert small.take(1) == later[0]
    assert kept not in later


@pytest.mark.parametrize(("pages", "fits"), [(14, True), (15, True), (16, False)])
def test_what_is_too_large_is_refused_and_takes_nothing(
    small: Arena, pages: int, fits: bool
) -> None:
    if fits:
        assert small.take(pages * PAGE_BYTES) == small.base
        return
    with pytest.raises(MemoryError, match="no 69632 bytes of address space"):
        small.take(pages * PAGE_BYTES)
    assert small.take(1) == small.base


def test_a_full_arena_has_room_again_when_something_is_given_back(small: Arena) -> None:
    places = [small.take(3 * PAGE_BYTES) for _ in range(4)]
    with pytest.raises(MemoryError):
        small.take(1)
    small.give_back(places[2], 3 * PAGE_BYTES)
    assert small.take(3 * PAGE_BYTES) == places[2]


DIES = """
import ctypes
from runtime_cache.aclsim import arena
arena.MAX_POISONED = 1
space = arena.Arena()
one, other = space.take(1), space.take(1)
space.give_back(one, 1)
print(ctypes.string_at(one, 1), flush=True)
if {oldest}:
    space.give_back(other, 1)
    ctypes.string_at(one, 1)
ctypes.string_at(one + 4096, 1)
"""


@pytest.mark.parametrize("oldest", [True, False], ids=["the oldest given back", "a guard page"])
def test_nobody_may_touch(oldest: bool) -> None:
    done = subprocess.run(
        [sys.executable, "-c", DIES.format(oldest=oldest)], capture_output=True, check=False
    )
    assert (done.returncode, done.stdout) == (-signal.SIGSEGV, b"b'\\xfe'\n")


def test_where_the_host_limits_address_space_less_is_reserved(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[int] = []
    reserve = mapping.reserve

    def limited(size_bytes: int) -> int:
        asked.append(size_bytes)
        if size_bytes > 1 << 34:
            raise MemoryError
        return reserve(size_bytes)

    monkeypatch.setattr(mapping, "reserve", limited)
    space = Arena()
    space.take(1)
    assert asked == [1 << 40, 1 << 38, 1 << 36, 1 << 34]
    assert space.end - space.base == 1 << 34


def test_without_any_address_space_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuses(size_bytes: int) -> int:
        raise MemoryError(f"no {size_bytes}")

    monkeypatch.setattr(mapping, "reserve", refuses)
    space = Arena()
    with pytest.raises(MemoryError):
        space.take(1)
    assert (space.base, space.end) == (0, 0)
