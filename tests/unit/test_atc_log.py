"""Progress out of the compiler's lines: what is documented, and nothing where nothing is."""

from __future__ import annotations

from om_models.atc_log import SHOWN_LINES, AtcLog


def fed(*lines: str) -> tuple[list[tuple[int, int]], list[str], AtcLog]:
    progress: list[tuple[int, int]] = []
    parts: list[str] = []
    log = AtcLog(lambda done, total: progress.append((done, total)), parts.append)
    for line in lines:
        log.feed(line)
    return progress, parts, log


def line_of(module: str, level: str = "INFO") -> str:
    """As the page of `--log` shows them."""
    return f"[{level}] {module}(30741,atc.bin):2021-12-09-16:10:22.539.141 [a.cc:52]30741 Do: x"


def test_the_software_compiler_counts_gears():
    progress, parts, _ = fed("ATC progress: compile gear 1/8", "ATC progress: compile gear 8/8")
    assert (progress, parts) == ([(1, 8), (8, 8)], [])


def test_parts_of_the_compiler_each_once_and_in_their_order():
    lines = [line_of(m) for m in ("GE", "GE", "FE", "GE", "TEFUSION", "FE", "TEFUSION")]
    assert fed(*lines)[1] == ["graph", "fusion of operators", "compilation of operators"]


def test_a_part_that_was_left_out_does_not_come_later():
    lines = [line_of("TEFUSION", "ERROR"), line_of("GE"), line_of("FE")]
    assert fed(*lines)[1] == ["compilation of operators"]


def test_other_modules_and_other_lines_say_nothing():
    lines = [line_of("RUNTIME"), "...", "GE is at work", "[INFO] GE: no", "ATC run success"]
    progress, parts, log = fed(*lines)
    assert (progress, parts, list(log.lines)) == ([], [], lines)


def test_the_end_is_kept_for_a_message_and_more_for_the_codes():
    log = fed(*(f"line {number}" for number in range(1000)))[2]
    assert log.last_lines == [f"line {number}" for number in range(1000 - SHOWN_LINES, 1000)]
    assert len(list(log.lines)) == 400
