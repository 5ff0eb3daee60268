"""The modules that a program gets when it says `import acl`: the functions of pyACL, nothing else.

`runtime_cache.aclsim` is the same surface, but a Python package with modules of its own beside it.
"""

from __future__ import annotations

from types import FunctionType, ModuleType

from runtime_cache import aclsim
from runtime_cache.aclsim import mdl, rt, util
from runtime_cache.aclsim.families import FAMILIES

_SURFACES: dict[str, ModuleType] = {"acl": aclsim, "acl.rt": rt, "acl.mdl": mdl, "acl.util": util}


def acl_modules() -> dict[str, ModuleType]:
    """Fresh modules by name, to be put in `sys.modules`: `acl`, its three parts, its families.

    They share the one simulated process with `runtime_cache.aclsim`.
    """
    modules = {name: _module(name, found) for name, found in _SURFACES.items()}
    modules |= {f"acl.{name}": vars(aclsim)[name] for name in FAMILIES}
    root = modules["acl"]
    for name, module in modules.items():
        if module is not root:
            setattr(root, name.removeprefix("acl."), module)
    return modules


def acl_functions(source: ModuleType) -> dict[str, FunctionType]:
    """The functions of the surface in a module, by name."""
    return {
        name: value
        for name, value in vars(source).items()
        if isinstance(value, FunctionType) and hasattr(value, "arg_format")
    }


def _module(name: str, source: ModuleType) -> ModuleType:
    """A module with the functions of the surface that `source` has."""
    module = ModuleType(name, source.__doc__)
    module.__file__ = source.__file__
    vars(module).update(acl_functions(source))
    return module
