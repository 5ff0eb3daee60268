"""The bundle: its files, for which SoC it was compiled, and whether it fits into the device."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from om_models.bundle import TOKENIZER_NAME, check_files, read_manifest
from om_models.manifest import Manifest
from om_models.memory_plan import MemoryPlan, plan_memory, size
from om_models.om_header import OmFileHeader, OmHeaderError, read_om_header
from om_models.socs import find_soc
from runtime_cache.errors import BundleError
from tools.doctor.findings import Finding, ok, problem, skipped, warning
from tools.doctor.installed import Installed, numbers


@dataclass(frozen=True, slots=True)
class Memory:
    """Free memory of the device, by whom it was measured.

    Attributes:
        free_bytes, total_bytes: of the device.
        is_after_first_use: the system's own share is no longer in `free_bytes`.
    """

    free_bytes: int
    total_bytes: int
    source: str
    is_after_first_use: bool


def check_bundle(path: Path, *, has_checksums: bool) -> tuple[Finding, Manifest | None]:
    """The manifest and the files it names."""
    remedy = "Make it again with rtcache-convert, or copy all of it again."
    try:
        manifest = read_manifest(path)
    except BundleError as error:
        return problem("bundle", f"{error.message}.", remedy), None
    needed = (*(om.path for om in manifest.oms), TOKENIZER_NAME)
    try:
        check_files(path, manifest, needed, verify=has_checksums)
    except BundleError as error:
        return problem("bundle", f"{error.message}.", remedy), manifest
    how = "checksums right" if has_checksums else "sizes right (checksums: --checksums)"
    text = f"{manifest.name} in {path}, {len(manifest.files)} files, {how}."
    return ok("bundle", text), manifest


def check_target(manifest: Manifest, *, is_sim: bool) -> Finding:
    """A bundle is for cards or for the software device."""
    if is_sim == (manifest.target == "sim"):
        return ok("target", f"The bundle was made with --target {manifest.target}.")
    device, target = ("sim:0", "sim") if is_sim else ("a card", "ascend")
    return problem(
        "target",
        f"The bundle was made with --target {manifest.target}, but the device is {device}.",
        f"Convert the model again with --target {target}.",
    )


def check_oms(path: Path, manifest: Manifest, toolkit: Installed | None) -> list[Finding]:
    """What the headers of a real bundle's models say."""
    if manifest.target == "sim":
        return [skipped("om", "The bundle's models are for the software device.")]
    return [_check_om(path / om.path, manifest, toolkit) for om in manifest.oms]


def check_soc(manifest: Manifest, soc: str | None, seen: str | None) -> Finding:
    """The bundle's SoC against the device's.

    Args:
        soc: the device's SoC, as ATC has it; None if it is not known.
        seen: what npu-smi calls it, if that says too little.
    """
    if find_soc(manifest.soc_version) is None:
        return warning(
            "soc",
            f"The bundle was compiled for {manifest.soc_version}, which is not in the table of"
            " SoCs known here.",
        )
    if soc is None:
        called = f": npu-smi calls it {seen}, which names more than one" if seen else ""
        return skipped(
            "soc",
            f"The bundle was compiled for {manifest.soc_version}; what the device is could not"
            f" be read{called}.",
        )
    if soc == manifest.soc_version:
        return ok("soc", f"Bundle and device are both {soc}.")
    return problem(
        "soc",
        f"The bundle was compiled for {manifest.soc_version}, but the device is {soc}.",
        f"Convert the model again with --soc-version {soc}.",
    )


def check_memory(manifest: Manifest, memory: Memory | None) -> Finding:
    """Free device memory against what the bundle will take."""
    total = None if memory is None else memory.total_bytes
    plan = plan_memory(manifest, manifest.model, total_bytes=total)
    needed = plan.needed_bytes - (plan.system_bytes if _is_without_system(memory) else 0)
    table = f"weights {size(plan.weights_bytes)}, KV pool {size(plan.kv_bytes)}, work memory"
    table += f" {size(plan.workspace_bytes)} (an estimate)"
    if memory is None:
        return _against_table(plan, table)
    text = (
        f"{size(memory.free_bytes)} of {size(memory.total_bytes)} are free ({memory.source});"
        f" the bundle takes about {size(needed)}: {table}."
    )
    if memory.free_bytes >= needed:
        return ok("memory", text)
    remedy = (
        "End what else uses the device (npu-smi info shows it), or convert the model again"
        " with a smaller --kv-capacity."
    )
    # All but the work memory is exact.
    if memory.free_bytes < needed - plan.workspace_bytes:
        return problem("memory", text, remedy)
    return warning("memory", text, remedy)


def _is_without_system(memory: Memory | None) -> bool:
    return memory is not None and memory.is_after_first_use


def _against_table(plan: MemoryPlan, table: str) -> Finding:
    """Without a measurement, against what the SoC has."""
    needed = f"The bundle takes about {size(plan.needed_bytes)}: {table}."
    if plan.free_bytes is not None and plan.free_bytes < 0:
        return problem(
            "memory",
            f"{needed} An {plan.soc} has {size(plan.total_bytes or 0)}.",
            "Convert the model again with a smaller --kv-capacity, or use a larger device.",
        )
    return skipped("memory", f"{needed} How much the device has free could not be read.")


def _check_om(path: Path, manifest: Manifest, toolkit: Installed | None) -> Finding:
    remedy = "Convert the model again."
    try:
        header = read_om_header(path)
    except (OmHeaderError, OSError) as error:
        return problem("om", f"{error}.", remedy)
    if header is None:
        return problem("om", f"{path} is no .om of a real SoC.", remedy)
    soc = header.soc_version
    if soc and soc != manifest.soc_version:
        return problem(
            "om",
            f"{path.name} was compiled for {soc}, the manifest says {manifest.soc_version}.",
            remedy,
        )
    return _check_age(path, header, toolkit)


def _check_age(path: Path, header: OmFileHeader, toolkit: Installed | None) -> Finding:
    """An .om runs on an equal or newer CANN, never on an older one.

    Source: ATC guide; that the header's version is that of CANN's parts is an inference.
    """
    made, has = numbers(header.atc_version), numbers(toolkit.component) if toolkit else ()
    if made and has and made > has:
        return warning(
            "om",
            f"{path.name} was made by ATC {header.atc_version}, and this host's CANN is older"
            f" ({toolkit.component if toolkit else ''}): an .om does not run on an older one.",
            "Update CANN here, or convert the model again with this host's.",
        )
    return ok(
        "om",
        f"{path.name}: {header.soc_version or 'a SoC it does not name'}, ATC"
        f" {header.atc_version or 'of unknown version'}.",
    )
