"""What is remembered of texts, for how long, and what is found."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtime_cache.text_memory import (
    DEFAULT_MAX_BYTES,
    OVERHEAD_BYTES,
    TextMemory,
    TokenizedText,
)


def known(
    text: str, tokens: Sequence[int] | None = None, answers: tuple[tuple[int, int], ...] = ()
) -> TokenizedText:
    """One token a byte, its value unless another is given."""
    raw = text.encode()
    ids = np.array(list(raw) if tokens is None else tokens, dtype=np.int32)
    return TokenizedText(raw, ids, np.arange(1, len(raw) + 1, dtype=np.int32), answers)


def texts(memory: TextMemory) -> list[str]:
    """What is remembered, found by looking up each."""
    every = [f"{a}{b}{c}" for a in "abc" for b in ("", *"abc") for c in ("", *"abc")]
    found = {near.known.text.decode() for text in every if (near := memory.nearest(text.encode()))}
    return sorted(found)


# --- one text ------------------------------------------------------------------------------------


def test_tokens_up_to_a_byte() -> None:
    text = TokenizedText(
        b"abcd",
        np.arange(5, dtype=np.int32),
        # BOS, `a`, a token without a text of its own, `bc`, `d`
        np.array([0, 1, 1, 3, 4], dtype=np.int32),
    )
    assert [text.num_tokens_to(place) for place in range(6)] == [1, 2, None, 4, 5, None]
    assert known("ab").num_tokens_to(0) is None


def test_which_bytes_are_the_models() -> None:
    text = known("abcdef", answers=((1, 2), (4, 6)))
    assert [text.is_answer(place) for place in range(8)] == [
        *(False, False, True, False, False, True, True, False)
    ]


def test_a_beginning_has_the_same_tokens() -> None:
    assert known("ab").is_beginning_of(known("ab"))
    assert known("ab").is_beginning_of(known("abc"))
    assert not known("ab", (97, 7)).is_beginning_of(known("abc"))
    assert not known("abc").is_beginning_of(known("ab"))
    assert not known("b").is_beginning_of(known("ab"))


def test_what_a_text_takes() -> None:
    assert known("abc").num_bytes == 3 + 3 * 4 + 3 * 4 + OVERHEAD_BYTES


# --- finding -------------------------------------------------------------------------------------


def test_nothing_is_found_in_an_empty_memory() -> None:
    memory = TextMemory()
    assert memory.nearest(b"a") is None
    assert memory.nearest(b"") is None
    assert (len(memory), memory.num_bytes) == (0, 0)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("abc", ("abc", 3)),
        ("abcx", ("abc", 3)),  # goes on from it
        ("ab", ("abc", 2)),  # is a beginning of it
        ("abd", ("abc", 2)),  # goes on differently
        ("aax", ("aa", 2)),
        ("b", None),
        ("", None),
        ("z", ("zz", 1)),
    ],
)
def test_the_longest_shared_beginning_is_found(text: str, expected: tuple[str, int] | None) -> None:
    memory = TextMemory()
    for item in ("abc", "aa", "zz"):
        memory.remember(known(item))
    found = memory.nearest(text.encode())
    assert (found and (found.known.text.decode(), found.num_shared)) == expected


@given(items=st.lists(st.text("ab", max_size=6)), text=st.text("abc", max_size=8))
def test_no_text_shares_more(items: list[str], text: str) -> None:
    memory = TextMemory()
    for number, item in enumerate(items):
        memory.remember(known(item, [number] * len(item)))
    heads = [text[:size] for size in range(len(text) + 1)]
    most = max((len(head) for head in heads for item in items if item.startswith(head)), default=0)
    found = memory.nearest(text.encode())
    assert (found.num_shared if found else 0) == most
    assert found is None or found.known.text.startswith(text.encode()[:most])


# --- one text for a conversation -----------------------------------------------------------------


def test_a_longer_text_takes_the_place_of_its_beginning() -> None:
    memory = TextMemory()
    memory.remember(known("a"))
    memory.remember(known("ab"))
    memory.remember(known("ac"))
    assert texts(memory) == ["ab", "ac"]
    memory.remember(known("a"))
    assert texts(memory) == ["ab", "ac"]
    assert memory.num_bytes == 2 * known("ab").num_bytes


def test_a_beginning_of_other_tokens_stays() -> None:
    memory = TextMemory()
    memory.remember(known("a", [1]))
    memory.remember(known("ab"))
    assert len(memory) == 2
    memory.remember(known("a", [2]))  # the later ids of the same text count
    assert len(memory) == 2
    found = memory.nearest(b"a")
    assert found is not None
    assert found.known.tokens.tolist() == [2]
    memory.remember(known("a"))  # now it is a beginning of the other
    assert len(memory) == 1


@given(st.lists(st.tuples(st.text("ab", max_size=4), st.integers(0, 2)), max_size=20))
def test_nothing_is_kept_twice_or_lost(items: list[tuple[str, int]]) -> None:
    """Against a plain list: the latest ids of every text, but for beginnings of others."""
    memory, latest = TextMemory(), list[TokenizedText]()
    for text, number in items:
        new = known(text, [*range(len(text) - 1), number][: len(text)])
        memory.remember(new)
        if any(new.is_beginning_of(old) and new.text != old.text for old in latest):
            latest = [old for old in latest if old.text != new.text]
            continue
        latest = [o for o in latest if not o.is_beginning_of(new) and o.text != new.text] + [new]
    assert len(memory) == len(latest)
    assert memory.num_bytes == sum(old.num_bytes for old in latest)
    for old in latest:
        found = memory.nearest(old.text)
        assert (found.num_shared if found else 0) == len(old.text)


# --- bounds --------------------------------------------------------------------------------------


def bounded(num_texts: int, spare: int = 0) -> TextMemory:
    """Room for so many texts of one letter."""
    return TextMemory(num_texts * known("a").num_bytes + spare)


def test_the_oldest_goes_when_there_is_no_room() -> None:
    size = known("a").num_bytes
    for spare, expected in ((-1, ["c"]), (0, ["b", "c"]), (size - 1, ["b", "c"])):
        memory = bounded(2, spare)
        for text in "abc":
            memory.remember(known(text))
        assert texts(memory) == expected
        assert memory.num_bytes == len(expected) * size


def test_a_text_that_fills_the_memory_and_one_that_is_larger() -> None:
    memory = TextMemory(known("abc").num_bytes)
    memory.remember(known("a"))
    memory.remember(known("abca"))
    assert texts(memory) == ["a"]
    memory.remember(known("bcc"))
    assert texts(memory) == ["bcc"]


def test_use_keeps_a_text_only_if_it_reaches_the_answer() -> None:
    for lookup, expected in ((b"ab", ["b", "c"]), (b"abc", ["abc", "c"])):
        memory = TextMemory(known("abc").num_bytes + known("b").num_bytes)
        memory.remember(known("abc", answers=((2, 3),)))
        memory.remember(known("b"))
        memory.nearest(lookup)
        memory.remember(known("c"))
        assert texts(memory) == expected


def test_to_be_told_again_is_use() -> None:
    for again in ("a", "aa"):  # a beginning of it, or the same
        memory = TextMemory(2 * known("aa").num_bytes)
        memory.remember(known("aa"))
        memory.remember(known("bb"))
        memory.remember(known(again))
        memory.remember(known("cc"))
        assert texts(memory) == ["aa", "cc"]


def test_a_memory_of_no_size_keeps_nothing() -> None:
    memory = TextMemory(0)
    memory.remember(known("a"))
    assert len(memory) == 0


def test_the_default_is_hundreds_of_long_conversations() -> None:
    tokens = np.zeros(8000, dtype=np.int32)
    one = TokenizedText(b"x" * 32000, tokens, tokens)
    assert DEFAULT_MAX_BYTES // one.num_bytes == 695


def test_many_threads() -> None:
    """Nothing is lost or counted twice, whoever comes first."""
    memory, errors = bounded(50), list[BaseException]()

    def work(number: int) -> None:
        try:
            for step in range(300):
                text = f"{number}{step % 60:02}"
                memory.remember(known(text))
                found = memory.nearest(text.encode())
                # None if the others were so fast that all that begins like it is forgotten.
                assert found is None or found.known.text.startswith(text[:1].encode())
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=[number]) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    assert memory.num_bytes == len(memory) * known("000").num_bytes
    assert len(memory) == 50 * known("a").num_bytes // known("000").num_bytes
