"""Digests under attack and under other circumstances: nothing collides, nothing differs.

The numbers in brackets are those of the reports in facts/peers.md (d) that a test answers.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest

from runtime_cache.cache import hashing, invariants
from runtime_cache.cache.hashing import HashChain, next_digest, root_digest
from runtime_cache.ids import BlockHash
from tests.support.caching import (
    BLOCK_SIZE,
    ROOT,
    admitted,
    chain_of,
    gauges,
    make_manager,
    num_cached,
    serve,
)

GOLDEN = json.loads((Path(__file__).parents[1] / "golden" / "prefix_digests.json").read_text())


# -- pairs that weak hashes take for the same -----------------------------------------------------


def polynomial(tokens: Sequence[int], base: int, modulus: int) -> int:
    """The hash that sums tokens, weighted by powers of the base."""
    value = 0
    for token in tokens:
        value = (value * base + token) % modulus
    return value


def thue_morse(num_tokens: int, *, first: int) -> list[int]:
    """1 where the number of ones in the position is odd: the pair collides modulo 2^64."""
    return [first ^ (position.bit_count() & 1) for position in range(num_tokens)]


@pytest.mark.parametrize("base", [3, 31, 257, 131, 0x100000001B3])
def test_pairs_that_collide_modulo_a_power_of_two(base: int) -> None:
    """[18]: whatever odd base a polynomial hash modulo 2^64 has."""
    one, other = thue_morse(2048, first=0), thue_morse(2048, first=1)
    assert polynomial(one, base, 2**64) == polynomial(other, base, 2**64)
    check_strangers(one, other)


@pytest.mark.parametrize(("base", "modulus"), [(31, 2**31 - 1), (131, 10**9 + 7)])
def test_pairs_that_collide_modulo_a_prime(base: int, modulus: int) -> None:
    """[18]: a token more in one place is paid for in the next ones."""
    one = [1000, 500, 1000, 1000, *range(8)]
    other = [1001, 500 - base, 1000, 1000, *range(8)]
    assert polynomial(one, base, modulus) == polynomial(other, base, modulus)
    check_strangers(one, other)


def test_pairs_that_only_their_order_tells_apart() -> None:
    """[18]: as for a hash that adds or xors."""
    check_strangers([1, 2, 3, 4, 5, 6, 7, 8], [5, 6, 7, 8, 1, 2, 3, 4])
    check_strangers([9, 9, 9, 9, 7, 7, 7, 7], [7, 7, 7, 7, 9, 9, 9, 9])


def check_strangers(one: Sequence[int], other: Sequence[int]) -> None:
    """No digest of one sequence is the other's, and neither is a hit for the other."""
    assert list(one) != list(other)
    assert not set(chain_of(one).digests) & set(chain_of(other).digests)
    common = next(i for i, (a, b) in enumerate(zip(one, other, strict=True)) if a != b)
    cache = make_manager(2 * len(one) // BLOCK_SIZE + 2)
    serve(cache, one)
    assert num_cached(cache, other) == common
    serve(cache, other)
    assert (num_cached(cache, one), num_cached(cache, other)) == (len(one), len(other))
    assert cache.counters.collisions == 0
    invariants.check(cache, [])


class Digest:
    """A hash function made of a changed SHA-256."""

    def __init__(self, change: Callable[[bytes], bytes]) -> None:
        self._change = change
        self._value = b""

    def __call__(self, data: bytes) -> Digest:
        made = Digest(self._change)
        made._value = self._change(hashlib.sha256(data).digest())
        return made

    def digest(self) -> bytes:
        return self._value


@pytest.mark.parametrize("kept", [slice(0, 8), slice(24, 32)], ids=["first 8 bytes", "last 8"])
def test_digests_whose_64_bits_are_the_same(monkeypatch: pytest.MonkeyPatch, kept: slice) -> None:
    """[18]: nothing looks at a part of a digest, at either end of it."""

    def alike(digest: bytes) -> bytes:
        changed = bytearray(digest)
        changed[kept] = bytes(8)
        return bytes(changed)

    monkeypatch.setattr(hashing, "sha256", Digest(alike))
    cache = make_manager(40)
    prompts = [[*range(start, start + 9)] for start in (0, 100, 200)]
    for prompt in prompts:
        assert num_cached(cache, prompt) == 0
        serve(cache, prompt)
    assert [num_cached(cache, prompt) for prompt in prompts] == [9, 9, 9]
    assert cache.counters.collisions == 0
    assert len({node.digest[kept] for node in cache.index}) == 1


def test_one_digest_for_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    """[18]: a collision forced at every block: a miss and a count, never another's rows."""
    monkeypatch.setattr(hashing, "sha256", Digest(lambda digest: bytes(32)))
    cache = make_manager(20)
    serve(cache, range(4))
    # The fourth token of a block is compared, like the others.
    for tokens, common in (([0, 1, 2, 9], 3), ([9, 1, 2, 3], 0), ([7, 7, 7, 7, 7], 0)):
        table = admitted(cache, [*tokens, 50])
        assert table.num_hit_tokens == common
        cache.release(table)
    before = cache.counters.collisions
    serve(cache, range(20, 29))
    assert cache.counters.collisions == before + 1
    assert (num_cached(cache, range(20, 29)), num_cached(cache, range(4))) == (0, 4)
    assert gauges(cache)[0] == 0


# -- the same everywhere ------------------------------------------------------------------------

TOKENS: list[int] = GOLDEN["chain"]["tokens"]


def golden_digests(tokens: np.ndarray[tuple[int], np.dtype[np.int32]]) -> list[str]:
    root = BlockHash(bytes.fromhex(GOLDEN["chain"]["root"]))
    chain = HashChain(root, GOLDEN["chain"]["block_size"])
    chain.extend(tokens)
    tail = next_digest(chain.digest_before(len(chain.digests)), chain.block(len(chain.digests)))
    return [digest.hex() for digest in (*chain.digests, tail)]


@pytest.mark.parametrize("dtype", ["<i4", ">i4", "<i8", ">i8", "<u4", ">u2", None])
def test_the_type_of_the_array_does_not_matter(dtype: str | None) -> None:
    """[22]: int32, int64, a list; in either order of bytes."""
    tokens = [token % 65_536 for token in TOKENS]
    assert golden_digests(np.array(tokens, dtype)) == golden_digests(np.array(tokens, np.int32))
    if dtype is None or np.dtype(dtype).itemsize > 2:
        expected = [*GOLDEN["chain"]["digests"], GOLDEN["chain"]["tail_digest"]]
        assert golden_digests(np.array(TOKENS, dtype)) == expected


def test_neither_the_stride_nor_the_order_in_memory_matters() -> None:
    """[22]: a view of something larger has the digests of its tokens."""
    spread = np.repeat(np.array(TOKENS, dtype=np.int32), 3)
    assert golden_digests(spread[::3]) == golden_digests(np.array(TOKENS, dtype=np.int32))
    backwards = np.array(TOKENS[::-1], dtype=np.int32)
    assert golden_digests(backwards[::-1]) == golden_digests(np.array(TOKENS, dtype=np.int32))


PROGRAM = """
import json, sys
import numpy as np
from runtime_cache.cache.hashing import HashChain, root_digest
tokens = np.array(json.loads(sys.argv[1]))
root = root_digest(bundle_digest=bytes(range(32)), block_size=4, adapter="a", tenant_salt=b"s")
chain = HashChain(root, 4)
chain.extend(tokens)
print(hash("a"), *(digest.hex() for digest in chain.digests))
"""


def test_processes_that_hash_differently_agree() -> None:
    """[22]: two values of PYTHONHASHSEED, under which Python's own hashes do differ."""
    found = []
    for seed in ("1", "2"):
        environment = os.environ | {"PYTHONHASHSEED": seed}
        command = [sys.executable, "-c", PROGRAM, json.dumps(TOKENS)]
        ended = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
        found.append(ended.stdout.split())
    assert found[0][0] != found[1][0]
    root = root_digest(bundle_digest=bytes(range(32)), block_size=4, adapter="a", tenant_salt=b"s")
    here = HashChain(root, 4)
    here.extend(np.array(TOKENS, dtype=np.int32))
    assert found[0][1:] == found[1][1:] == [digest.hex() for digest in here.digests]
    assert root != ROOT
