"""What a device will hold once a bundle is loaded: the plan before any work. Pure.

Weights, KV pool and staging are exact for the graph that is exported. Work memory is an estimate
from the shapes: what ATC plans is in the `.om` and is measured when it is loaded.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Protocol

from om_models.contract import GraphContract, TensorSpec
from om_models.manifest import Gear, KvSpec, OmFile
from om_models.socs import find_soc
from om_models.spec import ModelSpec
from om_models.weights import expected_shapes

#: What the first use of a device takes for the system's own packages, about [bytes].
#: Source: pyACL guide, memory management (first use of a device).
SYSTEM_BYTES = 300 << 20
#: The prefix length by which pools are compared [tokens].
PREFIX_TOKENS = 4096
#: Slots that hold no tokens: the null block, in its default size.
NULL_SLOTS = 64
#: What the driver adds to each sub-range of an allocation, alignment included, at most [bytes].
_RANGE_TAIL_BYTES = 128

_MIB, _GIB = 1 << 20, 1 << 30
_ITEM_BYTES = {"float16": 2, "float32": 4, "int32": 4, "int64": 8}
_WIDE_BYTES = 4  # norms, softmax and mask are float32 in every graph


class BundleNumbers(Protocol):
    """What a `Plan`, and a `Manifest` too, knows of the models to be loaded."""

    @property
    def soc_version(self) -> str: ...

    @property
    def dtype(self) -> str: ...

    @property
    def index_dtype(self) -> str: ...

    @property
    def kv(self) -> KvSpec: ...

    @property
    def oms(self) -> tuple[OmFile, ...]: ...


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Device memory by use [bytes].

    Attributes:
        soc: its name.
        is_board: one memory serves host and device, so the host's own needs come out of it too.
        total_bytes: of the device, or None if neither the table of SoCs nor the user says.
        system_bytes: what the system takes at the first use of a device, about.
        weights_bytes: constants of the graph, once for each `.om`.
        kv_bytes: the KV pool.
        workspace: work memory of each gear, an estimate; a model holds that of its largest.
        workspace_bytes: what all models hold together.
        staging_bytes: inputs and outputs of the steps; on a board their host side as well.
        kv_tokens: token slots, without those of the null block.
        prefixes_of_4096: prefixes of 4096 tokens that fit into the pool.
        concurrent_requests: sequences of `context` tokens that fit, if they share nothing.
        context: longest sequence [tokens].
        num_subgraphs: copies of the graph that ATC compiles, one a gear.
    """

    soc: str
    is_board: bool
    total_bytes: int | None
    system_bytes: int
    weights_bytes: int
    kv_bytes: int
    workspace: tuple[tuple[Gear, int], ...]
    workspace_bytes: int
    staging_bytes: int
    kv_tokens: int
    prefixes_of_4096: int
    concurrent_requests: int
    context: int
    num_subgraphs: int

    @property
    def needed_bytes(self) -> int:
        """All uses together."""
        return (
            self.system_bytes
            + self.weights_bytes
            + self.kv_bytes
            + self.workspace_bytes
            + self.staging_bytes
        )

    @property
    def free_bytes(self) -> int | None:
        """What is left; below 0 if it does not fit, None if the device's size is not known."""
        return None if self.total_bytes is None else self.total_bytes - self.needed_bytes


def plan_memory(
    numbers: BundleNumbers, spec: ModelSpec, *, total_bytes: int | None = None
) -> MemoryPlan:
    """The plan of a bundle, made or to be made: `plan_memory(manifest, manifest.model)`.

    Args:
        total_bytes: memory of the device, where it is known better than by the table of SoCs.
    """
    soc = find_soc(numbers.soc_version)
    is_board = soc is not None and soc.form == "board"
    kv, context = numbers.kv, _context(numbers.oms)
    workspaces = [_workspaces(numbers, spec, om) for om in numbers.oms]
    tokens = kv.num_slots - NULL_SLOTS
    return MemoryPlan(
        soc=numbers.soc_version,
        is_board=is_board,
        total_bytes=total_bytes or (soc.memory_bytes if soc else None),
        system_bytes=SYSTEM_BYTES,
        weights_bytes=len(numbers.oms) * weights_bytes(spec, numbers.dtype, context),
        kv_bytes=kv.num_slots * token_bytes(kv),
        workspace=tuple(dict(pair for found in workspaces for pair in found.items()).items()),
        workspace_bytes=sum(max(found.values()) for found in workspaces),
        staging_bytes=(1 + is_board) * sum(_staging_bytes(numbers, spec, om) for om in numbers.oms),
        kv_tokens=tokens,
        prefixes_of_4096=tokens // PREFIX_TOKENS,
        concurrent_requests=tokens // context,
        context=context,
        num_subgraphs=sum(len(found) for found in workspaces),
    )


def token_bytes(kv: KvSpec) -> int:
    """KV of one token in all layers, padding included [bytes]."""
    return 2 * kv.num_groups * kv.layers_per_group * kv.row_elements * _ITEM_BYTES[kv.dtype]


def weights_bytes(spec: ModelSpec, dtype: str, context: int) -> int:
    """Constants of one graph: weights, and the rotary tables of `context` positions [bytes]."""
    item = _ITEM_BYTES[dtype]
    # Weights of norms are float32 whatever the model is.
    weights = sum(
        prod(shape) * (_WIDE_BYTES if "norm" in name else item)
        for name, shape in expected_shapes(spec).items()
    )
    # cos and sin, each once more with the scale of q.
    return weights + 4 * context * (spec.head_dim // 2) * item


def workspace_bytes(spec: ModelSpec, dtype: str, kv: KvSpec, gear: Gear) -> int:
    """Work memory of one gear, an estimate from the shapes [bytes].

    What lives as long as the graph runs, and the largest of what lives for a while: the attention
    of one layer, its MLP, the logits. It takes for granted that memory of dead values is used
    again: 1.3 to 1.7 times the least that the exported graph needs (tests: workspace_estimate).
    How ATC plans is not known; the `.om` says what it asks for.
    """
    batch, fed, all_slots = gear.batch, gear.chunk, gear.past + gear.chunk
    item, num_fed = _ITEM_BYTES[dtype], batch * fed
    hidden = num_fed * spec.hidden_size * (item + _WIDE_BYTES)
    new_kv = num_fed * 2 * spec.num_layers * kv.row_elements * item
    mask = num_fed * all_slots * _WIDE_BYTES
    # K and V, each as it comes from the pool and turned for the product.
    gathered = 4 * batch * all_slots * kv.row_elements * item
    # Scores in the model's type, as float32, and their softmax.
    scores = num_fed * spec.num_heads * all_slots * (item + 2 * _WIDE_BYTES)
    inner = 3 * num_fed * spec.intermediate_size * item
    logits = batch * spec.vocab_size * item
    return hidden + new_kv + mask + max(gathered + scores, inner, logits)


def rows(plan: MemoryPlan) -> list[tuple[str, str]]:
    """The plan for people: what, and how much. Longer explanations are in `warnings`."""
    largest = max(plan.workspace, key=lambda pair: pair[1])[0]
    return [
        ("device", f"{plan.soc}, {_device_size(plan)}"),
        ("system", f"{size(plan.system_bytes)}, about, from the first use on"),
        ("weights", size(plan.weights_bytes)),
        (
            "KV pool",
            f"{size(plan.kv_bytes)}: {plan.kv_tokens} tokens, {plan.prefixes_of_4096} prefixes of"
            f" {PREFIX_TOKENS}, {plan.concurrent_requests} requests of {plan.context}",
        ),
        (
            "workspace",
            f"{size(plan.workspace_bytes)}, an estimate; largest gear {gear_name(largest)}",
        ),
        ("staging", size(plan.staging_bytes)),
        ("together", size(plan.needed_bytes)),
        ("left", _left(plan)),
    ]


def warnings(plan: MemoryPlan) -> list[str]:
    """What does not fit or is close to it, each with what to change; whole sentences."""
    found = list(_shortage(plan))
    if find_soc(plan.soc) is None:
        found.append(f"no SoC {plan.soc} is known here, so nothing is checked against what it can")
    if plan.total_bytes is None:
        found.append(f"how much memory {plan.soc} has is not known: give --device-memory")
    if plan.is_board:
        found.append("this board's one memory also serves the host: its own needs are not counted")
    return found


def _shortage(plan: MemoryPlan) -> Sequence[str]:
    free = plan.free_bytes
    if free is None or free >= 0:
        return ()
    pool = plan.kv_bytes + free
    smallest = (plan.context + 2 * NULL_SLOTS) * (plan.kv_bytes // (plan.kv_tokens + NULL_SLOTS))
    if plan.system_bytes + plan.weights_bytes > (plan.total_bytes or 0):
        change = "the weights alone do not fit; a smaller model, or a device with more memory"
    elif pool >= smallest:
        change = f"--kv-capacity {pool // _MIB}MiB would fit"
    else:
        change = (
            f"one sequence of {plan.context} tokens does not fit beside the rest: a shorter"
            " --context, a smaller --max-batch or smaller chunks take less"
        )
    return (f"{size(-free)} too much for {plan.soc}: {change}",)


def size(num_bytes: int) -> str:
    """A size for people: `1.50 GiB`, `300 MiB`, `12 KiB`."""
    if abs(num_bytes) >= _GIB:
        return f"{num_bytes / _GIB:.2f} GiB"
    if abs(num_bytes) >= _MIB:
        return f"{num_bytes / _MIB:.0f} MiB"
    return f"{num_bytes / 1024:.0f} KiB"


def gear_name(gear: Gear) -> str:
    """A gear as people read it: `8 x 1 @ 2048` is 8 sequences, fed one token, 2048 past slots."""
    return f"{gear.batch} x {gear.chunk} @ {gear.past}"


def _device_size(plan: MemoryPlan) -> str:
    return "memory not known" if plan.total_bytes is None else size(plan.total_bytes)


def _left(plan: MemoryPlan) -> str:
    free = plan.free_bytes
    if free is None:
        return "not known"
    return size(free) if free >= 0 else f"nothing: {size(-free)} too much"


def _context(oms: Sequence[OmFile]) -> int:
    roles = ([g.past for om in oms for g in om.prefill], [g.past for om in oms for g in om.decode])
    return min(max(pasts) for pasts in roles)


def _workspaces(numbers: BundleNumbers, spec: ModelSpec, om: OmFile) -> dict[Gear, int]:
    return {
        gear: workspace_bytes(spec, numbers.dtype, numbers.kv, gear)
        for gear in (*om.prefill, *om.decode)
    }


def _staging_bytes(numbers: BundleNumbers, spec: ModelSpec, om: OmFile) -> int:
    """Device buffers of one model's step inputs and outputs, each as its largest gear needs it."""
    contract = GraphContract(numbers.kv, numbers.index_dtype, spec.vocab_size)
    tensors: list[TensorSpec] = [*contract.step_inputs.values(), *contract.outputs.values()]
    gears = (*om.prefill, *om.decode)
    return sum(
        max(tensor.num_bytes(gear) for gear in gears) + _RANGE_TAIL_BYTES for tensor in tensors
    )
