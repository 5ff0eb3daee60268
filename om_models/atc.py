"""ATC command lines, and running them: the real compiler or the software device's.

Both take the same command line; only the program differs. Source of the options: the ATC tool
reference, one page an option; what was not confirmed there is said in docs/kernels.md.
"""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from om_models.contract import GraphContract, TensorSpec, gear_sizes
from om_models.gears import model_gears
from om_models.manifest import Gear, Manifest, OmFile
from om_models.plan import Target
from runtime_cache.errors import ConversionError

FRAMEWORK_ONNX = 5
#: The software device's compiler, as arguments of Python.
SOFTWARE_ATC = ("-m", "runtime_cache.aclsim", "atc")
#: How much of the compiler's output an error message carries [lines].
SHOWN_LINES = 15

OnLine = Callable[[str], None]


def atc_arguments(manifest: Manifest, om: OmFile, onnx_path: str, output: str) -> list[str]:
    """Options for one `.om`. Pure.

    Args:
        manifest: the draft is enough; gives KV shape and SoC.
        output: path without the suffix, which ATC adds.
    """
    gears = model_gears(om.prefill, om.decode)
    inputs = GraphContract.of(manifest).inputs
    arguments = [
        f"--framework={FRAMEWORK_ONNX}",
        f"--model={onnx_path}",
        f"--output={output}",
        "--input_format=ND",
        f"--input_shape={input_shape(inputs, gears)}",
    ]
    # A single shape is compiled as it is: --dynamic_dims wants two gears at least (E10035).
    if len(gears) > 1:
        arguments.append(f"--dynamic_dims={dynamic_dims(inputs, gears)}")
    return [
        *arguments,
        f"--soc_version={manifest.soc_version}",
        # The graph says itself which islands are float32; nothing is to be cast behind its back.
        "--precision_mode=must_keep_origin_dtype",
        "--log=error",
    ]


def input_shape(inputs: Mapping[str, TensorSpec], gears: Sequence[Gear]) -> str:
    """`--input_shape`: -1 for what gears decide, or the numbers themselves for a single gear."""
    sizes = gear_sizes(gears[0]) if len(gears) == 1 else {}
    return ";".join(
        f"{name}:{_joined([sizes.get(d, -1) if isinstance(d, str) else d for d in spec.dims])}"
        for name, spec in inputs.items()
    )


def dynamic_dims(inputs: Mapping[str, TensorSpec], gears: Sequence[Gear]) -> str:
    """`--dynamic_dims`: per gear a value for every -1, in input order."""
    free = [dim for spec in inputs.values() for dim in spec.dims if isinstance(dim, str)]
    return ";".join(_joined([gear_sizes(gear)[dim] for dim in free]) for gear in gears)


def _joined(dims: Sequence[int]) -> str:
    return ",".join(map(str, dims))


def shell_script(target: Target, command_lines: Sequence[Sequence[str]]) -> str:
    """What `--export-only` leaves for another host: the command lines, run from their directory."""
    program = ["atc"] if target == "ascend" else ["python3", *SOFTWARE_ATC]
    lines = [shlex.join([*program, *arguments]) for arguments in command_lines]
    return "\n".join(["#!/bin/sh", "set -e", 'cd "$(dirname "$0")"', *lines, ""])


def compiler(target: Target) -> list[str]:
    """The program that compiles for a target.

    Raises:
        ConversionError: the target is a real SoC and `atc` is not on the PATH.
    """
    if target == "sim":
        return [sys.executable, *SOFTWARE_ATC]
    program = shutil.which("atc")
    if program is None:
        raise ConversionError(
            "atc is not on the PATH: source set_env.sh of CANN, or use --export-only here and"
            " --from-export on a host that has CANN"
        )
    return [program]


def check_soc_version(target: Target, soc_version: str) -> None:
    """Refuse early what the software device's compiler would refuse after the weights.

    Raises:
        ConversionError: it does not know the SoC. What the real one knows is only known to itself.
    """
    if target != "sim":
        return
    # Imported late: brings ONNX Runtime, which a conversion for a card does without.
    from runtime_cache.aclsim.atc import tables

    if soc_version not in (known := tables().soc_versions):
        raise ConversionError(
            f"--soc-version {soc_version} is not known to the software device; known:"
            f" {', '.join(known)}"
        )


def run_atc(target: Target, arguments: Sequence[str], scratch: Path, on_line: OnLine) -> None:
    """Compile; returns when the `.om` is written.

    Args:
        arguments: paths in them must be absolute.
        scratch: where to make a directory for the compiler's litter, which is removed.
        on_line: called with each line of the compiler's output.

    Raises:
        ConversionError: the compiler is missing or failed; the message carries its last lines.
    """
    command = [*compiler(target), *arguments]
    last_lines: deque[str] = deque(maxlen=SHOWN_LINES)
    # ATC leaves kernel_meta/ and fusion_result.json where it runs.
    with (
        tempfile.TemporaryDirectory(dir=scratch, ignore_cleanup_errors=True) as directory,
        _interrupts_held() as release,
        subprocess.Popen(
            command,
            cwd=directory,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,  # a group of its own: CANN's atc is a script with children
        ) as process,
    ):
        try:
            release()
            for line in process.stdout or ():
                last_lines.append(line.rstrip())
                on_line(line.rstrip())
        except BaseException:
            # Interrupted: nobody waits an hour for what nobody wants.
            os.killpg(process.pid, signal.SIGKILL)
            raise
    if process.returncode != 0:
        shown = "\n".join(last_lines)
        raise ConversionError(f"atc failed with exit code {process.returncode}:\n{shown}")


@contextmanager
def _interrupts_held() -> Iterator[Callable[[], None]]:
    """Signals that would end the program wait until the function given is called.

    An interrupt within `Popen` would leave a compiler behind that nobody knows of.
    """
    came: list[int] = []
    before: dict[int, Any] = {}
    if threading.current_thread() is threading.main_thread():
        for each in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(each) not in (signal.SIG_IGN, None):
                before[each] = signal.signal(each, lambda number, _: came.append(number))

    def restore() -> None:
        while before:
            signal.signal(*before.popitem())

    def release() -> None:
        restore()
        for number in came:
            signal.raise_signal(number)

    try:
        yield release
    finally:
        restore()


def find_compiled(directory: Path, om: OmFile) -> Path | None:
    """The file ATC wrote, if it is there.

    ATC adds OS and processor to the name if host code is inside.

    Raises:
        ConversionError: there are several.
    """
    plain = directory / om.path
    if plain.is_file():
        return plain
    found = sorted(directory.glob(f"{plain.stem}_linux_*.om"))
    if len(found) > 1:
        names = ", ".join(path.name for path in found)
        raise ConversionError(f"{directory} holds several of {om.path}: {names}; leave one of them")
    return found[0] if found else None
