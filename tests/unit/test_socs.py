"""The table of SoCs: what the facts say of each family."""

from __future__ import annotations

import pytest

from om_models.socs import SOCS, check_soc_name, find_soc
from runtime_cache.errors import ConversionError

GIB = 1 << 30


def test_every_soc_stands_under_its_own_name() -> None:
    assert all(name == soc.name for name, soc in SOCS.items())
    assert all(name.startswith(f"Ascend{soc.family}") for name, soc in SOCS.items())


def test_an_unknown_soc_is_none() -> None:
    assert find_soc("Ascend310P") is None
    assert find_soc("310P3") is None


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("310P3", "; is Ascend310P3 meant?"),
        ("ascend910b4", "; is Ascend910B4 meant?"),
        ("tpu", ""),
    ],
)
def test_a_name_that_lacks_its_first_word(name: str, hint: str) -> None:
    check_soc_name("Ascend999")
    with pytest.raises(ConversionError) as caught:
        check_soc_name(name)
    assert caught.value.message == f"--soc-version {name}: a name begins with `Ascend`{hint}"


@pytest.mark.parametrize(
    ("name", "gib"),
    [
        ("Ascend310B1", None),
        ("Ascend310B4", None),  # boards with 4, 8 and 16 GB are sold
        ("Ascend310P3", 24),
        ("Ascend910B1", 64),
        ("Ascend910B3", 64),
        ("Ascend910B4", 32),
        ("Ascend910_9391", None),
    ],
)
def test_memory(name: str, gib: int | None) -> None:
    assert SOCS[name].memory_bytes == (None if gib is None else gib * GIB)


def test_only_310b_is_a_board_and_only_it_lacks_dynamic_shape() -> None:
    boards = {soc.family for soc in SOCS.values() if soc.form == "board"}
    static = {soc.family for soc in SOCS.values() if not soc.has_dynamic_shape}
    assert boards == static == {"310B"}


def test_310p_and_the_first_910_have_no_bfloat16() -> None:
    without = {soc.family for soc in SOCS.values() if not soc.has_bfloat16}
    assert without == {"310P", "910"}


def test_310_counts_ddr_and_910_hbm() -> None:
    assert all(soc.has_hbm == soc.family.startswith("910") for soc in SOCS.values())
