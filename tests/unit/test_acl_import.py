"""What a failed import of pyACL means; `test_select` has it end to end."""

from __future__ import annotations

import types

import pytest

from runtime_cache.device.acl_import import (
    explain_import,
    explain_stranger,
    is_pyacl,
    missing_library,
)


def module(**attributes: object) -> types.ModuleType:
    made = types.ModuleType("acl")
    made.__dict__.update(attributes)
    return made


def test_pyacl_is_known_by_what_it_has() -> None:
    runtime = module(malloc=1)
    assert is_pyacl(module(init=1, rt=runtime))
    assert not is_pyacl(module(init=1))
    assert not is_pyacl(module(rt=runtime))
    assert not is_pyacl(module(init=1, rt=module()))


def test_a_stranger_is_named_by_its_file() -> None:
    assert "at /x/acl.py is not pyACL: uninstall that package" in explain_stranger("/x/acl.py")
    assert "at an unknown place is not pyACL" in explain_stranger(None)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("acl.so: undefined symbol: _PyThreadState_UncheckedGet", "another version of Python"),
        ("acl.so: undefined symbol: PyUnicode_AsUTF8", "another version of Python"),
        ("acl.so: undefined symbol: aclrtPyramid", "of different releases"),
        ("libpython3.9.so.1.0: cannot open shared object file", "another version of Python"),
        ("libascend_hal.so: cannot open shared object file", "not mounted into this container"),
        ("libdcmi.so: cannot open shared object file", "not mounted into this container"),
        ("libge_common.so: cannot open shared object file", "or the NPU driver is not whole"),
        ("libc.so.6: version `GLIBC_2.34' not found", "for a newer operating system"),
    ],
)
def test_whose_symbol_is_missing(text: str, why: str) -> None:
    assert explain_import(text, None).endswith(why)


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("libascend_hal.so: cannot open shared object file: No such file", "libascend_hal.so"),
        ("/a/libc_sec.so.1: cannot open shared object file", "libc_sec.so.1"),
        ("cannot open shared object file", None),
        ("acl.so: undefined symbol: x", None),
    ],
)
def test_the_missing_library(text: str, name: str | None) -> None:
    assert missing_library(text) == name
