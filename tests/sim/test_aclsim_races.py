"""What the program touches while queued work may still use it: reported, however quick that was."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import runtime_cache.aclsim as acl
from runtime_cache.aclsim import inspect, races
from runtime_cache.aclsim.ledger import Misuse, ledger
from runtime_cache.aclsim.process import this_process
from tests.support.aclsim import (
    DEVICE_TO_DEVICE,
    DEVICE_TO_HOST,
    HOST_TO_DEVICE,
    Run,
    compile_om,
    device_bytes,
    ok,
    pinned,
    put,
    upload,
)

pytestmark = pytest.mark.usefixtures("fresh_device")


@pytest.fixture
def written(stream: int) -> int:
    """128 bytes; the first 64 were written by work that has ended, and nobody knows."""
    ptr = upload(np.zeros(128, np.uint8))
    ok(acl.rt.memset_async(ptr, 128, 1, 64, stream))
    let_it_end()
    return ptr


def let_it_end() -> None:
    """Waits for all queued work, behind the program's back."""
    for context in this_process().contexts.objects():
        for each in context.all_streams():
            each.fence().acquire()


def noted() -> list[tuple[str, str]]:
    return [(misuse.kind, misuse.sentence) for misuse in ledger.noted]


def test_a_read_of_what_queued_work_writes(written: int) -> None:
    assert device_bytes(written, 64) == bytes([1] * 64)
    assert noted() == [
        (
            "unsynchronised_read",
            f"acl.rt.memcpy reads 64 bytes at {written:#x}, which a queued acl.rt.memset_async "
            "uses; nothing was synchronised between",
        )
    ]


@pytest.mark.parametrize(("offset", "is_noted"), [(63, True), (64, False), (65, False)])
def test_only_what_overlaps_counts(written: int, offset: int, is_noted: bool) -> None:
    device_bytes(written + offset, 32)
    assert bool(noted()) is is_noted


def test_a_write_into_what_queued_work_uses(stream: int) -> None:
    host, _ = pinned(64)
    source, target = upload(np.ones(64, np.uint8)), upload(np.ones(64, np.uint8))
    ok(acl.rt.memcpy_async(target, 64, source, 64, DEVICE_TO_DEVICE, stream))
    ok(acl.rt.memcpy_async(host, 64, target, 64, DEVICE_TO_HOST, stream))
    put(source, np.zeros(64, np.uint8))
    ok(acl.rt.memset(target, 64, 0, 64))
    assert [kind for kind, _ in noted()] == ["unsynchronised_write"] * 2
    assert noted()[1][1].startswith("acl.rt.memset writes 64 bytes")


def test_a_read_of_pinned_memory_that_a_copy_still_fills(stream: int) -> None:
    host, _ = pinned(64)
    device = upload(np.ones(64, np.uint8))
    ok(acl.rt.memcpy_async(host, 64, device, 64, DEVICE_TO_HOST, stream))
    acl.util.ptr_to_bytes(host, 64)
    assert [kind for kind, _ in noted()] == ["unsynchronised_read"]


def test_pinned_memory_freed_while_a_copy_is_queued(stream: int) -> None:
    host, _ = pinned(64)
    device = upload(np.ones(64, np.uint8))
    ok(acl.rt.memcpy_async(device, 64, host, 64, HOST_TO_DEVICE, stream))
    let_it_end()
    ok(acl.rt.free_host(host))
    ((kind, sentence),) = noted()
    assert kind == "teardown_order"
    assert sentence.startswith(f"acl.rt.free_host frees 64 bytes at {host:#x}, which a queued")


def test_device_memory_freed_while_work_is_queued(written: int) -> None:
    ok(acl.rt.free(written))
    assert [kind for kind, _ in noted()] == ["teardown_order"]


def test_pageable_memory_is_taken_at_the_call_and_may_change(stream: int) -> None:
    own, device = np.ones(64, np.uint8), upload(np.zeros(64, np.uint8))
    ok(acl.rt.memcpy_async(device, 64, own.ctypes.data, 64, HOST_TO_DEVICE, stream))
    own[:] = 2
    ok(acl.rt.memcpy_async(own.ctypes.data, 64, device, 64, DEVICE_TO_HOST, stream))
    assert own.tolist() == [1] * 64
    device_bytes(device, 64)  # the copy back has waited for the stream
    assert noted() == []


def recorded_event(stream: int) -> int:
    event = int(ok(acl.rt.create_event()))
    ok(acl.rt.record_event(event, stream))
    let_it_end()
    return event


SETTLED: dict[str, Callable[[int], object]] = {
    "synchronize_stream": lambda stream: acl.rt.synchronize_stream(stream),
    "with a timeout": lambda stream: acl.rt.synchronize_stream_with_timeout(stream, 60_000),
    "synchronize_device": lambda stream: acl.rt.synchronize_device(),
    "stream_query": lambda stream: acl.rt.stream_query(stream),
    "synchronize_event": lambda stream: acl.rt.synchronize_event(recorded_event(stream)),
    "query_event_status": lambda stream: acl.rt.query_event_status(recorded_event(stream)),
    "destroy_stream": lambda stream: acl.rt.destroy_stream(stream),
    "destroy_stream_force": lambda stream: acl.rt.destroy_stream_force(stream),
    "stream_abort": lambda stream: acl.rt.stream_abort(stream),
}


@pytest.mark.parametrize("how", SETTLED)
def test_who_synchronises_may_read(written: int, stream: int, how: str) -> None:
    SETTLED[how](stream)
    device_bytes(written, 128)
    ok(acl.rt.free(written))
    assert noted() == []


def test_work_that_was_dropped_uses_nothing(stream: int) -> None:
    ptr = upload(np.zeros(64, np.uint8))
    with inspect.hold(stream):
        ok(acl.rt.memset_async(ptr, 64, 1, 64, stream))
        ok(acl.rt.stream_abort(stream))
        device_bytes(ptr, 64)
    ok(acl.rt.free(ptr))
    assert noted() == []


def test_a_stream_that_waited_for_another_counts_for_both(written: int, stream: int) -> None:
    other = ok(acl.rt.create_stream())
    event = recorded_event(stream)
    ok(acl.rt.stream_wait_event(other, event))
    ok(acl.rt.synchronize_stream(other))
    device_bytes(written, 64)
    assert noted() == []


def test_every_synchronising_function_is_there() -> None:
    modules = {"acl.rt": acl.rt, "acl.mdl": acl.mdl}
    for name in races.SETTLING:
        module, _, function = name.rpartition(".")
        assert hasattr(modules[module], function)


def test_a_run_writes_its_outputs_and_reads_its_inputs(tmp_path: Path) -> None:
    run = Run(compile_om(tmp_path))
    run.feed([1] * 6, [0, 0, 0])
    assert run.launch() == 0
    run.result(6)
    run.feed([2] * 6, [0, 0, 0])
    assert [kind for kind, _ in noted()] == ["unsynchronised_read", *["unsynchronised_write"] * 2]
    ledger.clear()
    assert (run.launch(), run.finish()) == (0, 0)
    run.result(6)
    run.feed([3] * 6, [0, 0, 0])
    assert noted() == []


def test_a_run_at_once_on_inputs_that_are_still_copied(tmp_path: Path) -> None:
    run = Run(compile_om(tmp_path))
    run.feed([1] * 6, [0, 0, 0])
    host, view = pinned(24)
    view[:] = 0
    ok(acl.rt.memcpy_async(run.input_ptrs[0], 24, host, 24, HOST_TO_DEVICE, run.stream))
    assert acl.mdl.execute(run.model, run.inputs, run.outputs) == 0
    assert [kind for kind, _ in noted()] == ["unsynchronised_read"]


def test_a_dataset_destroyed_while_its_run_is_queued(tmp_path: Path) -> None:
    run = Run(compile_om(tmp_path))
    with inspect.hold(run.stream):
        assert run.launch() == 0
        ok(acl.mdl.destroy_dataset(run.inputs))
    assert noted()[0] == (
        "teardown_order",
        "acl.mdl.destroy_dataset of a dataset whose execution is queued",
    )


def test_what_nobody_synchronises_is_forgotten_in_the_end(stream: int) -> None:
    ptr = upload(np.zeros(64, np.uint8))
    ok(acl.rt.memset_async(ptr, 64, 1, 64, stream))
    other = upload(np.zeros(64, np.uint8))
    for _ in range(races.MAX_UNSETTLED):
        ok(acl.rt.memset_async(other, 64, 1, 64, stream))
    let_it_end()
    device_bytes(ptr, 64)
    assert noted() == []
    device_bytes(other, 64)
    assert len(noted()) == 1


def test_bytes_that_nothing_else_holds_dangle() -> None:
    held = np.arange(4).tobytes()
    in_list = [np.arange(4).tobytes()]
    for data in (held, in_list[0]):
        assert acl.util.bytes_to_ptr(data)
    assert acl.util.bytes_to_ptr(b"a constant")
    assert noted() == []
    acl.util.bytes_to_ptr(np.arange(4).tobytes())
    assert list(ledger.noted) == [
        Misuse(
            "dangling",
            "acl.util.bytes_to_ptr got bytes that nothing else holds: they go when it returns, "
            "the pointer dangles",
        )
    ]
