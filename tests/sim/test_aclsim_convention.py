"""The calling convention of each of pyACL's functions, generated from what its source says."""

from __future__ import annotations

import signal
import warnings
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import pytest

from tests.support.aclsim import fresh_process
from tests.support.pyacl import REAL, RealFunction, plain_args, simulated

SIMULATED = simulated()
NAMES = sorted(REAL)
WITH_ARGS = [name for name in NAMES if REAL[name].codes]

NO_NUMBERS = [0.0, "0", None, b"", []]
REFUSED: dict[str, list[Any]] = {
    **{code: [np.int64(0), np.uint64(0), np.bool_(False), *NO_NUMBERS] for code in "kK"},
    **{code: [np.float32(0), *NO_NUMBERS] for code in "iIhHl"},
    "s": [b"", None, 3, "a\0b", "\udc80", ["a"]],
    "f": ["1.0", b"1", None, [], 1j],
    "d": ["1.0", b"1", None, [], 1j],
    "O": [],
}
OVERFLOWING = {
    "i": [1 << 31, -(1 << 31) - 1, np.int64(1 << 31)],
    "h": [1 << 15, -(1 << 15) - 1],
    "l": [1 << 63, -(1 << 63) - 1],
}
ACCEPTED: dict[str, list[Any]] = {
    **{code: [-1, (1 << 64) - 1, 1 << 64, -(1 << 70), True] for code in "kK"},
    **{code: [-1, 1 << 32, -(1 << 40), np.int64(0), np.uint8(0), True] for code in "IH"},
    "i": [-(1 << 31), (1 << 31) - 1, np.int64(0), np.uint8(0), True],
    "h": [-(1 << 15), (1 << 15) - 1, np.int16(0)],
    "l": [-(1 << 63), (1 << 63) - 1, np.int64(0)],
    "s": ["", "text", "名前"],
    "f": [0, 1.5, np.float32(1), np.int32(1), float("nan"), 1e300],
    "d": [0, 1.5, np.float64(1)],
    "O": [None, (), np.zeros(1)],
}
WRAP = {**dict.fromkeys("kK", 1 << 64), "I": 1 << 32, "H": 1 << 16}


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    before = signal.getsignal(signal.SIGINT)
    with fresh_process(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the functions for numpy arrays
        yield
    signal.signal(signal.SIGINT, before)


def cases(function: RealFunction, values: dict[str, list[Any]]) -> Iterator[tuple[int, Any]]:
    """(position, value) for each argument and each value of its code."""
    for position, code in enumerate(function.codes):
        for value in values.get(code, []):
            yield position, value


def having(codes: Iterable[str]) -> list[Any]:
    """The functions with an argument of one of these codes."""
    wanted = set(codes)
    return [pytest.param(REAL[name], id=name) for name in NAMES if wanted & set(REAL[name].codes)]


def with_value(function: RealFunction, position: int, value: Any) -> list[Any]:
    """Plain arguments but one."""
    args = plain_args(function)
    args[position] = value
    return args


def complains(error: BaseException, function: RealFunction) -> bool:
    """Whether the arguments themselves were refused."""
    return isinstance(error, TypeError) and str(error) == function.complaint


@pytest.mark.parametrize("name", sorted(set(NAMES) - set(WITH_ARGS)))
def test_functions_without_arguments_do_not_look_at_them(name: str) -> None:
    # A public program passes a device's number to `synchronize_device`.
    SIMULATED[name](0, "anything")


@pytest.mark.parametrize("name", WITH_ARGS)
def test_one_argument_too_many(name: str) -> None:
    with pytest.raises(TypeError) as caught:
        SIMULATED[name](*plain_args(REAL[name]), 0)
    assert complains(caught.value, REAL[name])


@pytest.mark.parametrize("name", [name for name in NAMES if REAL[name].num_required])
def test_one_argument_too_few(name: str) -> None:
    with pytest.raises(TypeError) as caught:
        SIMULATED[name](*plain_args(REAL[name])[: REAL[name].num_required - 1])
    assert complains(caught.value, REAL[name])


@pytest.mark.parametrize("name", WITH_ARGS)
def test_keywords_are_refused(name: str) -> None:
    args = plain_args(REAL[name])
    with pytest.raises(TypeError, match="keyword"):
        SIMULATED[name](*args[:-1], **{REAL[name].args[-1].rstrip("?"): args[-1]})


@pytest.mark.parametrize("function", having(code for code in REFUSED if REFUSED[code]))
def test_each_argument_refuses_what_its_code_refuses(function: RealFunction) -> None:
    for position, value in cases(function, REFUSED):
        with pytest.raises(TypeError) as caught:
            SIMULATED[function.name](*with_value(function, position, value))
        assert complains(caught.value, function), (position, value)


@pytest.mark.parametrize("function", having(OVERFLOWING))
def test_what_does_not_fit_a_checked_code_is_refused(function: RealFunction) -> None:
    for position, value in cases(function, OVERFLOWING):
        with pytest.raises(TypeError) as caught:
            SIMULATED[function.name](*with_value(function, position, value))
        assert complains(caught.value, function), (position, value)


# Complains of its object in the words of the convention.
SET_CALLBACK = "acl.rt.set_exception_info_callback"
# Not modelled, and without a code to say so.
WITHOUT_CODE = "acl.mdl.get_op_attr"


def attempt(function: RealFunction, args: list[Any]) -> Any:
    """What a call returns, or the error if the function refuses an object or has no code."""
    try:
        return SIMULATED[function.name](*args)
    except (TypeError, ValueError) as error:
        is_refused = str(error) == function.complaint and function.name != SET_CALLBACK
        if is_refused or "O" not in function.codes:
            raise
        return error
    except NotImplementedError as error:
        if function.name != WITHOUT_CODE:
            raise
        return error


@pytest.mark.parametrize("function", having(ACCEPTED))
def test_each_argument_accepts_what_its_code_accepts(function: RealFunction) -> None:
    for position, value in cases(function, ACCEPTED):
        check_shape(function, attempt(function, with_value(function, position, value)))


@pytest.mark.parametrize("function", having(WRAP))
def test_numbers_wrap_around_where_the_code_does_not_check(function: RealFunction) -> None:
    for position, step in cases(function, {code: [step] for code, step in WRAP.items()}):
        outcomes = []
        for value in (0, step):
            with fresh_process():
                result = attempt(function, with_value(function, position, value))
            outcomes.append(codes_of(result, function))
        assert outcomes[0] == outcomes[1], position


def codes_of(result: Any, function: RealFunction) -> Any:
    """The code of a result, or its type where there is none."""
    if function.returns[-1] != "ret" or isinstance(result, Exception):
        return type(result)
    return result[-1] if isinstance(result, tuple) else result


# --- results ---

RESULT_TYPES: dict[str, tuple[type, ...]] = {
    "None": (type(None),),
    "name": (str, type(None)),
    "msg": (str, type(None)),
    "str": (str,),
    "key": (str,),
    "dict": (dict,),
    "version_dict": (dict,),
    "list": (list, type(None)),
    "ms": (float, int),
    "float": (float,),
    "bytes": (bytes,),
    "ndarray": (np.ndarray, type(None)),
}


def check_shape(function: RealFunction, result: Any) -> None:
    """Checks number, order and types of what a call returned; errors have passed `attempt`."""
    if isinstance(result, Exception):
        return
    if len(function.returns) == 1:
        assert not isinstance(result, tuple)
        values = (result,)
    else:
        assert isinstance(result, tuple)
        values = result
    assert len(values) == len(function.returns)
    for value, what in zip(values, function.returns, strict=True):
        assert type(value) in RESULT_TYPES.get(what, (int,)), what


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("is_lost", [False, True], ids=["fresh", "without a context"])
def test_number_order_and_types_of_results(name: str, is_lost: bool) -> None:
    if is_lost:
        assert SIMULATED["acl.rt.reset_device"](0) == 0
    check_shape(REAL[name], attempt(REAL[name], plain_args(REAL[name])))


@pytest.mark.parametrize("name", NAMES)
def test_nothing_raises_for_want_of_init(name: str) -> None:
    assert SIMULATED["acl.finalize"]() == 0
    check_shape(REAL[name], attempt(REAL[name], plain_args(REAL[name])))
