"""From what the user asked for to the numbers of a bundle. Pure.

Every default is decided here and nowhere else, so that the command can print them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from om_models.gears import PLANS, GearPlan, check_plan, parse_gears
from om_models.manifest import KvSpec, Manifest, OmFile
from om_models.socs import check_soc_name
from om_models.spec import ModelSpec, check_context
from runtime_cache.errors import ConversionError

Target = Literal["ascend", "sim"]
Dtype = Literal["float16", "float32"]
Layout = Literal["fused", "split"]
IndexDtype = Literal["int32", "int64"]

#: Told to ATC for `--target sim` when the user names no SoC: what the software device plays.
SIM_SOC_VERSION = "Ascend310P3"
DEFAULT_CONTEXT = 2048
DEFAULT_KV_BYTES: dict[Target, int] = {"sim": 1 << 30, "ascend": 4 << 30}
DEFAULT_MAX_BATCH: dict[Target, int] = {"sim": 16, "ascend": 8}
DEFAULT_DTYPE: dict[Target, Dtype] = {"sim": "float32", "ascend": "float16"}
DEFAULT_GEARS: dict[Target, str] = {"sim": "fine", "ascend": "balanced"}
#: Slots are compiled in multiples of the default block, so that none is left over.
SLOT_MULTIPLE = 64
#: Every copy starts on this boundary, so every row does (docs/design.md) [bytes].
ROW_ALIGNMENT_BYTES = 64
#: Options of ATC that users may not set: they follow from the model, or change what the daemon
#: feeds and reads.
FIXED_ATC_OPTIONS = {
    *("mode", "om", "json", "display_model_info"),
    *("framework", "model", "weight", "output", "soc_version", "external_weight"),
    *("input_format", "input_shape", "input_shape_range", "dynamic_dims"),
    *("dynamic_batch_size", "dynamic_image_size", "insert_op_conf"),
    *("out_nodes", "output_type", "input_fp16_nodes"),
    *("is_input_adjust_hw_layout", "is_output_adjust_hw_layout"),
}
#: Options of ATC that name a file or directory, which ATC looks for from where it runs.
PATH_ATC_OPTIONS = {
    *("op_precision_mode", "modify_mixlist", "keep_dtype", "customize_dtypes"),
    *("fusion_switch_file", "compression_optimize_conf", "op_compiler_cache_dir", "debug_dir"),
}
#: With more, float16 would lose weights of an ordinary size (0.02) to its subnormal numbers.
MAX_MLP_SCALE = 256
#: Model inputs of this many elements or more are unproven on ATC.
MAX_INPUT_ELEMENTS = 2**31


@dataclass(frozen=True)
class ConvertOptions:
    """The command line, None where the user said nothing.

    Attributes:
        kv_bytes: size of the KV pool; excludes `kv_tokens`.
        context: largest number of tokens of a sequence.
        gears: the name of a plan (`gears.PLANS`), or gears in the syntax of `gears.parse_gears`.
        num_kv_groups: overrides the number of pool inputs; for tests.
        default_kv_bytes: in place of the target's default; it too grows with the context.
        external_weight: where ATC leaves the weights: 0 in the `.om`, 1 in a file each beside it,
            2 in one file beside it.
        atc_options: more options of ATC, by name.
        mlp_scale: see `graph.GraphOptions`.
    """

    target: Target
    soc_version: str | None = None
    kv_bytes: int | None = None
    kv_tokens: int | None = None
    context: int | None = None
    max_batch: int | None = None
    dtype: Dtype | None = None
    gears: str | None = None
    layout: Layout = "fused"
    index_dtype: IndexDtype = "int32"
    num_kv_groups: int | None = None
    default_kv_bytes: int | None = None
    external_weight: int = 0
    atc_options: Mapping[str, str] = field(default_factory=dict)
    mlp_scale: int = 1


@dataclass(frozen=True)
class Plan:
    """Every number of a bundle that does not come from the checkpoint."""

    target: Target
    soc_version: str
    dtype: Dtype
    index_dtype: IndexDtype
    layout: Layout
    gears: GearPlan
    kv: KvSpec
    atc_options: dict[str, str] = field(default_factory=dict)
    mlp_scale: int = 1

    @property
    def oms(self) -> tuple[OmFile, ...]:
        """The `.om` files this plan makes."""
        prefill, decode = self.gears.prefill, self.gears.decode
        if self.layout == "fused":
            return (OmFile(path="model.om", prefill=prefill, decode=decode),)
        return (
            OmFile(path="prefill.om", prefill=prefill, decode=()),
            OmFile(path="decode.om", prefill=(), decode=decode),
        )


def make_plan(spec: ModelSpec, options: ConvertOptions) -> Plan:
    """Fill in the defaults and check that the numbers agree.

    Raises:
        ConversionError: options contradict each other, the model, or a limit of ATC.
    """
    dtype = options.dtype or DEFAULT_DTYPE[options.target]
    gears = _gear_plan(spec, options)
    context = gears.max_model_len
    kv = _kv_spec(spec, dtype, context, options)
    if kv.num_slots < context + 2 * SLOT_MULTIPLE:
        raise ConversionError(
            f"a KV pool of {kv.num_slots} tokens does not hold one sequence of {context} tokens;"
            f" at least {context + 2 * SLOT_MULTIPLE} are needed"
        )
    return Plan(
        target=options.target,
        soc_version=_soc_version(options),
        dtype=dtype,
        index_dtype=options.index_dtype,
        layout=options.layout,
        gears=gears,
        kv=kv,
        atc_options=_atc_options(options),
        mlp_scale=_mlp_scale(dtype, options),
    )


def plan_of(manifest: Manifest) -> Plan:
    """The plan that a bundle or an export was made by."""
    return Plan(
        target=manifest.target,
        soc_version=manifest.soc_version,
        dtype=manifest.dtype,
        index_dtype=manifest.index_dtype,
        layout=manifest.layout,
        gears=GearPlan(manifest.prefill_gears, manifest.decode_gears),
        kv=manifest.kv,
        atc_options=manifest.atc_options,
        mlp_scale=manifest.mlp_scale,
    )


def _atc_options(options: ConvertOptions) -> dict[str, str]:
    if fixed := sorted(FIXED_ATC_OPTIONS & options.atc_options.keys()):
        raise ConversionError(
            f"--atc-option {fixed[0]}: follows from the model or from another option of this"
            " command; it cannot be given"
        )
    for name in PATH_ATC_OPTIONS & options.atc_options.keys():
        if not (value := options.atc_options[name]).startswith("/"):
            raise ConversionError(
                f"--atc-option {name}={value}: atc runs in a directory of its own; give the whole"
                " path, from / on"
            )
    external = {"external_weight": str(options.external_weight)} if options.external_weight else {}
    return external | dict(options.atc_options)


def _mlp_scale(dtype: Dtype, options: ConvertOptions) -> int:
    scale = options.mlp_scale
    if not 1 <= scale <= MAX_MLP_SCALE or scale & (scale - 1):
        raise ConversionError(f"--mlp-scale {scale} is no power of two from 1 to {MAX_MLP_SCALE}")
    if scale > 1 and dtype != "float16":
        raise ConversionError("--mlp-scale is for --dtype fp16; fp32 holds every activation")
    return scale


def _soc_version(options: ConvertOptions) -> str:
    if options.soc_version:
        check_soc_name(options.soc_version)
        return options.soc_version
    if options.target == "ascend":
        raise ConversionError(
            "--target ascend needs --soc-version: `Ascend` and the name that npu-smi info shows,"
            " such as Ascend310B4"
        )
    return SIM_SOC_VERSION


def _gear_plan(spec: ModelSpec, options: ConvertOptions) -> GearPlan:
    if options.gears is not None and options.gears not in PLANS:
        plan = parse_gears(options.gears)
        _check_explicit_gears(plan, options)
    else:
        context = options.context or min(spec.max_context, DEFAULT_CONTEXT)
        if context < 2:
            raise ConversionError("--context must be at least 2")
        max_batch = options.max_batch or DEFAULT_MAX_BATCH[options.target]
        plan = PLANS[options.gears or DEFAULT_GEARS[options.target]](context, max_batch)
    check_context(spec, plan.max_model_len)
    check_plan(plan, is_fused=options.layout == "fused")
    return plan


def _check_explicit_gears(plan: GearPlan, options: ConvertOptions) -> None:
    largest_past = max(gear.past for gear in (*plan.prefill, *plan.decode))
    largest_batch = max(gear.batch for gear in plan.decode)
    if largest_past != plan.max_model_len:
        raise ConversionError(
            "--gears: prefill and decode must have the same largest past, which is the context"
        )
    if options.context not in (None, largest_past):
        raise ConversionError(
            f"--context {options.context} contradicts --gears, whose largest past is {largest_past}"
        )
    if options.max_batch not in (None, largest_batch):
        raise ConversionError(
            f"--max-batch {options.max_batch} contradicts --gears, whose largest is {largest_batch}"
        )


def _kv_spec(spec: ModelSpec, dtype: Dtype, context: int, options: ConvertOptions) -> KvSpec:
    item_bytes = np.dtype(dtype).itemsize
    row_elements = _round_up(spec.kv_dim, ROW_ALIGNMENT_BYTES // item_bytes)
    token_bytes = 2 * spec.num_layers * row_elements * item_bytes
    num_slots = _num_slots(token_bytes, context, options)
    elements = num_slots * 2 * spec.num_layers * row_elements
    num_groups = options.num_kv_groups or _num_groups(spec.num_layers, elements)
    if spec.num_layers % num_groups:
        raise ConversionError(f"{spec.num_layers} layers cannot be cut into {num_groups} groups")
    return KvSpec(
        dtype=dtype,
        num_slots=num_slots,
        num_groups=num_groups,
        layers_per_group=spec.num_layers // num_groups,
        row_elements=row_elements,
    )


def _num_slots(token_bytes: int, context: int, options: ConvertOptions) -> int:
    if options.kv_tokens is not None and options.kv_bytes is not None:
        raise ConversionError("--kv-tokens and --kv-capacity exclude each other")
    if options.kv_tokens is not None:
        return _round_up(options.kv_tokens, SLOT_MULTIPLE)
    # A default must serve any model: room for two whole sequences at the least.
    smallest_bytes = 2 * (context + SLOT_MULTIPLE) * token_bytes
    default_bytes = options.default_kv_bytes or DEFAULT_KV_BYTES[options.target]
    capacity = options.kv_bytes or max(default_bytes, smallest_bytes)
    return capacity // token_bytes // SLOT_MULTIPLE * SLOT_MULTIPLE


def _num_groups(num_layers: int, elements: int) -> int:
    """The smallest divisor of the layers that keeps each pool input below the limit."""
    for num_groups in range(1, num_layers + 1):
        if num_layers % num_groups == 0 and elements // num_groups < MAX_INPUT_ELEMENTS:
            return num_groups
    raise ConversionError(
        f"the KV pool is too large: one layer alone has {elements // num_layers:,} elements;"
        f" inputs must stay below {MAX_INPUT_ELEMENTS:,}"
    )


def _round_up(value: int, multiple: int) -> int:
    return math.ceil(value / multiple) * multiple
