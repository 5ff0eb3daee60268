"""ATC command lines, and what they must not say.

The real compiler and the software device's take the same line; only the program differs
(`om_models.compiler`). Source of the options: the ATC tool reference, one page an option
(`om_models/data/atc_options.json`); what was not confirmed is said in docs/conversion.md.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path

from om_models.atc_table import Release, complaints
from om_models.contract import GraphContract, TensorSpec, gear_sizes
from om_models.gears import model_gears
from om_models.manifest import Gear, Manifest, OmFile
from om_models.plan import Plan, Target
from om_models.spec import ModelSpec
from runtime_cache.errors import ConversionError

FRAMEWORK_ONNX = 5
#: The software device's compiler, as arguments of Python.
SOFTWARE_ATC = ("-m", "runtime_cache.aclsim", "atc")
#: What ATC's own check of `--model` and `--output` does not let through (E10001); the former is
#: checked with its links followed. Source: hicann/ge, base/common/util.cc, and older releases.
_FOREIGN = re.compile("[^\u4e00-\u9fa5A-Za-z0-9./_-]")
#: Options that a user may replace by `--atc-option`; those not here follow from the model.
DEFAULTS = {
    # The graph says itself which islands are float32; nothing is to be cast behind its back.
    "precision_mode": "must_keep_origin_dtype",
    "log": "error",
}


def atc_arguments(manifest: Manifest, om: OmFile, onnx_path: str, output: str) -> list[str]:
    """Options for one `.om`.

    Args:
        manifest: the draft is enough; gives KV shape, SoC and the user's options.
        output: path without the suffix, which ATC adds.
    """
    contract = GraphContract.of(manifest)
    model = (onnx_path, output)
    return _arguments(contract, om, manifest.soc_version, manifest.atc_options, model)


def check_arguments(plan: Plan, spec: ModelSpec, release: Release | None) -> None:
    """Hold the command lines of a plan against the table of ATC's options, before any work.

    Args:
        release: of the CANN that will compile; None if it is not known.

    Raises:
        ConversionError: the release or the SoC does not have an option or its value.
    """
    contract = GraphContract(plan.kv, plan.index_dtype, spec.vocab_size)
    model = ("model.onnx", "model")
    found = dict.fromkeys(
        text
        for om in plan.oms
        for text in complaints(
            _arguments(contract, om, plan.soc_version, plan.atc_options, model), release
        )
    )
    if found:
        raise ConversionError("ATC would refuse its options: " + "; ".join(found))


def check_paths(target: Target, *paths: Path) -> None:
    """Refuse early what a real ATC would refuse when everything is written.

    Raises:
        ConversionError: a path, links followed, has other characters than ATC takes.
    """
    for path in paths:
        if target == "ascend" and (found := _FOREIGN.search(str(path.resolve()))):
            raise ConversionError(
                f"ATC refuses the path {path.resolve()} for its {found[0]!r}: it takes letters,"
                " digits, `-`, `_` and `.`; use another directory"
            )


def check_soc_version(target: Target, soc_version: str) -> None:
    """Refuse early what the software device's compiler would refuse after the weights.

    Raises:
        ConversionError: it does not know the SoC. What the real one knows is only known to itself.
    """
    if target != "sim":
        return
    # Imported late: brings ONNX Runtime, which a conversion for a card does without.
    from runtime_cache.aclsim.atc.compiler import tables

    if soc_version not in (known := tables().soc_versions):
        raise ConversionError(
            f"--soc-version {soc_version} is not known to the software device; known:"
            f" {', '.join(known)}"
        )


def _arguments(
    contract: GraphContract,
    om: OmFile,
    soc_version: str,
    options: Mapping[str, str],
    model: tuple[str, str],
) -> list[str]:
    gears = model_gears(om.prefill, om.decode)
    inputs = contract.inputs
    arguments = [
        f"--framework={FRAMEWORK_ONNX}",
        f"--model={model[0]}",
        f"--output={model[1]}",
        "--input_format=ND",
        f"--input_shape={input_shape(inputs, gears)}",
    ]
    # A single shape is compiled as it is: --dynamic_dims wants two gears at least (E10035).
    if len(gears) > 1:
        arguments.append(f"--dynamic_dims={dynamic_dims(inputs, gears)}")
    # The two ways to say the precision exclude each other.
    is_replaced = "precision_mode_v2" in options
    defaults = {k: v for k, v in DEFAULTS.items() if not (is_replaced and k == "precision_mode")}
    return [
        *arguments,
        f"--soc_version={soc_version}",
        *(f"--{name}={value}" for name, value in {**defaults, **options}.items()),
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


def shell_script(
    target: Target,
    command_lines: Sequence[Sequence[str]],
    variables: Mapping[str, str] | None = None,
) -> str:
    """What `--export-only` leaves for another host: the command lines, run from their directory.

    Args:
        variables: of the environment, to be set before.
    """
    program = ["atc"] if target == "ascend" else ["python3", *SOFTWARE_ATC]
    exports = [f"export {name}={shlex.quote(value)}" for name, value in (variables or {}).items()]
    lines = [shlex.join([*program, *arguments]) for arguments in command_lines]
    return "\n".join(["#!/bin/sh", "set -e", 'cd "$(dirname "$0")"', *exports, *lines, ""])
