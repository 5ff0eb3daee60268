"""The shipped JSON Schemas are those of the message types, and agree with the codec."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest

import ipc
from ipc.codec import Limits, decode_request
from ipc.errors import MalformedMessage
from ipc.messages import AnyReply, AnyRequest
from ipc.schemas import as_text, main, reply_schema, request_schema

GOLDEN = Path(__file__).parent.parent / "golden" / "wire"
SHIPPED = Path(ipc.__file__).parent / "json_schemas"
REQUESTS = jsonschema.Draft202012Validator(request_schema())
REPLIES = jsonschema.Draft202012Validator(reply_schema())


def test_the_shipped_files_are_what_the_types_say(tmp_path: Path) -> None:
    assert (SHIPPED / "requests.json").read_text(encoding="utf-8") == as_text(request_schema())
    assert (SHIPPED / "replies.json").read_text(encoding="utf-8") == as_text(reply_schema())
    main(str(tmp_path))
    names = {path.name for path in SHIPPED.iterdir()}
    assert {path.name for path in tmp_path.iterdir()} == names == {"requests.json", "replies.json"}


@pytest.mark.parametrize("validator", [REQUESTS, REPLIES], ids=["requests", "replies"])
def test_they_are_schemas(validator: jsonschema.Draft202012Validator) -> None:
    jsonschema.Draft202012Validator.check_schema(validator.schema)
    assert "\\\\A" not in json.dumps(validator.schema)


def test_every_message_and_field_is_described() -> None:
    for schema, kinds in ((request_schema(), AnyRequest), (reply_schema(), AnyReply)):
        assert len(schema["oneOf"]) == len(kinds.__args__)
        for name, part in schema["$defs"].items():
            assert part["description"], name
            for field, found in part.get("properties", {}).items():
                assert field == "type" or found["description"], (name, field)


@pytest.mark.parametrize("path", sorted(GOLDEN.glob("request.*.json")), ids=lambda p: p.stem)
def test_recorded_requests_are_valid(path: Path) -> None:
    REQUESTS.validate(json.loads(path.read_bytes()))


@pytest.mark.parametrize("path", sorted(GOLDEN.glob("reply.*.json")), ids=lambda p: p.stem)
def test_recorded_replies_are_valid(path: Path) -> None:
    message = json.loads(path.read_bytes())
    REPLIES.validate(message)
    REPLIES.validate(message | {"a_newer_field": 1})


PING = {"type": "ping", "id": "1"}
GENERATE = {"type": "generate", "id": "1", "prompt": "p"}
EVICT = {"type": "evict", "id": "1"}


@pytest.mark.parametrize(
    "message",
    [
        PING,
        PING | {"v": 1},
        PING | {"v": 2},
        PING | {"id": ""},
        PING | {"id": "x" * 65},
        PING | {"id": "a b"},
        PING | {"prompt": "p"},
        {"type": "ping"},
        {"type": "teleport", "id": "1"},
        GENERATE,
        GENERATE | {"prompt": None},
        GENERATE | {"prompt_ids": [1]},
        GENERATE | {"prompt": None, "prompt_ids": [1]},
        GENERATE | {"prompt_ids": None},
        GENERATE | {"top_p": 0},
        GENERATE | {"max_tokens": 1.5},
        GENERATE | {"max_tokens": None},
        GENERATE | {"temperature": None},
        GENERATE | {"credit": 1_000_000},
        GENERATE | {"credit": 1_000_001},
        GENERATE | {"logit_bias": {"01": 1}},
        GENERATE | {"stop": ["x"] * 17},
        {"type": "chat", "id": "1", "messages": []},
        {"type": "chat", "id": "1", "messages": [{"role": "robot", "content": ""}]},
        {"type": "open", "id": "1", "lease_ms": 999},
        {"type": "open", "id": "1", "lease_ms": 1000},
        EVICT,
        EVICT | {"all": True},
        EVICT | {"all": False},
        EVICT | {"all": True, "age_s": 0},
        EVICT | {"all": False, "age_s": 0},
        EVICT | {"digest": "0123456"},
        {"type": "list", "id": "1", "sort": "name"},
    ],
    ids=str,
)
def test_a_schema_accepts_what_the_daemon_accepts(message: dict[str, Any]) -> None:
    try:
        decode_request(json.dumps(message).encode(), Limits())
        is_accepted = True
    except MalformedMessage:
        is_accepted = False
    assert REQUESTS.is_valid(message) == is_accepted
