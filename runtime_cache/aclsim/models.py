"""A loaded model: its session, and one execution on device memory.

ONNX Runtime reads and writes simulated device memory through bound pointers; nothing is copied, and
the weights are mapped from the `.om`. Checked plans and bound pointers are kept, since a serving
loop repeats them.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import onnx
import onnxruntime as ort
from onnx.external_data_helper import ExternalDataInfo, uses_external_data

from runtime_cache.aclsim import codes
from runtime_cache.aclsim.external_data import refer_to
from runtime_cache.aclsim.failure import AclFailure
from runtime_cache.aclsim.mapping import POISON, round_up
from runtime_cache.aclsim.memory import (
    HUGE_PAGE_BYTES,
    TAIL_BYTES,
    DeviceMemory,
    is_device_address,
)
from runtime_cache.aclsim.om import OmFile, OmHeader
from runtime_cache.aclsim.recent import Recent
from runtime_cache.aclsim.settings import SimSettings

# How many combinations of gear and pointers are kept ready.
MAX_PLANS = 64
SELECTOR_ELEMENT_BYTES = 4
Range = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Plan:
    """One execution, checked and ready to be queued.

    Attributes:
        gear: index of the compiled shape.
        ranges: (device address, bytes needed) of inputs then outputs, selector excluded.
        selector: its device address and the bytes it held at the call; None without gears.
    """

    gear: int
    ranges: tuple[Range, ...]
    selector: tuple[int, bytes] | None


class LoadedModel:
    """A model on a device.

    Args:
        om: the checked file.
        memory: of the device it is loaded on; charged for weights and work memory.
        config: thread settings.

    Raises:
        AclFailure: 207001 if weights and work memory do not fit, 545001 if the graph does not load.

    Attributes:
        context: handle of the context it was loaded under.
        mode: `sync` or `async` after the first execution; the two may not be mixed.
        stream: the stream with queued executions.
        num_queued: executions that have not run.
    """

    def __init__(self, om: OmFile, memory: DeviceMemory, config: SimSettings, context: int) -> None:
        self.header = om.header
        self.memory = memory
        self.context = context
        self.mode: Literal["", "sync", "async"] = ""
        self.stream = 0
        self.num_queued = 0
        self.selected_gear = om.header.largest_gear
        self._run_lock = threading.Lock()
        self._plan_lock = threading.Lock()  # its own: planning must not wait for a run
        self._plans: Recent[tuple[bytes, tuple[Range, ...], tuple[Range, ...]], Plan]
        self._plans = Recent(MAX_PLANS)
        self._bindings: Recent[tuple[int, tuple[int, ...]], Any] = Recent(MAX_PLANS)
        self._gears = {tuple(gear.values): i for i, gear in enumerate(om.header.gears)}
        self._charged = charged_bytes(om.header.weights.length) + om.header.workspace_bytes
        memory.charge(self._charged)
        try:
            self._session = new_session(om, config)
        except AclFailure:
            memory.refund(self._charged)
            raise

    @property
    def selector_bytes(self) -> int:
        """Size of the gear selector input; 0 without gears."""
        return len(self.header.gears[0].values) * SELECTOR_ELEMENT_BYTES

    def find_gear(self, flat_dims: Sequence[int]) -> int:
        """The gear whose input dims, concatenated, are these.

        Raises:
            AclFailure: 145013 if there is none.
        """
        wanted = list(flat_dims)
        for index, gear in enumerate(self.header.gears):
            if gear.flat_dims == wanted:
                return index
        raise AclFailure(codes.GE_NOT_A_GEAR, f"dims {wanted} are no gear of the model")

    def plan(self, inputs: tuple[Range, ...], outputs: tuple[Range, ...]) -> Plan:
        """Checks the buffers of one execution against the gear that the selector holds now.

        Args:
            inputs, outputs: (address, size) of each data buffer in model order; the selector last.

        Raises:
            AclFailure: 145000 or 100000 for a wrong number of buffers, 100000 for null or host
                pointers and for an output that overlaps another buffer, 500002 for a short buffer,
                145011 or 145013 for an unusable selector.
        """
        self._check_counts(len(inputs), len(outputs))
        content = b""
        if self.header.has_gears:
            content = self.memory.read(
                inputs[-1][0], self.selector_bytes, codes.GE_SELECTOR_ADDRESS_INVALID
            )
        key = (content, inputs, outputs)
        with self._plan_lock:
            return self._plans.get(key, lambda: self._new_plan(content, inputs, outputs))

    def _new_plan(
        self, content: bytes, inputs: tuple[Range, ...], outputs: tuple[Range, ...]
    ) -> Plan:
        """A checked plan; `content` is what the selector holds, empty without gears."""
        gear_index, selector = 0, None
        if content:
            gear_index = self._selected(content)
            selector = (inputs[-1][0], content)
            inputs = inputs[:-1]
        gear = self.header.gears[gear_index]
        needs_in = self._needs("input", self.header.inputs, gear.inputs, inputs)
        needs_out = self._needs("output", self.header.outputs, gear.outputs, outputs)
        _check_aliasing(needs_in, needs_out)
        return Plan(gear_index, (*needs_in, *needs_out), selector)

    def enter_mode(self, mode: Literal["sync", "async"]) -> None:
        """Fixes how the model is executed, from its first execution on.

        Raises:
            AclFailure: 500002 if it was executed the other way before.
        """
        if self.mode not in ("", mode):
            sentence = "not support mix execute: sync and async on one model"
            raise AclFailure(codes.GE_FAILURE, sentence)
        self.mode = mode

    def _check_counts(self, num_inputs: int, num_outputs: int) -> None:
        wanted_inputs = len(self.header.inputs) + self.header.has_gears
        wanted_outputs = len(self.header.outputs)
        if (num_inputs, num_outputs) != (wanted_inputs, wanted_outputs):
            code = codes.INVALID_PARAM if self.header.has_gears else codes.GE_PARAM_INVALID
            raise AclFailure(
                code,
                f"{num_inputs} input and {num_outputs} output buffers given, the model has "
                f"{wanted_inputs} and {wanted_outputs}",
            )

    def _selected(self, content: bytes) -> int:
        """The gear that selector bytes name; bytes never written mean the largest."""
        if content == POISON * (len(content) // len(POISON)):
            return self.header.largest_gear
        step = SELECTOR_ELEMENT_BYTES
        parts = [content[i : i + step] for i in range(0, len(content), step)]
        values = tuple(int.from_bytes(part, "little", signed=True) for part in parts)
        index = self._gears.get(values)
        if index is None:
            raise AclFailure(codes.GE_NOT_A_GEAR, f"the selector holds {values}, which is no gear")
        return index

    def _needs(
        self,
        side: str,
        infos: Sequence[Any],
        gear_dims: Sequence[list[int]],
        given: Sequence[Range],
    ) -> list[Range]:
        """(address, bytes needed) of one side's buffers."""
        needs = []
        for info, dims, (address, size) in zip(infos, gear_dims, given, strict=True):
            need = info.size_bytes(dims)
            if not is_device_address(address):
                sentence = f"{side} {info.name}: {address:#x} is not a device address"
                raise AclFailure(codes.INVALID_PARAM, sentence)
            if size < need:
                sentence = f"{side} {info.name}: buffer of {size} bytes, the gear needs {need}"
                raise AclFailure(codes.GE_FAILURE, sentence)
            needs.append((address, need))
        return needs

    def run(self, plan: Plan) -> None:
        """Executes now, on the calling thread.

        Raises:
            AclFailure: 507015 for memory that is not live, 507011 if the selector changed after
                the call or the model itself fails.
        """
        if plan.selector is not None:
            self._check_selector(*plan.selector)
        with self.memory.pinned(plan.ranges, codes.RT_AICORE_EXCEPTION) as hosts, self._run_lock:
            key = (plan.gear, tuple(hosts))
            binding = self._bindings.get(key, lambda: self._bind(plan.gear, hosts))
            try:
                self._session.run_with_iobinding(binding)
            except Exception as error:  # ONNX Runtime raises many types, all mean the same here
                raise AclFailure(codes.RT_MODEL_EXECUTE, f"model run failed: {error}") from error

    def _check_selector(self, address: int, expected: bytes) -> None:
        content = self.memory.read(address, len(expected), codes.RT_AICORE_EXCEPTION)
        if content != expected:
            sentence = "the gear selector was rewritten while the execution was queued"
            raise AclFailure(codes.RT_MODEL_EXECUTE, sentence)

    def _bind(self, gear_index: int, hosts: Sequence[int]) -> Any:
        gear = self.header.gears[gear_index]
        binding = self._session.io_binding()
        addresses = iter(hosts)
        for info, dims in zip(self.header.inputs, gear.inputs, strict=True):
            binding.bind_input(info.name, "cpu", 0, info.onnx_type, dims, next(addresses))
        for info, dims in zip(self.header.outputs, gear.outputs, strict=True):
            binding.bind_output(info.name, "cpu", 0, info.onnx_type, dims, next(addresses))
        return binding

    def unload(self) -> None:
        """Gives the device memory back and drops the session."""
        self._bindings.clear()
        self._session = None
        self.memory.refund(self._charged)


def charged_bytes(length: int) -> int:
    """What an internal buffer of `length` bytes costs the device, in huge pages; 0 for none."""
    return round_up(length + TAIL_BYTES, HUGE_PAGE_BYTES) if length else 0


def check_soc(header: OmHeader, soc_name: str, path: object) -> None:
    """Refuses a model compiled for another SoC.

    Raises:
        AclFailure: 545001.
    """
    if header.soc_version != soc_name:
        raise AclFailure(
            codes.GE_LOAD_MODEL,
            f"{path}: soc version not supported: compiled for {header.soc_version}, "
            f"the device is {soc_name}",
        )


def new_session(om: OmFile, config: SimSettings) -> Any:
    """An ONNX Runtime session over the file, its weights mapped in place.

    Raises:
        AclFailure: 545001 if ONNX Runtime refuses the graph.
    """
    options = ort.SessionOptions()
    options.log_severity_level = 4
    options.intra_op_num_threads = config.threads or os.cpu_count() or 1
    options.add_session_config_entry("session.intra_op.allow_spinning", str(int(config.spin)))
    if config.weights_in_place:
        options.add_session_config_entry("session.disable_prepacking", "1")
        options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.add_session_config_entry(
        "session.model_external_initializers_file_folder_path", str(om.path.parent)
    )
    try:
        return ort.InferenceSession(_pointing_into(om), options, providers=["CPUExecutionProvider"])
    except Exception as error:  # ONNX Runtime raises many types, all mean the same here
        raise AclFailure(codes.GE_LOAD_MODEL, f"{om.path} does not load: {error}") from error


def _pointing_into(om: OmFile) -> bytes:
    """The graph with its external data pointing at the file's weights section."""
    model = onnx.load_model_from_string(om.graph)
    for tensor in model.graph.initializer:
        if uses_external_data(tensor):
            info = ExternalDataInfo(tensor)
            offset = om.weights_offset + (info.offset or 0)
            refer_to(tensor, om.path.name, offset, info.length or 0)
    return bytes(model.SerializeToString())


def _check_aliasing(inputs: Sequence[Range], outputs: Sequence[Range]) -> None:
    """Refuses an output that overlaps an input or another output.

    Raises:
        AclFailure: 100000.
    """
    for index, (address, size) in enumerate(outputs):
        for other, other_size in (*inputs, *outputs[:index]):
            if address < other + other_size and other < address + size:
                sentence = f"output {index} at {address:#x} overlaps another buffer of the run"
                raise AclFailure(codes.INVALID_PARAM, sentence)
