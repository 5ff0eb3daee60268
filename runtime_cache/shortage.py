"""Why a bundle does not fit onto a device, for people: what it needs, and what is there.

Device memory is taken before READY alone, so this is told before READY or never.
"""

from __future__ import annotations

from om_models import memory_plan
from om_models.manifest import Manifest
from runtime_cache.device.acl_device import AclDevice, MemoryInfo
from runtime_cache.device_memory import memory_or_none
from runtime_cache.errors import OutOfDeviceMemory


def explain(manifest: Manifest, device: AclDevice, error: OutOfDeviceMemory) -> OutOfDeviceMemory:
    """The same error, with the plan of the bundle's memory and what the device has.

    Args:
        device: open, and given back all that was allocated for the bundle.
    """
    memory = memory_or_none(device)
    total_bytes = None if memory is None else memory.total_bytes
    plan = memory_plan.plan_memory(manifest, manifest.model, total_bytes=total_bytes)
    rows = [*memory_plan.rows(plan), ("free now", _free(memory))]
    width = max(len(name) for name, _ in rows)
    table = "".join(f"\n  {name:<{width}}  {text}" for name, text in rows)
    kind = "pinned host" if error.function == "acl.rt.malloc_host" else "device"
    said = f" The driver says: {error.detail}." if error.detail else ""
    detail = (
        f"{kind} memory is too small for this bundle: convert with a smaller --kv-capacity, or "
        f"stop what else uses the device.{said} Planned:{table}"
    )
    return OutOfDeviceMemory(error.function, error.acl_code, error.acl_name, detail)


def _free(memory: MemoryInfo | None) -> str:
    if memory is None:
        return "the driver does not say"
    free, total = memory_plan.size(memory.free_bytes), memory_plan.size(memory.total_bytes)
    return f"{free} of {total}"
