"""Walks every import of the product and holds it against the layout's rules."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ("runtime_cache", "om_models", "ipc", "tools")

#: What a pure module may not import: it decides, and never does.
IMPURE = {"asyncio", "zmq", "acl", "structlog", "time", "random", "os", "uvloop", "threading"}

#: Modules and packages (with all they hold) that are pure.
PURE = (
    "runtime_cache.errors",
    "runtime_cache.ids",
    "runtime_cache.metrics",
    "runtime_cache.cache",
    "runtime_cache.engine",
    "runtime_cache.device.acl_api",
    "runtime_cache.device.kv_layout",
    "runtime_cache.device.om_contract",
    "om_models.spec",
    "om_models.manifest",
    "om_models.reference",
)
#: The engine's hands: its only files that are not pure.
NOT_PURE = ("runtime_cache.engine.executor", "runtime_cache.engine.loop")


@dataclass(frozen=True)
class Rule:
    """`modules` (all but `exempt`) import nothing of `forbidden`."""

    modules: tuple[str, ...]
    forbidden: tuple[str, ...]
    exempt: tuple[str, ...] = ()


RULES = {
    "ipc stands alone": Rule(("ipc",), ("runtime_cache", "om_models", "tools")),
    "the cache knows neither engine nor device": Rule(
        ("runtime_cache.cache",), ("runtime_cache.engine", "runtime_cache.device", "ipc")
    ),
    "the engine decides without device or wire": Rule(
        ("runtime_cache.engine",), ("runtime_cache.device", "ipc"), exempt=NOT_PURE
    ),
    "the engine's hands know no wire": Rule(NOT_PURE, ("ipc",)),
    "the device serves the engine": Rule(
        ("runtime_cache.device",),
        ("runtime_cache.engine", "runtime_cache.cache", "runtime_cache.service", "ipc"),
    ),
    "the software device knows nothing of its user": Rule(
        ("runtime_cache.aclsim",),
        ("runtime_cache.engine", "runtime_cache.cache", "runtime_cache.device", "ipc"),
    ),
    "models know nothing of serving": Rule(
        ("om_models",),
        ("runtime_cache.engine", "runtime_cache.cache", "runtime_cache.device", "ipc"),
    ),
    "acl is imported in one place": Rule(
        PACKAGES, ("acl",), exempt=("runtime_cache.device.select",)
    ),
    "the software device is chosen in one place": Rule(
        ("runtime_cache",),
        ("runtime_cache.aclsim",),
        exempt=("runtime_cache.aclsim", "runtime_cache.device.select"),
    ),
    "ONNX is for making models and for the software device": Rule(
        PACKAGES, ("onnx", "onnxruntime"), exempt=("om_models", "runtime_cache.aclsim")
    ),
    "the product does not import its tests": Rule(PACKAGES, ("tests",)),
    "pure modules do nothing": Rule(PURE, tuple(sorted(IMPURE)), exempt=NOT_PURE),
}


def is_under(module: str, packages: tuple[str, ...]) -> bool:
    return any(module == package or module.startswith(package + ".") for package in packages)


def module_name(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def imports(source: str, module: str, *, is_package: bool) -> Iterator[str]:
    """Every module named by an import, those for type checking only included."""
    package = module if is_package else module.rpartition(".")[0]
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parents = package.split(".")[: len(package.split(".")) - node.level + 1]
            base = ".".join([*parents, node.module or ""]) if node.level else node.module or ""
            # `from a import b` may name the module a.b.
            yield from (f"{base.rstrip('.')}.{alias.name}" for alias in node.names)


def product_imports() -> dict[str, set[str]]:
    found = {}
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            module, is_package = module_name(path), path.name == "__init__.py"
            source = path.read_text("utf-8")
            found[module] = set(imports(source, module, is_package=is_package))
    return found


IMPORTS = product_imports()


def breaches(rule: Rule, found: dict[str, set[str]]) -> list[str]:
    return [
        f"{module} imports {name}"
        for module, names in found.items()
        if is_under(module, rule.modules) and not is_under(module, rule.exempt)
        for name in sorted(names)
        if is_under(name, rule.forbidden)
    ]


@pytest.mark.parametrize("name", RULES)
def test_directions(name: str) -> None:
    assert breaches(RULES[name], IMPORTS) == []


def test_the_walk_sees_the_product() -> None:
    assert "runtime_cache.errors.InternalError" in IMPORTS["runtime_cache.engine.batch"]
    assert set(NOT_PURE) & set(IMPORTS), "the executor and the loop are exempt by these names"


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("import time", {"time"}),
        ("import os.path as p", {"os.path"}),
        ("from acl import rt", {"acl.rt"}),
        ("def f():\n    import random", {"random"}),
        ("from .state import State", {"a.b.state.State"}),
        ("from . import state", {"a.b.state"}),
        ("from ..c import d", {"a.c.d"}),
    ],
)
def test_every_form_of_import_is_seen(source: str, expected: set[str]) -> None:
    assert set(imports(source, "a.b.module", is_package=False)) == expected


@pytest.mark.parametrize(
    ("rule", "module", "name", "is_breach"),
    [
        ("pure modules do nothing", "runtime_cache.cache.pool", "time.monotonic", True),
        ("pure modules do nothing", "runtime_cache.engine.executor", "time.monotonic", False),
        ("pure modules do nothing", "runtime_cache.cache.pool", "timeit.timeit", False),
        ("ipc stands alone", "ipc.server", "runtime_cache.errors", True),
        ("acl is imported in one place", "runtime_cache.device.select", "acl", False),
        ("acl is imported in one place", "tools.doctor", "acl", True),
        ("the engine decides without device or wire", "runtime_cache.engine.state", "ipc.x", True),
    ],
)
def test_a_breach_is_found(rule: str, module: str, name: str, is_breach: bool) -> None:
    assert bool(breaches(RULES[rule], {module: {name}})) is is_breach
