"""Pages of device memory: which sizes an allocation may use, and what it costs in them.

Source: aclrtMalloc page of CANN 9.0.
"""

from __future__ import annotations

from runtime_cache.aclsim.mapping import round_up

NORMAL_PAGE_BYTES = 4096
HUGE_PAGE_BYTES = 2 << 20
GIANT_PAGE_BYTES = 1 << 30
HUGE_FROM_BYTES = (1 << 20) + 1
#: What pyACL adds to a size that is rounded up to 32 bytes; not with giant pages.
TAIL_BYTES = 32

_HUGE_ONLY = (1, 4)
_NORMAL_ONLY = (2, 5)
_GIANT_ONLY = (6, 7)
_HUGE_FIRST = (0, 3)


def costs(size_bytes: int, policy: int, pad_bytes: int) -> list[tuple[int, int]]:
    """(bytes, page size) that an allocation may take, best first.

    Args:
        size_bytes: what the program asked for.
        policy: ACL_MEM_MALLOC_*.
        pad_bytes: 32 for malloc, 0 for malloc_align32.
    """
    pad = 0 if policy in _GIANT_ONLY else pad_bytes
    reserved = round_up(size_bytes, 32) + pad
    return [(round_up(reserved, page), page) for page in _page_sizes(size_bytes, policy)]


def _page_sizes(size_bytes: int, policy: int) -> list[int]:
    """Page sizes an allocation may use, best first."""
    if policy in _GIANT_ONLY:
        return [GIANT_PAGE_BYTES]
    if policy in _HUGE_ONLY:
        return [HUGE_PAGE_BYTES]
    if policy in _NORMAL_ONLY:
        return [NORMAL_PAGE_BYTES]
    huge_from = HUGE_FROM_BYTES if policy in _HUGE_FIRST else HUGE_PAGE_BYTES
    if size_bytes < huge_from:
        return [NORMAL_PAGE_BYTES]
    return [HUGE_PAGE_BYTES, NORMAL_PAGE_BYTES]
