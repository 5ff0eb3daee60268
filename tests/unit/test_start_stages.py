"""What is told of a start, and how much time is asked for."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from runtime_cache.start_stages import StartStages

GB = 10**9


def manifest(*num_bytes: int, oms: int = 1) -> Any:
    return SimpleNamespace(
        name="llama",
        oms=[SimpleNamespace(path=f"{number}.om") for number in range(oms)],
        files={str(place): SimpleNamespace(num_bytes=n) for place, n in enumerate(num_bytes)},
    )


def test_a_start_from_beginning_to_end() -> None:
    told: list[tuple[str, float]] = []
    stages = StartStages(lambda what, may_take_s: told.append((what, may_take_s)))
    stages.reading("/b")
    stages.opening("npu:0")
    bundle = manifest(GB, GB, oms=2)
    for number, om in enumerate(bundle.oms, 1):
        stages.loading(bundle, om, number)
    stages.warming_up(2, 120_000)
    assert told == [
        ("Reading the bundle /b", 60),
        ("Opening npu:0", 120),
        ("Loading 0.om (1 of 2) of llama", 320),
        ("Loading 1.om (2 of 2) of llama", 320),
        ("Warming up", 300),
    ]


def test_a_single_model_is_not_numbered() -> None:
    told: list[str] = []
    bundle = manifest(1)
    StartStages(lambda what, _: told.append(what)).loading(bundle, bundle.oms[0], 1)
    assert told == ["Loading 0.om of llama"]


def test_checksums_are_told_in_tenths_and_with_the_time_that_the_rest_may_take() -> None:
    told: list[tuple[str, float]] = []
    stages = StartStages(lambda what, may_take_s: told.append((what, may_take_s)))
    for percent in range(1, 101):
        stages.checking(percent * GB // 100, GB)
    assert len(told) == 10
    assert told[0] == ("Checking the bundle: 1 %", 60 + 99)
    assert [seconds for _, seconds in told] == sorted((s for _, s in told), reverse=True)


def test_an_empty_bundle() -> None:
    told: list[str] = []
    StartStages(lambda what, _: told.append(what)).checking(0, 0)
    assert told == ["Checking the bundle: 0 %"]
