"""`python -m runtime_cache.aclsim run PROGRAM ...`: any program that says `import acl`, unchanged.

The program runs in this process as `__main__`, with the software device in the place of pyACL. When
it has ended, threads and exit handlers included, standard error gets a report of what a card would
not have forgiven. Its exit code is passed on.
"""

from __future__ import annotations

import argparse
import atexit
import contextlib
import gc
import importlib.util
import json
import os
import signal
import sys
import threading
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from importlib.abc import InspectLoader
from importlib.machinery import ModuleSpec, SourceFileLoader
from types import ModuleType, TracebackType
from typing import Any, NoReturn, get_args

from om_models.socs import SOCS
from runtime_cache.aclsim import children, misuse, settings, watcher
from runtime_cache.aclsim.ledger import Misuse, ledger
from runtime_cache.aclsim.module import acl_modules
from runtime_cache.aclsim.process import this_process
from runtime_cache.config import parse_bytes
from runtime_cache.errors import ConfigError

_LIBRARIES = {"site-packages", "dist-packages", "runtime_cache", "om_models"}
_EPILOG = """\
example:
  python -m runtime_cache.aclsim run --soc Ascend310B4 app.py net.om cat.npy

What is not given here is an environment variable RTCACHE_ACLSIM_<SETTING>, such
as RTCACHE_ACLSIM_GIL_LIMIT_MS=20 (docs/software_device.md)."""


def main(arguments: Sequence[str]) -> int:
    """Runs a program and returns its exit code; 2 if it cannot be started as asked."""
    options = _parse(arguments)
    try:
        changes = _changes(options)
        settings.configure(**changes)
        code = None if options.is_module else _compile(options.program)
    except (ValueError, ConfigError, OSError) as error:
        print(f"run: {error}", file=sys.stderr)
        return 2
    before = set(sys.modules)
    directory = os.getcwd() if options.is_module else _directory(options.program)
    sys.modules.update(acl_modules())
    _prepare_children(changes)
    watcher.watch()  # for programs that follow a device address
    ended = _run(options.program, options.args, code, directory)
    try:
        _end_of_process(before, directory)
    except KeyboardInterrupt:  # threads that do not end
        ended = _Ended(1, is_interrupted=True)
    ended = _with_report(ended, options)
    if ended.is_interrupted:
        _die_of_interrupt()
    return ended.exit_code


@dataclass(frozen=True, slots=True)
class _Ended:
    """How a program ended.

    Attributes:
        is_interrupted: by Ctrl-C.
    """

    exit_code: int = 0
    is_interrupted: bool = False


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m runtime_cache.aclsim run",
        description="Runs a program that imports acl (pyACL) on the Ascend device in software.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--soc", metavar="SOC", help="which SoC to stand for, such as Ascend310B4: decides memory")
    add("--memory", metavar="SIZE", help="device memory, such as 4GiB, in place of the SoC's own")
    add("--faults", metavar="FILE", help="script of calls that fail, come late or hang (JSON)")
    add(
        "--misuse",
        choices=get_args(settings.MisuseAction),
        help="report at the end (the default), warn also when it happens, or error: exit with 1",
    )
    add("--json", action="store_true", help="the report as one line of JSON")
    add("-m", dest="is_module", action="store_true", help="PROGRAM is a module, as for python -m")
    add("program", metavar="PROGRAM", help="the Python program")
    add("args", metavar="ARGS", nargs=argparse.REMAINDER, help="its arguments")
    return parser.parse_args(arguments)


def _changes(options: argparse.Namespace) -> dict[str, Any]:
    """The settings that were asked for.

    Raises:
        ValueError: a SoC that no table knows.
        ConfigError: a size that is none.
    """
    if options.soc is not None and options.soc not in SOCS:
        raise ValueError(f"SoC {options.soc!r} is unknown; known: {', '.join(SOCS)}")
    changes = {
        "soc_name": options.soc,
        "memory_bytes": None if options.memory is None else parse_bytes(options.memory),
        "faults": None if options.faults is None else os.path.abspath(options.faults),
        "misuse": options.misuse,
    }
    return {name: value for name, value in changes.items() if value is not None}


def _prepare_children(changes: dict[str, Any]) -> None:
    """Processes that the program starts find the stand-in too, with the same settings."""
    place = os.path.dirname(children.__file__)
    sys.path.insert(1, place)  # what multiprocessing hands on
    search = [place, os.environ.get("PYTHONPATH", "")]
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, search))
    for name, value in changes.items():
        os.environ[settings.ENV_PREFIX + name.upper()] = str(value)


def _directory(program: str) -> str:
    return os.path.dirname(os.path.realpath(program))


def _compile(program: str) -> Any:
    """The program's code, or the SyntaxError that it begins with, to be raised in its place.

    Raises:
        OSError: it cannot be read.
    """
    with open(program, "rb") as file:
        source = file.read()
    try:
        return compile(source, os.path.abspath(program), "exec", dont_inherit=True)
    except SyntaxError as error:
        return error


def _run(program: str, args: Sequence[str], code: Any, directory: str) -> _Ended:
    """Runs the code as `__main__`, and ends with the exit code that Python would have.

    Args:
        code: None if the program is a module, which is looked for here.
    """
    sys.argv = [program, *args]
    if not getattr(sys.flags, "safe_path", False):  # from Python 3.11 on
        sys.path[0] = directory
    try:
        if isinstance(code, SyntaxError):
            raise code.with_traceback(None)
        spec = None if code is not None else _find_module(program)
        module = _main_module(program, spec)
        sys.modules["__main__"] = module
        exec(code if spec is None else _code_of(spec), vars(module))
    except SystemExit as error:
        return _Ended(_exit_code(error.code))
    except BaseException as error:
        _show(error)
        return _Ended(1, isinstance(error, KeyboardInterrupt))
    return _Ended()


def _find_module(name: str) -> ModuleSpec:
    """What `python -m` runs under a name; of a package, its `__main__`.

    Raises:
        ImportError: nothing; what a package raises that is imported on the way.
    """
    spec = importlib.util.find_spec(name)
    if spec is not None and spec.submodule_search_locations is not None:
        spec = importlib.util.find_spec(f"{name}.__main__")
    if spec is None or spec.origin is None:
        raise ImportError(f"no module named {name} that could be run")
    sys.argv[0] = spec.origin
    return spec


def _code_of(spec: ModuleSpec) -> Any:
    """Raises ImportError if there is none: an extension module."""
    code = spec.loader.get_code(spec.name) if isinstance(spec.loader, InspectLoader) else None
    if code is None:
        raise ImportError(f"{spec.name} has no code that could be run")
    return code


def _main_module(program: str, spec: ModuleSpec | None) -> ModuleType:
    module = ModuleType("__main__")
    path = os.path.abspath(program) if spec is None else spec.origin
    module.__file__ = path
    module.__spec__ = spec
    module.__package__ = None if spec is None else spec.parent
    loader = SourceFileLoader("__main__", str(path)) if spec is None else spec.loader
    module.__dict__["__loader__"] = loader
    module.__dict__["__builtins__"] = sys.modules["builtins"]
    module.__dict__["__cached__"] = None
    return module


def _exit_code(code: Any) -> int:
    """What `sys.exit(code)` means: a number, nothing, or a text for standard error."""
    if code is None:
        return 0
    if isinstance(code, int):
        return code
    print(code, file=sys.stderr)
    return 1


def _show(error: BaseException) -> None:
    """Prints the traceback as Python does: from the program's own first line on."""
    own: TracebackType | None = error.__traceback__
    error.__traceback__ = own.tb_next if own is not None else None
    sys.excepthook(type(error), error, error.__traceback__)


def _end_of_process(before: set[str], directory: str) -> None:
    """Does what Python does at the end of a process, so that the report can come after it.

    Waits for threads, runs exit handlers, and lets go of the modules that the program imported
    from its own directory, so that destructors give back what they hold.
    """
    threading._shutdown()  # type: ignore[attr-defined]  # no public way ends idle thread pools
    atexit._run_exitfuncs()
    for name in {*sys.modules} - before | {"__main__"}:
        if _is_own(sys.modules[name], directory):
            del sys.modules[name]
    gc.collect()


def _is_own(module: Any, directory: str) -> bool:
    """Whether a module is the program's, not a library's that happens to be installed below it."""
    path = getattr(module, "__file__", None)
    if not isinstance(path, str):
        return False
    below = os.path.relpath(os.path.realpath(path), directory).split(os.sep)
    return below[0] != os.pardir and not _LIBRARIES & set(below)


def _with_report(ended: _Ended, options: argparse.Namespace) -> _Ended:
    """Writes the report. With the setting `misuse` at `error`, what is in it is a failure."""
    found = misuse.report(this_process())
    if settings.current().misuse == "error" and misuse.errors(found) and ended.exit_code == 0:
        ended = replace(ended, exit_code=1)
    text = _json(options.program, ended.exit_code, found) if options.json else _text(found)
    with contextlib.suppress(AttributeError, OSError, ValueError):
        sys.stdout.flush()  # unless nobody listens, or the program closed it or took it away
    with contextlib.suppress(OSError, ValueError):
        print(text, file=sys.__stderr__)  # wherever the program sends its own
    return ended


def _text(found: list[Misuse]) -> str:
    config, calls = settings.current(), sum(ledger.calls.values())
    head = f"software device ({config.soc_name}): {calls} calls"
    if not found:
        return f"{head}, and nothing that a card would not forgive"
    lines = [f"  {each.kind}: {each.sentence}" for each in found]
    return "\n".join([f"{head}; what a card would not forgive, or not quickly:", *lines])


def _json(program: str, exit_code: int, found: list[Misuse]) -> str:
    config = settings.current()
    return json.dumps(
        {
            "program": program,
            "exit_code": exit_code,
            "soc": config.soc_name,
            "form": "board" if config.has_one_memory else "card",
            "calls": dict(sorted(ledger.calls.items())),
            "misuses": [asdict(each) for each in found],
        }
    )


def _die_of_interrupt() -> NoReturn:
    """Ends as Python does after Ctrl-C, so that a shell sees the signal."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    os.kill(os.getpid(), signal.SIGINT)
    raise KeyboardInterrupt
