"""Programs that tests need beside Python. One that is missing skips a test, and the reason says so.

Where RTCACHE_CLIENTS=required is set, as in CI, it is a failure.
"""

from __future__ import annotations

import os
import shutil
from typing import NoReturn

import pytest


def lacking(what: str) -> NoReturn:
    """Skip, or fail where everything must be there."""
    if os.environ.get("RTCACHE_CLIENTS") == "required":
        pytest.fail(f"{what}; RTCACHE_CLIENTS=required")
    pytest.skip(f"{what} (.ci/run installs it)")


def need(*programs: str) -> None:
    """What is not on the PATH is lacking."""
    for program in programs:
        if shutil.which(program) is None:
            lacking(f"{program} is not installed")


def need_root() -> None:
    """What only root can set up is skipped for everybody else, in CI too."""
    if os.geteuid() != 0:
        pytest.skip("only root can set this up")
