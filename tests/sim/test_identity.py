"""What a bundle's KV is known by: other weights or another KV type at the same path is a miss.

[5, 15] of facts/peers.md (d). That the digest of a bundle covers weights, constants, KV type and
layout is shown by `test_bundle` and `test_convert`; here, that nothing is found under another one.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest

from om_models.bundle import Bundle
from runtime_cache.cache.hashing import HashChain
from runtime_cache.errors import BundleError
from runtime_cache.runtime import Runtime
from tests.support.served import (
    Comparison,
    Served,
    config_for,
    oracle,
    random_prompt,
    served,
)
from tests.support.tiny import make_bundle, tiny_reference

pytestmark = pytest.mark.asyncio(loop_factories=["uvloop"])

#: Ten blocks and one token.
PROMPT = random_prompt(1, 41)
NUM_TOKENS = 6


def chain_of(host: Served) -> HashChain:
    """The prompt's digests as the daemon of this bundle has them."""
    chain = host.runtime.cache.new_chain()
    chain.extend(np.array(PROMPT, dtype=np.int32))
    return chain


async def store_and_find(host: Served) -> HashChain:
    """Cold, then a hit, under the digests of this bundle."""
    assert (await host.greedy(PROMPT, NUM_TOKENS)).cached == 0
    assert (await host.greedy(PROMPT, NUM_TOKENS)).cached == 40
    chain = chain_of(host)
    assert all(host.runtime.cache.index.get(digest) for digest in chain.digests)
    return chain


async def test_other_weights_at_the_same_path(tmp_path: Path) -> None:
    comparison = Comparison()
    chains = []
    for seed in (0, 1, 0):
        bundle = make_bundle(tmp_path, seed=seed)
        async with served(bundle) as host:
            # Cold, whatever the daemon before it had cached; and right for the new weights.
            first = await host.greedy(PROMPT, NUM_TOKENS)
            assert first.cached == 0
            assert first.prefilled == len(PROMPT)
            reference = tiny_reference(seed=seed)
            comparison.check(first.token_ids, *oracle(reference, PROMPT, NUM_TOKENS))
            host.engine.evict(None)
            chains.append(await store_and_find(host))
            for other in chains[:-1]:
                is_same = other.digests == chains[-1].digests
                assert is_same == (len(chains) == 3 and other is chains[0])
                found = [host.runtime.cache.index.get(digest) for digest in other.digests]
                assert all(found) if is_same else not any(found)
        shutil.rmtree(bundle.path)
        shutil.rmtree(tmp_path / "checkpoint")


async def test_an_om_that_was_swapped_alone(tiny_bundle: Bundle, tmp_path: Path) -> None:
    """New bytes under the old manifest, which would give them the old digest: it does not start."""
    copy = Bundle(Path(shutil.copytree(tiny_bundle.path, tmp_path / "b")), tiny_bundle.manifest)
    path = copy.path / tiny_bundle.manifest.oms[0].path
    path.write_bytes(make_bundle(tmp_path, seed=1).path.joinpath(path.name).read_bytes())
    with pytest.raises(BundleError, match=rf"{path.name}.* (is damaged|has \d+ bytes)"):
        await Runtime.open(config_for(copy))


async def test_another_kv_type(tiny_bundle: Bundle, tiny_fp16_bundle: Bundle) -> None:
    """What was stored in one type is not found in the other: no digest is the same."""
    chains = []
    for bundle in (tiny_bundle, tiny_fp16_bundle):
        async with served(bundle) as host:
            chains.append(await store_and_find(host))
            index = host.runtime.cache.index
            found = [index.get(digest) for digest in chains[0].digests]
            assert all(found) if len(chains) == 1 else not any(found)
    types = [bundle.manifest.kv.dtype for bundle in (tiny_bundle, tiny_fp16_bundle)]
    assert types == ["float32", "float16"]
    assert not set(chains[0].digests) & set(chains[1].digests)
