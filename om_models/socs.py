"""The SoCs that ATC compiles for, and what this project has to know of each. Pure.

Source: platform_config of CANN 8.1.RC1 for names and memory sizes (910B, 310P). A size that no
source read here gives is None, and the table does not guess. So is that of a board, which carries
what its maker put on it: outputs of npu-smi that users published show 3513, 7545 and 15609 MB for
the 310B4. (Those of the 310P3 show 24 GB as its configuration does, or about 44 for one of a Duo.)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from runtime_cache.errors import ConversionError

Family = Literal["310B", "310P", "910", "910B", "910_93"]
Form = Literal["card", "board"]

_GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class Soc:
    """One SoC.

    Attributes:
        name: as `--soc_version` and `acl.get_soc_name` have it.
        form: `card` has a memory of its own and run mode 1; `board` is a host itself (RC form, run
            mode 0), with one memory for both.
        memory_bytes: of one device, or None if it depends on the board or is not known.
        has_hbm: its memory counts as HBM (attribute 1 of `get_mem_info`), else as DDR (0).
        has_bfloat16: ATC takes bfloat16 for it.
        has_dynamic_shape: ATC takes input ranges for it, not only gears.
    """

    name: str
    family: Family
    form: Form
    memory_bytes: int | None
    has_hbm: bool
    has_bfloat16: bool
    has_dynamic_shape: bool


def _family(
    family: Family,
    memory_gib: dict[str, int | None],
    *,
    form: Form = "card",
    has_hbm: bool = True,
    has_bfloat16: bool = True,
    has_dynamic_shape: bool = True,
) -> list[Soc]:
    return [
        Soc(
            f"Ascend{name}",
            family,
            form,
            None if gib is None else gib * _GIB,
            has_hbm,
            has_bfloat16,
            has_dynamic_shape,
        )
        for name, gib in memory_gib.items()
    ]


def _unknown(*names: str) -> dict[str, int | None]:
    return dict.fromkeys(names)


_ALL = (
    *_family(
        "310B",
        _unknown("310B1", "310B2", "310B3", "310B4"),
        form="board",
        has_hbm=False,
        has_dynamic_shape=False,
    ),
    *_family(
        "310P",
        {**_unknown("310P1"), "310P3": 24, **_unknown("310P5", "310P7")},
        has_hbm=False,
        has_bfloat16=False,
    ),
    *_family(
        "910",
        _unknown("910A", "910B", "910ProA", "910ProB", "910PremiumA"),
        has_bfloat16=False,
    ),
    *_family(
        "910B",
        {"910B1": 64, "910B2": 64, **_unknown("910B2C"), "910B3": 64, "910B4": 32}
        | _unknown("910B4-1"),
    ),
    *_family(
        "910_93",
        _unknown("910_9362", "910_9372", "910_9381", "910_9382", "910_9391", "910_9392"),
    ),
)

#: By name.
SOCS: dict[str, Soc] = {soc.name: soc for soc in _ALL}


def check_soc_name(name: str) -> None:
    """Refuse what can be no SoC: npu-smi shows the names without their first word.

    Raises:
        ConversionError: it does not begin with `Ascend`.
    """
    if not name.startswith("Ascend"):
        meant = next((known for known in SOCS if known.lower().endswith(name.lower())), None)
        hint = f"; is {meant} meant?" if meant else ""
        raise ConversionError(f"--soc-version {name}: a name begins with `Ascend`{hint}")


def find_soc(name: str) -> Soc | None:
    """The SoC of that name, or None if the table does not know it."""
    return SOCS.get(name)
