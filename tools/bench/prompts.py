"""Prompts of the benchmarks, and the least that must be computed for them. Pure.

Every user of a service sends the same system prompt and then something of their own.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Prompts = npt.NDArray[np.int32]


def shared_prompts(
    num_prompts: int, *, num_shared: int, num_own: int, vocab_size: int, seed: int
) -> Prompts:
    """Prompts with a common beginning and random ends.

    Returns:
        Token ids [num_prompts, num_shared + num_own].
    """
    random = np.random.default_rng(seed)
    prompts = random.integers(0, vocab_size, (num_prompts, num_shared + num_own), dtype=np.int32)
    prompts[:, :num_shared] = prompts[0, :num_shared]
    return prompts


def floor_tokens(num_prompts: int, *, num_shared: int, num_own: int) -> int:
    """Tokens to compute if the common beginning is computed once and every end is unlike."""
    return num_shared + num_prompts * num_own


def exact_floor_tokens(prompts: Prompts) -> int:
    """The fewest tokens that can be computed for exactly these prompts, in any order.

    One for each distinct beginning (a node of the token trie), and one for each prompt that was
    there before: at least its last token is computed.
    """
    distinct, lengths = _distinct(prompts)
    num_nodes = distinct.size - int(lengths.sum())
    return num_nodes + len(prompts) - len(distinct)


def num_cached_blocks(prompts: Prompts, block_size: int) -> int:
    """Blocks that hold the KV of all of them, if no beginning is held twice.

    A block that is filled in part counts as a whole one.
    """
    _, lengths = _distinct(prompts)
    num_tokens = prompts.shape[1]
    ends = [min(end, num_tokens) for end in range(block_size, num_tokens + block_size, block_size)]
    return sum(1 + int((lengths < end).sum()) for end in ends)


def _distinct(prompts: Prompts) -> tuple[Prompts, npt.NDArray[np.int64]]:
    """The distinct prompts in order, and what each has in common with the one before it [tokens].

    In this order no earlier one has more in common with it than the one just before.
    """
    rows = sorted({row.tobytes() for row in prompts})
    distinct = np.frombuffer(b"".join(rows), dtype=np.int32).reshape(len(rows), -1)
    differs = distinct[1:] != distinct[:-1]
    return distinct, differs.argmax(axis=1)
