"""How many files the process may have open.

Every client is a connection, and every connection an open file: the usual limit of 1024 would be
reached by as many clients. It is a soft one, for programs that use select(); none is used here.
"""

from __future__ import annotations

import resource
from contextlib import suppress

#: More is never asked for: some programs' children close every number that there might be.
MAX_FILES = 1 << 19


def allow_many() -> int:
    """Raise the soft limit of open files to the hard one; returns what is allowed now."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MAX_FILES if hard == resource.RLIM_INFINITY else min(hard, MAX_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with suppress(OSError, ValueError):  # forbidden here: what there was is enough for most
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]
