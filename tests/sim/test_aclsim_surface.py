"""The software device's surface against pyACL's own source, and the type stub against both."""

from __future__ import annotations

import ast
import json
from pathlib import Path
from typing import Any

import pytest

import runtime_cache.aclsim as acl

ROOT = Path(__file__).parents[2]
MODULES = {"acl": acl, "acl.rt": acl.rt, "acl.mdl": acl.mdl, "acl.util": acl.util}
REAL: dict[str, tuple[str, list[str]]] = json.loads(
    (ROOT / "tests/data/pyacl_surface.json").read_text()
)["functions"]


def simulated() -> dict[str, Any]:
    """Every function of the software device by its full pyACL name."""
    return {
        f"{prefix}.{name}": value
        for prefix, module in MODULES.items()
        for name, value in vars(module).items()
        if hasattr(value, "arg_format")
    }


def stubbed() -> dict[str, ast.FunctionDef]:
    """Every function of the type stub by its full pyACL name."""
    found = {}
    for prefix in MODULES:
        name = "__init__" if prefix == "acl" else prefix.removeprefix("acl.")
        tree = ast.parse((ROOT / f"typings/acl/{name}.pyi").read_text())
        for node in tree.body:
            if isinstance(node, ast.FunctionDef):
                found[f"{prefix}.{node.name}"] = node
    return found


def test_the_surface_is_not_empty() -> None:
    assert len(simulated()) == 81


@pytest.mark.parametrize("name", sorted(simulated()))
def test_each_function_exists_in_pyacl_with_the_same_parse_codes(name: str) -> None:
    assert simulated()[name].arg_format == REAL[name][0]


def test_the_stub_names_exactly_the_functions_there_are() -> None:
    assert sorted(stubbed()) == sorted(simulated())


@pytest.mark.parametrize("name", sorted(stubbed()))
def test_the_stub_is_positional_only_and_has_pyacls_arguments_and_results(name: str) -> None:
    node = stubbed()[name]
    assert node.args.args == node.args.kwonlyargs == []
    assert len(node.args.posonlyargs) == len(REAL[name][0].replace("|", ""))
    returns = node.returns
    is_tuple = isinstance(returns, ast.Subscript) and ast.unparse(returns.value) == "tuple"
    elements = returns.slice.elts if is_tuple else [returns]  # type: ignore[union-attr]
    assert len(elements) == len(REAL[name][1])
