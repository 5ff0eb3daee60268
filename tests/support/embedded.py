"""A tiny Llama opened with the embedded API, blocks of four tokens, one token a byte."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import structlog
from safetensors.numpy import save_file

from om_models.convert import convert
from om_models.plan import ConvertOptions
from runtime_cache.aclsim import faults, inspect
from runtime_cache.llm import LLM, PrefixCachingConfig
from tests.support.tiny import (
    BYTE_VOCAB,
    EOS,
    Silent,
    random_weights,
    tiny_spec,
    write_checkpoint,
)

BLOCK = 4
#: Begins with `<s>` as the model's texts do; one line a turn.
TEMPLATE = (
    "<s>{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
#: Room for prompts of some hundred characters.
OPTIONS = ConvertOptions(
    target="sim", kv_tokens=4096, gears="prefill=32,128@128,768 decode=1,4@128,768"
)
_SPEC = tiny_spec(max_position=768)
#: Token ids of `!` to `~`, with which the vocabulary begins.
_PRINTABLE = range(94)
#: A greedy answer of four tokens, whatever they are.
FOUR = {"max_tokens": 4, "temperature": 0, "ignore_eos": True}


def make_talking_bundle(directory: Path) -> Path:
    """A tiny Llama with a chat template and a context of 768 tokens; takes three seconds."""
    return _convert(write_checkpoint(directory / "checkpoint", _SPEC), directory / "bundle")


def make_brief_bundle(directory: Path) -> Path:
    """The same, but its answers are a few printable characters: all other tokens end them."""
    checkpoint = write_checkpoint(directory / "checkpoint", _SPEC)
    weights = random_weights(_SPEC)
    weights["model.embed_tokens.weight"][_PRINTABLE] *= 2  # else most answers were empty
    save_file(weights, checkpoint / "model.safetensors")
    ends = [EOS, *sorted(set(range(BYTE_VOCAB)) - {*_PRINTABLE})]
    (checkpoint / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}), "utf-8")
    return _convert(checkpoint, directory / "bundle")


def _convert(checkpoint: Path, bundle: Path) -> Path:
    path = checkpoint / "tokenizer_config.json"
    settings = json.loads(path.read_text("utf-8")) | {"chat_template": TEMPLATE}
    path.write_text(json.dumps(settings), "utf-8")
    convert(str(checkpoint), bundle, OPTIONS, Silent())
    return bundle


def open_llm(bundle: Path, caching: PrefixCachingConfig | None = None, **options: object) -> LLM:
    """An LLM on the software device as it is; blocks of four tokens unless `caching` says."""
    caching = caching or PrefixCachingConfig(block_size=BLOCK)
    settings: dict[str, object] = {"sim_memory": "1GiB", "sim_threads": 1}
    return LLM(bundle, "sim:0", caching, **settings | options)


@contextmanager
def fresh_device() -> Iterator[None]:
    """A software device as in a fresh process; at the end nothing is left on it."""
    inspect.reset()
    try:
        yield
        report = inspect.report()
        assert report.num_alive == 0
        assert [text for text in report.misuses if "injected fault" not in text] == []
    finally:
        faults.clear()
        structlog.reset_defaults()


@contextmanager
def opened_llm(
    bundle: Path, caching: PrefixCachingConfig | None = None, **options: object
) -> Iterator[LLM]:
    """An LLM on a fresh device, closed at the end."""
    with fresh_device(), open_llm(bundle, caching, **options) as llm:
        yield llm


def pool_of(llm: LLM) -> dict[str, int]:
    """The pool's gauges."""
    pool: dict[str, int] = llm.stats()["pool"]
    return pool
