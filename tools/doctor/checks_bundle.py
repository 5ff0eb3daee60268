"""The bundle: its files, for which SoC it was compiled, and whether it fits into the device."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from pathlib import Path

from om_models.bundle import TOKENIZER_NAME, check_files, read_manifest
from om_models.manifest import Manifest
from om_models.memory_plan import MemoryPlan, plan_memory, size
from om_models.om_header import OmFileHeader, OmHeaderError, read_om_header
from om_models.socs import find_soc
from runtime_cache.errors import BundleError
from tools.doctor.findings import Finding, ok, problem, skipped, warning
from tools.doctor.host import may
from tools.doctor.installed import Installed, numbers

_AGAIN = "Convert the model again."
_MAY_READ = "Let the daemon's user read it, and enter all directories on the way."


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
    try:
        manifest = read_manifest(path)
    except BundleError as error:
        return _no_bundle(error), None
    needed = (*(om.path for om in manifest.oms), TOKENIZER_NAME)
    try:
        check_files(path, manifest, needed, verify=has_checksums)
    except BundleError as error:
        return _no_bundle(error), manifest
    closed = [name for name in manifest.files if not may(path / name, os.R_OK)]
    if closed:
        text = f"This user may not read {', '.join(closed)} in {path}."
        return problem("bundle", text, _MAY_READ), manifest
    how = "checksums right" if has_checksums else "sizes right (checksums: --checksums)"
    text = f"{manifest.name} in {path}, {len(manifest.files)} files, {how}."
    return ok("bundle", text), manifest


def _no_bundle(error: BundleError) -> Finding:
    is_forbidden = isinstance(error.__cause__, PermissionError)
    again = "Make it again with rtcache-convert, or copy all of it again."
    return problem("bundle", f"{error.message}.", _MAY_READ if is_forbidden else again)


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


def check_oms(
    path: Path, manifest: Manifest, toolkit: Installed | None, machine: str
) -> tuple[list[Finding], int | None]:
    """What the headers of a real bundle's models say.

    Args:
        machine: this host's CPU, as `uname -m` has it.

    Returns:
        The findings, and the work memory of all models [bytes] if every header has it.
    """
    if manifest.target == "sim":
        return [skipped("om", "The bundle's models are for the software device.")], None
    findings, sizes = [], []
    for file in (path / om.path for om in manifest.oms):
        header, finding = _read_om(file)
        if header is not None:
            finding = _check_om(file, header, manifest, toolkit, machine)
        findings.append(finding)
        sizes.append(None if header is None else header.work_bytes)
    known = [num_bytes for num_bytes in sizes if num_bytes is not None and num_bytes > 0]
    return findings, sum(known) if len(known) == len(sizes) else None


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


def check_memory(manifest: Manifest, memory: Memory | None, work_bytes: int | None) -> Finding:
    """Free device memory against what the bundle will take.

    Args:
        work_bytes: work memory as the models' headers have it; None to estimate it.
    """
    total = None if memory is None else memory.total_bytes
    plan = plan_memory(manifest, manifest.model, total_bytes=total)
    source = "an estimate" if work_bytes is None else "as the .om says"
    if work_bytes is not None:
        plan = replace(plan, workspace_bytes=work_bytes)
    system = 0 if _is_without_system(memory) else plan.system_bytes
    needed = plan.needed_bytes - plan.system_bytes + system
    table = f"weights {size(plan.weights_bytes)}, KV pool {size(plan.kv_bytes)}, work memory"
    table += f" {size(plan.workspace_bytes)} ({source}), staging {size(plan.staging_bytes)}"
    table += f", the system {size(system)}" if system else ""
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
    # All but the work memory is exact; how much of it models share, the .om does not say.
    if memory.free_bytes < needed - plan.workspace_bytes:
        return problem("memory", text, remedy)
    return warning("memory", text, remedy)


def _is_without_system(memory: Memory | None) -> bool:
    return memory is not None and memory.is_after_first_use


def _against_table(plan: MemoryPlan, table: str) -> Finding:
    """Without a measurement, against what the SoC has."""
    needed = f"The bundle takes about {size(plan.needed_bytes)}: {table}."
    if plan.free_bytes is not None and plan.free_bytes < 0:
        # Only a warning: some cards and boards of a SoC have more than others.
        return warning(
            "memory",
            f"{needed} An {plan.soc} is known with {size(plan.total_bytes or 0)}.",
            "Convert the model again with a smaller --kv-capacity, or use a larger device.",
        )
    return skipped("memory", f"{needed} How much the device has free could not be read.")


def _read_om(path: Path) -> tuple[OmFileHeader | None, Finding]:
    """The header, or the finding that there is none."""
    try:
        header = read_om_header(path)
    except OmHeaderError as error:
        return None, problem("om", f"{error.message}.", _AGAIN)
    except OSError as error:
        return None, problem("om", f"{path} cannot be read: {error.strerror}.", _AGAIN)
    return header, problem("om", f"{path} is no .om of a real SoC.", _AGAIN)


def _check_om(
    path: Path,
    header: OmFileHeader,
    manifest: Manifest,
    toolkit: Installed | None,
    machine: str,
) -> Finding:
    soc, cpu = header.soc_version, header.host_cpu
    if soc and soc != manifest.soc_version:
        text = f"{path.name} was compiled for {soc}, the manifest says {manifest.soc_version}."
        return problem("om", text, _AGAIN)
    if header.needs_host_check and cpu and cpu != machine:
        text = f"{path.name} carries code for hosts with {cpu}, this one has {machine}."
        return problem("om", text, "Convert the model again on such a host.")
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
