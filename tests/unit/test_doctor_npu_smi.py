"""Tables of npu-smi, as releases from 23.0 to 26.0 print them."""

from __future__ import annotations

import pytest

from tests.support.ascend_host import SMI_310B4, SMI_910B4, SMI_A3
from tools.doctor.npu_smi import Chip, failure, parse, version

MIB = 1 << 20

SMI_310P = """\
| npu-smi 25.2.0                                   Version: 25.2.0 |
| NPU     Name                  | Health          | Power(W)     Temp(C)   Hugepages-Usage(page) |
| Chip    Device                | Bus-Id          | AICore(%)    Memory-Usage(MB) |
+===============================+=================+===============================================+
| 2       310P3                 | OK              | NA           45                0     / 0    |
| 0       0                     | 0000:01:00.0    | 0            1529 / 44280 |
+-------------------------------+-----------------+-----------------------------------------------+
| 2       310P3                 | OK              | NA           43                0     / 0    |
| 1       1                     | 0000:01:00.0    | 0            37623/ 43693 |
+===============================+=================+===============================================+
| No running processes found in NPU 2 |
"""


def chips(text: str) -> list[Chip]:
    found = parse(text)
    assert found is not None
    return found


def test_two_cards_with_hbm() -> None:
    assert chips(SMI_910B4) == [
        Chip(0, 0, None, "910B4", "OK", 2838 * MIB, 32768 * MIB),
        Chip(1, 0, None, "910B4", "OK", 29356 * MIB, 32768 * MIB),
    ]
    assert version(SMI_910B4) == "24.1.1"
    assert chips(SMI_910B4)[0].free_bytes == (32768 - 2838) * MIB


def test_two_chips_of_one_card_without_hbm() -> None:
    assert chips(SMI_310P) == [
        Chip(2, 0, 0, "310P3", "OK", 1529 * MIB, 44280 * MIB),
        Chip(2, 1, 1, "310P3", "OK", 37623 * MIB, 43693 * MIB),
    ]


def test_a_board() -> None:
    assert chips(SMI_310B4) == [Chip(0, 0, 0, "310B4", "Alarm", 3628 * MIB, 15609 * MIB)]


def test_two_dies_of_an_a3() -> None:
    assert [(c.chip, c.device, c.name, c.soc_version) for c in chips(SMI_A3)] == [
        (0, 0, "Ascend910", None),
        (1, 1, "Ascend910", None),
    ]


@pytest.mark.parametrize(
    ("name", "soc"),
    [
        ("910B4", "Ascend910B4"),
        ("910B4-1", "Ascend910B4-1"),
        ("910B2C", "Ascend910B2C"),
        ("310P3", "Ascend310P3"),
        ("310B1", "Ascend310B1"),
        ("910A", "Ascend910A"),
        ("910B9", "Ascend910B9"),  # not in the table of SoCs, but of its form
        ("310B", None),
        ("310P", None),
        ("Ascend910", None),
        ("x", None),
    ],
)
def test_the_soc_by_its_name(name: str, soc: str | None) -> None:
    assert Chip(0, 0, None, name, "OK", None, None).soc_version == soc


@pytest.mark.parametrize(
    ("cell", "used", "total"),
    [
        ("0 0 / 0 3131 / 65536", 3131, 65536),
        ("0 1529/44280 0 / 0", 1529, 44280),
        ("0 0 / 0 0 / 0", None, None),
        ("NA", None, None),
        ("0 9 / 8", 9, 8),
    ],
)
def test_memory(cell: str, used: int | None, total: int | None) -> None:
    text = f"| NPU Name | Health | Power |\n| 0 910B1 | OK | 1 |\n| 0 0 | bus | {cell} |\n"
    (chip,) = chips(text)
    expected = (None, None) if used is None or total is None else (used * MIB, total * MIB)
    assert (chip.used_bytes, chip.total_bytes) == expected
    assert chip.free_bytes is None or chip.free_bytes >= 0


@pytest.mark.parametrize(
    "text",
    [
        "",
        "\n",
        "GPU 0: something",
        "| NPU | other |\n| 0 910B4 | OK |",
        '{"npu": []}',
        "\0\xff|" * 9,
    ],
)
def test_what_is_no_such_table(text: str) -> None:
    assert parse(text) is None
    assert version(text) is None


@pytest.mark.parametrize(
    "rows",
    [
        "",
        "| 0 910B4 | OK | 1 |\n",
        "| 0 910B4 | OK |\n| 0 0 | bus |\n",
        "| zero 910B4 | OK | 1 |\n| 0 0 | bus | 1 / 2 |\n",
        "| 0 910B4 | | 1 |\n| 0 0 | bus | 1 / 2 |\n",
        "| NPU Chip | Process id | name |\n| 0 0 | 1 | python |\n| 0 0 | 2 | python |\n",
    ],
)
def test_a_table_without_chips(rows: str) -> None:
    assert parse(f"| NPU Name | Health | Power |\n{rows}") == []


def test_why_it_did_not_reach_the_driver() -> None:
    assert failure("dcmi module initialize failed. ret is -8005") == -8005
    used = "dcmi model initialized failed, because the device is used. ret is -8020"
    assert failure(used) == -8020
    assert failure("all is well") is None
