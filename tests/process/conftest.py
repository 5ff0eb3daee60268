"""What the tests with real processes share: a bundle that costs nothing to serve."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.rtcached import make_null_bundle


@pytest.fixture(scope="session")
def null_bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A do-nothing bundle; not to be changed."""
    return make_null_bundle(tmp_path_factory.mktemp("null"))
