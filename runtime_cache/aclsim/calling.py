"""The calling convention of pyACL, written once and declared for every function.

    acl_function = surface("acl.rt")

    @acl_function("ki", failed=(0,))
    def malloc(size: int, policy: int) -> int: ...

The format holds `PyArg_ParseTuple` codes, as in pyACL's C++ source: `k K` take real Python ints
only and wrap modulo 2^64, `i l h` take anything with `__index__` that fits the C type, `I H` the
same without a check of the size, `s` a str, `f d` numbers, `O` any object; what follows `|` is
optional. Wrong arguments raise TypeError `<module>.<name> args parse failed`; everything else comes
back as a code, with the values first and the code last.

Functions without arguments do not look at what they are given, as in pyACL, where programs do that.
"""

from __future__ import annotations

import operator
import struct
from collections.abc import Callable, Sequence
from copy import deepcopy
from time import perf_counter
from typing import Any

from runtime_cache.aclsim import faults, process, races
from runtime_cache.aclsim.codes import RT_FEATURE_NOT_SUPPORTED, SUCCESS
from runtime_cache.aclsim.failure import AclFailure, last_error, recent_messages
from runtime_cache.aclsim.ledger import ledger

Converter = Callable[[Any], Any]
Body = Callable[..., Any]
AclFunction = Callable[..., Any]

_MASK_64 = (1 << 64) - 1
_MASK_32 = (1 << 32) - 1
_MASK_16 = (1 << 16) - 1

#: The functions that let other Python threads run while they wait. All others keep the interpreter
#: to themselves for as long as they take, model loads and `acl.mdl.execute` included.
#: Source: pyACL C++ source, hicann/runtime commit 134e2edb.
RELEASES_GIL = frozenset(
    (
        "acl.rt.process_report",
        "acl.rt.stream_wait_event",
        "acl.rt.synchronize_device",
        "acl.rt.synchronize_event",
        "acl.rt.synchronize_event_with_timeout",
        "acl.rt.synchronize_stream",
        "acl.rt.synchronize_stream_with_timeout",
        "acl.util.start_thread",
        "acl.util.stop_thread",
    )
)


def _real_int(value: Any) -> int:
    """`k`, `K`: numpy integers are refused, negative and large values wrap."""
    if not isinstance(value, int):
        raise TypeError("not a Python int")
    return value & _MASK_64


def _ranged(low: int, high: int) -> Converter:
    """`i`, `h`, `l`: any integer object inside the C type."""

    def convert(value: Any) -> int:
        number = operator.index(value)
        if not low <= number <= high:
            raise OverflowError("does not fit the C type")
        return number

    return convert


def _masked(mask: int) -> Converter:
    """`I`, `H`: any integer object, without an overflow check."""
    return lambda value: operator.index(value) & mask


def _text(value: Any) -> str:
    """`s`: a str without NUL that UTF-8 can hold."""
    if not isinstance(value, str) or "\0" in value:
        raise TypeError("not a str")
    value.encode()
    return value


def _number(value: Any) -> float:
    """`f`, `d`: what Python takes as a real number; no text."""
    if isinstance(value, str | bytes | bytearray):
        raise TypeError("not a number")
    return float(value)


def _anything(value: Any) -> Any:
    """`O`: the object itself."""
    return value


_CONVERTERS: dict[str, Converter] = {
    "k": _real_int,
    "K": _real_int,
    "i": _ranged(-(1 << 31), (1 << 31) - 1),
    "l": _ranged(-(1 << 63), (1 << 63) - 1),
    "h": _ranged(-(1 << 15), (1 << 15) - 1),
    "H": _masked(_MASK_16),
    "I": _masked(_MASK_32),
    "s": _text,
    "f": _number,
    "d": _number,
    "O": _anything,
}


#: What `struct` calls the C type of each code for ints that need no conversion where they fit.
_PLAIN_CODES = {"k": "Q", "K": "Q", "i": "i", "l": "q", "h": "h", "H": "H", "I": "I"}


def _parser(full_name: str, arg_format: str) -> Callable[[Sequence[Any]], Sequence[Any]]:
    """Compiles a format into a function from the argument tuple to the values."""
    if not arg_format:
        return lambda args: ()
    required, _, optional = arg_format.partition("|")
    converters = [_CONVERTERS[code] for code in required + optional]
    most, least = len(converters), len(required)
    complaint = f"{full_name} args parse failed"

    def parse(args: Sequence[Any]) -> Sequence[Any]:
        if not least <= len(args) <= most:
            raise TypeError(complaint)
        try:
            return [convert(value) for convert, value in zip(converters, args, strict=False)]
        except (TypeError, ValueError, OverflowError):
            raise TypeError(complaint) from None

    if not set(arg_format) <= _PLAIN_CODES.keys():
        return parse
    return _for_plain_ints([_PLAIN_CODES[code] for code in arg_format], parse)


def _for_plain_ints(
    codes: Sequence[str], parse: Callable[[Sequence[Any]], Sequence[Any]]
) -> Callable[[Sequence[Any]], Sequence[Any]]:
    """`parse`, quicker for what nearly all calls pass: Python ints that fit the C types."""
    types = (int,) * len(codes)
    pack = struct.Struct("=" + "".join(codes)).pack

    def parse_plain(args: Sequence[Any]) -> Sequence[Any]:
        if tuple(map(type, args)) != types:
            return parse(args)
        try:
            pack(*args)
        except struct.error:
            return parse(args)
        return args

    return parse_plain


_NO_PLAIN_VALUE = object()


def surface(prefix: str) -> Callable[..., Callable[[Body], AclFunction]]:
    """Makes the decorator for one module of pyACL, such as `acl.rt`.

    The decorator takes the format and one of:
        failed: the values that stand before the code when the call fails. The function then
            returns `(value, ..., ret)`; with no `failed` it returns `ret` alone.
        plain: the function returns its value without a code, and this one on failure.
    """

    def acl_function(
        arg_format: str = "",
        *,
        failed: tuple[object, ...] = (),
        plain: object = _NO_PLAIN_VALUE,
    ) -> Callable[[Body], AclFunction]:
        def decorate(body: Body) -> AclFunction:
            shape = _result_shape(failed, plain)
            return _bind(f"{prefix}.{body.__name__}", arg_format, body, shape)

        return decorate

    return acl_function


def not_modelled(
    full_name: str,
    arg_format: str,
    *failed: object,
    takes: dict[int, type] | None = None,
) -> AclFunction:
    """A function of pyACL that has the convention and no behaviour here: 207000, and a sentence.

    Args:
        failed: the values before the code.
        takes: types of `O` arguments by position, such as `{1: dict}`; others raise TypeError.
    """

    def body(*values: Any) -> None:
        for position, kind in (takes or {}).items():
            if not isinstance(values[position], kind):
                raise TypeError(f"argument {position + 1} is not a {kind.__name__}")
        sentence = "not modelled by the software device"
        raise AclFailure(RT_FEATURE_NOT_SUPPORTED, sentence)

    body.__name__ = full_name.rpartition(".")[2]
    body.__doc__ = "In the surface, but not modelled: 207000."
    return _bind(full_name, arg_format, body, _result_shape(failed, _NO_PLAIN_VALUE))


class _ResultShape:
    """How a body's value, or a failure's code, is handed to the caller."""

    def __init__(self, on_success: Callable[[Any], Any], on_failure: Callable[[int], Any]) -> None:
        self.on_success = on_success
        self.on_failure = on_failure


def _result_shape(failed: tuple[object, ...], plain: object) -> _ResultShape:
    if plain is not _NO_PLAIN_VALUE:
        return _ResultShape(lambda value: value, lambda code: deepcopy(plain))
    if not failed:
        return _ResultShape(lambda value: SUCCESS, lambda code: code)

    def on_failure(code: int) -> tuple[object, ...]:
        return *deepcopy(failed), code

    if len(failed) == 1:
        return _ResultShape(lambda value: (value, SUCCESS), on_failure)
    return _ResultShape(lambda values: (*values, SUCCESS), on_failure)


def _bind(full_name: str, arg_format: str, body: Body, shape: _ResultShape) -> AclFunction:
    """The function that programs call: positional only, whatever the body says."""
    faults.register(full_name)
    parse = _parser(full_name, arg_format)
    count_call, strike, on_success = ledger.count_call, faults.script.strike, shape.on_success
    holds_gil = full_name not in RELEASES_GIL
    act = races.settling(full_name, body)

    def call(*args: Any) -> Any:
        started = perf_counter()
        try:
            values = parse(args)
            count_call(full_name)
            failure = strike(full_name, "call")
            if failure is not None:
                process.note_failure(failure)
                raise failure
            return on_success(act(*values))
        except AclFailure as failure:
            return shape.on_failure(_noted(full_name, failure))
        except (TypeError, ValueError) as error:
            _note_refusal(full_name, args, error)
            raise
        finally:
            if holds_gil:
                seconds = perf_counter() - started
                if seconds > ledger.gil_limit_s:
                    ledger.time_call(full_name, seconds)

    call.__name__ = body.__name__
    call.__qualname__ = full_name
    call.__doc__ = body.__doc__
    call.__module__ = body.__module__
    call.arg_format = arg_format  # type: ignore[attr-defined]  # for the tests of the surface
    return call


def _note_refusal(full_name: str, args: Sequence[Any], error: Exception) -> None:
    """Names a call that raised in the report: pyACL's own words do not say what was wrong."""
    types = ", ".join(type(value).__name__ for value in args)
    ledger.note_misuse(f"{full_name}({types}) raised {type(error).__name__}: {error}", "bad_call")


def _noted(full_name: str, failure: AclFailure) -> int:
    """Keeps a failure for the report, the error text and the last error; returns its code."""
    if not failure.is_noted:
        ledger.note_failure(full_name, failure.code, failure.sentence)
    recent_messages.add(f"{full_name}: {failure.sentence}")
    last_error.note(failure.code)
    return failure.code
