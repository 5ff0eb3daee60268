"""Where an answer ends, and that nothing shown is taken back."""

from __future__ import annotations

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from runtime_cache.engine.request import SamplingParams
from runtime_cache.engine.stopping import StopChecker, StopResult

EOS = 2


def checker(*stop: str, ids: tuple[int, ...] = (), ignore_eos: bool = False) -> StopChecker:
    params = SamplingParams(stop=stop, stop_token_ids=frozenset(ids), ignore_eos=ignore_eos)
    return StopChecker(params, frozenset({EOS}), lambda token_id: f"<{token_id}>")


def test_without_stop_strings_everything_passes_at_once() -> None:
    check = checker()
    assert check.feed(5, "abc") == StopResult("abc")
    assert check.feed(6, "") == StopResult("")
    assert check.flush() == StopResult("")


def test_a_stop_over_three_tokens() -> None:
    check = checker("STOP")
    assert check.feed(5, "a S").text == "a "
    assert check.feed(6, "TO").text == ""
    assert check.feed(7, "P b") == StopResult("", "STOP")


def test_held_text_that_was_no_stop_is_shown() -> None:
    check = checker("STOP")
    assert check.feed(5, "STO") == StopResult("")
    assert check.feed(6, "RE S") == StopResult("STORE ")
    assert check.flush() == StopResult("S")


def test_a_false_start_inside_a_held_text() -> None:
    check = checker("aab")
    assert [check.feed(5, "a").text for _ in range(4)] == ["", "", "a", "a"]
    assert check.feed(5, "b") == StopResult("", "aab")


def test_the_stop_that_is_complete_first_counts() -> None:
    assert checker("world", "lo").feed(5, "hello world") == StopResult("hel", "lo")
    assert checker("abc", "b").feed(5, "abc") == StopResult("a", "b")


def test_of_those_complete_together_the_longest() -> None:
    assert checker("b", "ab", "xb").feed(5, "aab") == StopResult("a", "ab")


def test_a_stop_string_at_the_very_beginning() -> None:
    assert checker("a").feed(5, "abc") == StopResult("", "a")


def test_unicode() -> None:
    check = checker("🏳️‍🌈", "終わり")
    assert check.feed(5, "x🏳").text == "x"
    assert check.feed(6, "🏳️").text == "🏳"
    assert check.feed(7, "\u200d終わ").text == "🏳️\u200d"
    assert check.feed(8, "り") == StopResult("", "終わり")


def test_end_token_ends_and_is_not_shown() -> None:
    check = checker("STOP")
    assert check.feed(5, "x ST").text == "x "
    assert check.feed(EOS, "never") == StopResult("ST", "<2>")


def test_ignored_end_token_is_an_ordinary_one() -> None:
    assert checker(ignore_eos=True).feed(EOS, "x") == StopResult("x")


def test_the_request_s_own_end_tokens_count_even_so() -> None:
    check = checker(ids=(7,), ignore_eos=True)
    assert check.feed(5, "a") == StopResult("a")
    assert check.feed(7, "b") == StopResult("", "<7>")


def test_flush_takes_the_detokenizer_s_rest() -> None:
    check = checker("a\ufffd")
    assert check.feed(5, "xa") == StopResult("x")
    assert check.flush("\ufffd") == StopResult("", "a\ufffd")
    check = checker("b\ufffd")
    assert check.feed(5, "xa") == StopResult("xa")
    assert check.flush("\ufffd") == StopResult("\ufffd")


def test_nothing_after_the_end() -> None:
    check = checker("a")
    check.feed(5, "a")
    assert check.flush("more") == StopResult("")
    with pytest.raises(ValueError, match="after the end"):
        check.feed(6, "b")


def test_an_empty_stop_string_is_refused() -> None:
    with pytest.raises(ValueError, match="empty"):
        checker("a", "")


def expected(text: str, stops: list[str]) -> tuple[str, str | None]:
    """Letter by letter: the text before the stop that is complete first, the longest of them."""
    for end in range(1, len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            longest = max(ending, key=len)
            return text[: end - len(longest)], longest
    return text, None


def run(check: StopChecker, pieces: list[str]) -> tuple[str, str | None]:
    shown = ""
    for piece in pieces:
        result = check.feed(5, piece)
        shown += result.text
        if result.stop is not None:
            return shown, result.stop
    return shown + check.flush().text, None


LETTERS = st.text("ab", min_size=1, max_size=4)


@settings(deadline=None)
@given(st.lists(st.text("abc", max_size=5), max_size=8), st.lists(LETTERS, max_size=4))
@example(["aa", "ab"], ["aab", "b"])
@example(["ab", "abc"], ["abab", "ba"])
def test_any_cut_into_pieces(pieces: list[str], stops: list[str]) -> None:
    assert run(checker(*stops), pieces) == expected("".join(pieces), stops)


@settings(deadline=None)
@given(st.lists(st.text("ab", max_size=3), max_size=8), st.lists(LETTERS, min_size=1, max_size=3))
def test_no_more_is_held_than_could_begin_a_stop(pieces: list[str], stops: list[str]) -> None:
    check, fed, shown = checker(*stops), "", ""
    for piece in pieces:
        result = check.feed(5, piece)
        fed, shown = fed + piece, shown + result.text
        if result.stop is not None:
            return
        held = fed[len(shown) :]
        assert fed == shown + held
        assert not held or any(stop.startswith(held) for stop in stops)
