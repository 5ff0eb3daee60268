"""Digests are golden, stable, and computed once a block."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtime_cache.cache import hashing
from runtime_cache.cache.hashing import HashChain, common_tokens, next_digest, root_digest
from runtime_cache.ids import BlockHash

GOLDEN = json.loads((Path(__file__).parents[1] / "golden" / "prefix_digests.json").read_text())


def pack(*tokens: int) -> bytes:
    """Token ids as the index has them."""
    return np.array(tokens, dtype="<i4").tobytes()


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
    assert [digest.hex() for digest in chain.digests] == GOLDEN["chain"]["digests"]
    assert chain.block(1) == bytes.fromhex("0500000006000000ffff010000000000")
    assert chain.packed == pack(*GOLDEN["chain"]["tokens"])


def test_a_partly_filled_block_is_golden() -> None:
    chain = golden_chain()
    chain.extend(np.array(GOLDEN["chain"]["tokens"], dtype=np.int32))
    digest = next_digest(chain.digest_before(2), chain.block(2))
    assert digest.hex() == GOLDEN["chain"]["tail_digest"]


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
    ("num_tokens", "num_digests"), [(0, 0), (3, 0), (4, 1), (5, 1), (7, 1), (8, 2), (9, 2)]
)
def test_only_full_blocks_have_digests(num_tokens: int, num_digests: int) -> None:
    chain = golden_chain()
    chain.extend(np.arange(num_tokens, dtype=np.int32))
    assert (chain.num_tokens, len(chain.digests)) == (num_tokens, num_digests)


def test_growing_token_by_token_gives_the_same_chain() -> None:
    tokens = np.arange(13, dtype=np.int32)
    whole, grown = golden_chain(), golden_chain()
    whole.extend(tokens)
    for end in range(14):
        grown.extend(tokens[:end])
    assert (grown.digests, grown.packed) == (whole.digests, whole.packed)


def test_tokens_that_were_taken_in_are_not_read_again() -> None:
    chain = golden_chain()
    chain.extend(np.arange(6, dtype=np.int32))
    chain.extend(np.array([99, 99, 99, 99, 99, 99, 6, 7], dtype=np.int32))
    assert chain.packed == pack(*range(8))
    chain.extend(np.arange(3, dtype=np.int32))
    assert chain.packed == pack(*range(8))


def test_each_block_is_hashed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    hashed: list[bytes] = []

    def counting(data: bytes) -> object:
        hashed.append(data)
        return hashlib.sha256(data)

    monkeypatch.setattr(hashing, "sha256", counting)
    chain = golden_chain()
    for end in (5, 9, 9, 12):
        chain.extend(np.arange(end, dtype=np.int32))
    parents = [chain.root, *chain.digests[:2]]
    assert hashed == [parent + chain.block(i) for i, parent in enumerate(parents)]


def test_a_digest_depends_on_everything_before_it() -> None:
    one, other = golden_chain(), golden_chain()
    one.extend(np.array([1, 2, 3, 4, 5, 6, 7, 8], dtype=np.int32))
    other.extend(np.array([0, 2, 3, 4, 5, 6, 7, 8], dtype=np.int32))
    assert one.block(1) == other.block(1)
    assert one.digests[1] != other.digests[1]


def test_fields_of_the_root_cannot_run_into_each_other() -> None:
    digests = {
        root_digest(bundle_digest=b"ab", block_size=4, adapter="c", tenant_salt=b"d"),
        root_digest(bundle_digest=b"a", block_size=4, adapter="bc", tenant_salt=b"d"),
        root_digest(bundle_digest=b"ab", block_size=4, adapter="cd", tenant_salt=b""),
        root_digest(bundle_digest=b"ab", block_size=4, adapter="", tenant_salt=b"cd"),
        root_digest(bundle_digest=b"ab", block_size=8, adapter="c", tenant_salt=b"d"),
    }
    assert len(digests) == 5


@pytest.mark.parametrize(
    ("position", "end", "tokens"),
    [
        (0, None, (0, 1, 2, 3)),
        (1, None, (4, 5)),
        (2, None, ()),
        (0, 0, ()),
        (0, 3, (0, 1, 2)),
        (0, 4, (0, 1, 2, 3)),
        (0, 5, (0, 1, 2, 3)),
        (1, 4, ()),
        (1, 5, (4,)),
        (1, 9, (4, 5)),
    ],
)
def test_a_block_is_cut_out(position: int, end: int | None, tokens: tuple[int, ...]) -> None:
    chain = golden_chain()
    chain.extend(np.arange(6, dtype=np.int32))
    assert chain.block(position, end) == pack(*tokens)


def test_before_the_first_block_is_the_root() -> None:
    chain = golden_chain()
    chain.extend(np.arange(9, dtype=np.int32))
    assert chain.digest_before(0) == chain.root
    assert [chain.digest_before(i) for i in (1, 2)] == chain.digests


@pytest.mark.parametrize(
    ("one", "other", "num_common"),
    [
        ((), (), 0),
        ((1,), (), 0),
        ((1, 2, 3), (1, 2, 3), 3),
        ((1, 2), (1, 2, 3), 2),
        ((1, 2, 4), (1, 2, 3), 2),
        ((0, 2, 3), (1, 2, 3), 0),
        ((0, 0, 0), (0, 0, 1 << 24), 2),  # only the last byte differs
        ((131071,), (131070,), 0),
    ],
)
def test_tokens_in_common(one: tuple[int, ...], other: tuple[int, ...], num_common: int) -> None:
    assert common_tokens(pack(*one), pack(*other)) == num_common
    assert common_tokens(pack(*other), pack(*one)) == num_common


#: Tokens that differ in one byte only.
near = st.lists(st.sampled_from([0, 1, 256, 1 << 16, 1 << 24]), max_size=6)


@given(near, near)
def test_tokens_in_common_are_those_of_a_loop(one: list[int], other: list[int]) -> None:
    num_common = 0
    while one[: num_common + 1] == other[: num_common + 1] and num_common < len(one):
        num_common += 1
    assert common_tokens(pack(*one), pack(*other)) == num_common
