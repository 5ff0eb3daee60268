"""`import acl` and the first use of the device, each in a process of its own with a limit.

In a process of its own: a vendor's library may crash, hang, print, or change signal handlers.
"""

from __future__ import annotations

import json
import os
import re
from dataclasses import dataclass
from typing import Any

from runtime_cache.device.acl_import import (
    describe_failure,
    explain_import,
    explain_stranger,
    is_of_driver,
    missing_library,
)
from tools.doctor.findings import Finding, ok, problem, sentence, warning
from tools.doctor.host import Host, Ran
from tools.doctor.installed import Installed, find_set_env, library_directories

IMPORT_LIMIT_S = 30.0
#: The first use of a device takes seconds. Source: runtime FAQ (kernel packages are sent to it).
PROBE_LIMIT_S = 120.0

_MARK = "rtcache-doctor: "
#: What pip has that is not pyACL.
_STRANGERS = ("acl", "pyacl")
#: Both programs leave the current directory off the path, as an installed command does.
_START = f"""\
import sys
sys.path[:] = [path for path in sys.path if path]
import json
def say(**facts):
    print("\\n{_MARK}" + json.dumps(facts, default=str), flush=True)
"""
_IMPORT = (
    _START
    + f"""\
from importlib import metadata, util
pip = {{}}
for name in {_STRANGERS!r}:
    try:
        pip[name] = metadata.version(name)
    except metadata.PackageNotFoundError:
        pass
found = util.find_spec("acl")
known = {{"pip": pip, "place": found and (found.origin or list(found.submodule_search_locations))}}
say(**known)
try:
    import acl
except BaseException as error:
    name = getattr(error, "name", None)
    say(**known, error=str(error), kind=type(error).__name__, missing=name)
else:
    is_whole = hasattr(acl, "init") and hasattr(getattr(acl, "rt", None), "malloc")
    say(**known, file=getattr(acl, "__file__", None), is_pyacl=is_whole)
"""
)
#: Counts a repeated init (100002) as done.
_PROBE = (
    _START
    + """\
import acl
device = int(sys.argv[1])
code = acl.init()
if code not in (0, 100002):
    say(call="acl.init", code=code)
    raise SystemExit(0)
facts = {"soc": acl.get_soc_name()}
code = acl.rt.set_device(device)
if code:
    say(call="acl.rt.set_device", code=code, message=acl.get_recent_err_msg(), **facts)
    raise SystemExit(0)
for attribute in (1, 0):
    free, total, code = acl.rt.get_mem_info(attribute)
    if code == 0 and total:
        facts.update(free_bytes=free, total_bytes=total)
        break
say(**facts)
acl.rt.reset_device(device)
acl.finalize()
"""
)
_ABSENT = "ModuleNotFoundError"
_TAGGED = re.compile(r"acl\.cpython-(\d)(\d+)\w*-([\w]+)-linux-gnu\.so")

#: Codes whose meaning an operator can act on. Source: the error code page of the pyACL guide.
_CODES = {
    107001: "there is no device of that number, or the driver is not loaded",
    500000: "an internal error, at init mostly an installation that is not whole",
    500001: "the platform's files do not know this SoC: CANN does not fit the device",
    207000: "the driver is older than this CANN",
    507033: "the device did not start: it may be lost, or in use by another container",
}


@dataclass(frozen=True, slots=True)
class Probe:
    """What the device said of itself through pyACL.

    Attributes:
        soc: its name, as ATC has it.
        free_bytes, total_bytes: of its memory, after the first use took its share.
    """

    soc: str | None
    free_bytes: int | None
    total_bytes: int | None


@dataclass(frozen=True, slots=True)
class AclImport:
    """How the import of `acl` went.

    Attributes:
        is_ready: it is pyACL.
        is_absent: there is no module of that name.
    """

    findings: list[Finding]
    is_ready: bool
    is_absent: bool


def check_acl(host: Host, toolkit: Installed | None, driver: Installed | None) -> AclImport:
    """Whether pyACL can be imported."""
    ran = _run(host, _IMPORT, (), IMPORT_LIMIT_S)
    facts = _facts(ran)
    pip, place = facts.get("pip") or {}, facts.get("place")
    if "error" in facts:
        finding = _explain(host, facts, toolkit, driver)
    elif "file" not in facts:
        what = f"importing `acl`{f' from {place}' if place else ''}"
        finding = _no_answer("acl", what, ran, IMPORT_LIMIT_S)
    elif not facts.get("is_pyacl"):
        text = sentence(explain_stranger(facts["file"] or place))
        finding = problem("acl", text, _remove(pip, place))
    else:
        finding = ok("acl", f"pyACL is {facts['file']}.")
    findings = [finding]
    if pip and finding.remedy != _remove(pip, place):
        named = " and ".join(f"{name} {version}" for name, version in pip.items())
        text = f"pip has installed {named}, which has nothing to do with Ascend."
        findings.append(warning("acl", text, _remove(pip, place)))
    is_absent = facts.get("kind") == _ABSENT and facts.get("missing") == "acl"
    return AclImport(findings, finding.status == "ok", is_absent)


def check_probe(host: Host, device_id: int) -> tuple[Finding, Probe | None]:
    """The first use of the device: what it is and how much memory it has free."""
    ran = _run(host, _PROBE, (str(device_id),), PROBE_LIMIT_S)
    facts = _facts(ran)
    if "call" in facts:
        code = facts["code"]
        meaning = _CODES.get(code, "see the error codes of pyACL, and the device's log")
        text = f"{facts['call']} answers {code} for device {device_id}: {meaning}."
        if facts.get("message"):
            text += f" It says: {' '.join(str(facts['message']).split())[:300]}"
        return problem("device", text, "See the findings about nodes, driver and npu-smi."), None
    if "soc" not in facts:
        what = f"the first use of device {device_id}"
        return _no_answer("device", what, ran, PROBE_LIMIT_S), None
    probe = Probe(facts["soc"], facts.get("free_bytes"), facts.get("total_bytes"))
    return ok("device", f"Device {device_id} is {probe.soc or 'of unknown name'}."), probe


def _run(host: Host, program: str, arguments: tuple[str, ...], limit_s: float) -> Ran:
    try:
        return host.run([host.executable, "-c", program, *arguments], limit_s)
    except OSError as error:
        return Ran(127, "", str(error))


def _facts(ran: Ran) -> dict[str, Any]:
    """What the program said last; nothing if it did not get so far."""
    found = re.findall(rf"^{_MARK}(.*)$", ran.out, re.MULTILINE)
    try:
        facts = json.loads(found[-1]) if found else {}
    except ValueError:
        return {}
    return facts if isinstance(facts, dict) else {}


def _no_answer(check: str, what: str, ran: Ran, limit_s: float) -> Finding:
    """A program that ended without its last line, or did not end."""
    how = sentence(f"{what} {ran.how_it_ended(limit_s)}")
    if ran.is_flood:
        return problem(check, how, "See what that module is: pyACL does not print.")
    if ran.code is None:
        return problem(
            check,
            how,
            "A driver or device that hangs is the usual cause: see npu-smi and `dmesg`, and"
            " start the device again.",
        )
    said = ran.err.strip().splitlines()
    last = f" It said: {sentence(said[-1][:200])}" if said else ""
    return problem(
        check,
        f"{how}{last}",
        "pyACL, CANN and driver of different releases do this: see the findings about them.",
    )


def _explain(
    host: Host, facts: dict[str, Any], toolkit: Installed | None, driver: Installed | None
) -> Finding:
    text, kind, place = str(facts["error"]), facts["kind"], facts.get("place")
    if kind not in (_ABSENT, "ImportError"):
        remedy = _remove(facts.get("pip") or {}, place)
        return problem("acl", sentence(describe_failure(kind, text, place)), remedy)
    missing = facts["missing"] if kind == _ABSENT else None
    other = _built_for_another(host, toolkit) if missing == "acl" else None
    if other is not None:
        return problem(
            "acl",
            f"pyACL is installed, but was built for {other}, not for Python"
            f" {host.python[0]}.{host.python[1]} on {host.machine}.",
            "Make the virtual environment with that Python.",
        )
    which = f"pyACL ({place})" if place else "pyACL"
    why = f"{which} cannot be imported: {explain_import(text, missing)}"
    return problem("acl", sentence(why), _remedy(host, text, missing, toolkit, driver))


def _remedy(
    host: Host,
    text: str,
    missing: str | None,
    toolkit: Installed | None,
    driver: Installed | None,
) -> str:
    library = missing_library(text)
    if library is not None:
        found = host.find_in(library_directories(toolkit, driver), library)
        if found is not None:
            return f"{library} is in {found}: export LD_LIBRARY_PATH={found}:$LD_LIBRARY_PATH"
        if is_of_driver(library):
            return (
                "Install the driver; in a container mount /usr/local/Ascend/driver, and see that"
                " its lib64/driver and lib64/common are in LD_LIBRARY_PATH."
            )
    if "undefined symbol" in text or "libpython" in text:
        return "Source the set_env.sh of one CANN only, with the Python it was made for."
    if missing is not None and missing != "acl":
        return f"Install {missing} into this virtual environment."
    if toolkit is None:
        return "Install the CANN toolkit; pyACL is part of it and is not on PyPI."
    return f"Run `source {find_set_env(host, toolkit.root) or 'set_env.sh'}`."


def _built_for_another(host: Host, toolkit: Installed | None) -> str | None:
    """For which Python the extension is that lies on the path, if for another than this one."""
    directories = host.paths("PYTHONPATH")
    if toolkit is not None:
        directories.append(os.path.join(toolkit.root, "python/site-packages"))
    others = []
    for directory in directories:
        for match in filter(None, map(_TAGGED.fullmatch, host.names_in(directory))):
            if (int(match[1]), int(match[2])) == host.python[:2] and match[3] == host.machine:
                return None
            others.append(f"Python {match[1]}.{match[2]} on {match[3]} ({directory}/{match[0]})")
    return others[0] if others else None


def _remove(pip: dict[str, str], place: object) -> str:
    """How to be rid of a module `acl` that is not pyACL."""
    if pip:
        return f"Run: pip uninstall {' '.join(pip)}"
    return f"Remove {place or 'that module'}, or take its directory off PYTHONPATH."
