"""One `.om`, loaded and ready: its gears, each with everything a run needs.

All that a step could want is made at load. In service there is no allocation, and no gear is set:
the selector of each gear's dataset is written once, here, because pyACL writes it with an immediate
copy that would race with a run in flight.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy.typing as npt

from om_models.contract import GraphContract
from om_models.manifest import Gear, OmFile
from runtime_cache.device.acl_api import GEAR_INPUT, Dims
from runtime_cache.device.acl_codes import check
from runtime_cache.device.acl_device import AclDevice
from runtime_cache.device.kv_pool import KvPool
from runtime_cache.device.om_contract import OmDesc, check_desc
from runtime_cache.device.om_desc import read_desc
from runtime_cache.device.staging import InputStaging, OutputStaging, pack
from runtime_cache.device.teardown import Teardown


@dataclass(frozen=True, slots=True)
class LoadedGear:
    """One gear, ready to run.

    Attributes:
        dataset: input dataset handle; its selector says this gear.
        inputs: host arrays of the step inputs in this gear's shapes, over the pinned buffer.
        upload_bytes: what one copy takes to the device.
    """

    dataset: int
    inputs: dict[str, npt.NDArray[Any]]
    upload_bytes: int


class OmModel:
    """A loaded `.om` with its staging and datasets. One run in flight at a time.

    Attributes:
        gears: by shape.
        outputs: where results arrive: the logits, and the new KV of each group.
    """

    def __init__(
        self, device: AclDevice, path: Path, om: OmFile, contract: GraphContract, pool: KvPool
    ) -> None:
        """Loads the file, checks it, makes the buffers and the datasets.

        The load holds the interpreter lock for its whole duration (pyACL's doing).

        Raises:
            BundleError: the file is not what the manifest says; nothing is left.
            AclError: no room, or the driver refused; nothing is left.
        """
        self._device = device
        self._teardown = Teardown()
        with self._teardown.undo_on_error():
            self._model_id = self._load(path)
            desc = read_desc(device.acl, self._model_id)
            gears = tuple(dict.fromkeys(om.prefill + om.decode))
            check_desc(om.path, desc, contract, gears)
            self._make_staging(desc, contract, gears)
            self._output_dataset = self._make_dataset(
                [
                    (self.outputs.ptrs[name], tensor.num_bytes)
                    for name, tensor in zip(desc.output_names, desc.outputs, strict=True)
                ]
            )
            self.gears: dict[Gear, LoadedGear] = self._load_gears(desc, contract, gears, pool)

    def upload(self, gear: LoadedGear) -> None:
        """Queues the copy of the gear's inputs to the device.

        Raises:
            AclError: the driver refused.
        """
        self._inputs.upload(gear.upload_bytes)

    def execute(self, gear: LoadedGear) -> None:
        """Queues one run of the model; its errors surface at `synchronize`.

        Raises:
            AclError: the driver refused.
        """
        acl = self._device.acl
        code = acl.mdl.execute_async(
            self._model_id, gear.dataset, self._output_dataset, self._device.stream
        )
        check("acl.mdl.execute_async", code, acl)

    def close(self) -> None:
        """Destroys datasets and buffers, unloads the model; no run may be in flight. Idempotent.

        Raises:
            DeviceError: the first failure, after everything was tried.
        """
        self._teardown.close()

    def _load(self, path: Path) -> int:
        acl = self._device.acl
        model_id, code = acl.mdl.load_from_file(str(path))
        check("acl.mdl.load_from_file", code, acl)
        self._teardown.push(lambda: check("acl.mdl.unload", acl.mdl.unload(model_id), acl))
        return model_id

    def _make_staging(self, desc: OmDesc, contract: GraphContract, gears: tuple[Gear, ...]) -> None:
        step_inputs = contract.step_inputs
        sizes = [tensor.num_bytes for tensor in desc.inputs if tensor.name in step_inputs]
        self._inputs = InputStaging(self._device, sizes)
        self._teardown.push(self._inputs.close)
        logits_shape = (max(gear.batch for gear in gears), contract.vocab_size)
        output_sizes = {
            name: tensor.num_bytes
            for name, tensor in zip(desc.output_names, desc.outputs, strict=True)
        }
        self.outputs = OutputStaging(self._device, output_sizes, logits_shape)
        self._teardown.push(self.outputs.close)

    def _load_gears(
        self, desc: OmDesc, contract: GraphContract, gears: tuple[Gear, ...], pool: KvPool
    ) -> dict[Gear, LoadedGear]:
        selectors = self._make_selectors(desc, len(gears))
        return {
            gear: self._load_gear(desc, contract, gear, pool, selector)
            for gear, selector in zip(gears, selectors, strict=True)
        }

    def _make_selectors(self, desc: OmDesc, num_gears: int) -> list[int]:
        """One selector buffer per gear, side by side in one allocation [device addresses]."""
        if not desc.gears:
            return [0] * num_gears
        size = desc.inputs[desc.input_names.index(GEAR_INPUT)].num_bytes
        packing = pack([size] * num_gears)
        base = self._device.malloc(packing.num_bytes)
        self._teardown.push(lambda: self._device.free(base))
        return [base + offset for offset in packing.offsets]

    def _load_gear(
        self, desc: OmDesc, contract: GraphContract, gear: Gear, pool: KvPool, selector: int
    ) -> LoadedGear:
        specs = contract.step_inputs
        staged = [name for name in desc.input_names if name in specs]
        packing = pack([specs[name].num_bytes(gear) for name in staged])
        offsets = dict(zip(staged, packing.offsets, strict=True))
        ptrs = {name: self._inputs.device_ptr + offset for name, offset in offsets.items()}
        ptrs |= {
            f"kv_pool_{group}": pool.group_ptr(group) for group in range(pool.layout.num_groups)
        }
        ptrs[GEAR_INPUT] = selector
        dataset = self._make_dataset([(ptrs[t.name], t.num_bytes) for t in desc.inputs])
        if desc.gears:
            self._select(dataset, desc, contract.gear_dims(gear, desc.input_names))
        host = self._inputs.host
        return LoadedGear(
            dataset=dataset,
            inputs={
                name: host.array(offsets[name], specs[name].shape(gear), specs[name].dtype)
                for name in staged
            },
            upload_bytes=packing.num_bytes,
        )

    def _select(self, dataset: int, desc: OmDesc, dims: tuple[int, ...]) -> None:
        acl = self._device.acl
        index = desc.input_names.index(GEAR_INPUT)
        gear: Dims = {"name": "", "dimCount": len(dims), "dims": list(dims)}
        code = acl.mdl.set_input_dynamic_dims(self._model_id, dataset, index, gear)
        check("acl.mdl.set_input_dynamic_dims", code, acl)

    def _make_dataset(self, buffers: list[tuple[int, int]]) -> int:
        """A dataset over (device address, bytes) pairs, in the model's order."""
        acl = self._device.acl
        dataset = acl.mdl.create_dataset()
        self._teardown.push(
            lambda: check("acl.mdl.destroy_dataset", acl.mdl.destroy_dataset(dataset), acl)
        )
        for ptr, num_bytes in buffers:
            buffer = acl.create_data_buffer(ptr, num_bytes)
            self._teardown.push(self._destroy_data_buffer(buffer))
            _, code = acl.mdl.add_dataset_buffer(dataset, buffer)
            check("acl.mdl.add_dataset_buffer", code, acl)
        return dataset

    def _destroy_data_buffer(self, buffer: int) -> Callable[[], None]:
        acl = self._device.acl
        return lambda: check("acl.destroy_data_buffer", acl.destroy_data_buffer(buffer), acl)
