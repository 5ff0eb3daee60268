"""JSON Schemas of all messages, made from the message types: `python -m ipc.schemas DIRECTORY`.

They are shipped in `ipc/json_schemas`, one file for what clients send and one for what the daemon
answers; a test holds them to the types. They say what the types say: `PROTOCOL.md` has the rest.
"""

from __future__ import annotations

import inspect
import json
import re
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from ipc import messages
from ipc.messages import PROTOCOL_VERSION, AnyReply, AnyRequest, Request

_DIALECT = "https://json-schema.org/draft/2020-12/schema"
_ATTRIBUTE = re.compile(r"^    (\w+): (.+(?:\n {8}.+)*)", re.MULTILINE)


def request_schema() -> dict[str, Any]:
    """Of what a client may send."""
    schema = _schema("What a client of rtcached sends", AnyRequest.__args__)
    for kind in AnyRequest.__args__:
        _restrict(kind, schema["$defs"][kind.__name__])
    return schema


def reply_schema() -> dict[str, Any]:
    """Of what the daemon answers; a newer one may add fields."""
    return _schema("What rtcached answers", AnyReply.__args__)


def as_text(schema: dict[str, Any]) -> str:
    """As it stands in its file."""
    return json.dumps(schema, indent=1, ensure_ascii=False) + "\n"


def documented(kind: type[Struct]) -> dict[str, str]:
    """Field → its meaning as a sentence, from the docstrings of a type and of its bases."""
    found = {}
    for base in reversed(kind.__mro__):
        for name, text in _ATTRIBUTE.findall(inspect.cleandoc(base.__doc__ or "")):
            meaning = " ".join(text.split())
            found[name] = meaning[0].upper() + meaning[1:].rstrip(".") + "."
    return found


def _schema(title: str, kinds: Iterable[type[Struct]]) -> dict[str, Any]:
    kinds = tuple(kinds)
    _, parts = msgspec.json.schema_components(kinds)
    schema = {
        "$schema": _DIALECT,
        "title": f"{title}, protocol version {PROTOCOL_VERSION}",
        "oneOf": [{"$ref": f"#/$defs/{kind.__name__}"} for kind in kinds],
        "$defs": parts,
    }
    for name, part in parts.items():
        _describe(getattr(messages, name), part)
    portable: dict[str, Any] = _portable(schema)
    return portable


def _describe(kind: type[Struct], schema: dict[str, Any]) -> None:
    """Each field with its meaning; the type's without those of its fields."""
    head = inspect.cleandoc(kind.__doc__ or "").partition("\n\nAttributes:")[0]
    schema["description"] = head
    tag = kind.__struct_config__.tag
    if tag is not None:
        schema["title"] = tag
    meanings = documented(kind)
    for name, field in schema.get("properties", {}).items():
        if name in meanings:
            field["description"] = meanings[name]


def _restrict(kind: type[Request], schema: dict[str, Any]) -> None:
    """What holds for several fields together, and that there is one version."""
    schema["properties"]["v"] = {"const": PROTOCOL_VERSION, **schema["properties"]["v"]}
    if kind.one_of:
        schema["oneOf"] = [
            {"required": [name], "properties": {name: {"not": {"enum": [None, False]}}}}
            for name in kind.one_of
        ]


def _portable(value: Any) -> Any:
    """The same with patterns that every language reads: `\\A` and `\\Z` are Python's."""
    if isinstance(value, dict):
        return {
            key: _as_ecma(part) if key == "pattern" and isinstance(part, str) else _portable(part)
            for key, part in value.items()
        }
    return [_portable(part) for part in value] if isinstance(value, list) else value


def _as_ecma(pattern: str) -> str:
    return pattern.replace(r"\A", "^").replace(r"\Z", "$")


def main(directory: str) -> None:
    """Write both files."""
    for name, schema in (("requests", request_schema()), ("replies", reply_schema())):
        path = Path(directory) / f"{name}.json"
        path.write_text(as_text(schema), encoding="utf-8")
        print(path)


if __name__ == "__main__":
    main(sys.argv[1])
