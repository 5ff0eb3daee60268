"""Memory of `acl.rt`: allocation, copies, fills."""

from __future__ import annotations

from functools import partial
from typing import Any

from runtime_cache.aclsim import codes, copies
from runtime_cache.aclsim.calling import surface
from runtime_cache.aclsim.failure import AclFailure
from runtime_cache.aclsim.process import current_context, current_stream, this_process
from runtime_cache.aclsim.row_copies import Rows, copy_rows, copy_rows_later

acl_function = surface("acl.rt")

_DDR_ATTRIBUTES = (0, 2, 3)
_HBM_ATTRIBUTES = (1, 4, 5)
_ON_HOST, _ON_DEVICE, _UNREGISTERED = 0, 1, 2
_MALLOC_VALUES = ("moduleId", "deviceId", "rsv")


# --- allocation ---


@acl_function("ki", failed=(0,))
def malloc(size: int, policy: int) -> int:
    """Device memory, 64-byte aligned, poisoned; costs ALIGN_UP(size, 32) + 32, in pages."""
    return current_context().device.memory.malloc(size, policy)


@acl_function("ki", failed=(0,))
def malloc_align32(size: int, policy: int) -> int:
    """As `malloc`, without the 32-byte tail."""
    return current_context().device.memory.malloc(size, policy, pad_bytes=0)


@acl_function("ki", failed=(0,))
def malloc_cached(size: int, policy: int) -> int:
    """As `malloc`, as on A2 and A3 cards."""
    return current_context().device.memory.malloc(size, policy)


@acl_function("kiO", failed=(0,))
def malloc_with_cfg(size: int, policy: int, cfg: object) -> int:
    """As `malloc`; the configuration is checked and changes nothing."""
    _check_malloc_config(cfg)
    return current_context().device.memory.malloc(size, policy)


@acl_function("k")
def free(dev_ptr: int) -> None:
    """Frees at once, without waiting for work that uses the memory."""
    copies.free_device(current_context(), dev_ptr)


def _malloc_host(size: int) -> int:
    memory = current_context().device.memory
    payer = memory if memory.has_one_memory else None
    return this_process().host_memory.malloc(size, payer)


@acl_function("k", failed=(0,))
def malloc_host(size: int) -> int:
    """Pinned host memory, 64-byte aligned, poisoned."""
    return _malloc_host(size)


@acl_function("kO", failed=(0,))
def malloc_host_with_cfg(size: int, cfg: object) -> int:
    """As `malloc_host`; the configuration is checked and changes nothing."""
    _check_malloc_config(cfg)
    return _malloc_host(size)


@acl_function("k")
def free_host(host_ptr: int) -> None:
    """Frees memory of `malloc_host`; 100000 for a null pointer."""
    if host_ptr == 0:
        raise AclFailure(codes.INVALID_PARAM, "free of a null pointer")
    current_context()
    copies.free_host(host_ptr)


def _check_malloc_config(cfg: object) -> None:
    """Checks `{}` or `{"numAttrs": n, "attrs": [{"attr": int, "value": {...}}, ...]}`.

    Raises:
        TypeError: no dict, or no list of dicts under `attrs`.
        KeyError: `numAttrs` is not the length of `attrs`, or a value has none of the known keys.
    """
    if not isinstance(cfg, dict):
        raise TypeError("the configuration is no dict")
    if not cfg:
        return
    attrs = cfg.get("attrs")
    if not isinstance(attrs, list):
        raise TypeError("the configuration has no list under 'attrs'")
    if cfg.get("numAttrs", 0) != len(attrs):
        raise KeyError("numAttrs is not the number of attrs")
    for attr in attrs:
        value = attr.get("value") if isinstance(attr, dict) else None
        if not isinstance(value, dict):
            raise TypeError("an attribute is no dict with a dict under 'value'")
        if not any(key in value for key in _MALLOC_VALUES):
            raise KeyError(f"a value has none of {', '.join(_MALLOC_VALUES)}")


# --- fills and copies ---


@acl_function("kkik")
def memset(ptr: int, max_count: int, value: int, count: int) -> None:
    """Sets bytes now, in no stream's order."""
    context = current_context()
    copies.check_fill(ptr, max_count, count)
    copies.fill_now(context, ptr, value, count)


@acl_function("kkikk")
def memset_async(ptr: int, max_count: int, value: int, count: int, stream: int) -> None:
    """Sets bytes at its turn in the stream."""
    context, target = current_context(), current_stream(stream)
    copies.check_fill(ptr, max_count, count)
    work = partial(copies.fill, context, ptr, value, count, codes.RT_DMA)
    target.submit("acl.rt.memset_async", work, writes=((ptr, count),))


@acl_function("kkkki")
def memcpy(dst: int, dst_max: int, src: int, count: int, kind: int) -> None:
    """Copies now, in no stream's order."""
    copies.copy_now(current_context(), dst, dst_max, src, count, kind)


@acl_function("kkkkik")
def memcpy_async(dst: int, dst_max: int, src: int, count: int, kind: int, stream: int) -> None:
    """Copies at its turn in the stream; pageable host data are taken at the call."""
    context = current_context()
    copies.copy_later(context, context.stream(stream), dst, dst_max, src, count, kind)


@acl_function("kkkkkki")
def memcpy2d(
    dst: int, dpitch: int, src: int, spitch: int, width: int, height: int, kind: int
) -> None:
    """Copies rows now, host to device or back."""
    rows = Rows(dst, dpitch, src, spitch, width, height, kind)
    copy_rows(current_context(), rows)


@acl_function("kkkkkkik")
def memcpy2d_async(
    dst: int, dpitch: int, src: int, spitch: int, width: int, height: int, kind: int, stream: int
) -> None:
    """Copies rows at its turn in the stream, host to device or back."""
    rows = Rows(dst, dpitch, src, spitch, width, height, kind)
    copy_rows_later(current_context(), current_stream(stream), rows)


@acl_function("kk")
def mem_flush(ptr: int, size: int) -> None:
    """Writes caches back. Nothing to do here: there are none; the range is checked."""
    _check_device_range(ptr, size)


@acl_function("kk")
def mem_invalidate(ptr: int, size: int) -> None:
    """Empties caches. Nothing to do here: there are none; the range is checked."""
    _check_device_range(ptr, size)


def _check_device_range(ptr: int, size: int) -> None:
    """Raises 100000 for a null pointer or size 0, 107000 for what is no device memory."""
    if ptr == 0 or size == 0:
        raise AclFailure(codes.INVALID_PARAM, "null pointer or size 0")
    current_context().device.memory.check(ptr, size, codes.RT_PARAM_INVALID)


# --- questions ---


@acl_function("i", failed=(0, 0))
def get_mem_info(attr: int) -> tuple[int, int]:
    """(free, total) bytes of the device; 0, 0 for a kind of memory that the SoC does not have."""
    memory = current_context().device.memory
    known = _HBM_ATTRIBUTES if this_process().config.has_hbm else _DDR_ATTRIBUTES
    if attr not in known:
        return 0, 0
    return memory.free_bytes, memory.total_bytes


def _attributes(device_id: int, kind: int, page_bytes: int) -> dict[str, Any]:
    location = {"id": device_id, "type": kind}
    return {"location": location, "page_size": page_bytes, "rsv": [0, 0, 0, 0]}


@acl_function("k", failed=(_attributes(0, _ON_HOST, 0),))
def pointer_get_attributes(ptr: int) -> dict[str, Any]:
    """Where memory lies: type 0 host (`malloc_host`), 1 device, 2 not known to ACL; its pages."""
    if ptr == 0:
        raise AclFailure(codes.INVALID_PARAM, "null pointer")
    process, device = this_process(), current_context().device
    if process.host_memory.is_pinned(ptr):
        return _attributes(0, _ON_HOST, 0)
    page_bytes = device.memory.page_bytes(ptr)
    if page_bytes is None:
        return _attributes(0, _UNREGISTERED, 0)
    return _attributes(device.device_id, _ON_DEVICE, page_bytes)
