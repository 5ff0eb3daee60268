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
from dataclasses import dataclass
from pathlib import Path

import msgspec
import onnx

from om_models.socs import find_soc
from runtime_cache import __version__
from runtime_cache.aclsim.atc import show
from runtime_cache.aclsim.atc.flags import help_text
from runtime_cache.aclsim.atc.graph import (
    apply_input_shapes,
    check_operators,
    check_soc,
    data_dependent_node,
    has_bfloat16,
    imports_of,
    read_model,
)
from runtime_cache.aclsim.atc.infer import ShapeTable
from runtime_cache.aclsim.atc.options import (
    MODE_JSON,
    MODE_SHOW,
    AtcError,
    AtcOptions,
    parse_options,
)
from runtime_cache.aclsim.atc.rewrite import output_names, rewrite
from runtime_cache.aclsim.atc.shapes import Bounds, fill_gear
from runtime_cache.aclsim.atc.trial import TrialRuns
from runtime_cache.aclsim.atc.weights import (
    ExternalWeights,
    Weight,
    external_weights,
    find_weights,
    made_directory,
    place_in_section,
    section_chunks,
)
from runtime_cache.aclsim.failure import AclFailure
from runtime_cache.aclsim.mapping import round_up
from runtime_cache.aclsim.om import ExternalFile, Gear, OmHeader, Section, TensorInfo, read_om
from runtime_cache.aclsim.om_writer import write_om
from runtime_cache.aclsim.sessions import new_session
from runtime_cache.aclsim.settings import SimSettings

_WORKSPACE_STEP_BYTES = 2 << 20
_HELP = ("--help", "--h", "-h")
_INTERRUPTED = 130  # as shells have it


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
    """Does what `--mode` says; prints progress, then `ATC run success`, or why `ATC run failed`.

    Returns:
        The exit code.
    """
    if any(argument in _HELP for argument in arguments):
        print(help_text())
        return 0
    print("ATC start working now, please wait for a moment.", flush=True)
    try:
        _run(parse_options(arguments, tables().soc_versions))
    except AtcError as error:
        print(f"{error.code}: {error.reason}\nATC run failed, please check the reason above.")
        return 1
    except KeyboardInterrupt:
        print("ATC run failed: interrupted. Nothing was written.")
        return _INTERRUPTED
    print("ATC run success, welcome to the next use.")
    return 0


def _run(options: AtcOptions) -> None:
    if options.mode == MODE_JSON:
        show.write_json(options.om, options.json)
    elif options.mode == MODE_SHOW:
        print("\n".join(show.show(options.om)))
    else:
        target = compile_model(options)
        if options.shows_info:
            print("\n".join(show.show(target)))


def compile_model(options: AtcOptions) -> Path:
    """Writes `<output>.om`, or `<output>_<system>_<processor>.om` for a model with host code.

    Returns:
        Its path.

    Raises:
        AtcError: the model or its shapes are refused, or a file cannot be written; no file is
            left behind.
    """
    if not options.has_plain_paths:
        _progress("the real ATC refuses these paths (E10001): a-z A-Z 0-9 - . _ / and Chinese only")
    _progress("read model")
    model = read_model(options.model)
    _progress(f"check {len(model.graph.node)} nodes")
    keeps_rules = _check_rules(model, options)
    check_soc(model, find_soc(options.soc_version))
    rewrite(model, options)
    inputs = apply_input_shapes(
        model, options.input_shape, options.ranges, has_gears=options.gears is not None
    )
    weights = find_weights(model, options.model.parent)
    try:
        with made_directory(options.output.parent), external_weights(options.output) as external:
            store = _store(weights, options, external)
            trial = TrialRuns(model, weights, options.model.parent, inputs)
            shapes = _compile_shapes(model, inputs, trial, options)
            header = _header(model, options, shapes, store, has_atc_rules=keeps_rules)
            return _write(model, header, store, options)
    except OSError as error:
        reason = f"cannot write [{options.output}]: {error}"
        raise AtcError("E10001", f"--output: {reason}") from error


def _check_rules(model: onnx.ModelProto, options: AtcOptions) -> bool:
    """Whether the parser of ATC would take the model.

    Raises:
        AtcError: it would not, and its rules are in force.
    """
    try:
        check_operators(model, tables().ops)
    except AtcError as error:
        if options.has_atc_rules:
            raise
        _progress(f"rules lifted by --no-atc-rules, the real ATC refuses this: {error}")
        return False
    return True


@dataclass(frozen=True, slots=True)
class _Store:
    """Where the weights go.

    Attributes:
        section_bytes, placed: of the weights section inside the `.om`; offsets and weights.
        external: the files beside it.
    """

    section_bytes: int
    placed: list[tuple[int, Weight]]
    external: list[ExternalFile]


def _store(weights: list[Weight], options: AtcOptions, external: ExternalWeights) -> _Store:
    """Moves the weights out of the graph, to the section or to files of their own."""
    if options.external_weight == 0:
        placed, section_bytes = place_in_section(weights)
        return _Store(section_bytes, placed, [])
    _progress(f"write {sum(weight.length for weight in weights)} bytes of external weights")
    if options.external_weight == 1:
        external.write_each(weights)
    else:
        external.write_combined(weights)
    return _Store(0, [], list(external.files.values()))


@dataclass(frozen=True, slots=True)
class _Shapes:
    """What is compiled: gears (one for a static model), or ranges."""

    inputs: list[TensorInfo]
    outputs: list[TensorInfo]
    gears: list[Gear]
    ranges: list[list[Bounds]]


def _compile_shapes(
    model: onnx.ModelProto, inputs: list[TensorInfo], trial: TrialRuns, options: AtcOptions
) -> _Shapes:
    """The shapes of every gear; ranges for a model without gears whose shapes stay open."""
    table = ShapeTable(model, inputs, trial)
    dependent = data_dependent_node(model)
    if options.ranges:
        return _ranged(inputs, table, options)
    if dependent is not None and options.gears is not None:
        name = f"[{dependent.name}] ({dependent.op_type})"
        raise AtcError("E20001", f"node {name} makes shapes that depend on data; gears exclude it")
    gears = _compile_gears(table, inputs, options)
    if dependent is None and gears is not None:
        return _Shapes(inputs, table.outputs, gears, [])
    soc = find_soc(options.soc_version)
    if options.gears is not None or (soc is not None and not soc.has_dynamic_shape):
        who = "gears do" if options.gears else f"{options.soc_version} does"
        raise AtcError("E20001", f"an output shape depends on data, which {who} not take")
    return _ranged(inputs, table, options)


def _compile_gears(
    table: ShapeTable, inputs: list[TensorInfo], options: AtcOptions
) -> list[Gear] | None:
    """Every gear, or None as soon as one has shapes that depend on data."""
    gears = []
    kind = options.gears.kind if options.gears else "dims"
    wanted = options.gears.values if options.gears else [[]]
    for number, values in enumerate(wanted, 1):
        _progress(f"compile gear {number}/{len(wanted)}")
        gear = table.gear(values, fill_gear([info.dims for info in inputs], values, kind))
        if gear is None:
            return None
        gears.append(gear)
    return gears


def _ranged(inputs: list[TensorInfo], table: ShapeTable, options: AtcOptions) -> _Shapes:
    _progress("compile with dynamic shape")
    ranges = [options.ranges.get(info.name) or [(dim, dim) for dim in info.dims] for info in inputs]
    return _Shapes(inputs, table.outputs, [], ranges)


def _header(
    model: onnx.ModelProto,
    options: AtcOptions,
    shapes: _Shapes,
    store: _Store,
    *,
    has_atc_rules: bool,
) -> OmHeader:
    """All but the graph's length and the checksums."""
    return OmHeader(
        inputs=shapes.inputs,
        outputs=shapes.outputs,
        gears=shapes.gears,
        soc_version=options.soc_version,
        atc_command=options.command,
        versions=_versions(model),
        workspace_bytes=_workspace_bytes(shapes),
        graph=Section(0, ""),
        weights=Section(store.section_bytes, ""),
        gear_kind=options.gears.kind if options.gears else "dims",
        ranges=shapes.ranges,
        input_format=options.input_format,
        external=store.external,
        has_atc_rules=has_atc_rules,
        host=options.host if not shapes.gears else "",
        has_bfloat16=has_bfloat16(model),
        output_names=output_names(model, options.out_nodes),
    )


def _write(model: onnx.ModelProto, header: OmHeader, store: _Store, options: AtcOptions) -> Path:
    graph = model.SerializeToString()
    header = msgspec.structs.replace(header, graph=Section(len(graph), ""))
    suffix = f"_{header.host}.om" if header.host else ".om"
    target = options.output.with_name(options.output.name + suffix)
    _progress(f"write {store.section_bytes} bytes of weights")
    write_om(target, header, graph, section_chunks(store.placed), verify=_check_loads)
    return target


def _check_loads(path: Path) -> None:
    """Loads the new file once, as the device will."""
    _progress("load")
    try:
        new_session(read_om(str(path)), SimSettings(threads=1, weights_in_place=True))
    except AclFailure as failure:
        reason = failure.sentence.replace(str(path), "the compiled model")
        raise AtcError("E20001", reason) from failure


def _workspace_bytes(shapes: _Shapes) -> int:
    """Work memory to charge: an estimate, twice the outputs of the gear where they are largest; 0
    for a model with ranges, whose runs take what they need."""
    if not shapes.gears:
        return 0
    sizes = [
        sum(info.size_bytes(dims) for info, dims in zip(shapes.outputs, gear.outputs, strict=True))
        for gear in shapes.gears
    ]
    return round_up(2 * max(sizes) + 1, _WORKSPACE_STEP_BYTES)


def _versions(model: onnx.ModelProto) -> dict[str, str]:
    is_plain = len(model.opset_import) == 1
    return {
        "runtime-cache": __version__,
        "onnx": importlib.metadata.version("onnx"),
        "onnxruntime": importlib.metadata.version("onnxruntime"),
        "python": platform.python_version(),
        "opset": str(model.opset_import[0].version) if is_plain else imports_of(model),
    }


def _progress(what: str) -> None:
    print(f"ATC progress: {what}", flush=True)
