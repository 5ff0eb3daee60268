"""`acl.util`: addresses of bytes and arrays, threads; `acl.init` files, versions, logs."""

from __future__ import annotations

import ctypes
import json
import logging
import os
import signal
import subprocess
import sys
import threading
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import runtime_cache.aclsim as acl
from runtime_cache.aclsim import settings
from tests.support.aclsim import fresh_process, ok, pinned
from tests.support.pyacl import ROOT

pytestmark = pytest.mark.usefixtures("fresh_device")

FLOAT32, FLOAT16, INT64, INT8 = 11, 23, 7, 1


# --- bytes ---


def test_addresses_of_bytes_are_read_by_ctypes_and_by_acl() -> None:
    data = b"prefix cache"
    ptr = acl.util.bytes_to_ptr(data)
    assert ctypes.string_at(ptr, len(data)) == data
    assert acl.util.ptr_to_bytes(ptr, 6) == b"prefix"
    assert acl.util.ptr_to_bytes(ptr, 0) == b""


@pytest.mark.parametrize("value", [bytearray(b"x"), memoryview(b"x"), "x", np.zeros(1), None])
def test_only_bytes_have_an_address(value: Any) -> None:
    with pytest.raises(ValueError, match="takes bytes"):
        acl.util.bytes_to_ptr(value)


def test_device_memory_of_a_card_is_not_read() -> None:
    device = ok(acl.rt.malloc(64, 0))
    assert acl.util.ptr_to_bytes(device, 64) == b""
    assert "is not readable from the host" in acl.get_recent_err_msg()


# --- numpy ---


def messages(record: list[warnings.WarningMessage]) -> list[str]:
    """The texts of plain Warnings, which point at this file."""
    assert {each.category for each in record} <= {Warning}
    assert {each.filename for each in record} <= {__file__}
    return [str(each.message) for each in record]


def test_numpy_to_ptr_warns_each_time() -> None:
    array = np.arange(4, dtype=np.float32)
    for _ in range(2):
        with warnings.catch_warnings(record=True) as record:
            warnings.simplefilter("always")
            assert acl.util.numpy_to_ptr(array) == array.ctypes.data
        assert messages(record) == [
            "acl.util.numpy_to_ptr goes away; acl.util.bytes_to_ptr takes its place"
        ]


def test_numpy_to_ptr_warns_twice_of_an_array_with_gaps() -> None:
    array = np.arange(8)[::2]
    with warnings.catch_warnings(record=True) as record:
        warnings.simplefilter("always")
        assert acl.util.numpy_to_ptr(array) == array.ctypes.data
    assert "is not contiguous" in messages(record)[1]


def test_numpy_contiguous_to_ptr_gives_the_array_that_holds_the_elements() -> None:
    whole, gaps = np.arange(4), np.arange(8)[::2]
    with pytest.warns(Warning, match="goes away"):
        ptr, kept = acl.util.numpy_contiguous_to_ptr(whole)
    assert (ptr, kept.ctypes.data) == (whole.ctypes.data, whole.ctypes.data)
    with pytest.warns(Warning, match="goes away"):
        ptr, kept = acl.util.numpy_contiguous_to_ptr(gaps)
    assert kept.tolist() == [0, 2, 4, 6]
    assert ptr == kept.ctypes.data != gaps.ctypes.data


@pytest.mark.parametrize("value", [b"x", [1], None])
@pytest.mark.filterwarnings("ignore::Warning")
def test_only_arrays_have_an_address(value: Any) -> None:
    for function in (acl.util.numpy_to_ptr, acl.util.numpy_contiguous_to_ptr):
        with pytest.raises(ValueError, match="ndarray"):
            function(value)


def test_ptr_to_numpy_is_a_writable_view() -> None:
    ptr, memory = pinned(24)
    memory[:] = 0
    with pytest.warns(Warning, match=r"^acl\.util\.ptr_to_numpy goes away"):
        view = acl.util.ptr_to_numpy(ptr, (2, 3), FLOAT32)
    view[1, 2] = 1.5
    assert memory.view(np.float32).tolist() == [0, 0, 0, 0, 0, 1.5]
    assert (view.shape, view.dtype, view.base is not None) == ((2, 3), np.float32, True)


@pytest.mark.filterwarnings("ignore::Warning")
@pytest.mark.parametrize("number", range(24))
def test_every_type_number_of_numpy_is_numpys(number: int) -> None:
    ptr, _ = pinned(64)
    if number in (17, 18, 19, 20):  # objects, texts, records: no plain memory
        return
    assert acl.util.ptr_to_numpy(ptr, (1,), number).dtype.num == number


@pytest.mark.filterwarnings("ignore::Warning")
def test_ptr_to_numpy_refuses_what_would_crash() -> None:
    ptr, _ = pinned(64)
    with pytest.raises(TypeError, match="tuple of ints"):
        acl.util.ptr_to_numpy(ptr, [1], FLOAT32)
    with pytest.raises(TypeError, match="tuple of ints"):
        acl.util.ptr_to_numpy(ptr, (1.0,), FLOAT32)
    for number in (-1, 24, 999):
        with pytest.raises(ValueError, match="no type number"):
            acl.util.ptr_to_numpy(ptr, (1,), number)
    for wrong in (0, ok(acl.rt.malloc(64, 0))):
        with pytest.raises(ValueError, match="not readable"):
            acl.util.ptr_to_numpy(wrong, (1,), FLOAT32)


# --- threads ---


@pytest.fixture
def interrupts() -> Iterator[None]:
    """Gives Python its SIGINT back."""
    handler = signal.getsignal(signal.SIGINT)
    yield
    signal.signal(signal.SIGINT, handler)


@pytest.mark.usefixtures("interrupts")
def test_a_thread_calls_its_function_with_its_argument() -> None:
    seen: list[tuple[int, Any]] = []
    for arg in ({"x": 1}, (1, 2), None):

        def note(*args: Any) -> None:
            seen.append((threading.get_ident(), args))

        ident = ok(acl.util.start_thread(note, arg))
        assert acl.util.stop_thread(ident) == 0
        assert seen[-1] == (ident, () if arg is None else (arg,))


@pytest.mark.usefixtures("interrupts")
def test_a_thread_that_is_over_keeps_its_id_until_it_is_stopped() -> None:
    seen: list[int] = []
    idents = []
    for number in range(20):
        idents.append(ok(acl.util.start_thread(seen.append, number)))
    assert len(set(idents)) == 20
    assert [acl.util.stop_thread(ident) for ident in reversed(idents)] == [0] * 20
    assert sorted(seen) == list(range(20))


@pytest.mark.usefixtures("interrupts")
def test_the_id_of_a_started_thread_is_good_for_reports() -> None:
    context, seen = ok(acl.rt.get_context()), []
    subscribed = threading.Event()

    def serve(timeout_ms: int) -> None:
        ok(acl.rt.set_context(context))
        subscribed.wait()
        ok(acl.rt.process_report(timeout_ms))

    ident = ok(acl.util.start_thread(serve, 30_000))
    ok(acl.rt.subscribe_report(ident, 0))
    subscribed.set()
    ok(acl.rt.launch_callback(seen.append, 1, 1, 0))
    ok(acl.rt.synchronize_stream(0))
    assert acl.util.stop_thread(ident) == 0
    ok(acl.rt.unsubscribe_report(ident, 0))
    assert seen == [1]


@pytest.mark.usefixtures("interrupts")
def test_stop_thread_raises_what_the_thread_raised(capfd: pytest.CaptureFixture[str]) -> None:
    def fail(arg: int) -> None:
        raise LookupError(f"no page {arg}")

    ident = ok(acl.util.start_thread(fail, 7))
    with pytest.raises(RuntimeError, match=r"^exception=LookupError,msg=thread call failed;$"):
        acl.util.stop_thread(ident)
    assert "LookupError: no page 7" in capfd.readouterr().err
    assert acl.util.stop_thread(ident) == 3


def test_the_function_of_a_thread_must_be_callable() -> None:
    with pytest.raises(TypeError, match="cannot be called"):
        acl.util.start_thread("print", None)


INTERRUPTED = """
import os, signal, sys
import runtime_cache.aclsim as acl
if len(sys.argv) > 1:
    ident, ret = acl.util.start_thread(print, "started")
    acl.util.stop_thread(ident)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
try:
    os.kill(os.getpid(), signal.SIGINT)
    signal.pause()
except KeyboardInterrupt:
    sys.exit(5)
"""


def test_starting_a_thread_takes_keyboard_interrupts_away() -> None:
    command = [sys.executable, "-c", INTERRUPTED]
    plain = subprocess.run(command, cwd=ROOT, capture_output=True, check=False)
    started = subprocess.run([*command, "start"], cwd=ROOT, capture_output=True, check=False)
    assert plain.returncode == 5
    assert started.returncode == -signal.SIGINT


# --- init, versions, logs ---


def restarted(*config: str) -> int:
    """Ends ACL and starts it with a file."""
    ok(acl.finalize())
    code: int = acl.init(*config)
    return code


def test_init_reads_its_file(tmp_path: Path) -> None:
    path = tmp_path / "acl.json"
    assert restarted(str(path)) == 100003
    path.write_text("{")
    assert acl.init(str(path)) == 100006
    for text in ("[]", "[" * 100_000):
        path.write_text(text)
        assert acl.init(str(path)) == 100006
    assert acl.init(str(tmp_path)) == 100003
    os.mkfifo(tmp_path / "pipe")
    assert acl.init(str(tmp_path / "pipe")) == 100003
    path.write_bytes(b"\xff\xfe")
    assert acl.init(str(path)) == 100003
    for text in ("", " \n", "{}"):
        path.write_text(text)
        assert acl.init(str(path)) == 0
        ok(acl.finalize())
    assert acl.init("") == 0


def test_a_repeated_init_has_the_same_file(tmp_path: Path) -> None:
    one, other = tmp_path / "one.json", tmp_path / "other.json"
    one.write_text('{"err_msg_mode": "0"}')
    other.write_text('{"err_msg_mode": "1"}')
    assert restarted(str(one)) == 0
    assert acl.init(str(one)) == 100002
    assert acl.init() == 100002
    assert acl.init(str(other)) == 100000


def other_thread(call: Any) -> Any:
    """What a call gives in another thread."""
    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.append(call()))
    thread.start()
    thread.join()
    return results[0]


@pytest.mark.parametrize(("mode", "is_shared"), [("0", False), ("1", True)])
def test_the_error_text_is_of_a_thread_or_of_the_process(
    tmp_path: Path, mode: str, is_shared: bool
) -> None:
    path = tmp_path / "acl.json"
    path.write_text(json.dumps({"err_msg_mode": mode}))
    assert restarted(str(path)) == 0
    acl.rt.set_context(0)
    text = other_thread(acl.get_recent_err_msg)
    assert text == ("acl.rt.set_context: null context" if is_shared else None)
    assert restarted() == 0


def test_keys_without_an_effect_are_named(tmp_path: Path) -> None:
    path = tmp_path / "acl.json"
    path.write_text('{"dump": {"dump_scene": "aic_err_brief_dump"}}')
    assert restarted(str(path)) == 0
    assert acl.get_recent_err_msg() == "acl.init: 'dump' has no effect in the software device"


def test_a_default_device_is_set_by_the_first_call_of_a_thread_that_needs_it(
    tmp_path: Path,
) -> None:
    path = tmp_path / "acl.json"
    path.write_text('{"defaultDevice": {"default_device": "1"}}')
    with fresh_process(device_count=2):
        assert restarted(str(path)) == 0
        assert other_thread(acl.rt.get_device) == (1, 0)
        assert acl.rt.get_device() == (0, 0)  # this thread has set one itself
        assert other_thread(lambda: acl.rt.reset_device(1)) == 0
        assert acl.rt.reset_device(1) == 107000


@pytest.mark.parametrize(
    "value", ["0", {}, {"default_device": 0}, {"default_device": "-1"}], ids=str
)
def test_a_default_device_that_is_not_understood_is_refused(tmp_path: Path, value: Any) -> None:
    path = tmp_path / "acl.json"
    path.write_text(json.dumps({"defaultDevice": value}))
    assert restarted(str(path)) == 100000
    assert acl.init() == 0


def test_references_are_counted_down() -> None:
    assert acl.init() == 100002
    assert acl.finalize_reference() == (1, 0)
    assert acl.rt.get_device() == (0, 0)
    assert acl.finalize_reference() == (0, 0)
    assert acl.finalize_reference() == (0, 100037)
    assert acl.rt.set_device(0) == 100001


def test_versions_and_attributes() -> None:
    assert acl.get_version() == (1, 15, 0, 0)
    version, code = acl.get_cann_version(0)
    assert (code, set(version.values())) == (207000, {""})
    assert acl.get_cann_attribute(0) == (0, 207000)
    assert acl.get_device_capability(0, 0) == (0, 207000)
    assert acl.get_cann_attribute(1) == (0, 0)  # 310P has no bfloat16
    settings.configure(soc_name="Ascend910B4")
    assert restarted() == 0
    assert acl.get_cann_attribute(1) == (1, 0)


def test_app_log_goes_to_pythons_log(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG, logger="acl.app_log"):
        for level in (-1, 0, 1, 2, 3, 4):
            assert acl.app_log(level, f"level %s {level}") is None
    assert [(each.levelname, each.message) for each in caplog.records] == [
        ("DEBUG", "level %s 0"),
        ("INFO", "level %s 1"),
        ("WARNING", "level %s 2"),
        ("ERROR", "level %s 3"),
    ]
