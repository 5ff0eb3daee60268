"""The doctor's words: 80 columns, a summary, nothing that steers a terminal."""

from __future__ import annotations

import pytest

from tools.doctor.findings import Finding, ok, problem, sentence, skipped, warning
from tools.doctor.report import as_json, encode, render, shorten, summary, wrap

FINDINGS = [
    ok("python", "Python 3.11.4."),
    warning("npu-smi", "npu-smi is nowhere.", "Mount it."),
    problem("nodes", "There is " + "nothing at all " * 12 + ".", "Run this " * 20 + "command."),
    skipped("bundle", "No bundle was named."),
]


def test_the_text() -> None:
    text = render("title", FINDINGS, has_colours=False)
    lines = text.splitlines()
    assert lines[:4] == [
        "title",
        "ok       python     Python 3.11.4.",
        "warning  npu-smi    npu-smi is nowhere.",
        "                    -> Mount it.",
    ]
    assert lines[-2:] == ["", "1 problem, 1 warning, 1 ok, 1 skipped"]
    assert max(map(len, lines)) <= 80
    arrow = next(n for n, line in enumerate(lines) if "-> Run" in line)
    assert lines[arrow + 1].startswith(" " * 23 + "this Run")


def test_colours_change_nothing_else() -> None:
    coloured = render("title", FINDINGS, has_colours=True)
    plain = render("title", FINDINGS, has_colours=False)
    assert "\x1b[31;1mproblem \x1b[0m" in coloured
    assert "\x1b" not in plain
    for code in ("\x1b[31;1m", "\x1b[33m", "\x1b[32m", "\x1b[2m", "\x1b[0m"):
        coloured = coloured.replace(code, "")
    assert coloured == plain


def test_a_path_is_not_cut() -> None:
    path = "/very" * 30
    assert wrap(f"It is in {path} now.") == ["It is in", path, "now."]
    assert wrap("use --no-probe " * 3, 20) == ["use --no-probe use", "--no-probe use", "--no-probe"]
    assert wrap("") == [""]


def test_a_word_of_more_than_a_line_is_cut() -> None:
    assert shorten(f"a {'b' * 80} c") == f"a {'b' * 80} c"
    assert shorten(f"a {'b' * 81} c") == f"a {'b' * 77}... c"
    assert shorten("a\x1bb\nc", 3) == "a b c"


def test_characters_of_two_columns() -> None:
    """Chinese has no spaces, and each character takes two columns."""
    assert wrap("ab 驱动未加载 cd", 9) == ["ab 驱动未", "加载 cd"]
    assert wrap("驱动", 3) == ["驱", "动"]
    text = render("t", [ok("npu-smi", "says: " + "检查设备状态" * 9)], has_colours=False)
    first, second, *_ = text.splitlines()[1:]
    assert len(first) == 20 + 6 + 27
    assert len(second.strip()) == 27


def test_texts_of_other_programs_steer_nothing() -> None:
    text = render("t", [ok("acl", "a\x1b[2Jb\nc\x07")], has_colours=False)
    assert "\x1b" not in text
    assert "a [2Jb c" in text


@pytest.mark.parametrize(
    ("findings", "expected"),
    [
        ([], "0 problems"),
        ([ok("a", "")], "0 problems, 1 ok"),
        ([problem("a", "", "")] * 2, "2 problems"),
        ([warning("a", "")] * 3, "0 problems, 3 warnings"),
    ],
)
def test_the_summary(findings: list[Finding], expected: str) -> None:
    assert summary(findings) == expected


def test_for_programs() -> None:
    found = as_json("npu:0", FINDINGS)
    assert found["device"] == "npu:0"
    assert found["has_problems"] is True
    assert found["summary"] == {"problem": 1, "warning": 1, "ok": 1, "skipped": 1}
    assert found["findings"][0] == {
        "check": "python",
        "status": "ok",
        "text": "Python 3.11.4.",
        "remedy": "",
    }
    assert as_json("npu:0", FINDINGS[:2])["has_problems"] is False


def test_names_that_are_no_text_do_not_stop_the_report() -> None:
    """As Python has the name of a file whose bytes are not UTF-8."""
    found = [ok("om", "\udcff.om is there.")]
    assert '"text":"?.om is there."' in encode(as_json("npu:0", found))
    assert "  .om is there." in render("t", found, has_colours=False)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("the device is lost", "The device is lost."),
        ("pyACL is not here.", "pyACL is not here."),
        ("npu-smi is not here", "npu-smi is not here."),
        ("/a/b is damaged", "/a/b is damaged."),
        ("did you mean a.b?", "Did you mean a.b?"),
        ("", "."),
    ],
)
def test_sentences(text: str, expected: str) -> None:
    assert sentence(text) == expected
