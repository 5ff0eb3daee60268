"""The module `acl` for programs that import it: the surface of pyACL, and nothing beside it."""

from __future__ import annotations

import sys
from types import ModuleType

from runtime_cache import aclsim
from runtime_cache.aclsim import families, mdl, rt, util


def install() -> ModuleType:
    """Puts `acl` and its families into `sys.modules`, before the program imports them."""
    acl = _surface("acl", aclsim)
    parts = {"rt": _surface("acl.rt", rt), "mdl": _surface("acl.mdl", mdl)}
    parts["util"] = _surface("acl.util", util)
    parts |= {name: getattr(families, name) for name in families.FAMILIES}
    sys.modules["acl"] = acl
    for name, part in parts.items():
        setattr(acl, name, part)
        sys.modules[f"acl.{name}"] = part
    return acl


def _surface(name: str, source: ModuleType) -> ModuleType:
    """A module with the pyACL functions of another, which also holds what makes them work."""
    module = ModuleType(name, source.__doc__)
    for key, value in vars(source).items():
        if hasattr(value, "arg_format"):
            setattr(module, key, value)
    return module
