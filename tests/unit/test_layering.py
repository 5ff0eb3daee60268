"""Walks every import of the product and holds it against the layout's rules."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ("runtime_cache", "om_models", "ipc", "tools")

#: What a pure module may not import: it decides, and never does.
IMPURE = {"asyncio", "zmq", "acl", "structlog", "time", "random", "os", "uvloop", "threading"}

#: Pure as a whole, but for the engine's hands. Other modules are pure if their docstring says so.
PURE_PACKAGES = ("runtime_cache.cache", "runtime_cache.engine")
NOT_PURE = (
    "runtime_cache.engine.executor",
    "runtime_cache.engine.loop",
    "runtime_cache.engine.recovery",
)


@dataclass(frozen=True)
class Rule:
    """`modules` (all but `exempt`) import nothing of `forbidden`."""

    modules: tuple[str, ...]
    forbidden: tuple[str, ...]
    exempt: tuple[str, ...] = ()


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


def says_pure(source: str) -> bool:
    """Whether the module's docstring has the word."""
    docstring = ast.get_docstring(ast.parse(source)) or ""
    return re.search(r"(?<!not )\bpure\b", docstring, re.IGNORECASE) is not None


PATHS = [path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))]
SOURCES = {module_name(path): path.read_text("utf-8") for path in PATHS}
IMPORTS = {
    module: set(imports(source, module, is_package=path.name == "__init__.py"))
    for path, (module, source) in zip(PATHS, SOURCES.items(), strict=True)
}
PURE = tuple(module for module, source in SOURCES.items() if says_pure(source))

RULES = {
    "ipc stands alone": Rule(("ipc",), ("runtime_cache", "om_models", "tools")),
    "the cache knows neither engine nor device": Rule(
        ("runtime_cache.cache",), ("runtime_cache.engine", "runtime_cache.device", "ipc")
    ),
    # Its gears are those of `om_models.manifest`, which is pure data.
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
    # `om_models.atc` runs the software device's compiler, which is no device.
    "the software device is chosen in one place": Rule(
        PACKAGES,
        ("runtime_cache.aclsim",),
        exempt=("runtime_cache.aclsim", "runtime_cache.device.select", "om_models.atc"),
    ),
    "ONNX is for making models and for the software device": Rule(
        PACKAGES, ("onnx", "onnxruntime"), exempt=("om_models", "runtime_cache.aclsim")
    ),
    "the product does not import its tests": Rule(PACKAGES, ("tests",)),
    "pure modules do nothing": Rule(PURE, tuple(sorted(IMPURE))),
}


def module_of(name: str) -> str:
    """Of an imported name: itself if it is a module of ours, or what holds it."""
    return name if name in IMPORTS else name.rpartition(".")[0]


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


def test_the_rules_name_what_exists() -> None:
    rules = RULES.values()
    named = {n for rule in rules for n in (*rule.modules, *rule.forbidden, *rule.exempt)}
    assert {name for name in named if is_under(name, PACKAGES)} <= set(IMPORTS)


def test_cache_and_engine_are_pure_but_for_the_engines_hands() -> None:
    inside = {module for module in IMPORTS if is_under(module, PURE_PACKAGES)}
    assert inside - set(PURE_PACKAGES) - set(PURE) == set(NOT_PURE)


def test_pure_modules_import_none_of_ours_but_pure_ones() -> None:
    imported = {(module, module_of(name)) for module in PURE for name in IMPORTS[module]}
    impure = {(module, ours) for module, ours in imported if ours in IMPORTS and ours not in PURE}
    # An exception class, beside the error texts that the software device keeps per thread.
    assert impure == {("runtime_cache.aclsim.address_map", "runtime_cache.aclsim.failure")}


@pytest.mark.parametrize(
    ("docstring", "is_pure"),
    [
        ("What is. Pure.", True),
        ("Pure data, commands.", True),
        ("What can go wrong; pure.", True),
        ("The hand.\n\n    Not pure: it acts.", False),
        ("Purely for people.", False),
    ],
)
def test_a_pure_module_says_so(docstring: str, is_pure: bool) -> None:
    assert says_pure(f'"""{docstring}"""\nx = "Pure"') is is_pure


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
        ("pure modules do nothing", "runtime_cache.cache.block_pool", "time.monotonic", True),
        ("pure modules do nothing", "runtime_cache.engine.executor", "time.monotonic", False),
        ("pure modules do nothing", "runtime_cache.cache.block_pool", "timeit.timeit", False),
        ("ipc stands alone", "ipc.server", "runtime_cache.errors", True),
        ("acl is imported in one place", "runtime_cache.device.select", "acl", False),
        ("acl is imported in one place", "tools.demo", "acl", True),
        (
            "the software device is chosen in one place",
            "om_models.atc",
            "runtime_cache.aclsim.atc",
            False,
        ),
        (
            "the software device is chosen in one place",
            "om_models.convert",
            "runtime_cache.aclsim.atc",
            True,
        ),
        ("the engine decides without device or wire", "runtime_cache.engine.state", "ipc.x", True),
    ],
)
def test_a_breach_is_found(rule: str, module: str, name: str, is_breach: bool) -> None:
    assert bool(breaches(RULES[rule], {module: {name}})) is is_breach
