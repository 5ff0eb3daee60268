"""PROTOCOL.md names every word that a daemon may send: error codes, reasons, states."""

from __future__ import annotations

import re
from pathlib import Path
from typing import get_args

import pytest

import ipc
from ipc import messages
from ipc.codec import Encoding, Limits, decode_reply, decode_request, encode
from runtime_cache import errors

PAGE = (Path(ipc.__file__).parent / "PROTOCOL.md").read_text(encoding="utf-8")
#: Errors of programs that are no daemon, and bases that nobody raises.
_NEVER_SENT = {"config", "bundle", "conversion", "request"}


#: Of this module alone: programs that use the daemon have errors of their own.
_ERRORS = [
    kind
    for kind in vars(errors).values()
    if isinstance(kind, type) and issubclass(kind, errors.RuntimeCacheError)
]


def chapter(title: str) -> str:
    found = re.search(rf"^## {title}\n(.*?)(?=^## |\Z)", PAGE, re.DOTALL | re.MULTILINE)
    assert found is not None, title
    return found[1]


def retries() -> dict[str, str]:
    """Error code → the column that says whether to try again."""
    rows = re.findall(r"^\| (`.+?`) \|.*\| ([^|]+) \|$", chapter("Error codes"), re.MULTILINE)
    return {code: retry for cell, retry in rows for code in re.findall(r"`(\w+)`", cell)}


@pytest.mark.parametrize("kind", _ERRORS, ids=lambda kind: kind.__name__)
def test_every_error_of_the_daemon_is_in_the_table(kind: type[errors.RuntimeCacheError]) -> None:
    if kind.code in _NEVER_SENT:
        return
    assert retries()[kind.code].startswith("yes" if kind.retryable else "no"), kind.code


@pytest.mark.parametrize("word", get_args(messages.FinishReason))
def test_every_finish_reason_is_told(word: str) -> None:
    assert f"`{word}`" in chapter("Replies")


def test_links_lead_somewhere() -> None:
    headings = re.findall(r"^#+ (.+)$", PAGE, re.MULTILINE)
    anchors = {re.sub(r"[^\w -]", "", heading).lower().replace(" ", "-") for heading in headings}
    links = set(re.findall(r"\]\(#([\w-]+)\)", PAGE))
    assert links <= anchors, links - anchors


def test_lines_of_prose_are_short() -> None:
    prose = [line for line in PAGE.splitlines() if not line.startswith(("|", "{"))]
    assert [line for line in prose if len(line) > 100] == []


def test_the_exchange_is_one_that_the_codec_takes() -> None:
    lines = re.findall(r"^    (→|←) (\{.*\})$", chapter("An exchange, message by message"), re.M)
    whole = [(way, text.encode()) for way, text in lines if "…" not in text]
    assert len(whole) == len(lines) - 2
    for way, text in whole:
        assert decode_request(text, Limits()) if way == "→" else decode_reply(text)


def test_the_bytes_of_a_ping() -> None:
    (found,) = re.findall(r"^    (82 [0-9a-f ]+)$", PAGE, re.MULTILINE)
    ping = messages.Ping(messages.MessageId("1"))
    assert bytes.fromhex(found) == encode(ping, Encoding.MSGPACK)
