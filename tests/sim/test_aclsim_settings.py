"""Settings of the software device: defaults, environment, refusals."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from runtime_cache.aclsim import inspect, settings


@pytest.fixture(autouse=True)
def _restored() -> Iterator[None]:
    yield
    settings.configure()


def test_environment_overrides_defaults_and_configure_overrides_both(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("RTCACHE_ACLSIM_MEMORY_BYTES", "1073741824")
    monkeypatch.setenv("RTCACHE_ACLSIM_SOC_NAME", "Ascend310B4")
    monkeypatch.setenv("RTCACHE_ACLSIM_SPIN", "1")
    configured = settings.configure(soc_name="Ascend910B2")
    assert configured == settings.SimSettings(
        memory_bytes=1 << 30, soc_name="Ascend910B2", spin=True
    )
    assert settings.current() is configured


def test_configure_without_arguments_forgets_earlier_changes() -> None:
    settings.configure(threads=3)
    assert settings.configure().threads == 0


@pytest.mark.parametrize(
    ("variable", "value", "message"),
    [
        ("RTCACHE_ACLSIM_MEMROY_BYTES", "1", "no such setting"),
        ("RTCACHE_ACLSIM_THREADS", "two", "expected int"),
        ("RTCACHE_ACLSIM_THREADS", "-1", "expected int"),
        ("RTCACHE_ACLSIM_SPIN", "2", "expected bool"),
        ("RTCACHE_ACLSIM_RUN_MODE", "2", "run_mode must be 0 or 1"),
    ],
)
def test_a_wrong_environment_is_refused(variable: str, value: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        settings.from_environment({variable: value, "UNRELATED": "x"})


@pytest.mark.parametrize(
    "changes",
    [{"memory_bytes": 5, "initial_use_bytes": 5}, {"threads": -1}, {"device_count": 0}],
)
def test_values_out_of_range_are_refused(changes: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="must"):
        settings.configure(**changes)


def test_unknown_names_are_refused() -> None:
    with pytest.raises(TypeError):
        settings.configure(memory=1)


@pytest.mark.parametrize(
    ("soc_name", "has_hbm"), [("Ascend310P3", False), ("Ascend310B1", False), ("Ascend910B4", True)]
)
def test_memory_kind_follows_the_soc(soc_name: str, has_hbm: bool) -> None:
    assert settings.SimSettings(soc_name=soc_name).has_hbm is has_hbm


def test_a_wrong_environment_stops_configure_and_not_the_import(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("RTCACHE_ACLSIM_THREADS", "many")
    inspect.power_cycle()
    with pytest.raises(ValueError, match="expected int"):
        settings.configure()
    monkeypatch.undo()
