"""Which checks are made, in which order, and what of one is told to the next."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from om_models.manifest import Manifest
from om_models.socs import find_soc
from runtime_cache import options
from runtime_cache.config import Config
from runtime_cache.device.select import load_acl, parse_device
from runtime_cache.errors import ConfigError
from tools.doctor.checks_acl import Probe, check_acl, check_probe
from tools.doctor.checks_bundle import (
    Memory,
    check_bundle,
    check_memory,
    check_oms,
    check_soc,
    check_target,
)
from tools.doctor.checks_devices import (
    check_container,
    check_nodes,
    check_smi,
    signs_of_npu,
    visible_index,
)
from tools.doctor.checks_metrics import check_metrics
from tools.doctor.checks_security import check_security
from tools.doctor.checks_service import check_log_directory, check_sockets, check_work_directory
from tools.doctor.checks_software import (
    check_cann,
    check_driver,
    check_group,
    check_numpy,
    check_python,
    check_versions,
    installed_version,
)
from tools.doctor.findings import Finding, ok, problem, sentence, skipped, warning
from tools.doctor.host import Host
from tools.doctor.installed import Installed, find_driver, find_toolkit
from tools.doctor.npu_smi import Chip


@dataclass(frozen=True, slots=True)
class Request:
    """What the operator asks for.

    Attributes:
        device: `npu:N` or `sim:N`; None to take it from the configuration or the bundle.
        bundle: directory; None to take it from the configuration.
        config: path of an rtcached.toml.
        has_checksums: read the whole bundle.
        may_probe: use the device, not only look at the host.
    """

    device: str | None = None
    bundle: Path | None = None
    config: str | None = None
    has_checksums: bool = False
    may_probe: bool = True


@dataclass(frozen=True, slots=True)
class Examined:
    """What was found.

    Attributes:
        device: what was looked at.
    """

    device: str
    findings: list[Finding]


@dataclass(frozen=True, slots=True)
class _Card:
    """What is known of the device after it was looked at."""

    soc: str | None = None
    seen: str | None = None
    memory: Memory | None = None


def examine(host: Host, request: Request) -> Examined:
    """Make all checks that the host allows.

    Raises:
        ConfigError: the device's name in the request is none.
    """
    loaded, about_config = _load_config(host, request)
    config = loaded or Config()
    path = request.bundle or (Path(config.model.bundle) if config.model.bundle else None)
    manifest, about_bundle = _load_bundle(path, request)
    named = request.device or config.device.device or None
    if request.device is None and (fault := _fault_of_device(config.device.device)) is not None:
        about_config.append(fault)
        named = None
    device = named or ("sim:0" if manifest is not None and manifest.target == "sim" else "npu:0")
    kind, device_id = parse_device(device)
    is_sim = kind == "sim"
    toolkit = None if is_sim else find_toolkit(host)
    findings = [check_python(host, toolkit), check_numpy(toolkit)]
    card = _Card()
    if is_sim:
        findings.append(_check_software_device())
    elif signs := signs_of_npu(host):
        findings.append(ok("npu", f"Signs of an Ascend NPU: {', '.join(signs)}."))
        more, card = _look_at_card(host, request, device_id, toolkit, manifest)
        findings += more
    else:
        findings += _without_npu(host, is_asked=named is not None)
    findings += [*about_config, *about_bundle]
    if path is not None and manifest is not None:
        findings += _look_at_bundle(path, manifest, card, toolkit, host, is_sim=is_sim)
    findings += _look_at_service(host, request, loaded, is_sim=is_sim)
    if any(finding.check == "nodes" for finding in findings):
        findings.append(check_log_directory(host))
    return Examined(device, findings)


def _load_config(host: Host, request: Request) -> tuple[Config | None, list[Finding]]:
    """The configuration, or None if it is wrong."""
    try:
        config = options.load(request.config, env=host.env).config
    except ConfigError as error:
        option = f" --config {request.config}" if request.config else ""
        remedy = f"Correct it; `rtcached{option} --check-config` checks it again."
        return None, [problem("config", text, remedy) for text in _faults(error)]
    if not request.config:
        return config, [skipped("config", "No configuration was named: --config FILE.")]
    return config, [ok("config", f"{request.config} is right.")]


def _faults(error: ConfigError) -> list[str]:
    """A sentence for each fault: the message is one, or a heading and a list."""
    first, *others = error.message.splitlines()
    return [sentence(line.removeprefix("  - ")) for line in others or [first]]


def _fault_of_device(name: str) -> Finding | None:
    """Of the device's name in the configuration; empty is none."""
    try:
        parse_device(name or "npu:0")
    except ConfigError as error:
        return problem("config", sentence(error.message), "Change device.device.")
    return None


def _load_bundle(path: Path | None, request: Request) -> tuple[Manifest | None, list[Finding]]:
    if path is None:
        text = "No bundle was named, by --bundle DIR or by model.bundle of the configuration."
        return None, [skipped("bundle", text)]
    finding, manifest = check_bundle(path, has_checksums=request.has_checksums)
    return manifest, [finding]


def _check_software_device() -> Finding:
    try:
        load_acl("sim:0")
    except ConfigError as error:
        return problem("sim", sentence(error.message), "Run: pip install 'runtime-cache[sim]'")
    version = installed_version("onnxruntime") or "of unknown version"
    return ok(
        "sim",
        f"The software device can be used, with ONNX Runtime {version}. It needs no card, no"
        " driver and no CANN, so none of them is looked at.",
    )


def _without_npu(host: Host, *, is_asked: bool) -> list[Finding]:
    """What to say on a host that never saw an NPU."""
    text = "There is no sign of an Ascend NPU: no device node, no driver, no CANN, no npu-smi."
    if is_asked:
        remedy = "Install driver and CANN, or choose the software device: --device sim:0"
        first = problem("npu", text, remedy)
    else:
        first = skipped("npu", f"{text} The software device needs none of them: --device sim:0")
    acl = check_acl(host, None, None)
    return [first, *(() if acl.is_absent else acl.findings)]


def _look_at_card(
    host: Host,
    request: Request,
    device_id: int,
    toolkit: Installed | None,
    manifest: Manifest | None,
) -> tuple[list[Finding], _Card]:
    driver = find_driver(host)
    acl = check_acl(host, toolkit, driver)
    nodes = check_nodes(host, device_id)
    about_smi, chips = check_smi(host)
    findings = [
        check_cann(host, toolkit),
        check_driver(driver),
        check_versions(toolkit, driver),
        *acl.findings,
        nodes,
        check_group(host, driver, may_use_nodes=nodes.status == "ok"),
        check_container(host, driver, is_board=_is_board(chips, manifest)),
        *about_smi,
    ]
    index = visible_index(host, device_id)
    chip = chips[index] if index is not None and index < len(chips) else None
    why = _why_no_probe(request, acl_is_ready=acl.is_ready, nodes=nodes)
    if why:
        return [*findings, skipped("device", why)], _card(chip, None)
    finding, probe = check_probe(host, device_id)
    if finding.status == "ok":
        findings = [_not_needed(other) for other in findings]
    return [*findings, finding], _card(chip, probe)


def _not_needed(finding: Finding) -> Finding:
    """Mounts that a device works without are no problem: no page says which are needed for what."""
    if (finding.check, finding.status) != ("container", "problem"):
        return finding
    text = f"{finding.text} The device works without them; npu-smi and health reports may not."
    return warning(finding.check, text, finding.remedy)


def _why_no_probe(request: Request, *, acl_is_ready: bool, nodes: Finding) -> str:
    if not request.may_probe:
        return "The device was not used: --no-probe."
    if not acl_is_ready:
        return "The device was not used: pyACL cannot be imported."
    if nodes.status == "problem":
        return "The device was not used: its nodes are not in order."
    return ""


def _card(chip: Chip | None, probe: Probe | None) -> _Card:
    """pyACL's word before npu-smi's."""
    soc = (probe.soc if probe else None) or (chip.soc_version if chip else None)
    memory = None
    if probe is not None and probe.free_bytes is not None and probe.total_bytes is not None:
        memory = Memory(probe.free_bytes, probe.total_bytes, "pyACL", is_after_first_use=True)
    elif chip is not None and chip.free_bytes is not None and chip.total_bytes is not None:
        memory = Memory(chip.free_bytes, chip.total_bytes, "npu-smi", is_after_first_use=False)
    return _Card(soc, chip.name if chip else None, memory)


def _is_board(chips: list[Chip], manifest: Manifest | None) -> bool:
    """By npu-smi's word, else by what the bundle is for."""
    names = [f"Ascend{chip.name}" for chip in chips]
    if not names and manifest is not None:
        names = [manifest.soc_version]
    found = (find_soc(name) for name in names)
    return any(soc is not None and soc.form == "board" for soc in found)


def _look_at_bundle(
    path: Path,
    manifest: Manifest,
    card: _Card,
    toolkit: Installed | None,
    host: Host,
    *,
    is_sim: bool,
) -> Iterator[Finding]:
    yield check_target(manifest, is_sim=is_sim)
    about_oms, work_bytes = check_oms(path, manifest, toolkit, host.machine)
    yield from about_oms
    if not is_sim:
        yield check_soc(manifest, card.soc, card.seen)
        yield check_memory(manifest, card.memory, work_bytes)


def _look_at_service(
    host: Host, request: Request, config: Config | None, *, is_sim: bool
) -> Iterator[Finding]:
    if config is None:
        text = "Where the daemon listens is not known before the configuration is corrected."
        yield skipped("socket", text)
    elif not request.config and "RTCACHE_IPC_ENDPOINT" not in host.env:
        yield skipped("socket", "Where the daemon listens is not known: --config FILE.")
    else:
        yield from check_sockets(host, config)
        yield from check_security(host, config)
        yield from check_metrics(config)
    yield check_work_directory(host, is_sim=is_sim)
