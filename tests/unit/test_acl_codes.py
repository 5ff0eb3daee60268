"""Names and classes of pyACL codes, and which error each becomes."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import cast

import pytest

from runtime_cache.device import acl_codes
from runtime_cache.device.acl_api import AclModule
from runtime_cache.device.acl_codes import AclClass, check, class_of, name_of
from runtime_cache.errors import AclError, DeviceLost, OutOfDeviceMemory


class Message:
    """The one part of `acl` that `check` uses; counts how often it is asked."""

    def __init__(self, text: str | None = None) -> None:
        self._text = text
        self.num_reads = 0

    def get_recent_err_msg(self) -> str | None:
        self.num_reads += 1
        return self._text


def as_acl(message: Message) -> AclModule:
    return cast("AclModule", message)


#: Codes that no call of the driver gives: of model bundles, and of aclnn.
NOT_CALLED = {148053, 161001, 161002, 361001, 561000}
KNOWN = {
    int(code): name
    for code, (name, _) in json.loads(
        (Path(__file__).parent.parent / "data" / "acl_errors.json").read_text("utf-8")
    )["codes"].items()
}

# The classes as the project's reading of the manuals lists them; every code is in one of the rows.
CLASSES = [
    (AclClass.BENIGN, [100002, 100037, 507012, 100036]),
    (AclClass.CALLER, [100000, 100001, 100011, 107000, 107001, 107002, 107003, 107004, 107015]),
    (AclClass.CALLER, [107017, 145000, 145002, 145003, 145011, 145012, 145013, 145021, 145022]),
    (AclClass.CALLER, [207000, 200001, 200006]),
    (AclClass.CALLER, [100003, 100017, 100018, 100019, 107011, 107012, 145001, 207002, 300000]),
    (AclClass.MEMORY, [200000, 207001, 207018, 245000, 245002]),
    (AclClass.RESOURCE, [207005, 207007, 207008, 207010]),
    (AclClass.TIMEOUT, [107019, 107020, 507046, 507047, 545601]),
    (AclClass.TASK, [507011, 507013, 507014, 507034, 507015, 507035, 507016, 507017, 507018]),
    (AclClass.TASK, [500000, 500001, 500002, 500003, 545000]),
    (AclClass.TASK, [107023, 207003, 507000, 507023]),
    (AclClass.DEVICE, [507010, 507053, 507054, 507055, 507056, 507057, 507899, 507901]),
    (AclClass.DEVICE, [207004, 500004, 507033, 507001, 107022]),
    (AclClass.INSTALL, [100039, 207006]),
    (AclClass.MODEL, [100016, 145006, 545001]),
    (AclClass.UNKNOWN, [1, -1, 999999]),
]


@pytest.mark.parametrize(("expected", "codes"), CLASSES)
def test_class_of_each_code(expected: AclClass, codes: list[int]) -> None:
    assert {code: class_of(code) for code in codes} == dict.fromkeys(codes, expected)


def test_every_code_of_the_manuals_has_its_name_and_a_class() -> None:
    assert {code: name_of(code) for code in KNOWN.keys() - NOT_CALLED} == {
        code: name for code, name in KNOWN.items() if code not in NOT_CALLED
    }
    listed = [code for kind, codes in CLASSES if kind is not AclClass.UNKNOWN for code in codes]
    assert sorted(listed) == sorted(KNOWN.keys() - NOT_CALLED) == sorted(acl_codes._CODES)


#: The rows of the table in docs/faults.md, and the classes that each is about.
ROWS = {
    "a wrong argument": {AclClass.CALLER},
    "the `.om` does not suit": {AclClass.MODEL},
    "driver or permissions": {AclClass.INSTALL},
    "no memory, no resources": {AclClass.MEMORY, AclClass.RESOURCE},
    "waited too long": {AclClass.TIMEOUT},
    "the task failed": {AclClass.TASK},
    "the device is lost": {AclClass.DEVICE},
}


def is_meant(code: int, cell: str) -> bool:
    """Whether a cell such as `100000–100019 but 100002, 145xxx` means a code."""
    for piece in re.split("[,;] ", cell):
        meant, _, excepted = piece.partition(" but ")
        first, _, last = meant.partition("–")
        ends = first.replace("x", "0"), (last or first).replace("x", "9")
        is_inside = meant[0].isdigit() and int(ends[0]) <= code <= int(ends[1])
        if is_inside and str(code) not in excepted:
            return True
    return False


def test_the_documentation_has_every_code_in_its_row() -> None:
    text = (Path(__file__).parents[2] / "docs" / "faults.md").read_text("utf-8")
    table = text.partition("## Which code means what")[2].partition("\n## ")[0]
    rows = dict(re.findall(r"^\| (.*?) \| (\d.*?) \|", table, re.MULTILINE))
    assert rows.keys() == ROWS.keys()
    for code in acl_codes._CODES:
        expected = [name for name, kinds in ROWS.items() if class_of(code) in kinds]
        assert [name for name in ROWS if is_meant(code, rows[name])] == expected, code


@pytest.mark.parametrize(
    ("code", "name"),
    [
        (100002, "ACL_ERROR_REPEAT_INITIALIZE"),
        (207001, "ACL_ERROR_RT_MEMORY_ALLOCATION"),
        (507046, "ACL_ERROR_RT_STREAM_SYNC_TIMEOUT"),
        (507901, "ACL_ERROR_RT_SOCKET_CLOSE"),
        (424242, "unknown"),
    ],
)
def test_name_of_each_code(code: int, name: str) -> None:
    assert name_of(code) == name


def test_every_name_is_used_once() -> None:
    names = [name for name, _ in acl_codes._CODES.values()]
    assert len(set(names)) == len(names)


def test_success_asks_nothing() -> None:
    message = Message("stale text of another failure")
    check("acl.rt.malloc", 0, as_acl(message))
    assert message.num_reads == 0


@pytest.mark.parametrize(
    ("code", "error_type", "retryable"),
    [
        (107000, AclError, False),
        (207001, OutOfDeviceMemory, True),
        (245002, OutOfDeviceMemory, True),
        (207008, AclError, True),
        (507046, AclError, True),
        (507015, AclError, True),
        (507054, DeviceLost, True),
        (507901, DeviceLost, True),
        (123456, AclError, True),
        (145006, AclError, False),
        (207006, AclError, False),
    ],
)
def test_error_of_each_class(code: int, error_type: type[AclError], retryable: bool) -> None:
    with pytest.raises(AclError) as caught:
        check("acl.rt.malloc", code, as_acl(Message()))
    assert type(caught.value) is error_type
    assert caught.value.retryable is retryable


def test_the_error_carries_function_code_name_and_the_drivers_words() -> None:
    message = Message("\nEL0004: no memory\n")
    with pytest.raises(OutOfDeviceMemory) as caught:
        check("acl.rt.malloc", 207001, as_acl(message))
    error = caught.value
    assert (error.function, error.acl_code) == ("acl.rt.malloc", 207001)
    assert error.acl_name == "ACL_ERROR_RT_MEMORY_ALLOCATION"
    assert error.message == (
        "acl.rt.malloc failed: 207001 (ACL_ERROR_RT_MEMORY_ALLOCATION): EL0004: no memory"
    )
    assert message.num_reads == 1


def test_an_unknown_code_without_words() -> None:
    with pytest.raises(AclError) as caught:
        check("acl.rt.free", 31337, as_acl(Message(None)))
    assert caught.value.message == "acl.rt.free failed: 31337 (unknown)"
