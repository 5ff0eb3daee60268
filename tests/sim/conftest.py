"""Fixtures: a fresh device; compiled variants of models; a watched device for the executor."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

import runtime_cache.aclsim as acl
from om_models.bundle import Bundle
from runtime_cache.aclsim import faults, inspect
from runtime_cache.device.acl_device import AclDevice
from runtime_cache.engine.executor import Executor
from tests.support.aclsim import fresh_process, ok
from tests.support.coded_model import CODED_VARIANTS, make_coded_bundle
from tests.support.devices import num_leaked, opened
from tests.support.sum_chat import BLOCK
from tests.support.sum_model import VARIANTS, SumModel, compile_sum_model
from tests.support.tiny import TINY_OPTIONS, make_bundle


class Opener:
    """Opens executors on one device, and closes them."""

    def __init__(self, device: AclDevice, bundles: dict[SumModel, Path]) -> None:
        self._device = device
        self._bundles = bundles
        self._executors: list[Executor] = []

    def __call__(self, model: SumModel = VARIANTS[0], *, step_timeout_ms: int = 30_000) -> Executor:
        executor = Executor.open(
            self._device,
            model.manifest(),
            self._bundles[model],
            block_size=BLOCK,
            step_timeout_ms=step_timeout_ms,
        )
        self._executors.append(executor)
        return executor

    def close(self) -> None:
        for executor in self._executors:
            executor.close()


@pytest.fixture
def fresh_device() -> Iterator[None]:
    """A fresh process with device 0 set in this thread; everything is forgotten at the end."""
    with fresh_process():
        yield


@pytest.fixture
def stream(fresh_device: None) -> int:
    """A stream of the default context."""
    return int(ok(acl.rt.create_stream()))


@pytest.fixture(scope="session")
def sum_bundles(tmp_path_factory: pytest.TempPathFactory) -> dict[SumModel, Path]:
    """Every variant, compiled."""
    found = {model: tmp_path_factory.mktemp("sum") for model in VARIANTS}
    for model, directory in found.items():
        compile_sum_model(model, directory)
    return found


@pytest.fixture(scope="session")
def tiny_bundle(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    """The base Llama of `tests.support.tiny`: 1024 KV tokens, context 128."""
    return make_bundle(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="session")
def tiny_fp16_bundle(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    """The same in fp16."""
    options = replace(TINY_OPTIONS, dtype="float16")
    return make_bundle(tmp_path_factory.mktemp("tiny16"), options=options)


@pytest.fixture(scope="session", params=CODED_VARIANTS)
def coded_bundle(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Bundle:
    """The model of `tests.support.coded_model`: 512 KV tokens, context 128."""
    return make_coded_bundle(tmp_path_factory.mktemp("coded"), CODED_VARIANTS[request.param])


@pytest.fixture
def sum_device() -> Iterator[AclDevice]:
    """A device that holds nothing, and was never misused, when the test ends."""
    with opened(memory_bytes=1 << 30) as device:
        yield device
        faults.clear()
        assert num_leaked() == 0
        assert [text for text in inspect.report().misuses if "injected fault" not in text] == []


@pytest.fixture
def open_executor(sum_device: AclDevice, sum_bundles: dict[SumModel, Path]) -> Iterator[Opener]:
    """Opens a variant's executor; closed at the end."""
    opener = Opener(sum_device, sum_bundles)
    yield opener
    opener.close()
