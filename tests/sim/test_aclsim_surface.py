"""The software device has all of pyACL's surface, and nothing else; so has the type stub."""

from __future__ import annotations

import ast
import subprocess
import sys
from types import FunctionType, ModuleType

import pytest

import runtime_cache.aclsim as aclsim
from runtime_cache.aclsim import faults, inspect
from runtime_cache.aclsim.calling import RELEASES_GIL
from runtime_cache.aclsim.families import FAMILIES
from runtime_cache.aclsim.module import acl_modules
from tests.support.pyacl import MODULES, PARTS, REAL, ROOT, simulated

# In the surface and asynchronous on a card, but not modelled here.
NOT_QUEUED = {"acl.rt.memcpy_async_with_condition"}


def test_every_function_of_pyacl_is_there_and_no_other() -> None:
    assert len(REAL) == 220
    assert sorted(simulated()) == sorted(REAL)


@pytest.mark.parametrize("name", sorted(REAL))
def test_a_function_has_pyacls_parse_codes_and_says_what_it_does(name: str) -> None:
    function = simulated()[name]
    assert function.arg_format == REAL[name].format  # type: ignore[attr-defined]
    assert function.__name__ == name.rpartition(".")[2]
    assert function.__doc__


@pytest.mark.parametrize("part", PARTS)
def test_a_module_has_functions_and_modules_and_no_constants(part: str) -> None:
    public = {n: value for n, value in vars(MODULES[part]).items() if not n.startswith("_")}
    assert {type(value) for value in public.values()} <= {FunctionType, ModuleType, type(aclsim.op)}
    modules = {n for n, value in public.items() if isinstance(value, ModuleType)}
    assert modules == ({"rt", "mdl", "util", *FAMILIES} if part == "acl" else set())


@pytest.mark.parametrize("module", [aclsim, aclsim.rt, aclsim.mdl, aclsim.util])
def test_the_package_itself_has_no_constants(module: ModuleType) -> None:
    public = {name: value for name, value in vars(module).items() if not name.startswith("_")}
    assert [n for n, value in public.items() if isinstance(value, int | float | str)] == []


def test_the_functions_of_the_package_are_those_of_the_modules() -> None:
    assert MODULES["acl.rt"].memcpy is aclsim.rt.memcpy
    assert MODULES["acl"].rt is MODULES["acl.rt"]
    assert MODULES["acl"].op is aclsim.op


def test_each_call_makes_modules_that_a_program_may_change() -> None:
    acl_modules()["acl"].init = None  # type: ignore[attr-defined]
    assert MODULES["acl"].init is aclsim.init


PROGRAM = """
import sys
from runtime_cache.aclsim.module import acl_modules
sys.modules.update(acl_modules())
import acl
import acl.mdl
from acl.rt import memcpy
from acl.util import bytes_to_ptr
assert acl.rt.memcpy is memcpy and acl.util.bytes_to_ptr is bytes_to_ptr
assert acl.init() == 0 and acl.rt.set_device(0) == 0 and acl.mdl.create_desc() > 0
print(acl.__name__, acl.rt.__name__)
"""


def test_programs_import_parts_of_acl() -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout == "acl acl.rt\n"


@pytest.mark.parametrize("name", sorted(FAMILIES))
def test_a_family_that_is_absent_says_so_at_the_first_call(name: str) -> None:
    family = getattr(aclsim, name)
    with pytest.raises(NotImplementedError, match=rf"^acl\.{name}\.create is not in the software "):
        family.create(1, 2)
    assert inspect.report().misuses[-1].startswith(f"acl.{name}.create is not in the software ")
    with pytest.raises(AttributeError, match="_private"):
        _ = family._private
    assert f"acl.{name}" in MODULES


def test_the_functions_that_release_the_gil_are_pyacls() -> None:
    assert {name for name, real in REAL.items() if real.releases_gil} == RELEASES_GIL


def test_what_queues_work_on_a_card_queues_it_here() -> None:
    assert {name for name, real in REAL.items() if real.is_async} == faults.QUEUED | NOT_QUEUED


# --- the type stub ---


def stubbed() -> dict[str, ast.FunctionDef]:
    """Every function of the type stub by its full pyACL name."""
    found = {}
    for part in PARTS:
        name = "__init__" if part == "acl" else part.removeprefix("acl.")
        tree = ast.parse((ROOT / f"typings/acl/{name}.pyi").read_text())
        for node in tree.body:
            if isinstance(node, ast.FunctionDef):
                found[f"{part}.{node.name}"] = node
    return found


STUBS = stubbed()
PYTHON_TYPES = {**dict.fromkeys("kKiIhHl", "int"), "s": "str", "f": "float", "d": "float"}


def test_the_stub_names_exactly_pyacls_functions() -> None:
    assert sorted(STUBS) == sorted(REAL)


@pytest.mark.parametrize("name", sorted(REAL))
def test_the_stub_is_positional_only_with_the_types_of_the_parse_codes(name: str) -> None:
    node, real = STUBS[name], REAL[name]
    assert node.args.args == node.args.kwonlyargs == []
    assert len(node.args.posonlyargs) == len(real.codes)
    assert len(node.args.posonlyargs) - len(node.args.defaults) == real.num_required
    for argument, code in zip(node.args.posonlyargs, real.codes, strict=True):
        assert argument.annotation is not None
        assert ast.unparse(argument.annotation) == PYTHON_TYPES.get(
            code, ast.unparse(argument.annotation)
        )


@pytest.mark.parametrize("name", sorted(REAL))
def test_the_stub_has_pyacls_results(name: str) -> None:
    returns = STUBS[name].returns
    is_tuple = isinstance(returns, ast.Subscript) and ast.unparse(returns.value) == "tuple"
    elements = returns.slice.elts if is_tuple else [returns]  # type: ignore[union-attr]
    assert len(elements) == len(REAL[name].returns)
    if REAL[name].returns[-1] == "ret":
        assert ast.unparse(elements[-1]) == "int"
    assert (ast.unparse(elements[0]) == "None") == (REAL[name].returns == ("None",))
