"""ATC's codes in words: all of the table, several at once, unknown ones, words without a code."""

from __future__ import annotations

import pytest

from om_models.atc_errors import EXPLANATIONS, explain, explanation_of

LOGS = "~/ascend/log/debug/plog"

#: The codes that the notes on ATC list as those met most.
MET_MOST = (
    *("E10001", "E10003", "E10014", "E10002", "E10011", "E10004", "E10005", "E10006", "E10007"),
    *("E10016", "E10035", "E10036", "E10037", "E10038", "E10039", "E10040", "E10045", "E10046"),
    *("E10049", "E10050", "E10501", "E16001", "E16004", "E16002", "E19010", "E16005", "E20001"),
    *("E40021", "E40000", "E19999", "EZ9999", "EH9999"),
    *("507011", "507015", "507018", "145000", "145022"),
)


@pytest.mark.parametrize("code", MET_MOST)
def test_every_code_has_a_meaning_and_a_next_step(code: str):
    (text,) = explain([f"{code}: [PID: 7] 2025-03-18-09:02:18.501.341 something."], LOGS)
    assert text.startswith(f"{code}: ")
    assert ". Next: " in text


def test_meanings_are_sentences_of_their_own():
    for code, found in EXPLANATIONS.items():
        assert found.meaning[0].islower() or found.meaning.startswith(("ATC", "--")), code
        assert not found.meaning.endswith("."), code
        assert found.advice, code


def test_an_output_as_users_published_it():
    output = """\
ATC start working now, please wait for a moment.
...
ATC run failed, Please check the detail log, Try 'atc --help' for more information
EC0010: [PID: 129520] 2025-07-08-10:25:28.680.962 Failed to import Python module \
[ModuleNotFoundError: No module named 'decorator'.].
        Solution: Check that all required components are properly installed.
        TraceBack (most recent call last):
        build graph failed, graph id:0, ret:-1[FUNC:BuildModel][FILE:ge_generator.cc][LINE:148]
"""
    assert explain(output.splitlines(), LOGS) == [
        "EC0010: ATC's Python lacks a module. Next: install it into the Python that CANN was"
        " installed for (docs/conversion.md has the list)",
        "ATC's Python lacks the module decorator: install it there",
    ]


def test_several_codes_come_in_their_order_and_once():
    lines = ["E40021: x", "[ERROR] E19999: y", "E40021: again", "trace E16002"]
    codes = [text.partition(":")[0] for text in explain(lines, LOGS)]
    assert codes == ["E40021", "E19999", "E16002"]


@pytest.mark.parametrize("code", ["E19999", "EZ9999", "EH9999"])
def test_inner_errors_say_where_the_log_lies(code: str):
    (text,) = explain([f"{code}: Inner Error!"], LOGS)
    assert text.endswith(f"{LOGS}/plog-*.log")


def test_unknown_codes_pass_through():
    assert explain(["E77777: whatever"], LOGS) == [
        "E77777: not known here; ATC's own words are above"
    ]
    assert explanation_of("EI0001") is None


@pytest.mark.parametrize(
    ("line", "word"),
    [
        (
            "atc.bin: error while loading shared libraries: libascend_hal.so: cannot open shared"
            " object file",
            "devlib",
        ),
        ("OSError: [Errno 28] No space left on device", "the disk is full"),
        ("fork: Cannot allocate memory", "--compile-jobs 1"),
        ("ModuleNotFoundError: No module named 'te'", "lacks the module te"),
    ],
)
def test_words_without_a_code(line: str, word: str):
    (text,) = explain([line], LOGS)
    assert word in text


@pytest.mark.parametrize(
    "line",
    ["", "all is well", "weight_E10001ab", "step 507 of 15071", "EMPTY VALUE", "line 14500"],
)
def test_what_is_no_code(line: str):
    assert explain([line], LOGS) == []
