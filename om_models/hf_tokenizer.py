"""A tokenizer from a Hugging Face model directory.

The encoding itself is in `tokenizer.json`; which tokens begin and end a text, and the chat
template, are spread over `tokenizer_config.json`, `config.json`, `generation_config.json` and
`chat_template.jinja`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import tokenizers

from om_models.chat import with_tokens
from om_models.tokenizer import TokenizerError, TokenizerSource, read_library


def tokenizer_from_hf(directory: Path) -> TokenizerSource:
    """Read the tokenizer of a checkpoint.

    Raises:
        TokenizerError: there is no `tokenizer.json`, or one of the files is damaged.
    """
    path = directory / "tokenizer.json"
    if not path.is_file():
        raise TokenizerError(
            f"{directory} has no tokenizer.json; make one with transformers: "
            f"AutoTokenizer.from_pretrained({str(directory)!r}).save_pretrained({str(directory)!r})"
        )
    library = read_library(path)
    library.no_padding()
    library.no_truncation()
    config = _read_json(directory / "tokenizer_config.json")
    return TokenizerSource(
        library=library,
        bos_token_id=_bos_token_id(library, config),
        eos_token_ids=_eos_token_ids(library, config, directory),
        chat_template=_chat_template(config, directory),
    )


def _read_json(path: Path) -> dict[str, Any]:
    """The object in the file; empty if there is no file."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise TokenizerError(f"cannot read {path}: {error}") from error
    if not isinstance(value, dict):
        raise TokenizerError(f"{path} does not hold a JSON object")
    return value


def _bos_token_id(library: tokenizers.Tokenizer, config: dict[str, Any]) -> int | None:
    """BOS if a prompt gets one: by the explicit flag, else by what `tokenizer.json` itself adds."""
    bos = _token_id(library, config.get("bos_token"))
    adds_bos = config.get("add_bos_token")
    if adds_bos is not None:
        return bos if adds_bos else None
    first = library.encode("", add_special_tokens=True).ids[:1]
    if not first or (bos is not None and first[0] != bos):
        return None
    ends = _token_id(library, config.get("eos_token"))
    return None if bos is None and first[0] == ends else first[0]


def _eos_token_ids(
    library: tokenizers.Tokenizer, config: dict[str, Any], directory: Path
) -> tuple[int, ...]:
    """The tokenizer's own EOS first, then what the other files add; each once."""
    keys = ("eos_token", "eot_token", "eom_token")
    found = [_token_id(library, config.get(key)) for key in keys]
    for name in ("generation_config.json", "config.json"):
        value = _read_json(directory / name).get("eos_token_id")
        ids = value if isinstance(value, list) else [value]
        if value is not None and not all(isinstance(i, int) for i in ids):
            raise TokenizerError(f"{directory / name}: eos_token_id is {value!r}, not token ids")
        found.extend(ids)
    return tuple(dict.fromkeys(i for i in found if i is not None))


def _token_id(library: tokenizers.Tokenizer, token: Any) -> int | None:
    """Id of a token as `tokenizer_config.json` writes it: its text, or an object with `content`."""
    text = _token_text(token)
    return None if text is None else library.token_to_id(text)


def _token_text(token: Any) -> str | None:
    text = token.get("content") if isinstance(token, dict) else token
    return text if isinstance(text, str) else None


def _chat_template(config: dict[str, Any], directory: Path) -> str | None:
    source = _template_source(config, directory)
    if source is None:
        return None
    tokens = {name: _token_text(config.get(name)) for name in ("bos_token", "eos_token")}
    return with_tokens(source, **tokens)


def _template_source(config: dict[str, Any], directory: Path) -> str | None:
    """The template file if there is one, else the entry of the configuration.

    An entry with several named templates gives the one called `default`.
    """
    path = directory / "chat_template.jinja"
    if path.is_file():
        try:
            return path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise TokenizerError(f"cannot read {path}: {error}") from error
    entry = config.get("chat_template")
    if isinstance(entry, list):
        named = {item.get("name"): item.get("template") for item in entry if isinstance(item, dict)}
        entry = named.get("default")
    return entry if isinstance(entry, str) else None
