"""The JSON file that `acl.init` takes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from runtime_cache.aclsim import codes
from runtime_cache.aclsim.failure import AclFailure, recent_messages

_ERROR_TEXT = "err_msg_mode"
_SHARED = "1"
_DEFAULT_DEVICE = "defaultDevice"


def read(path: str) -> dict[str, Any]:
    """What the file says; {} for no file and for an empty one.

    Raises:
        AclFailure: 100003 if it cannot be read, 100006 if it is no JSON object.
    """
    if not path:
        return {}
    try:
        if not Path(path).is_file():  # a pipe would be waited for
            raise AclFailure(codes.INVALID_FILE, f"configuration {path} is no file")
        text = Path(path).read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise AclFailure(codes.INVALID_FILE, f"configuration {path}: {error}") from error
    if not text.strip():
        return {}
    try:
        document = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise AclFailure(codes.PARSE_FILE, f"configuration {path}: {error}") from error
    if not isinstance(document, dict):
        raise AclFailure(codes.PARSE_FILE, f"configuration {path}: not a JSON object")
    return document


def default_device(document: dict[str, Any]) -> int | None:
    """The device of threads that set none: `{"defaultDevice": {"default_device": "0"}}`.

    Raises:
        AclFailure: 100000 for anything else under that key.
    """
    if _DEFAULT_DEVICE not in document:
        return None
    found = document[_DEFAULT_DEVICE]
    text = found.get("default_device") if isinstance(found, dict) else None
    if not isinstance(text, str) or not text.isdecimal():
        raise AclFailure(codes.INVALID_PARAM, f"{_DEFAULT_DEVICE} is not understood: {found!r}")
    return int(text)


def apply(document: dict[str, Any]) -> None:
    """Chooses whose error text is kept: each thread's ("0", the default) or the process' ("1")."""
    recent_messages.is_shared = document.get(_ERROR_TEXT) == _SHARED
    for key in sorted(document.keys() - {_ERROR_TEXT, _DEFAULT_DEVICE}):
        recent_messages.add(f"acl.init: {key!r} has no effect in the software device")
