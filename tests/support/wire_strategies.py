"""Hypothesis strategies for requests, made from their types: a new message needs no line here.

A message is drawn as plain objects, so that it can be spoilt before it is encoded. `valid` keeps
what each field says of itself, and that of some fields exactly one is to be given; `nearly_valid`
breaks one thing.
"""

from __future__ import annotations

import json
import re
import string
from collections.abc import Mapping
from functools import cache
from typing import Any

import msgspec
from hypothesis import strategies as st
from msgspec import inspect

from ipc.codec import Limits, decode_request
from ipc.errors import MalformedMessage
from ipc.messages import AnyRequest

Fields = Mapping[str, Any]

#: Longest text and list that is drawn: limits above it are for other tests.
_LONGEST = 40
_VISIBLE = string.digits + string.ascii_letters + string.punctuation

ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=8,
)


def _sized(kind: inspect.StrType | inspect.VarTupleType | inspect.DictType) -> tuple[int, int]:
    shortest = kind.min_length or 0
    return shortest, max(shortest, min(kind.max_length or _LONGEST, _LONGEST))


def _text(kind: inspect.StrType) -> st.SearchStrategy[str]:
    shortest, longest = _sized(kind)
    alphabet: Any = st.characters(exclude_categories=("Cs",))
    if kind.pattern is not None:
        alphabet = [letter for letter in _VISIBLE if re.search(kind.pattern, letter)]
    return st.text(alphabet, min_size=shortest, max_size=longest)


def _integer(kind: inspect.IntType) -> st.SearchStrategy[int]:
    lowest = kind.ge if kind.ge is not None else -(2**63)
    highest = kind.le if kind.le is not None else 2**63 - 1
    small = st.integers(lowest, min(highest, lowest + 20))
    return small | st.integers(lowest, highest) | st.sampled_from([lowest, highest])


def _number(kind: inspect.FloatType) -> st.SearchStrategy[float]:
    lowest = kind.ge if kind.ge is not None else kind.gt
    highest = kind.le if kind.le is not None else kind.lt
    return st.floats(
        min_value=lowest,
        max_value=highest,
        exclude_min=kind.gt is not None,
        exclude_max=kind.lt is not None,
        allow_nan=False,
        allow_infinity=False,
    )


def _values(kind: inspect.Type) -> st.SearchStrategy[Any]:
    """What a field of this type may hold."""
    match kind:
        case inspect.Metadata():
            return _values(kind.type)
        case inspect.StrType():
            return _text(kind)
        case inspect.IntType():
            return _integer(kind)
        case inspect.FloatType():
            return _number(kind)
        case inspect.BoolType():
            return st.booleans()
        case inspect.NoneType():
            return st.none()
        case inspect.LiteralType():
            return st.sampled_from(kind.values)
        case inspect.VarTupleType():
            shortest, longest = _sized(kind)
            return st.lists(_values(kind.item_type), min_size=shortest, max_size=min(longest, 8))
        case inspect.DictType():
            return st.dictionaries(_values(kind.key_type), _values(kind.value_type), max_size=4)
        case inspect.UnionType():
            return st.one_of([_values(part) for part in kind.types])
        case inspect.StructType():
            return _struct(kind)
    raise TypeError(f"no strategy for {kind}: add one, so that its messages are fuzzed too")


def _struct(kind: inspect.StructType) -> st.SearchStrategy[dict[str, Any]]:
    needed = {field.encode_name: _values(field.type) for field in kind.fields if field.required}
    others = {field.encode_name: _values(field.type) for field in kind.fields if not field.required}
    others.pop("v", None)
    tag = {} if kind.tag is None else {kind.tag_field or "type": st.just(kind.tag)}
    # Few of the optional ones: where exactly one of several is wanted, it is not always refused.
    chosen = st.sets(st.sampled_from(sorted(others)), max_size=3) if others else st.just(set())
    return chosen.flatmap(
        lambda names: st.fixed_dictionaries(tag | needed | {name: others[name] for name in names})
    )


@cache
def request_types() -> dict[str, inspect.StructType]:
    """Every request there is: its word → its type."""
    union = inspect.type_info(AnyRequest)
    assert isinstance(union, inspect.UnionType)
    kinds = [kind for kind in union.types if isinstance(kind, inspect.StructType)]
    return {str(kind.tag): kind for kind in kinds}


@cache
def _requests(word: str) -> st.SearchStrategy[dict[str, Any]]:
    return _struct(request_types()[word])


@cache
def _field(word: str, name: str) -> st.SearchStrategy[Any]:
    """Values of an optional field but for those that mean "not given"."""
    (field,) = (field for field in request_types()[word].fields if field.encode_name == name)
    return _values(field.type).filter(lambda value: value not in (None, False))


@st.composite
def valid(draw: st.DrawFn) -> dict[str, Any]:
    """Requests of all kinds; those that have answers with many messages more often."""
    word = draw(st.sampled_from([*sorted(request_types()), *["generate"] * 8]))
    fields = draw(_requests(word))
    try:
        decode_request(packed(fields), Limits())
    except MalformedMessage as refusal:
        # The sentence names the fields: "exactly one of `a` and `b` must be given, got …".
        head, found, _ = refusal.message.partition(" must be given")
        if found:
            names = re.findall(r"`(\w+)`", head)
            name = draw(st.sampled_from(names))
            fields = {key: value for key, value in fields.items() if key not in names}
            fields[name] = draw(_field(word, name))
    return fields


@st.composite
def nearly_valid(draw: st.DrawFn) -> Fields:
    """A request with one thing wrong: a field's value, a field too few or too many, or the type."""
    fields = draw(valid())
    name = draw(st.sampled_from(sorted(fields)))
    change = draw(st.sampled_from(["value", "missing", "unknown", "type", "version"]))
    if change == "missing":
        del fields[name]
    elif change == "unknown":
        fields[draw(st.text(max_size=10))] = draw(ANYTHING)
    elif change == "type":
        fields["type"] = draw(st.sampled_from(sorted(request_types())))
    else:
        fields["v" if change == "version" else name] = draw(ANYTHING)
    return fields


def packed(fields: Fields) -> bytes:
    """A message in msgpack."""
    return msgspec.msgpack.encode(fields)


def in_json(fields: Fields) -> bytes:
    """A message in JSON, with what only some writers put there: NaN and escaped half characters."""
    return json.dumps(fields).encode()


def payloads() -> st.SearchStrategy[bytes]:
    """Requests, valid or nearly so, in both encodings."""
    encodings = st.sampled_from([packed, in_json])
    return st.builds(lambda write, fields: write(fields), encodings, valid() | nearly_valid())
