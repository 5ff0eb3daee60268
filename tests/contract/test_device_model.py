"""What the driver relies on in `acl.mdl`; the same on software device and card."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from om_models.contract import GraphContract
from om_models.manifest import Gear
from runtime_cache.device.acl_api import ALL_INPUTS, GEAR_INPUT, DataType, Dims
from runtime_cache.device.acl_device import AclDevice
from runtime_cache.device.kv_layout import KvLayout
from runtime_cache.device.om_desc import read_desc
from tests.support.devices import DEVICES, opened
from tests.support.sum_model import (
    DECODE,
    PREFILL,
    SPEC,
    SumModel,
    compile_sum_model,
    compile_sum_model_with_atc,
)

MODEL = SumModel()
LAYOUT = KvLayout.from_spec(MODEL.manifest().kv, 4)
CONTRACT = GraphContract.of(MODEL.manifest())
NAMES = list(CONTRACT.inputs)
GEARS = PREFILL + DECODE
TIMEOUT_MS = 60_000


def compile_for(device: AclDevice, name: str, directory: Path) -> None:
    if name.startswith("sim"):
        compile_sum_model(MODEL, directory)
    elif shutil.which("atc") is None:
        pytest.skip("ATC is not installed here")
    else:
        compile_sum_model_with_atc(MODEL, directory, device.soc_name)


@dataclass
class Loaded:
    """A loaded model."""

    device: AclDevice
    model_id: int
    desc: int


@pytest.fixture(params=DEVICES)
def loaded(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Loaded]:
    with opened(request.param) as device:
        compile_for(device, request.param, tmp_path)
        mdl = device.acl.mdl
        model_id, code = mdl.load_from_file(str(tmp_path / "model.om"))
        assert code == 0
        desc = mdl.create_desc()
        assert mdl.get_desc(desc, model_id) == 0
        yield Loaded(device, model_id, desc)
        assert mdl.destroy_desc(desc) == 0
        assert mdl.unload(model_id) == 0


class Run:
    """One gear's dataset with memory of its own, as large as the model's largest gear."""

    def __init__(self, loaded: Loaded, gear: Gear) -> None:
        self._loaded, self._device, self.gear = loaded, loaded.device, gear
        self._buffers: list[int] = []
        self._ptrs: list[int] = []
        mdl, desc = self._device.acl.mdl, loaded.desc
        sizes = [mdl.get_input_size_by_index(desc, i) for i in range(mdl.get_num_inputs(desc))]
        self.inputs = self._dataset(sizes)
        self.input_ptrs = dict(zip([*NAMES, GEAR_INPUT], self._ptrs, strict=True))
        sizes = [mdl.get_output_size_by_index(desc, i) for i in range(mdl.get_num_outputs(desc))]
        self.outputs = self._dataset(sizes)
        self.logits_ptr = self._ptrs[len(NAMES) + 1]

    def _dataset(self, sizes: list[int]) -> int:
        acl = self._device.acl
        dataset = acl.mdl.create_dataset()
        for size in sizes:
            ptr = self._device.malloc(size)
            self._device.fill_zero(ptr, size)
            self._ptrs.append(ptr)
            self._buffers.append(acl.create_data_buffer(ptr, size))
            assert acl.mdl.add_dataset_buffer(dataset, self._buffers[-1]) == (dataset, 0)
        return dataset

    def select(self, dims: tuple[int, ...]) -> int:
        """Sets the gear; returns the code."""
        gear: Dims = {"name": "", "dimCount": len(dims), "dims": list(dims)}
        return self._device.acl.mdl.set_input_dynamic_dims(
            self._loaded.model_id, self.inputs, len(NAMES), gear
        )

    def select_own(self) -> int:
        return self.select(CONTRACT.gear_dims(self.gear, NAMES))

    def execute(self) -> int:
        device = self._device
        return device.acl.mdl.execute_async(
            self._loaded.model_id, self.inputs, self.outputs, device.stream
        )

    def upload_ids(self, first: int) -> None:
        """ids `first`, `first + 1`, ...; all else stays 0: everything is in sight."""
        count = self.gear.batch * self.gear.chunk
        host = self._device.malloc_host(4 * count)
        host.array(0, (count,), np.int32)[:] = np.arange(first, first + count)
        self._device.copy_to_device(self.input_ptrs["input_ids"], host.ptr, 4 * count)
        self._device.synchronize(TIMEOUT_MS)
        self._device.free_host(host)

    def logits(self) -> npt.NDArray[np.float32]:
        shape = (self.gear.batch, SPEC.vocab_size)
        host = self._device.malloc_host(4 * shape[0] * shape[1])
        self._device.copy_to_host(host.ptr, self.logits_ptr, host.num_bytes)
        self._device.synchronize(TIMEOUT_MS)
        found: npt.NDArray[np.float32] = host.array(0, shape, np.float32).copy()
        self._device.free_host(host)
        return found

    def close(self) -> None:
        acl = self._device.acl
        for buffer in self._buffers:
            assert acl.destroy_data_buffer(buffer) == 0
        for dataset in (self.inputs, self.outputs):
            assert acl.mdl.destroy_dataset(dataset) == 0
        for ptr in self._ptrs:
            self._device.free(ptr)


def sums(gear: Gear, first: int) -> list[float]:
    """The first logit of each batch entry when every key is in sight."""
    ids = np.arange(first, first + gear.batch * gear.chunk).reshape(gear.batch, gear.chunk)
    return [float(total) for total in ids.sum(axis=1)]


def test_inputs_come_in_the_graphs_order_with_the_gear_input_last(loaded: Loaded) -> None:
    desc = read_desc(loaded.device.acl, loaded.model_id)
    assert list(desc.input_names) == [*NAMES, GEAR_INPUT]


def test_outputs_come_in_the_graphs_order(loaded: Loaded) -> None:
    desc = read_desc(loaded.device.acl, loaded.model_id)
    assert [tensor.name.rpartition(":")[2] for tensor in desc.outputs] == ["logits", "new_kv_0"]
    # Operator, number of its output, name.
    assert all(re.fullmatch(r".+:\d+:\w+", tensor.name) for tensor in desc.outputs)


def test_types_dims_and_sizes_of_the_description(loaded: Loaded) -> None:
    desc = read_desc(loaded.device.acl, loaded.model_id)
    mask = desc.inputs[NAMES.index("mask")]
    assert (mask.data_type, mask.dims) == (DataType.FLOAT16, (-1, 1, -1, -1))
    assert mask.num_bytes >= 8 * 24 * 2
    pool = desc.inputs[NAMES.index("kv_pool_0")]
    assert (pool.dims, pool.num_bytes) == ((128, 32), LAYOUT.group_bytes)
    assert desc.outputs[0].data_type == DataType.FLOAT
    assert desc.outputs[1].num_bytes >= 8 * LAYOUT.group_token_bytes


def test_gears_are_all_inputs_dims_one_after_the_other(loaded: Loaded) -> None:
    desc = read_desc(loaded.device.acl, loaded.model_id)
    assert set(desc.gears) == {CONTRACT.gear_dims(gear, NAMES) for gear in GEARS}


def test_a_bad_index_gives_no_code(loaded: Loaded) -> None:
    mdl = loaded.device.acl.mdl
    assert mdl.get_input_name_by_index(loaded.desc, 99) == ""
    assert mdl.get_input_data_type(loaded.desc, 99) == -1
    assert mdl.get_input_size_by_index(loaded.desc, 99) == 0


def test_more_gears_than_4096_are_not_asked_for(loaded: Loaded) -> None:
    mdl = loaded.device.acl.mdl
    _, code = mdl.get_input_dynamic_dims(loaded.desc, ALL_INPUTS, 4097)
    assert code == 100000


@pytest.mark.parametrize("gear", GEARS, ids=str)
def test_every_gear_runs(loaded: Loaded, gear: Gear) -> None:
    run = Run(loaded, gear)
    assert run.select_own() == 0
    run.upload_ids(3)
    assert run.execute() == 0
    assert run.logits()[0, 0] == sums(gear, 3)[0]
    run.close()


def test_a_gear_set_once_holds_while_others_run(loaded: Loaded) -> None:
    """The driver sets each dataset's gear at load and never again."""
    runs = [Run(loaded, gear) for gear in GEARS]
    for run in runs:
        assert run.select_own() == 0
    for first in (1, 5):
        for run in reversed(runs):
            run.upload_ids(first)
            assert run.execute() == 0
            assert run.logits()[0, 0] == sums(run.gear, first)[0]
    for run in runs:
        run.close()


def test_a_shape_that_is_no_gear_is_refused(loaded: Loaded) -> None:
    run = Run(loaded, GEARS[0])
    assert run.select(CONTRACT.gear_dims(Gear(1, 2, 8), NAMES)) == 145013
    run.close()


def test_a_model_that_is_not_loaded_is_refused(loaded: Loaded) -> None:
    acl, stream = loaded.device.acl, loaded.device.stream
    run = Run(loaded, GEARS[0])
    assert acl.mdl.execute_async(4_000_000, run.inputs, run.outputs, stream) == 145003
    run.close()


def test_a_dataset_without_buffers_is_refused(loaded: Loaded) -> None:
    acl, stream = loaded.device.acl, loaded.device.stream
    run = Run(loaded, GEARS[0])
    empty = acl.mdl.create_dataset()
    assert acl.mdl.execute_async(loaded.model_id, empty, run.outputs, stream) != 0
    assert acl.mdl.destroy_dataset(empty) == 0
    run.close()


def test_a_file_that_is_not_there_is_refused(loaded: Loaded, tmp_path: Path) -> None:
    model_id, code = loaded.device.acl.mdl.load_from_file(str(tmp_path / "missing.om"))
    assert (model_id, code != 0) == (0, True)
