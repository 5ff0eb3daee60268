"""How the command line names prompts: files of text, of token ids, of a conversation, of many."""

from __future__ import annotations

import argparse
import re
from typing import Any

import msgspec

from ipc.command_line import read_text

#: Between two numbers: blanks, or one comma.
_SEPARATOR = re.compile(r"\s*,\s*|\s+")


def add_prompt(parser: argparse.ArgumentParser) -> None:
    """The options that name one prompt."""
    parser.add_argument(
        "file", nargs="?", metavar="FILE", help="text file, or - for standard input"
    )
    parser.add_argument("--ids", action="store_true", help="the file holds token ids")
    parser.add_argument("--messages", metavar="FILE", help="JSON file with a conversation")


def read_prompt(args: argparse.Namespace, text_field: str = "text") -> dict[str, Any]:
    """The prompt that these options name, as the methods of `Client` take it.

    Args:
        text_field: what the method calls a text.

    Raises:
        ValueError: none or several, or a file's content is not what it should be.
        OSError: the file cannot be read.
    """
    if (args.file is None) == (args.messages is None):
        many = ", or --jsonl" if "jsonl" in args else ""
        raise ValueError(f"give either a file or --messages{many}")
    if args.messages is not None:
        if args.ids:
            raise ValueError("--ids is about a file, not about --messages")
        return {"messages": _turns(args.messages)}
    text = read_text(args.file)
    return {"prompt_ids": _ids(args.file, text)} if args.ids else {text_field: text}


class Line(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One line of a file of many prompts, for `register`.

    Attributes:
        text, prompt_ids, messages: the prompt; exactly one of them.
        name: what the answer calls it.
    """

    text: str | None = None
    prompt_ids: list[int] | None = None
    messages: list[dict[str, str]] | None = None
    name: str | None = None

    def __post_init__(self) -> None:
        """Check what one field alone cannot show."""
        if len(self.prompt) != 1:
            raise ValueError("exactly one of `text`, `prompt_ids` and `messages` must be given")

    @property
    def prompt(self) -> dict[str, Any]:
        """The fields that are given."""
        fields = {"text": self.text, "prompt_ids": self.prompt_ids, "messages": self.messages}
        return {name: value for name, value in fields.items() if value is not None}


def read_lines(file: str) -> list[tuple[int, Line]]:
    """The prompts of a JSONL file (- for standard input) and their lines' numbers; blank ones skip.

    Raises:
        ValueError: a line is not a prompt, or there is none; nothing has been done.
        OSError: the file cannot be read.
    """
    decoder = msgspec.json.Decoder(Line)
    lines = []
    for number, text in enumerate(read_text(file).split("\n"), 1):
        if not text.strip():
            continue
        try:
            lines.append((number, decoder.decode(text)))
        except msgspec.DecodeError as error:
            raise ValueError(f"{file}, line {number}: {error}") from error
    if not lines:
        raise ValueError(f"{file} holds no prompt")
    return lines


def _turns(file: str) -> list[dict[str, str]]:
    try:
        return msgspec.json.decode(read_text(file), type=list[dict[str, str]])
    except msgspec.DecodeError as error:
        raise ValueError(f"{file} is not a JSON list of turns: {error}") from error


def _ids(file: str, text: str) -> list[int]:
    """A whole JSON list, or plain numbers."""
    try:
        if text.lstrip().startswith("["):
            return msgspec.json.decode(text, type=list[int])
        return [int(word) for word in _SEPARATOR.split(text.strip())] if text.strip() else []
    except (ValueError, msgspec.DecodeError) as error:
        raise ValueError(f"{file} holds something else than token ids") from error
