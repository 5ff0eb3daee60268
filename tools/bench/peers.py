"""What others do to find a cached prefix, written small, for comparison. Pure.

Both are given their tokens in the form they keep them in. Both only look: what a hit then costs
(tables of slots, holds, times of last use) is left out, which favours them.
"""

from __future__ import annotations

import hashlib
import pickle
from array import array
from collections.abc import Sequence
from typing import NamedTuple


class BlockMap:
    """Digest → block for every full block: what vLLM does by default.

    A block has 16 tokens; its digest is SHA-256 over the pickled triple (parent's digest, tuple of
    the tokens, extra keys). A hit is believed without comparing tokens.
    Source: vLLM, v1/core/kv_cache_utils.py, `hash_block_tokens` and `sha256`.
    """

    block_size = 16
    _ROOT = bytes(32)

    def __init__(self) -> None:
        self._blocks: dict[bytes, int] = {}

    def insert(self, tokens: Sequence[int]) -> None:
        """Cache all full blocks of a prompt."""
        for digest in self._digests(tokens):
            self._blocks.setdefault(digest, len(self._blocks))

    def match(self, tokens: Sequence[int]) -> int:
        """Length of the longest cached prefix [tokens]."""
        num_blocks = 0
        for digest in self._digests(tokens):
            if digest not in self._blocks:
                break
            num_blocks += 1
        return num_blocks * self.block_size

    def _digests(self, tokens: Sequence[int]) -> list[bytes]:
        digests = []
        parent = self._ROOT
        size = self.block_size
        for start in range(0, len(tokens) - size + 1, size):
            triple = (parent, tuple(tokens[start : start + size]), None)
            pickled = pickle.dumps(triple, protocol=pickle.HIGHEST_PROTOCOL)
            parent = hashlib.sha256(pickled).digest()
            digests.append(parent)
        return digests


class _Node:
    """A run of tokens, and what follows it by first token."""

    __slots__ = ("children", "tokens")

    def __init__(self, tokens: array[int]) -> None:
        self.tokens = tokens
        self.children: dict[int, _Node] = {}


class RadixTree:
    """A compressed token trie: what SGLang does at page size 1.

    Runs are compared by doubling windows and halving in the one that differs; a match that ends
    inside a node splits it.
    Source: SGLang, srt/mem_cache/radix_cache.py, `RadixKey.match` and `_match_prefix_helper`.
    """

    def __init__(self) -> None:
        self._root = _Node(array("q"))

    def insert(self, tokens: array[int]) -> None:
        """Cache a prompt."""
        found = self._walk(tokens)
        rest = tokens[found.num_tokens :]
        if rest:
            found.node.children[rest[0]] = _Node(rest)

    def match(self, tokens: array[int]) -> int:
        """Length of the longest cached prefix [tokens]."""
        return self._walk(tokens).num_tokens

    def _walk(self, tokens: array[int]) -> _Found:
        node, num_tokens = self._root, 0
        while tokens and (child := node.children.get(tokens[0])) is not None:
            length = common_length(child.tokens, tokens)
            num_tokens += length
            if length < len(child.tokens):
                return _Found(_split(node, child, length), num_tokens)
            node, tokens = child, tokens[length:]
        return _Found(node, num_tokens)


class _Found(NamedTuple):
    """Where a match ends."""

    node: _Node
    num_tokens: int


def _split(parent: _Node, child: _Node, length: int) -> _Node:
    """Cut a node in two; returns the upper one."""
    upper = _Node(child.tokens[:length])
    child.tokens = child.tokens[length:]
    upper.children[child.tokens[0]] = child
    parent.children[upper.tokens[0]] = upper
    return upper


def common_length(one: array[int], other: array[int]) -> int:
    """How many tokens two runs have in common at their beginning."""
    num_tokens = min(len(one), len(other))
    low, step = 0, 1
    while low < num_tokens:
        high = min(low + step, num_tokens)
        if one[low:high] != other[low:high]:
            return _first_difference(one, other, low, high)
        low, step = high, step * 2
    return num_tokens


def _first_difference(one: array[int], other: array[int], low: int, high: int) -> int:
    """Where they differ first; they do within [low, high)."""
    while high - low > 1:
        middle = (low + high) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle
    return low
