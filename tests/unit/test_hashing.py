"""Digests are golden, stable, and computed once a block."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from runtime_cache.cache import hashing
from runtime_cache.cache.hashing import BlockKey, HashChain, next_digest, root_digest
from runtime_cache.ids import BlockHash

GOLDEN = json.loads((Path(__file__).parents[1] / "golden" / "prefix_digests.json").read_text())


@pytest.mark.parametrize("vector", GOLDEN["roots"])
def test_root_digests_are_golden(vector: dict[str, object]) -> None:
    digest = root_digest(
        bundle_digest=bytes.fromhex(str(vector["bundle_digest"])),
        block_size=int(str(vector["block_size"])),
        adapter=str(vector["adapter"]),
        tenant_salt=bytes.fromhex(str(vector["tenant_salt"])),
    )
    assert digest.hex() == vector["digest"]


def golden_chain() -> HashChain:
    return HashChain(
        BlockHash(bytes.fromhex(GOLDEN["chain"]["root"])), GOLDEN["chain"]["block_size"]
    )


def test_block_digests_are_golden() -> None:
    chain = golden_chain()
    chain.extend(np.array(GOLDEN["chain"]["tokens"], dtype=np.int32))
    assert [key.digest.hex() for key in chain.keys] == GOLDEN["chain"]["digests"]
    assert chain.keys[1].tokens == bytes.fromhex("0500000006000000ffff010000000000")


def test_digests_are_the_same_in_another_process() -> None:
    code = (
        "from runtime_cache.cache.hashing import root_digest;"
        "print(root_digest(bundle_digest=b'\\x11' * 32, block_size=4).hex())"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert result.stdout.strip() == GOLDEN["roots"][0]["digest"]


@pytest.mark.parametrize(
    ("num_tokens", "num_keys"), [(0, 0), (3, 0), (4, 1), (5, 1), (7, 1), (8, 2), (9, 2)]
)
def test_only_full_blocks_have_keys(num_tokens: int, num_keys: int) -> None:
    chain = golden_chain()
    chain.extend(np.arange(num_tokens, dtype=np.int32))
    assert len(chain.keys) == num_keys


def test_growing_token_by_token_gives_the_same_keys() -> None:
    tokens = np.arange(13, dtype=np.int32)
    whole, grown = golden_chain(), golden_chain()
    whole.extend(tokens)
    for end in range(14):
        grown.extend(tokens[:end])
    assert grown.keys == whole.keys


def test_each_block_is_hashed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    hashed: list[bytes] = []

    def counting(parent: BlockHash, tokens: bytes) -> BlockHash:
        hashed.append(tokens)
        return next_digest(parent, tokens)

    monkeypatch.setattr(hashing, "next_digest", counting)
    chain = golden_chain()
    for end in (5, 9, 9, 12):
        chain.extend(np.arange(end, dtype=np.int32))
    assert hashed == [key.tokens for key in chain.keys]
    assert len(hashed) == 3


def test_a_digest_depends_on_everything_before_it() -> None:
    one, other = golden_chain(), golden_chain()
    one.extend(np.array([1, 2, 3, 4, 5, 6, 7, 8], dtype=np.int32))
    other.extend(np.array([0, 2, 3, 4, 5, 6, 7, 8], dtype=np.int32))
    assert one.keys[1].tokens == other.keys[1].tokens
    assert one.keys[1].digest != other.keys[1].digest


def test_fields_of_the_root_cannot_run_into_each_other() -> None:
    digests = {
        root_digest(bundle_digest=b"ab", block_size=4, adapter="c", tenant_salt=b"d"),
        root_digest(bundle_digest=b"a", block_size=4, adapter="bc", tenant_salt=b"d"),
        root_digest(bundle_digest=b"ab", block_size=4, adapter="cd", tenant_salt=b""),
        root_digest(bundle_digest=b"ab", block_size=4, adapter="", tenant_salt=b"cd"),
        root_digest(bundle_digest=b"ab", block_size=8, adapter="c", tenant_salt=b"d"),
    }
    assert len(digests) == 5


def test_keys_compare_by_value() -> None:
    assert BlockKey(BlockHash(b"d"), b"t") == BlockKey(BlockHash(b"d"), b"t")
