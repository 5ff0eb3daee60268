"""The calling convention of pyACL, written once and declared for every function.

    acl_function = surface("acl.rt")

    @acl_function("ki", failed=(0,))
    def malloc(size: int, policy: int) -> int: ...

The format holds `PyArg_ParseTuple` codes, as in pyACL's C++ source: `k K` take real Python ints
only and wrap modulo 2^64, `i I h H` take anything with `__index__`, `s` a str, `f d` numbers, `O`
any object; what follows `|` is optional. Wrong arguments raise TypeError `<name> args parse
failed`; everything else comes back as a code, with the values first and the code last.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Sequence
from copy import copy
from typing import Any

from runtime_cache.aclsim import faults, process
from runtime_cache.aclsim.codes import SUCCESS
from runtime_cache.aclsim.failure import AclFailure, recent_messages
from runtime_cache.aclsim.ledger import ledger

Converter = Callable[[Any], Any]
Body = Callable[..., Any]

_MASK_64 = (1 << 64) - 1
_MASK_32 = (1 << 32) - 1


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


def _unsigned_32(value: Any) -> int:
    """`I`: any integer object, without an overflow check."""
    return operator.index(value) & _MASK_32


def _text(value: Any) -> str:
    """`s`: a str without NUL."""
    if not isinstance(value, str) or "\0" in value:
        raise TypeError("not a str")
    return value


def _number(value: Any) -> float:
    """`f`, `d`: what Python takes as a real number; never a str."""
    if isinstance(value, str):
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
    "H": lambda value: operator.index(value) & 0xFFFF,
    "I": _unsigned_32,
    "s": _text,
    "f": _number,
    "d": _number,
    "O": _anything,
}


def _parser(name: str, arg_format: str) -> Callable[[Sequence[Any]], list[Any]]:
    """Compiles a format into a function from the argument tuple to the values."""
    required, _, optional = arg_format.partition("|")
    converters = [_CONVERTERS[code] for code in required + optional]
    most, least = len(converters), len(required)

    def parse(args: Sequence[Any]) -> list[Any]:
        if not least <= len(args) <= most:
            raise TypeError(f"{name} args parse failed")
        try:
            return [convert(value) for convert, value in zip(converters, args, strict=False)]
        except (TypeError, ValueError, OverflowError):
            raise TypeError(f"{name} args parse failed") from None

    return parse


_NO_PLAIN_VALUE = object()


def surface(prefix: str) -> Callable[..., Callable[[Body], Callable[..., Any]]]:
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
    ) -> Callable[[Body], Callable[..., Any]]:
        def decorate(body: Body) -> Callable[..., Any]:
            full_name = f"{prefix}.{body.__name__}"
            faults.register(full_name)
            parse = _parser(body.__name__, arg_format)
            shape = _result_shape(failed, plain)
            call = _bind(full_name, parse, body, shape)
            call.arg_format = arg_format  # type: ignore[attr-defined]  # for the surface test
            return call

        return decorate

    return acl_function


class _ResultShape:
    """How a body's value, or a failure's code, is handed to the caller."""

    def __init__(self, on_success: Callable[[Any], Any], on_failure: Callable[[int], Any]) -> None:
        self.on_success = on_success
        self.on_failure = on_failure


def _result_shape(failed: tuple[object, ...], plain: object) -> _ResultShape:
    if plain is not _NO_PLAIN_VALUE:
        return _ResultShape(lambda value: value, lambda code: plain)
    if not failed:
        return _ResultShape(lambda value: SUCCESS, lambda code: code)
    if len(failed) == 1:
        return _ResultShape(lambda value: (value, SUCCESS), lambda code: (*map(copy, failed), code))
    return _ResultShape(lambda values: (*values, SUCCESS), lambda code: (*map(copy, failed), code))


def _bind(
    full_name: str,
    parse: Callable[[Sequence[Any]], list[Any]],
    body: Body,
    shape: _ResultShape,
) -> Callable[..., Any]:
    """The function that programs call."""

    count_call, strike = ledger.count_call, faults.script.strike
    on_success = shape.on_success

    @functools.wraps(body)
    def call(*args: Any) -> Any:
        values = parse(args)
        count_call(full_name)
        try:
            failure = strike(full_name, "call")
            if failure is not None:
                process.note_failure(failure)
                raise failure
            return on_success(body(*values))
        except AclFailure as failure:
            ledger.note_failure(full_name, failure.code, failure.sentence)
            recent_messages.add(f"{full_name}: {failure.sentence}")
            return shape.on_failure(failure.code)

    del call.__wrapped__  # positional only, whatever the body says
    return call
