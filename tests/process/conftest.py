"""What the tests with real processes share: a bundle that costs nothing to serve."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.rtcached import make_null_bundle


@pytest.fixture(scope="session")
def null_bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A do-nothing bundle; not to be changed."""
    return make_null_bundle(tmp_path_factory.mktemp("null"))


@pytest.fixture
def slow_steps(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """The steps of daemons that are started after it take 10 ms, however fast this machine is.

    So an answer of 4000 tokens is still being written when a test has done what it wants to do
    meanwhile, be it that another process is started.
    """
    slow = {"function": "acl.mdl.execute_async", "when": "run", "delay_ms": 10, "every": 1}
    path = tmp_path_factory.mktemp("slow") / "faults.json"
    path.write_text(json.dumps({"faults": [slow]}))
    monkeypatch.setenv("RTCACHE_ACLSIM_FAULTS", str(path))
