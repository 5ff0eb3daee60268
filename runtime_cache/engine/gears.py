"""The compiled shapes of a bundle, and the choice of the smallest one that fits. Pure."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable
from typing import Literal

from om_models.manifest import Gear, longest_sequence
from runtime_cache.errors import ConfigError, InternalError

Role = Literal["prefill", "decode"]
_ROLES: tuple[Role, ...] = ("prefill", "decode")


class GearTable:
    """The gears of a bundle by role.

    Attributes:
        max_batch: the most sequences one decode step can feed.
        max_model_len: the most tokens a sequence may have; see `longest_sequence`.
    """

    def __init__(self, prefill: Iterable[Gear], decode: Iterable[Gear]) -> None:
        """Args:
            prefill: gears of batch 1.
            decode: gears of chunk 1.

        Raises:
            ConfigError: a role has no gear, or a gear that is not of its role.
        """
        # The rows are the main cost of a step, the past comes second.
        self._gears: dict[Role, tuple[Gear, ...]] = {
            "prefill": tuple(sorted(set(prefill), key=lambda gear: (gear.chunk, gear.past))),
            "decode": tuple(sorted(set(decode), key=lambda gear: (gear.batch, gear.past))),
        }
        self._check()
        self.max_batch = max(gear.batch for gear in self._gears["decode"])
        self.max_model_len = longest_sequence(self._gears["prefill"], self._gears["decode"])
        self._decode_pasts = sorted({gear.past for gear in self._gears["decode"]})
        self._decode_batches = [
            max(gear.batch for gear in self._gears["decode"] if gear.past >= past)
            for past in self._decode_pasts
        ]

    @property
    def chunk(self) -> int:
        """The longest prefill chunk; of a `fixed` table the grid on which prompts are cut."""
        return max(gear.chunk for gear in self._gears["prefill"])

    @property
    def is_fixed(self) -> bool:
        """Whether there is one gear a role, of which one row is used."""
        return self.max_batch == 1 and all(len(gears) == 1 for gears in self._gears.values())

    def fixed(self, min_chunk: int) -> GearTable:
        """One gear a role, so that the same tokens are always computed in the same way.

        Of the gears with the longest past: for prefill the smallest chunk of at least `min_chunk`,
        or else the largest; for decode the smallest batch, of which one row is used, since what
        else is in a batch may decide how a row is summed.
        """
        prefill, decode = (_with_longest_past(self._gears[role]) for role in _ROLES)
        chunks = [gear for gear in prefill if gear.chunk >= min_chunk] or prefill[-1:]
        table = GearTable(chunks[:1], decode[:1])
        table.max_batch = 1
        table._decode_batches = [1]
        return table

    def _check(self) -> None:
        for role, gears in self._gears.items():
            if not gears:
                raise ConfigError(f"the bundle has no {role} gear")
            for gear in gears:
                other = gear.batch if role == "prefill" else gear.chunk
                if other != 1 or min(gear.batch, gear.chunk, gear.past) < 1:
                    raise ConfigError(f"{gear} cannot be a {role} gear")

    def pick(self, role: Role, *, batch: int = 1, chunk: int = 1, past: int) -> Gear:
        """The smallest gear of `role` that holds all three.

        Raises:
            InternalError: none does; `chunk_for` and `max_batch_at` tell what fits.
        """
        for gear in self._gears[role]:
            if gear.batch >= batch and gear.chunk >= chunk and gear.past >= past:
                return gear
        raise InternalError(f"no {role} gear holds batch {batch}, chunk {chunk}, past {past}")

    def max_batch_at(self, past: int) -> int:
        """The most sequences one decode step can feed if one of them has `past` tokens before it.

        At least 1 for any `past` below `max_model_len`; 0 if no gear holds it.
        """
        place = bisect_left(self._decode_pasts, past)
        return self._decode_batches[place] if place < len(self._decode_batches) else 0

    def chunk_for(self, num_tokens: int, *, past: int, max_tokens: int | None = None) -> int:
        """How many of the next `num_tokens` tokens to feed in one prefill step.

        Full gears as long as there are enough tokens. The rest goes into the smallest gear that
        holds it, unless cutting it in two at least halves the computed rows: with gears of 16, 64
        and 256, a rest of 65 is fed as 64 and 1 rather than with 191 rows of padding.

        Args:
            num_tokens: at least 1.
            past: tokens before them, below `max_model_len`.
            max_tokens: what one step may feed; the smallest gear is used even if it is larger.
        """
        chunks = sorted({g.chunk for g in self._gears["prefill"] if g.past >= past})
        allowed = [c for c in chunks if max_tokens is None or c <= max_tokens] or chunks[:1]
        if num_tokens >= allowed[-1]:
            return allowed[-1]
        whole = _smallest(allowed, num_tokens)
        full = max((chunk for chunk in allowed if chunk <= num_tokens), default=0)
        if full and 2 * (full + _smallest(allowed, num_tokens - full)) <= whole:
            return full
        return num_tokens


def _with_longest_past(gears: tuple[Gear, ...]) -> list[Gear]:
    longest = max(gear.past for gear in gears)
    return [gear for gear in gears if gear.past == longest]


def _smallest(chunks: list[int], num_tokens: int) -> int:
    """The smallest chunk that holds the tokens; one does."""
    return next(chunk for chunk in chunks if chunk >= num_tokens)
