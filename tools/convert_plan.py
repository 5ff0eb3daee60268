"""`rtcache-convert --plan`: what the device will hold, before any work. Reads no weights."""

from __future__ import annotations

from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table

from om_models.config_json import read_spec
from om_models.gears import MAX_GEARS, PLANS, model_gears
from om_models.memory_plan import MemoryPlan, gear_name, plan_memory, rows, size, warnings
from om_models.plan import ConvertOptions, Plan, make_plan, plan_of
from om_models.spec import ModelSpec

#: Gears shown one by one; of more, those that need the most memory.
_SHOWN_GEARS = 8


def show_plan(
    source: str, options: ConvertOptions | None, device_bytes: int | None, *, is_shown: bool
) -> dict[str, object]:
    """Make the plan, print it for people if asked to.

    Args:
        options: None if the source is an export, which has decided everything.
        device_bytes: memory of the device, if the user knows it better than the table of SoCs.

    Returns:
        The plan for programs.

    Raises:
        ConversionError, BundleError: the source or the options are wrong.
    """
    plan, spec = _planned(source, options)
    memory = plan_memory(plan, spec, total_bytes=device_bytes)
    notes = [*warnings(memory), *_compile_notes(plan)]
    others = _subgraphs(plan)
    if is_shown:
        _print(Path(source).name, plan, memory, others, notes)
    return _summary(plan, memory, others, notes)


def _planned(source: str, options: ConvertOptions | None) -> tuple[Plan, ModelSpec]:
    if options is None:
        from om_models.bundle import read_manifest
        from om_models.work_directory import DRAFT_NAME

        draft = read_manifest(Path(source), DRAFT_NAME, "an export")
        return plan_of(draft), draft.model
    spec, options = _spec(source, options)
    return make_plan(spec, options), spec


def _spec(source: str, options: ConvertOptions) -> tuple[ModelSpec, ConvertOptions]:
    """The model's numbers; of a checkpoint's directory `config.json` is enough."""
    if (config := Path(source) / "config.json").is_file():
        return read_spec(config), options
    # Imported late: brings onnx and gguf.
    from om_models.sources import open_source, source_defaults

    with open_source(source) as model:
        return model.spec, source_defaults(source, options)


def _subgraphs(plan: Plan) -> dict[str, int]:
    """How many copies of the graph each named plan would compile for this context and batch."""
    context = plan.gears.max_model_len
    max_batch = max(gear.batch for gear in plan.gears.decode)
    made = {name: make(context, max_batch) for name, make in PLANS.items()}
    if plan.layout == "fused":
        return {name: len(model_gears(p.prefill, p.decode)) for name, p in made.items()}
    return {name: len(p.prefill) + len(p.decode) for name, p in made.items()}


def _compile_notes(plan: Plan) -> list[str]:
    """What field projects report of gears; nothing of it was measured here."""
    if plan.target == "sim":
        return []
    return [
        "field projects report models that grew by 50 to 100 %, on disk and in memory, with gears;"
        " the weights above are counted once",
        "compile time grows with the subgraphs, and no project publishes figures; on a board of"
        " 12 GB a 1.5B model was reported to take hours and to run out of memory: --compile-jobs 1",
    ]


def _print(
    source: str, plan: Plan, memory: MemoryPlan, others: dict[str, int], notes: list[str]
) -> None:
    console = Console(highlight=False)
    console.print(f"{source}: {plan.dtype}, {plan.layout}, context {memory.context} tokens")
    console.print(_memory_table(memory))
    console.print(_gear_title(memory))
    console.print(_gear_table(memory))
    named = ", ".join(f"{name} {count}" for name, count in others.items())
    console.print(f"subgraphs: {memory.num_subgraphs} (of at most {MAX_GEARS} a model); {named}")
    console.print(f"files: {', '.join(om.path for om in plan.oms)}")
    for note in notes:
        console.print(f"note: {note}", markup=False)


def _memory_table(memory: MemoryPlan) -> Table:
    table = Table(box=box.SIMPLE, show_header=False)
    table.add_column(no_wrap=True)
    table.add_column()
    for name, value in rows(memory):
        table.add_row(name, value, style="red" if value.startswith("nothing") else None)
    return table


def _gear_title(memory: MemoryPlan) -> str:
    num_gears = len(memory.workspace)
    which = f"the {_SHOWN_GEARS} largest of {num_gears}" if num_gears > _SHOWN_GEARS else "all"
    return f"workspace by gear, estimated (sequences x fed tokens @ past slots), {which}:"


def _gear_table(memory: MemoryPlan) -> Table:
    table = Table(box=box.SIMPLE, show_header=False)
    for gear, num_bytes in sorted(memory.workspace, key=lambda pair: -pair[1])[:_SHOWN_GEARS]:
        table.add_row(gear_name(gear), size(num_bytes))
    return table


def _summary(
    plan: Plan, memory: MemoryPlan, others: dict[str, int], notes: list[str]
) -> dict[str, object]:
    return {
        "target": plan.target,
        "soc_version": memory.soc,
        "dtype": plan.dtype,
        "layout": plan.layout,
        "context": memory.context,
        "device_bytes": memory.total_bytes,
        "system_bytes": memory.system_bytes,
        "weights_bytes": memory.weights_bytes,
        "kv_bytes": memory.kv_bytes,
        "kv_tokens": memory.kv_tokens,
        "prefixes_of_4096": memory.prefixes_of_4096,
        "concurrent_requests": memory.concurrent_requests,
        "workspace_bytes_estimated": memory.workspace_bytes,
        "staging_bytes": memory.staging_bytes,
        "needed_bytes": memory.needed_bytes,
        "free_bytes": memory.free_bytes,
        "fits": None if memory.free_bytes is None else memory.free_bytes >= 0,
        "subgraphs": memory.num_subgraphs,
        "subgraphs_of_plans": others,
        "gears": [
            {"batch": g.batch, "chunk": g.chunk, "past": g.past, "workspace_bytes_estimated": n}
            for g, n in memory.workspace
        ],
        "notes": notes,
    }
