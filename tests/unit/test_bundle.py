"""Bundles are written whole or not at all, and damage is found before use."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from om_models.bundle import (
    TOKENIZER_NAME,
    Bundle,
    bundle_digest,
    load_bundle,
    seal,
)
from om_models.manifest import FORMAT, MANIFEST_NAME, Gear, KvSpec, Manifest, OmFile
from om_models.staging import staged_directory
from runtime_cache.errors import BundleError
from tests.support.tiny import BASE_SPEC, tiny_spec

KV = KvSpec(dtype="float32", num_slots=128, num_groups=1, layers_per_group=2, row_elements=16)
DRAFT = Manifest(
    format=FORMAT,
    name="tiny",
    digest="ab" * 32,
    target="sim",
    soc_version="Ascend310P3",
    layout="fused",
    dtype="float32",
    index_dtype="int32",
    model=BASE_SPEC,
    kv=KV,
    oms=(OmFile(path="model.om", prefill=(Gear(1, 8, 64),), decode=(Gear(1, 1, 64),)),),
    bos_token_id=256,
    eos_token_ids=(257,),
    chat_template=None,
    files={},
    made_by={"runtime-cache": "0"},
)


def write(output: Path, om: bytes = b"compiled") -> Bundle:
    with staged_directory(output, MANIFEST_NAME) as staging:
        (staging / "model.om").write_bytes(om)
        (staging / TOKENIZER_NAME).write_text("{}")
        manifest = seal(staging, DRAFT)
    return Bundle(output, manifest)


@pytest.fixture
def bundle(tmp_path: Path) -> Bundle:
    return write(tmp_path / "bundle")


def edit_manifest(bundle: Bundle, **changes: Any) -> None:
    path = bundle.path / MANIFEST_NAME
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


# --- writing --------------------------------------------------------------------------------------


def test_what_is_written_is_what_is_loaded(bundle: Bundle):
    loaded = load_bundle(bundle.path)
    assert loaded == bundle
    assert msgspec.structs.replace(loaded.manifest, files={}) == DRAFT
    assert {name: entry.num_bytes for name, entry in loaded.manifest.files.items()} == {
        "model.om": 8,
        "tokenizer.json": 2,
    }


# --- loading --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["model.om", "tokenizer.json"])
def test_every_flipped_byte_is_found(bundle: Bundle, name: str):
    path = bundle.path / name
    whole = path.read_bytes()
    for index in range(len(whole)):
        path.write_bytes(whole[:index] + bytes([whole[index] ^ 1]) + whole[index + 1 :])
        with pytest.raises(BundleError, match=f"{name} is damaged: its checksum differs"):
            load_bundle(bundle.path)
        assert load_bundle(bundle.path, verify=False) == bundle


@pytest.mark.parametrize("verify", [True, False])
def test_a_file_of_another_size_is_found_at_once(bundle: Bundle, verify: bool):
    (bundle.path / "model.om").write_bytes(b"compile")
    with pytest.raises(BundleError, match=r"model\.om has 7 bytes, the manifest says 8"):
        load_bundle(bundle.path, verify=verify)


def test_a_missing_file(bundle: Bundle):
    (bundle.path / "model.om").unlink()
    with pytest.raises(BundleError, match=r"model\.om is missing: No such file"):
        load_bundle(bundle.path)


def test_no_bundle_at_all(tmp_path: Path):
    with pytest.raises(BundleError, match="is not a bundle: no such directory"):
        load_bundle(tmp_path / "nothing")
    with pytest.raises(BundleError, match=r"is not a bundle: cannot read manifest\.json"):
        load_bundle(tmp_path)


@pytest.mark.parametrize(
    ("found", "message"),
    [
        (FORMAT + 1, "has bundle format 3, newer than 2; convert it again"),
        (FORMAT - 1, "has bundle format 1, older than 2; convert it again"),
    ],
)
def test_another_format(bundle: Bundle, found: int, message: str):
    # A newer manifest may well have fields that this program does not know.
    edit_manifest(bundle, format=found, new_field=1)
    with pytest.raises(BundleError, match=message):
        load_bundle(bundle.path)


@pytest.mark.parametrize("text", ["", "{", "[]", '{"format": 2}', '{"format": "1"}'])
def test_a_damaged_manifest(bundle: Bundle, text: str):
    (bundle.path / MANIFEST_NAME).write_text(text)
    with pytest.raises(BundleError, match=r"manifest\.json is damaged"):
        load_bundle(bundle.path)


def test_an_unknown_field_is_named(bundle: Bundle):
    edit_manifest(bundle, gaers=[])
    with pytest.raises(BundleError, match="unknown field `gaers`"):
        load_bundle(bundle.path)


@pytest.mark.parametrize("name", ["../x", "/etc/passwd", "a/../../x"])
def test_a_manifest_cannot_name_files_outside(bundle: Bundle, name: str):
    entry = {"num_bytes": 1, "sha256": ""}
    edit_manifest(bundle, files={name: entry})
    with pytest.raises(BundleError, match="outside the bundle"):
        load_bundle(bundle.path)


def test_a_file_without_checksum_is_not_used(bundle: Bundle):
    edit_manifest(bundle, files={"tokenizer.json": {"num_bytes": 2, "sha256": "0"}})
    with pytest.raises(BundleError, match=r"no checksum for model\.om"):
        load_bundle(bundle.path)


def test_verification_reports_its_progress(bundle: Bundle):
    calls: list[tuple[int, int]] = []
    load_bundle(bundle.path, progress=lambda done, total: calls.append((done, total)))
    assert calls == [(8, 10), (10, 10)]


# --- identity -------------------------------------------------------------------------------------


def test_the_digest_never_changes():
    assert bundle_digest("00" * 32, BASE_SPEC, KV) == GOLDEN_DIGEST


def test_the_digest_covers_weights_model_and_kv_layout():
    changed = [
        bundle_digest("01" * 32, BASE_SPEC, KV),
        bundle_digest("00" * 32, tiny_spec(rms_eps=1e-6), KV),
        bundle_digest("00" * 32, tiny_spec(rope_theta=1e6), KV),
        *(
            bundle_digest("00" * 32, BASE_SPEC, msgspec.structs.replace(KV, **change))
            for change in (
                {"dtype": "float16"},
                {"row_elements": 32},
                {"num_groups": 2, "layers_per_group": 1},
            )
        ),
    ]
    assert len({GOLDEN_DIGEST, *changed}) == 7


def test_the_digest_does_not_cover_the_capacity():
    larger = msgspec.structs.replace(KV, num_slots=256)
    assert bundle_digest("00" * 32, BASE_SPEC, larger) == GOLDEN_DIGEST


GOLDEN_DIGEST = "8ae3220684cc0fafc0e35a1664fa9f6905e814e6fce6e41f788009b70ade3062"
