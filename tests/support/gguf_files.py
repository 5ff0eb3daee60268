"""GGUF files that hold a tokenizer and nothing else."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = (int(kind) for kind in gguf.TokenType)


def write_gguf_tokenizer(path: Path, **values: Any) -> Path:
    """Write `tokenizer.ggml.<name>` for each value; `chat_template` goes to its own key."""
    writer = gguf.GGUFWriter(path, "llama")
    for name, value in values.items():
        key = "tokenizer.chat_template" if name == "chat_template" else f"tokenizer.ggml.{name}"
        match value:
            case bool():
                writer.add_bool(key, value)
            case int():
                writer.add_uint32(key, value)
            case str():
                writer.add_string(key, value)
            case _:
                writer.add_array(key, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path
