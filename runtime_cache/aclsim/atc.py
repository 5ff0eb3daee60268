"""The software device's ATC: `python -m runtime_cache.aclsim atc --framework=5 --model=...`.

Takes the real compiler's command line and refuses what it would refuse, then writes an `.om` for
the software device. It translates nothing: the model keeps its types and is executed as it is,
whatever `--precision_mode` says.
"""

from __future__ import annotations

import functools
import importlib.metadata
import importlib.resources
import platform
from collections.abc import Sequence
from pathlib import Path

import msgspec
import onnx

from runtime_cache import __version__
from runtime_cache.aclsim.atc_graph import (
    ShapeTable,
    apply_input_shapes,
    check_operators,
    fill_gear,
    move_weights_out,
    read_model,
    weight_chunks,
)
from runtime_cache.aclsim.atc_options import AtcError, AtcOptions, parse_options
from runtime_cache.aclsim.failure import AclFailure
from runtime_cache.aclsim.mapping import round_up
from runtime_cache.aclsim.om import Gear, OmHeader, Section, read_om
from runtime_cache.aclsim.om_writer import write_om
from runtime_cache.aclsim.sessions import new_session
from runtime_cache.aclsim.settings import SimSettings

_WORKSPACE_STEP_BYTES = 2 << 20


class AtcTables(msgspec.Struct, frozen=True):
    """Facts about the real ATC.

    Attributes:
        ops: inclusive opset ranges for which ATC's ONNX parser knows an operator.
    """

    about: str
    source: str
    soc_versions: list[str]
    ops: dict[str, list[tuple[int, int]]]


@functools.cache
def tables() -> AtcTables:
    """The packaged tables."""
    resource = importlib.resources.files("runtime_cache.aclsim") / "data" / "atc_onnx_ops.json"
    return msgspec.json.decode(resource.read_bytes(), type=AtcTables)


def main(arguments: Sequence[str]) -> int:
    """Compiles; prints progress, then `ATC run success` or the reason and `ATC run failed`.

    Returns:
        The exit code.
    """
    print("ATC start working now, please wait for a moment.", flush=True)
    try:
        compile_model(parse_options(arguments, tables().soc_versions))
    except AtcError as error:
        print(f"{error.code}: {error.reason}\nATC run failed, please check the reason above.")
        return 1
    print("ATC run success, welcome to the next use.")
    return 0


def compile_model(options: AtcOptions) -> Path:
    """Writes `<output>.om` and returns its path.

    Raises:
        AtcError: the model or its shapes are refused, or the file cannot be written; no file is
            left behind.
    """
    _progress("read model")
    model = read_model(options.model)
    _progress(f"check {len(model.graph.node)} nodes")
    check_operators(model, tables().ops)
    inputs = apply_input_shapes(model, options.input_shape)
    weights, weights_bytes = move_weights_out(model, options.model.parent)
    shapes = ShapeTable(model, inputs)
    gears = []
    wanted = options.gears or [[]]
    for number, values in enumerate(wanted, 1):
        _progress(f"compile gear {number}/{len(wanted)}")
        gears.append(shapes.gear(values, fill_gear(inputs, values)))
    graph = model.SerializeToString()
    header = OmHeader(
        inputs=inputs,
        outputs=shapes.outputs,
        gears=gears,
        soc_version=options.soc_version,
        atc_command=options.command,
        versions=_versions(model),
        workspace_bytes=0,
        graph=Section(len(graph), ""),
        weights=Section(weights_bytes, ""),
    )
    header = msgspec.structs.replace(header, workspace_bytes=_workspace_bytes(header))
    target = options.output.with_name(options.output.name + ".om")
    _progress(f"write {weights_bytes} bytes of weights")
    try:
        write_om(target, header, graph, weight_chunks(weights), verify=_check_loads)
    except OSError as error:
        raise AtcError("E10001", f"--output: cannot write [{target}]: {error}") from error
    return target


def _check_loads(path: Path) -> None:
    """Loads the new file once, as the device will."""
    _progress("load")
    try:
        new_session(read_om(str(path)), SimSettings(threads=1, weights_in_place=True))
    except AclFailure as failure:
        raise AtcError("E20001", failure.sentence) from failure


def _workspace_bytes(header: OmHeader) -> int:
    """Work memory to charge: an estimate, twice the outputs of the largest gear."""
    gear: Gear = header.gears[header.largest_gear]
    pairs = zip(header.outputs, gear.outputs, strict=True)
    outputs = sum(info.size_bytes(dims) for info, dims in pairs)
    return round_up(2 * outputs + 1, _WORKSPACE_STEP_BYTES)


def _versions(model: onnx.ModelProto) -> dict[str, str]:
    return {
        "runtime-cache": __version__,
        "onnx": importlib.metadata.version("onnx"),
        "onnxruntime": importlib.metadata.version("onnxruntime"),
        "python": platform.python_version(),
        "opset": str(model.opset_import[0].version),
    }


def _progress(what: str) -> None:
    print(f"ATC progress: {what}", flush=True)
