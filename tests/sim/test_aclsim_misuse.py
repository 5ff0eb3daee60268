"""The report of misuse: what is left over, given back in the wrong order, or slow."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import runtime_cache.aclsim as acl
from runtime_cache.aclsim import faults, inspect, misuse, settings
from runtime_cache.aclsim.ledger import MAX_MISUSES, Misuse, ledger
from runtime_cache.aclsim.process import this_process
from tests.support.aclsim import Run, compile_om, fresh_process, ok, pinned


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    inspect.reset()
    yield
    inspect.reset()


def found() -> list[tuple[str, str]]:
    return [(each.kind, each.sentence) for each in misuse.report(this_process())]


def opened() -> None:
    settings.configure(gil_limit_ms=600_000)
    ok(acl.init())
    ok(acl.rt.set_device(0))


def closed() -> None:
    ok(acl.rt.reset_device(0))
    ok(acl.finalize())


def test_a_program_that_gives_everything_back() -> None:
    opened()
    ok(acl.rt.free(ok(acl.rt.malloc(64, 0))))
    closed()
    assert found() == []


def test_a_program_that_never_began() -> None:
    assert found() == []


# --- leaks ---

MAKERS: dict[str, tuple[Callable[[], object], str]] = {
    "device memory": (
        lambda: ok(acl.rt.malloc(100, 0)),
        "1 device allocation was never freed (100 bytes)",
    ),
    "pinned memory": (lambda: pinned(100), "1 pinned host buffer was never freed (100 bytes)"),
    "stream": (lambda: ok(acl.rt.create_stream()), "1 stream was never destroyed"),
    "event": (lambda: ok(acl.rt.create_event()), "1 event was never destroyed"),
    "context": (lambda: ok(acl.rt.create_context(0)), "1 context was never destroyed"),
    "dataset": (acl.mdl.create_dataset, "1 dataset was never destroyed"),
    "data buffer": (
        lambda: acl.create_data_buffer(64, 64),
        "1 data buffer was never destroyed",
    ),
    "model description": (acl.mdl.create_desc, "1 model description was never destroyed"),
    "tensor description": (
        lambda: acl.create_tensor_desc(0, [1], 2),
        "1 tensor description was never destroyed",
    ),
    "load options": (
        acl.mdl.create_config_handle,
        "1 model config handle was never destroyed",
    ),
}


@pytest.mark.parametrize("what", MAKERS)
def test_what_is_alive_at_the_end_is_a_leak(what: str) -> None:
    opened()
    make, sentence = MAKERS[what]
    make()
    assert ("leak", sentence) in found()
    assert [kind for kind, _ in found()].count("leak") == 1


def test_several_of_a_kind_stand_together() -> None:
    opened()
    for size in (64, 100):
        ok(acl.rt.malloc(size, 0))
        ok(acl.rt.create_stream())
    leaks = [sentence for kind, sentence in found() if kind == "leak"]
    assert leaks == [
        "2 streams were never destroyed",
        "2 device allocations were never freed (164 bytes)",
    ]


def test_a_model_that_stays_loaded(tmp_path: Path) -> None:
    opened()
    ok(acl.mdl.load_from_file(str(compile_om(tmp_path))))
    assert ("leak", "model 1 was never unloaded") in found()


def test_what_the_reset_had_to_free_is_a_leak(tmp_path: Path) -> None:
    opened()
    ok(acl.mdl.load_from_file(str(compile_om(tmp_path))))
    ok(acl.rt.malloc(100, 0))
    closed()
    assert found() == [
        ("leak", "reset_device(0) unloaded model 1, still loaded"),
        ("leak", "reset_device(0) freed 1 of malloc, 100 bytes, still allocated"),
    ]


# --- order ---


def test_a_device_and_acl_that_are_not_closed() -> None:
    opened()
    assert found() == [
        ("teardown_order", "device 0 was set once more than it was reset"),
        ("teardown_order", "acl.finalize was not called; it must be before the exit"),
    ]
    ok(acl.rt.set_device(0))
    assert found()[0][1] == "device 0 was set 2 times more than it was reset"


def test_work_that_nobody_waited_for() -> None:
    opened()
    stream = ok(acl.rt.create_stream())
    ptr = ok(acl.rt.malloc(64, 0))
    ok(acl.rt.memset_async(ptr, 64, 0, 64, stream))
    sentence = "the program ended without waiting for acl.rt.memset_async"
    assert ("teardown_order", sentence) in found()
    ok(acl.rt.synchronize_stream(stream))
    assert sentence not in [text for _, text in found()]


@pytest.mark.parametrize("end", ["finalize", "finalize_reference"])
def test_finalize_before_reset(end: str) -> None:
    opened()
    ok(getattr(acl, end)())
    assert found()[0] == (
        "teardown_order",
        "acl.finalize while device 0 is set: reset it first",
    )


def test_free_after_reset_device() -> None:
    opened()
    ptr = ok(acl.rt.malloc(64, 0))
    ok(acl.rt.reset_device(0))
    assert acl.rt.free(ptr) == 107002
    assert found()[1][0] == "teardown_order"
    assert found()[1][1].startswith("acl.rt.free -> 107002: ")


def test_a_context_destroyed_under_a_model(tmp_path: Path) -> None:
    opened()
    context = ok(acl.rt.create_context(0))
    model = ok(acl.mdl.load_from_file(str(compile_om(tmp_path))))
    ok(acl.rt.destroy_context(context))
    assert acl.mdl.unload(model) == 107002
    kinds = [kind for kind, _ in found()]
    assert kinds[:2] == ["teardown_order", "teardown_order"]
    assert found()[0][1] == "a context was destroyed under which model 1 is loaded"
    assert found()[1][1].startswith("acl.mdl.unload -> 107002: ")


@pytest.mark.parametrize("what", ["reset_device", "destroy_context"])
def test_what_holds_the_rest_given_back_first(what: str) -> None:
    opened()
    context = ok(acl.rt.create_context(0))
    stream = ok(acl.rt.create_stream())
    given = {"reset_device": 0, "destroy_context": context}[what]
    assert getattr(acl.rt, what)(given) == 107000
    ok(acl.rt.destroy_stream(stream))
    assert found()[0][0] == "teardown_order"
    assert "alive" in found()[0][1]


def test_a_stream_destroyed_after_its_context_was_left() -> None:
    opened()
    stream = ok(acl.rt.create_stream())
    ok(acl.rt.create_context(0))
    assert acl.rt.destroy_stream(stream) == 107003
    assert found()[0][0] == "teardown_order"


# --- calls ---


def test_bad_calls_stand_once_with_their_number() -> None:
    opened()
    for _ in range(3):
        assert acl.rt.malloc(0, 0) == (0, 100000)
    closed()
    assert found() == [("bad_call", "acl.rt.malloc -> 100000: size is 0 (3 times)")]


def test_queued_work_that_failed_stands_once() -> None:
    opened()
    stream, ptr = ok(acl.rt.create_stream()), ok(acl.rt.malloc(64, 0))
    ok(acl.rt.memset_async(ptr + 64, 64, 0, 64, stream))
    assert acl.rt.synchronize_stream(stream) == 507013
    (misuse,) = ledger.noted
    assert misuse.sentence.startswith("queued acl.rt.memset_async -> 507013: ")


def test_what_a_script_asked_for_is_no_misuse() -> None:
    opened()
    stream, ptr = ok(acl.rt.create_stream()), ok(acl.rt.malloc(64, 0))
    ok(acl.rt.set_stream_failure_mode(stream, 1))
    faults.inject("acl.rt.malloc", code=100000)
    faults.inject("acl.rt.memset_async", code=507015, when="run")
    assert acl.rt.malloc(64, 0)[1] == 100000
    ok(acl.rt.memset_async(ptr, 64, 0, 64, stream))
    assert acl.rt.synchronize_stream(stream) == 507015
    assert acl.rt.memset_async(ptr, 64, 0, 64, stream) == 507015
    assert list(ledger.noted) == []


def test_what_a_lost_device_keeps_is_no_misuse() -> None:
    opened()
    stream, ptr = ok(acl.rt.create_stream()), ok(acl.rt.malloc(64, 0))
    faults.inject("acl.rt.memset_async", code=507054, when="run")
    ok(acl.rt.memset_async(ptr, 64, 1, 64, stream))
    for given_back in (
        acl.rt.synchronize_stream(stream),
        acl.rt.free(ptr),
        acl.rt.destroy_stream(stream),
        acl.rt.reset_device(0),
    ):
        assert given_back == 507054
    ok(acl.finalize())
    assert found() == []


def test_the_oldest_go_beyond_a_thousand() -> None:
    for number in range(MAX_MISUSES + 1):
        ledger.note_misuse(f"number {number}")
    assert len(ledger.noted) == MAX_MISUSES
    assert ledger.noted[0] == Misuse("bad_call", "number 1")


@pytest.mark.parametrize(("seconds", "is_slow"), [(0.1, False), (0.1000001, True)])
def test_calls_that_keep_the_interpreter_for_longer_than_the_limit(
    seconds: float, is_slow: bool
) -> None:
    opened()
    closed()
    ledger.gil_limit_s = 0.1
    ledger.time_call("acl.mdl.execute", seconds)
    assert bool(found()) is is_slow


def test_slow_calls_stand_together_and_are_no_errors() -> None:
    with fresh_process(gil_limit_ms=100):
        for seconds in (0.2, 0.35, 0.01):
            ledger.time_call("acl.mdl.execute", seconds)
        last = misuse.report(this_process())[-1]
        assert last == Misuse(
            "gil",
            "acl.mdl.execute kept the interpreter to itself for up to 350 ms (2 calls above "
            "100 ms): no other thread of the program runs meanwhile",
        )
        assert misuse.errors([last, Misuse("leak", "x")]) == [Misuse("leak", "x")]


def test_only_calls_that_hold_the_interpreter_are_timed(tmp_path: Path) -> None:
    with fresh_process(gil_limit_ms=0):
        run = Run(compile_om(tmp_path))
        run.feed([1] * 6, [0, 0, 0])
        assert (run.launch(), run.finish()) == (0, 0)
        slow = set(ledger.slow_calls)
    assert {"acl.mdl.load_from_file", "acl.mdl.execute_async", "acl.rt.memcpy"} <= slow
    assert "acl.rt.synchronize_stream" not in slow


def test_a_misuse_is_logged_at_once_if_asked_for(caplog: pytest.LogCaptureFixture) -> None:
    for action, count in (("report", 0), ("warn", 1), ("error", 0)):
        caplog.clear()
        with caplog.at_level(logging.WARNING), fresh_process(misuse=action):
            acl.rt.malloc(0, 0)
        texts = [record.getMessage() for record in caplog.records]
        assert texts == ["bad_call: acl.rt.malloc -> 100000: size is 0"] * count
