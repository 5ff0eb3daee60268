"""Timeouts, last errors, what is not modelled, and calls that hold the GIL."""

from __future__ import annotations

import threading
from typing import Any

import pytest

import runtime_cache.aclsim as acl
from runtime_cache.aclsim import inspect
from runtime_cache.aclsim.calling import RELEASES_GIL, not_modelled, surface
from runtime_cache.aclsim.failure import AclFailure
from runtime_cache.aclsim.ledger import ledger
from runtime_cache.aclsim.rt import not_modelled as rt_not_modelled
from runtime_cache.aclsim.timeouts import INTERVAL_US
from tests.support.aclsim import fresh_process, ok
from tests.support.pyacl import PLAIN, REAL

pytestmark = pytest.mark.usefixtures("fresh_device")


# --- timeouts of operators ---


def test_the_operator_limit_is_254_steps_unless_it_is_set() -> None:
    assert acl.rt.get_op_timeout_interval() == (INTERVAL_US, 0)
    assert acl.rt.get_op_execute_timeout() == (INTERVAL_US * 254 // 1000, 0)
    assert INTERVAL_US * 254 // 1_000_000 == 1090  # 1091 s, rounded


@pytest.mark.parametrize(
    ("asked_us", "steps"),
    [
        (0, 254),
        (1, 1),
        (INTERVAL_US - 1, 1),
        (INTERVAL_US, 1),
        (INTERVAL_US + 1, 2),
        (INTERVAL_US * 253 + 1, 254),
        (INTERVAL_US * 254 + 1, 254),
        (1 << 63, 254),
    ],
)
def test_the_operator_limit_is_rounded_up_to_steps(asked_us: int, steps: int) -> None:
    assert acl.rt.set_op_execute_timeout_v2(asked_us) == (steps * INTERVAL_US, 0)
    assert acl.rt.get_op_execute_timeout() == (steps * INTERVAL_US // 1000, 0)


def test_the_operator_limit_in_seconds() -> None:
    assert acl.rt.set_op_execute_time_out(5) == 0
    assert acl.rt.get_op_execute_timeout() == (2 * INTERVAL_US // 1000, 0)


# --- last errors ---


def test_the_last_error_of_the_runtime_stays_until_it_is_taken() -> None:
    assert acl.rt.get_last_error(0) == 0
    acl.rt.synchronize_stream(5)
    acl.rt.get_device()  # a success changes nothing
    assert acl.rt.peek_at_last_error(0) == 107003
    assert acl.rt.peek_at_last_error(0) == 107003
    assert acl.rt.get_last_error(0) == 107003
    assert acl.rt.get_last_error(0) == 0


def test_the_layer_above_sets_no_last_error() -> None:
    acl.rt.set_context(0)
    assert acl.rt.get_last_error(0) == 0


def test_each_thread_has_its_last_error() -> None:
    codes: list[int] = []
    acl.rt.synchronize_stream(5)
    thread = threading.Thread(target=lambda: codes.append(acl.rt.get_last_error(0)))
    thread.start()
    thread.join()
    assert codes == [0]
    assert acl.rt.get_last_error(0) == 107003


# --- not modelled ---

ABSENT = sorted(
    name for name, value in vars(rt_not_modelled).items() if hasattr(value, "arg_format")
)
OBJECTS: dict[str, dict[int, Any]] = {
    "mem_set_pid_to_shareable_handle": {1: []},
    "ipc_mem_set_import_pid": {1: []},
    "mem_uce_repair": {1: []},
}


@pytest.mark.parametrize("name", ABSENT)
def test_what_is_not_modelled_says_so(name: str) -> None:
    real = REAL[f"acl.rt.{name}"]
    args = [PLAIN[code] for code in real.codes]
    for position, value in OBJECTS.get(name, {}).items():
        args[position] = value
    result = getattr(acl.rt, name)(*args)
    assert (result[-1] if isinstance(result, tuple) else result) == 207000
    sentence = f"acl.rt.{name}: not modelled by the software device"
    assert acl.get_recent_err_msg() == sentence
    assert inspect.report().misuses == (
        f"acl.rt.{name} -> 207000: not modelled by the software device",
    )


@pytest.mark.parametrize("name", [n for n in ABSENT if "O" in REAL[f"acl.rt.{n}"].codes])
def test_what_is_not_modelled_refuses_objects_of_another_type(name: str) -> None:
    args = [PLAIN[code] for code in REAL[f"acl.rt.{name}"].codes]
    args[REAL[f"acl.rt.{name}"].codes.index("O")] = (1, 2)
    with pytest.raises(TypeError, match=r"is not a (dict|list)"):
        getattr(acl.rt, name)(*args)


def test_failure_values_are_not_shared_between_calls() -> None:
    absent = not_modelled("acl.test.absent", "", {"ids": []})
    absent()[0]["ids"].append(1)
    assert absent() == ({"ids": []}, 207000)


# --- the GIL ---


def function_that_takes(
    seconds: float, monkeypatch: pytest.MonkeyPatch, name: str, *, fails: bool = False
) -> Any:
    """A function of the surface during which the clock goes on by so much."""
    clock = [100.0]
    monkeypatch.setattr("runtime_cache.aclsim.calling.perf_counter", lambda: clock[0])

    def body() -> None:
        clock[0] += seconds
        if fails:
            raise AclFailure(100000, "fails")

    body.__name__ = name
    return surface("acl.rt")("")(body)


@pytest.mark.parametrize(("milliseconds", "is_named"), [(99, False), (100, False), (101, True)])
def test_a_call_that_holds_the_gil_for_long_is_named(
    monkeypatch: pytest.MonkeyPatch, milliseconds: int, is_named: bool
) -> None:
    inspect.clear()
    assert ledger.gil_limit_s == 0.1
    function_that_takes(milliseconds / 1000, monkeypatch, "test_holder")()
    assert ("acl.rt.test_holder" in ledger.slow_calls) == is_named


def test_the_limit_is_a_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    with fresh_process(gil_limit_ms=5):
        call = function_that_takes(0.006, monkeypatch, "test_holder")
        for _ in range(3):
            call()
        slow = ledger.slow_calls["acl.rt.test_holder"]
        assert slow.count == 3
        assert slow.longest_s == pytest.approx(0.006)


def test_a_call_that_fails_is_timed_too(monkeypatch: pytest.MonkeyPatch) -> None:
    inspect.clear()
    call = function_that_takes(1, monkeypatch, "test_holder", fails=True)
    assert call() == 100000
    assert ledger.slow_calls["acl.rt.test_holder"].count == 1


@pytest.mark.parametrize("name", sorted(n for n in RELEASES_GIL if n.startswith("acl.rt.")))
def test_a_call_that_lets_others_run_is_not_timed(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    inspect.clear()
    function_that_takes(10, monkeypatch, name.removeprefix("acl.rt."))()
    assert ledger.slow_calls == {}


def test_waiting_for_a_device_with_a_timeout_holds_the_gil_on_a_card() -> None:
    with fresh_process(gil_limit_ms=0):
        inspect.clear()
        stream = ok(acl.rt.create_stream())
        with inspect.hold(stream):
            assert acl.rt.synchronize_device_with_timeout(1) == 507046
            assert acl.rt.synchronize_stream_with_timeout(stream, 1) == 507046
        assert "acl.rt.synchronize_device_with_timeout" in ledger.slow_calls
        assert "acl.rt.synchronize_stream_with_timeout" not in ledger.slow_calls
