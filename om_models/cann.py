"""The user's CANN: where it is, which release, and the environment its `atc` runs in.

`set_env.sh` is sourced in a clean shell, and what it leaves is `atc`'s environment. The virtual
environment that this program runs in has no place there: ATC compiles operators with the Python
that CANN was installed for.

Source: layout and contents of an installed CANN 8.1.RC1 (set_env.sh, `*_install.info`,
`version.cfg`, `version.info`); environment page of the ATC guide (hicann/ge, devlib on hosts
without a device); requirements page instg_0045.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from om_models.atc_table import Release
from runtime_cache.errors import ConversionError

#: Where installations are, the first found is taken; `~` is the home of who runs this.
WELL_KNOWN = (
    "/usr/local/Ascend/ascend-toolkit/latest",
    "/usr/local/Ascend/cann",
    "~/Ascend/ascend-toolkit/latest",
    "~/Ascend/cann",
)
#: By these the shell of the user says which one it has sourced.
HOME_VARIABLES = ("ASCEND_HOME_PATH", "ASCEND_TOOLKIT_HOME")
#: What ATC's Python must import, and the package that has it. Source: instg_0045.
PYTHON_MODULES = {
    "numpy": "numpy",
    "google.protobuf": "protobuf==3.20.*",
    "decorator": "decorator",
    "sympy": "sympy",
    "cffi": "cffi",
    "attr": "attrs",
    "Cython": "cython",
    "yaml": "pyyaml",
    "scipy": "scipy",
    "psutil": "psutil",
    "absl": "absl-py",
}
#: Importing all of it takes long on a small board; what was not asked in time counts as there.
PYTHON_CHECK_S = 5.0
_SOURCE_S = 30.0
#: Passed on into the clean shell; everything else of the caller's environment stays outside.
_PASSED = (
    *("HOME", "USER", "LOGNAME", "SHELL", "LANG", "LC_ALL", "TMPDIR"),
    *("LD_LIBRARY_PATH", "PYTHONPATH"),
)
_PASSED_PREFIXES = ("ASCEND_", "TE_", "MAX_COMPILE_CORE_NUMBER", "ATC_")
_VERSION_LINES = re.compile(
    r"^(?:version|version_dir|toolkit_running_version)=\[?(?:[\d.]+:)?([^\]\s]+)\]?\s*$",
    re.MULTILINE,
)
_DRIVER_LIBRARY = "libascend_hal.so"
#: As a user's shell takes it: what the script returns is not asked, its variables stand.
_SOURCING = '. "$1" >/dev/null || :; exec "$2" -0'
#: Imports everything, whatever the modules print or raise meanwhile.
_IMPORTING = """\
import importlib, sys
for name in sys.argv[1:]:
    try: importlib.import_module(name)
    except BaseException: print("missing", name, flush=True)
"""


@dataclass(frozen=True)
class Cann:
    """An installation that can compile.

    Attributes:
        home: its directory, or None if only an `atc` on the PATH is known.
        atc: the program.
        environment: what it runs in, whole.
        release: None if no file of the installation says it.
    """

    home: Path | None
    atc: Path
    environment: Mapping[str, str]
    release: Release | None

    def describe(self) -> str:
        """For people: `CANN 8.1.RC1, /usr/local/Ascend/ascend-toolkit/latest`."""
        name = f"CANN {self.release}" if self.release else "CANN, release not known"
        return f"{name}, {self.home or self.atc}"


def find_cann(directory: Path | None = None, environ: Mapping[str, str] = os.environ) -> Cann:
    """The installation to compile with.

    Looked for in: `directory`; what the shell has sourced; an `atc` on the PATH, which runs in the
    present environment if it belongs to no installation; the usual places.

    Args:
        directory: the user's choice, and then nothing else is tried.

    Raises:
        ConversionError: there is none, or it has no `set_env.sh`, or no `atc` after sourcing it.
    """
    if directory is not None:
        return _sourced(directory.expanduser().absolute(), environ)
    for name in HOME_VARIABLES:
        if environ.get(name) and find_set_env(Path(environ[name])):
            return _sourced(Path(environ[name]), environ)
    clean = scrubbed(environ)
    if program := shutil.which("atc", path=clean.get("PATH", "")):
        home = _home_of(Path(program))
        if home and find_set_env(home):
            return _sourced(home, environ)
        return Cann(home, Path(program), clean, read_release(home) if home else None)
    for place in WELL_KNOWN:
        if find_set_env(path := Path(place.replace("~", environ.get("HOME", "~"), 1))):
            return _sourced(path, environ)
    named = [f"{name}={environ[name]}" for name in HOME_VARIABLES if environ.get(name)]
    stale = f", and no set_env.sh where {' and '.join(named)} says" if named else ""
    raise ConversionError(
        f"atc is not on the PATH{stale}: source set_env.sh of CANN or name its directory by --cann;"
        " or use --export-only here and --from-export on a host that has CANN"
    )


def find_set_env(home: Path) -> Path | None:
    """`set_env.sh` of an installation: inside, beside (8.x), or under the processor's directory."""
    places = [home, *home.glob("*-linux/script"), *home.glob("*-linux")]
    if home.name == "latest" or Release.parse(home.name):
        places.insert(1, home.parent)
    return next((path for p in places if (path := p / "set_env.sh").is_file()), None)


def read_release(home: Path) -> Release | None:
    """What the installation says of itself; None if no file does, nor the directory's name."""
    patterns = ("*-linux/ascend_toolkit_install.info", "version.cfg", "*/version.info")
    for path in (path for pattern in patterns for path in sorted(home.glob(pattern))):
        with suppress(OSError):  # not for this user to read
            for text in _VERSION_LINES.findall(path.read_text("utf-8", "replace")):
                if release := Release.parse(text):
                    return release
    return Release.parse(home.resolve().name.removeprefix("cann-"))


def scrubbed(environ: Mapping[str, str]) -> dict[str, str]:
    """The environment without what belongs to this program's Python."""
    ours = _own_prefixes(environ)
    clean = dict(environ)
    for name in ("VIRTUAL_ENV", "VIRTUAL_ENV_PROMPT", "PYTHONHOME"):
        clean.pop(name, None)
    for name in ("PATH", "PYTHONPATH"):
        if name in clean:
            kept = [part for part in clean[name].split(os.pathsep) if not _is_under(part, ours)]
            clean[name] = os.pathsep.join(kept)
    return clean


def missing_modules(environment: Mapping[str, str]) -> list[str]:
    """Packages that ATC's Python, `python3` of that environment, lacks.

    Raises:
        ConversionError: there is no such Python, or it does not start.
    """
    python = shutil.which("python3", path=environment.get("PATH", ""))
    if python is None:
        raise ConversionError("ATC needs a python3, and none is on the PATH that set_env.sh leaves")
    try:
        said = subprocess.run(
            [python, "-c", _IMPORTING, *PYTHON_MODULES],
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=PYTHON_CHECK_S,
            check=True,
        ).stdout
    except subprocess.TimeoutExpired as error:
        said = error.stdout or b""
    except subprocess.CalledProcessError as error:
        last = [f"exit code {error.returncode}", *_lines(error.stderr)][-1]
        raise ConversionError(f"ATC's Python, {python}, does not start: {last}") from error
    except OSError as error:
        raise ConversionError(f"ATC's Python, {python}, does not start: {error}") from error
    found = _lines(said)
    return [package for name, package in PYTHON_MODULES.items() if f"missing {name}" in found]


def check_python(cann: Cann) -> None:
    """Refuse now what ATC would find out after the model is read.

    Raises:
        ConversionError: its Python lacks packages; they are named.
    """
    if missing := missing_modules(cann.environment):
        python = shutil.which("python3", path=cann.environment.get("PATH", ""))
        names = " ".join(f"'{name}'" if "*" in name else name for name in missing)
        raise ConversionError(
            f"ATC compiles with {python} (this program's own virtual environment is left out),"
            f" which lacks: {', '.join(missing)}\n"
            f"install them there: {python} -m pip install {names}\n"
            "(--no-python-check starts atc all the same)"
        )


def python_notes(cann: Cann) -> Iterator[str]:
    """What of ATC's Python does not suit its release, where that is documented; sentences."""
    limits = _python_limits(cann.release)
    python = shutil.which("python3", path=cann.environment.get("PATH", ""))
    if limits is None or python is None:
        return
    found = _python_version(python, cann.environment)
    first, last = limits
    if found is not None and not first <= found <= last:
        yield (
            f"ATC's Python is {found[0]}.{found[1]} ({python}); CANN {cann.release} names"
            f" {first[0]}.{first[1]} to {last[0]}.{last[1]}"
        )


def _sourced(home: Path, environ: Mapping[str, str]) -> Cann:
    script = find_set_env(home)
    if script is None:
        raise ConversionError(f"{home} holds no set_env.sh: it is not a CANN installation")
    environment, said = _environment_after(script, scrubbed(environ))
    home = _chosen(home, environment)
    program = shutil.which("atc", path=environment.get("PATH", ""))
    if program is None:
        raise ConversionError(
            f"{script} puts no atc on the PATH: the CANN toolkit (not only the runtime) is needed"
            + "".join(f"\nit said: {line}" for line in said)
        )
    return Cann(home, Path(program), _with_driver_stub(environment, home), read_release(home))


def _chosen(home: Path, environment: Mapping[str, str]) -> Path:
    """The installation that is sourced, where `home` is the directory that holds several."""
    named = [Path(environment[name]) for name in HOME_VARIABLES if environment.get(name)]
    return next((path for path in named if home in path.parents and path.is_dir()), home)


def _environment_after(
    script: Path, environ: Mapping[str, str]
) -> tuple[dict[str, str], list[str]]:
    """What sourcing a script leaves in a shell without the caller's variables; its complaints."""
    shell = shutil.which("bash") or "/bin/sh"
    passed = {k: v for k, v in environ.items() if k in _PASSED or k.startswith(_PASSED_PREFIXES)}
    passed["PATH"] = environ.get("PATH") or os.defpath
    try:
        done = subprocess.run(
            [shell, "-c", _SOURCING, shell, str(script), shutil.which("env") or "/usr/bin/env"],
            env=passed,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=_SOURCE_S,
            check=True,
        )
    except subprocess.CalledProcessError as error:
        failure = f"{script} fails with exit code {error.returncode}"
        raise ConversionError(": ".join([failure, *_lines(error.stderr)])) from error
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ConversionError(f"{script} cannot be sourced: {error}") from error
    pairs = (entry.partition("=") for entry in done.stdout.decode(errors="replace").split("\0"))
    return {name: value for name, equals, value in pairs if equals}, _lines(done.stderr)


def _lines(output: bytes) -> list[str]:
    lines = (line.strip() for line in output.decode(errors="replace").splitlines())
    return [line for line in lines if line]


def _with_driver_stub(environment: dict[str, str], home: Path) -> dict[str, str]:
    """On a host without the driver, atc links against the stubs that CANN brings (devlib)."""
    paths = environment.get("LD_LIBRARY_PATH", "").split(os.pathsep)
    if any((Path(path) / _DRIVER_LIBRARY).exists() for path in paths if path):
        return environment
    stubs = [str(path) for path in sorted(home.glob("*-linux/devlib")) if path.is_dir()]
    joined = os.pathsep.join([*filter(None, paths), *stubs])
    return {**environment, "LD_LIBRARY_PATH": joined} if stubs else environment


def _home_of(program: Path) -> Path | None:
    """The installation whose `bin` an atc lies in, if it is one."""
    parents = program.resolve().parents
    return next((path for path in parents[1:4] if find_set_env(path) or read_release(path)), None)


def _own_prefixes(environ: Mapping[str, str]) -> list[Path]:
    own = [Path(sys.prefix)] if sys.prefix != sys.base_prefix else []
    if environ.get("VIRTUAL_ENV"):
        own.append(Path(environ["VIRTUAL_ENV"]))
    return own


def _is_under(part: str, prefixes: Sequence[Path]) -> bool:
    return any(Path(part) == prefix or prefix in Path(part).parents for prefix in prefixes)


def _python_limits(release: Release | None) -> tuple[tuple[int, int], tuple[int, int]] | None:
    """First and last Python of a release. Source: instg_0045 of 8.0, 8.5.0, 9.0.0, 9.1."""
    if release is None:
        return None
    known = {(8, 0): (3, 11), (8, 5): (3, 13), (9, 0): (3, 13), (9, 1): (3, 14)}
    last = known.get((release.major, release.minor))
    return None if last is None else ((3, 7), last)


def _python_version(python: str, environment: Mapping[str, str]) -> tuple[int, int] | None:
    program = "import sys; print(*sys.version_info[:2])"
    try:
        said = subprocess.run(
            [python, "-c", program],
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=PYTHON_CHECK_S,
            check=True,
        ).stdout
        major, minor = said.split()[-2:]  # a sitecustomize may print before
        return int(major), int(minor)
    except (OSError, subprocess.SubprocessError, ValueError):
        return None
