"""Which shapes a bundle is compiled for. Pure.

A gear costs compile time (ATC clones the graph for each) and, if the next larger one has to be
used, padding. The software device compiles in no time, so its default plan is fine; a real SoC
gets at most 8 gears (balanced). ATC's guide recommends 3 or 4 (small).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import product

from om_models.manifest import Gear, longest_sequence
from runtime_cache.errors import ConversionError

#: Source: ATC option `--dynamic_dims`, error E10036.
MAX_GEARS = 100
#: Smallest past gear of the fine plan: one default block. Attention to 64 hidden slots is under 1 %
#: of the work of the smallest chunk, so a smaller gear would save nothing that can be measured.
SMALLEST_PAST = 64
#: Smallest chunk of the fine plan: below it a step costs the same, the weights being read once.
SMALLEST_CHUNK = 16
#: Largest chunk of the fine plan; a longer step would stall running answers.
LARGEST_CHUNK = 512
#: The only chunk of the small plan: a longer one pads most prompts' ends, a shorter one reads the
#: weights more often.
SMALL_CHUNK = 128

_ROLE = re.compile(r"(prefill|decode)=([\d,]+)@([\d,]+)")


@dataclass(frozen=True)
class GearPlan:
    """The gears of both roles, each sorted ascending."""

    prefill: tuple[Gear, ...]
    decode: tuple[Gear, ...]

    @property
    def max_model_len(self) -> int:
        """See `longest_sequence`."""
        return longest_sequence(self.prefill, self.decode)


def fine_plan(context: int, max_batch: int) -> GearPlan:
    """Powers of two in every direction, at most `MAX_GEARS` in all."""
    chunks = _powers_of_two(SMALLEST_CHUNK, min(context, LARGEST_CHUNK))
    batches = _powers_of_two(1, max_batch)
    pasts = _powers_of_two(min(SMALLEST_PAST, context // 2), context)
    while len(pasts) * (len(chunks) + len(batches)) > MAX_GEARS:
        pasts = pasts[::-2][::-1]  # every second one, the largest kept
    return grid(chunks, batches, pasts)


def coarse_plan(context: int, max_batch: int) -> GearPlan:
    """Two values in every direction: 8 gears, or fewer where two coincide."""
    chunks = sorted({min(64, context), min(256, context)})
    quarter = -(-context // (4 * SMALLEST_PAST)) * SMALLEST_PAST
    pasts = sorted({min(quarter, context // 2), context})
    return grid(chunks, sorted({1, max_batch}), pasts)


def small_plan(context: int, max_batch: int) -> GearPlan:
    """One chunk, one past, and answers alone or as many as go: 3 gears, or 2."""
    return grid([min(SMALL_CHUNK, context)], sorted({1, max_batch}), [context])


#: Plans by the name users give them; each takes the context and the largest batch.
PLANS: dict[str, Callable[[int, int], GearPlan]] = {
    "small": small_plan,
    "balanced": coarse_plan,
    "fine": fine_plan,
}


def parse_gears(text: str) -> GearPlan:
    """Read `--gears`: `prefill=16,64@256,2048 decode=1,8@256,2048`.

    Each word multiplies its chunks (prefill) or batches (decode) by its pasts; a role may have
    several words.

    Raises:
        ConversionError: the text does not read so, a number is 0, or a role has no gear.
    """
    gears: dict[str, set[Gear]] = {"prefill": set(), "decode": set()}
    for word in text.split():
        match = _ROLE.fullmatch(word)
        if not match:
            raise ConversionError(
                f"--gears: {word!r} is none of {', '.join(PLANS)} and not of the form"
                " prefill=CHUNKS@PASTS or decode=BATCHES@PASTS"
            )
        role, sizes, pasts = match[1], _numbers(match[2]), _numbers(match[3])
        plan = grid(sizes, sizes, pasts)
        gears[role].update(plan.prefill if role == "prefill" else plan.decode)
    for role, found in gears.items():
        if not found:
            raise ConversionError(f"--gears names no {role} gear")
    return GearPlan(tuple(sorted(gears["prefill"])), tuple(sorted(gears["decode"])))


def check_plan(plan: GearPlan, *, is_fused: bool) -> None:
    """Refuse what ATC would refuse after minutes.

    Raises:
        ConversionError: a model would have more than `MAX_GEARS` gears.
    """
    models = [model_gears(plan.prefill, plan.decode)] if is_fused else [plan.prefill, plan.decode]
    for gears in models:
        if len(gears) > MAX_GEARS:
            raise ConversionError(f"{len(gears)} gears in one model; ATC takes {MAX_GEARS}")


def model_gears(*roles: Iterable[Gear]) -> tuple[Gear, ...]:
    """The gears of one model that serves these roles, each once: ATC refuses duplicates."""
    return tuple(dict.fromkeys(gear for role in roles for gear in role))


def grid(chunks: Iterable[int], batches: Iterable[int], pasts: Iterable[int]) -> GearPlan:
    """Every chunk and every batch with every past."""
    pasts = tuple(pasts)
    return GearPlan(
        tuple(sorted(Gear(1, chunk, past) for chunk, past in product(chunks, pasts))),
        tuple(sorted(Gear(batch, 1, past) for batch, past in product(batches, pasts))),
    )


def _powers_of_two(first: int, last: int) -> list[int]:
    """`first`, doubled while below `last`, then `last` itself."""
    sizes = []
    while first < last:
        sizes.append(first)
        first *= 2
    return [*sizes, last]


def _numbers(text: str) -> list[int]:
    numbers = [int(piece) for piece in text.split(",") if piece]
    if not numbers or 0 in numbers:
        raise ConversionError(f"--gears: {text!r} must list numbers above 0")
    return numbers
