"""`manifest.json`, the contract between a bundle and the daemon. Pure data.

A bundle is a directory: the compiled `.om` file(s), external weights in `weight/` beside them,
`tokenizer.json`, `manifest.json`. The manifest names every file with its size and SHA-256, and
carries all numbers the daemon needs, so that nothing is guessed from an `.om`.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

import msgspec

from om_models.spec import ModelSpec

FORMAT = 2
MANIFEST_NAME = "manifest.json"


class Gear(msgspec.Struct, frozen=True, order=True, forbid_unknown_fields=True):
    """One compiled shape.

    `batch` sequences, each fed `chunk` tokens, each attending to `past` slots of the KV pool.
    Prefill gears have batch 1, decode gears have chunk 1.

    Attributes:
        batch: sequences in the batch (B).
        chunk: tokens fed per sequence (S).
        past: past slots per sequence (P), at least 1: no dimension of a model may be 0.
    """

    batch: int
    chunk: int
    past: int


def longest_sequence(prefill: Iterable[Gear], decode: Iterable[Gear]) -> int:
    """The most tokens a sequence may have, prompt and answer together: `max_model_len` elsewhere.

    It is the largest `past` that both roles have a gear for. The last token of an answer is never
    fed, so the last fed token of the longest sequence has two tokens fewer before it.

    Args:
        prefill: at least one gear.
        decode: at least one gear.
    """
    return min(max(gear.past for gear in gears) for gears in (prefill, decode))


class OmFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One compiled model. Fused layout: one file for both roles; split: one file a role.

    Attributes:
        path: relative to the bundle.
        prefill: gears with batch 1; empty if the file does not serve prefill.
        decode: gears with chunk 1; empty if the file does not serve decode.
    """

    path: str
    prefill: tuple[Gear, ...]
    decode: tuple[Gear, ...]


class KvSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The KV pool the `.om` was compiled for (`docs/design.md`).

    Input `kv_pool_g` of group g has shape `[num_slots * 2 * layers_per_group, row_elements]`; row
    `slot * 2 * layers_per_group + 2 * layer_in_group` is K, the next one V.

    Attributes:
        num_slots: token slots compiled in, those of the null block included.
        num_groups: equal groups the layers are cut into; 1 for small models.
        row_elements: `kv_heads * head_dim`, padded so that a row is a multiple of 64 bytes.
    """

    dtype: Literal["float16", "float32"]
    num_slots: int
    num_groups: int
    layers_per_group: int
    row_elements: int


class FileEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Size [bytes] and SHA-256 [hex] of one file."""

    num_bytes: int
    sha256: str


class Manifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Everything the daemon knows of a bundle.

    Attributes:
        name: for people; the source's file or directory name.
        digest: identity of weights, KV type and layout [hex SHA-256]; the root of every prefix key.
        target: `ascend` for the card, `sim` for the software device.
        soc_version: what ATC was told.
        layout: `fused` or `split`.
        dtype: of weights and arithmetic outside the protected islands.
        bos_token_id: put before a text prompt; None if the model wants none.
        eos_token_ids: tokens that end an answer.
        chat_template: Jinja source, or None.
        files: every file of the bundle but the manifest, by relative path.
        made_by: versions of the tools that made it.
        mlp_scale: see `graph.GraphOptions`.
        atc_options: options of ATC beside those that follow from the model, by name.
    """

    format: int
    name: str
    digest: str
    target: Literal["ascend", "sim"]
    soc_version: str
    layout: Literal["fused", "split"]
    dtype: Literal["float16", "float32"]
    index_dtype: Literal["int32", "int64"]
    model: ModelSpec
    kv: KvSpec
    oms: tuple[OmFile, ...]
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    chat_template: str | None
    files: dict[str, FileEntry]
    made_by: dict[str, str]
    atc_options: dict[str, str] = {}
    mlp_scale: int = 1

    @property
    def prefill_gears(self) -> tuple[Gear, ...]:
        """Those of all files."""
        return tuple(gear for om in self.oms for gear in om.prefill)

    @property
    def decode_gears(self) -> tuple[Gear, ...]:
        """Those of all files."""
        return tuple(gear for om in self.oms for gear in om.decode)

    @property
    def max_model_len(self) -> int:
        """See `longest_sequence`."""
        return longest_sequence(self.prefill_gears, self.decode_gears)
