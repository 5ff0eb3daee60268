"""Typical mistakes of programs: each is named in the report that a program ends with.

The programs lie in `tests/programs/mistakes`; most go on after the mistake, as programs do that do
not look at return codes.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.support.programs import (
    BOARD,
    PROGRAMS,
    Ended,
    classifier,
    compile_model,
    run_program,
)

STATIC = "--input_shape=picture:1,3,8,8"

#: For each program: what it prints, and kind and words of what the report says of it.
NAMED: dict[str, tuple[str, list[tuple[str, str]]]] = {
    "frees_too_early": (
        "synchronize_stream returned 507015",
        [
            ("teardown_order", r"acl\.rt\.free .* which a queued acl\.mdl\.execute_async uses"),
            ("bad_call", r"queued acl\.mdl\.execute_async -> 507015: use after free"),
        ],
    ),
    "leaks": (
        "",
        [
            ("teardown_order", r"device 0 was set once more than it was reset"),
            ("teardown_order", r"acl\.finalize was not called"),
            ("leak", r"1 context was never destroyed"),
            ("leak", r"1 stream was never destroyed"),
            ("leak", r"2 data buffers were never destroyed"),
            ("leak", r"2 datasets were never destroyed"),
            ("leak", r"1 model description was never destroyed"),
            ("leak", r"model \d+ was never unloaded"),
            ("leak", r"2 device allocations were never freed \(808 bytes\)"),
        ],
    ),
    "lets_bytes_go": (
        "",
        [("dangling", r"acl\.util\.bytes_to_ptr got bytes that nothing else holds")],
    ),
    "mixed_runs": (
        "execute_async returned 500002",
        [("bad_call", r"acl\.mdl\.execute_async -> 500002: .*mix execute")],
    ),
    "model_on_device": (
        "load_from_mem returned 100000",
        [("bad_call", r"acl\.mdl\.load_from_mem -> 100000: .* is device memory: on a card")],
    ),
    "no_context": (
        "malloc returned (0, 107002)",
        [("bad_call", r"acl\.rt\.malloc -> 107002: thread .* has no context")],
    ),
    "no_subscription": (
        "launch_callback returned 107015",
        [("bad_call", r"acl\.rt\.launch_callback -> 107015: no thread is subscribed")],
    ),
    "numpy_sizes": (
        "TypeError: acl.rt.malloc args parse failed",
        [("bad_call", r"acl\.rt\.malloc\(int64, int\) raised TypeError")],
    ),
    "reads_device_address": (
        "b''",
        [("bad_call", r"acl\.util\.ptr_to_bytes .*not readable from the host")],
    ),
    "reads_pinned_too_early": (
        "40",
        [
            (
                "unsynchronised_read",
                r"acl\.util\.ptr_to_bytes reads 40 bytes .* which a queued acl\.rt\.memcpy_async",
            )
        ],
    ),
    "reads_too_early": (
        "nan",
        [
            (
                "unsynchronised_read",
                r"acl\.rt\.memcpy reads 40 bytes .* which a queued acl\.mdl\.execute_async uses",
            )
        ],
    ),
    "two_streams": (
        "execute_async returned 500002",
        [("bad_call", r"acl\.mdl\.execute_async -> 500002: .* another stream")],
    ),
    "wrong_order": (
        "",
        [
            ("teardown_order", r"acl\.rt\.reset_device -> 107000: 1 context"),
            ("teardown_order", r"acl\.finalize while device 0 is set"),
        ],
    ),
}


@pytest.fixture(scope="module")
def om(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A classifier of one picture at a time, for a card."""
    return compile_model(classifier(), tmp_path_factory.mktemp("om"), STATIC)


def mistake(
    name: str, om: Path, *, flags: Sequence[str] = (), gil_limit_ms: int = 600_000
) -> Ended:
    """Runs one of the programs."""
    program = f"mistakes/{name}.py"
    return run_program(program, om, flags=flags, gil_limit_ms=gil_limit_ms)


@pytest.mark.parametrize("name", NAMED)
def test_a_mistake_is_named(om: Path, name: str) -> None:
    said, named = NAMED[name]
    ended = mistake(name, om)
    assert ended.code == 0, ended.err
    assert said in ended.out
    for kind, words in named:
        assert any(k == kind and re.search(words, text) for k, text in ended.misuses), ended.err
    # What follows from a mistake is named too, under its kind; nothing else is.
    assert {kind for kind, _ in ended.misuses} <= {kind for kind, _ in named} | {"bad_call"}


def test_every_program_is_looked_at() -> None:
    programs = {path.stem for path in (PROGRAMS / "mistakes").glob("*.py")} - {"one_model"}
    others = {"dereferences", "images", "keeps_the_lock", "keywords", "raises"}
    assert programs == set(NAMED) | others


def test_misuse_can_be_an_error(om: Path) -> None:
    assert mistake("two_streams", om, flags=["--misuse", "error"]).code == 1
    assert mistake("keeps_the_lock", om, flags=["--misuse", "error"]).code == 0


def test_keywords_are_refused_as_python_does_it(om: Path) -> None:
    ended = mistake("keywords", om)
    assert ended.code == 1
    assert re.search(r"TypeError: .*set_device", ended.err)


def test_a_program_that_raises_gets_its_report_too(om: Path) -> None:
    ended = mistake("raises", om)
    assert ended.code == 1
    assert "ValueError: of the program itself" in ended.err
    assert ("leak", "1 stream was never destroyed") in ended.misuses


def test_calls_that_keep_other_threads_waiting_are_named(om: Path) -> None:
    ended = mistake("keeps_the_lock", om, gil_limit_ms=0)
    named = {text.split()[0] for kind, text in ended.misuses if kind == "gil"}
    assert {"acl.mdl.execute", "acl.mdl.load_from_file"} <= named
    assert {kind for kind, _ in ended.misuses} == {"gil"}


def test_a_family_that_is_not_there_says_so(om: Path) -> None:
    ended = mistake("images", om)
    assert ended.code == 1
    assert "NotImplementedError: acl.media.dvpp_create_channel_desc is not in the" in ended.err


def test_device_memory_that_is_read_behind_the_librarys_back(om: Path) -> None:
    ended = mistake("dereferences", om)
    assert ended.code == -11  # as with a card
    assert "dereferences.py" in ended.err
    assert (
        "the program died of SIGSEGV, at an address that it may not follow. Device memory"
        in ended.err.splitlines()[-1]
    )


def test_on_a_board_that_is_no_mistake(tmp_path: Path) -> None:
    path = compile_model(classifier(), tmp_path, STATIC, soc=BOARD)
    for name in ("dereferences", "model_on_device"):
        ended = run_program(f"mistakes/{name}.py", path, soc=BOARD)
        assert (ended.code, ended.misuses) == (0, []), ended.err
