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
        ("RTCACHE_ACLSIM_MISUSE", "loud", "misuse must be report, warn or error, not 'loud'"),
        ("RTCACHE_ACLSIM_GIL_LIMIT_MS", "-1", "expected int"),
    ],
)
def test_a_wrong_environment_is_refused(variable: str, value: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        settings.from_environment({variable: value, "UNRELATED": "x"})


@pytest.mark.parametrize(
    "changes",
    [
        {"memory_bytes": 5, "initial_use_bytes": 5},
        {"soc_name": "Ascend310P3", "initial_use_bytes": 24 << 30},
        {"threads": -1},
        {"device_count": 0},
        {"gil_limit_ms": -1},
    ],
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


@pytest.mark.parametrize(
    ("soc_name", "capacity_bytes", "mode"),
    [
        ("Ascend310B4", 8 << 30, 0),  # not known: boards of this SoC differ
        ("Ascend310P3", 24 << 30, 1),
        ("Ascend910B4", 32 << 30, 1),
        ("Ascend910B2", 64 << 30, 1),
        ("Ascend910_9391", 8 << 30, 1),  # not known
        ("AscendOfTomorrow", 8 << 30, 1),
    ],
)
def test_memory_and_form_follow_the_soc(soc_name: str, capacity_bytes: int, mode: int) -> None:
    configured = settings.SimSettings(soc_name=soc_name)
    assert (configured.capacity_bytes, configured.mode) == (capacity_bytes, mode)
    assert configured.has_one_memory is (mode == 0)


def test_memory_and_form_can_be_set() -> None:
    board = settings.SimSettings(soc_name="Ascend310B4", memory_bytes=1 << 30, run_mode=1)
    assert (board.capacity_bytes, board.mode) == (1 << 30, 1)
    assert settings.SimSettings(run_mode=0).has_one_memory


def test_every_setting_can_come_from_the_environment() -> None:
    found = settings.from_environment(
        {
            "RTCACHE_ACLSIM_MEMORY_BYTES": "1073741824",
            "RTCACHE_ACLSIM_RUN_MODE": "0",
            "RTCACHE_ACLSIM_FAULTS": "/tmp/faults.json",
            "RTCACHE_ACLSIM_MISUSE": "error",
            "RTCACHE_ACLSIM_GIL_LIMIT_MS": "0",
        }
    )
    assert found == settings.SimSettings(
        memory_bytes=1 << 30, run_mode=0, faults="/tmp/faults.json", misuse="error", gil_limit_ms=0
    )


def test_a_wrong_environment_stops_configure_and_not_the_import(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("RTCACHE_ACLSIM_THREADS", "many")
    inspect.power_cycle()
    with pytest.raises(ValueError, match="expected int"):
        settings.configure()
    monkeypatch.undo()
