"""What an import of the vendor's module `acl` that went wrong means, in words. Pure.

The driver says it at the start of the daemon, `rtcache-doctor` before that.

Source: pyACL field reports; the texts are the dynamic loader's.
"""

from __future__ import annotations

import re

SET_ENV = "`source <toolkit>/set_env.sh` in the environment of this process sets it"

_MISSING_LIBRARY = re.compile(r"(?:^|[\s/])([\w.+-]+\.so[\w.]*): cannot open shared object file")
#: How names of libraries begin that are known to be the driver's; it has more.
_OF_DRIVER = ("libascend_hal", "libdrv", "libdcmi", "libdevmmap")
_OF_PYTHON = re.compile(r"undefined symbol: _?Py")


def is_pyacl(module: object) -> bool:
    """Whether it has what pyACL has; the unrelated package `acl` of PyPI imports well."""
    return hasattr(module, "init") and hasattr(getattr(module, "rt", None), "malloc")


def explain_stranger(file: str | None) -> str:
    """What to do about a module `acl` that is not pyACL.

    Args:
        file: where it was found, if it says so.
    """
    return (
        f"the module `acl` at {file or 'an unknown place'} is not pyACL:"
        " uninstall that package; pyACL comes with CANN, not with pip"
    )


def explain_import(text: str, missing_module: str | None) -> str:
    """What the operator has to do about a failed import.

    Args:
        text: of the ImportError.
        missing_module: name of a ModuleNotFoundError.
    """
    if missing_module == "acl":
        return f"PYTHONPATH does not lead to it, or CANN is not installed; {SET_ENV}"
    if "libascendcl" in text:
        return f"{text}: LD_LIBRARY_PATH is not set; {SET_ENV}"
    if _OF_PYTHON.search(text) or "libpython" in text:
        return f"{text}: pyACL was built for another version of Python"
    if "undefined symbol" in text:
        return f"{text}: pyACL and the CANN libraries are of different releases"
    if "cannot open shared object file" in text:
        return f"{text}: {_explain_library(missing_library(text) or '')}"
    if "GLIBC" in text:
        return f"{text}: this CANN was built for a newer operating system"
    return text


def is_of_driver(library: str) -> bool:
    """Whether a shared library comes with the NPU driver, not with CANN."""
    return library.startswith(_OF_DRIVER)


def _explain_library(library: str) -> str:
    if is_of_driver(library):
        return "the NPU driver is not installed, or not mounted into this container"
    return "LD_LIBRARY_PATH does not lead to it, or CANN or the NPU driver is not whole"


def explain_failure(error: BaseException) -> str:
    """What to do about a module `acl` whose import ends with another error than ImportError."""
    return describe_failure(type(error).__name__, str(error))


def describe_failure(kind: str, text: str, file: str | None = None) -> str:
    """The same, from the error's name and text.

    Args:
        file: where the module was found, if that is known.
    """
    return (
        f"the module `acl`{f' at {file}' if file else ''} ends with {kind}: {text}; pyACL does"
        " not: another package of that name is in its place, and is to be uninstalled"
    )


def missing_library(text: str) -> str | None:
    """The shared library that the dynamic loader did not find, or None."""
    match = _MISSING_LIBRARY.search(text)
    return match[1] if match else None
