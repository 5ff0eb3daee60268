"""A loaded model: what all kinds have in common, and how they are executed.

ONNX Runtime reads simulated device memory through bound pointers; inputs and weights are not
copied. `geared_models` has the models with compiled shapes, `ranged_models` those whose shapes
each run decides.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, Literal, Protocol

from runtime_cache.aclsim import codes
from runtime_cache.aclsim.datasets import Dataset
from runtime_cache.aclsim.failure import AclFailure
from runtime_cache.aclsim.lent_memory import (
    NOTHING_LENT,
    LentMemory,
    Range,
    check_lent,
    lending_of,
)
from runtime_cache.aclsim.mapping import round_up
from runtime_cache.aclsim.memory import DeviceMemory, is_device_address
from runtime_cache.aclsim.om import OmFile, OmHeader, TensorInfo
from runtime_cache.aclsim.pages import HUGE_PAGE_BYTES, TAIL_BYTES
from runtime_cache.aclsim.sessions import new_session
from runtime_cache.aclsim.settings import SimSettings

Mode = Literal["sync", "async"]


class Plan(Protocol):
    """One execution, checked and ready to be queued.

    Attributes:
        reads, writes: (device address, bytes) of inputs and of outputs, as far as they are known.
    """

    @property
    def reads(self) -> tuple[Range, ...]: ...

    @property
    def writes(self) -> tuple[Range, ...]: ...

    def run(self) -> None:
        """Executes now, on the calling thread.

        Raises:
            AclFailure: 507015 for memory that is not live, 507011 if the model itself fails.
        """


class LoadedModel(ABC):
    """A model on a device.

    Args:
        om: the checked file.
        memory: of the device it is loaded on; charged for weights and work memory unless the
            program lends its own.
        config: thread settings.
        context: handle of the context it is loaded under.
        lent: memory of the program.

    Raises:
        AclFailure: 207001 if weights and work memory do not fit, 545001 if the graph does not load,
            245000, 107000 or 100000 for lent memory that cannot be used, 145002 without its
            external weights. Nothing is taken.

    Attributes:
        mode: `sync` or `async` after the first execution; the two may not be mixed.
        stream: the stream with queued executions.
        num_queued: executions that have not run.
    """

    def __init__(
        self,
        om: OmFile,
        memory: DeviceMemory,
        config: SimSettings,
        context: int,
        lent: LentMemory = NOTHING_LENT,
    ) -> None:
        self.header = om.header
        self.memory = memory
        self.context = context
        self.mode: Mode | None = None
        self.stream = 0
        self.num_queued = 0
        self._lent = lent
        self._lending = lending_of(memory)
        self._run_lock = threading.Lock()
        self._check_lent()
        self._charged = self._bytes_to_charge()
        memory.charge(self._charged)
        self._session: Any = None
        try:
            self._session = new_session(om, config)
            if lent.weights is not None:
                self._lending.claim_weights(lent.weights, om.header.weights.sha256)
        except AclFailure:
            memory.refund(self._charged)
            raise

    def _check_lent(self) -> None:
        needed_work, needed_weights = memory_needs(self.header)
        if self._lent.work is not None:
            check_lent(self.memory, "work", self._lent.work, needed_work)
        if self._lent.weights is not None:
            check_lent(self.memory, "weight", self._lent.weights, needed_weights)

    def _bytes_to_charge(self) -> int:
        work, weights = memory_needs(self.header)
        charged = charged_bytes(self.header.external_bytes)
        charged += work if self._lent.work is None else 0
        return charged + (weights if self._lent.weights is None else 0)

    @abstractmethod
    def plan(self, inputs: Dataset, outputs: Dataset, *, can_allocate: bool = False) -> Plan:
        """Checks the buffers of one execution.

        Args:
            can_allocate: an output buffer (0, 0) is for the run to fill with memory of its own.

        Raises:
            AclFailure: 145000 or 100000 for a wrong number of buffers, 100000 for null or host
                pointers and for an output that overlaps another buffer, 500002 for a short buffer.
        """

    def enter_mode(self, mode: Mode) -> None:
        """Fixes how the model is executed, from its first execution on.

        Raises:
            AclFailure: 500002 if it was executed the other way before.
        """
        if self.mode is None:
            self.mode = mode
        elif self.mode != mode and not self.header.has_ranges:
            sentence = "not support mix execute: sync and async on one model"
            raise AclFailure(codes.GE_FAILURE, sentence)

    def _check_counts(self, num_inputs: int, num_outputs: int) -> None:
        wanted_inputs = len(self.header.inputs) + self.header.has_gears
        wanted_outputs = len(self.header.outputs)
        if (num_inputs, num_outputs) != (wanted_inputs, wanted_outputs):
            is_static = not (self.header.has_gears or self.header.has_ranges)
            raise AclFailure(
                codes.GE_PARAM_INVALID if is_static else codes.INVALID_PARAM,
                f"{num_inputs} input and {num_outputs} output buffers given, the model has "
                f"{wanted_inputs} and {wanted_outputs}",
            )

    def _execute(self, binding: Any) -> None:
        """One run of the session. Call with the run lock held."""
        if self._lent.work is None:
            self._run_session(binding)
        else:
            with self._lending.working_in(self, self._lent.work):
                self._run_session(binding)

    def _run_session(self, binding: Any) -> None:
        try:
            self._session.run_with_iobinding(binding)
        except Exception as error:  # ONNX Runtime raises many types, all mean the same here
            raise AclFailure(codes.RT_MODEL_EXECUTE, f"model run failed: {error}") from error

    def unload(self) -> None:
        """Gives the device memory back and drops the session."""
        self._session = None
        if self._lent.weights is not None:
            self._lending.release_weights(self._lent.weights)
        self.memory.refund(self._charged)


def needed_ranges(
    side: str, infos: Sequence[TensorInfo], all_dims: Sequence[list[int]], given: Sequence[Range]
) -> list[Range]:
    """(address, bytes needed) of the buffers of one side, `input` or `output`.

    Raises:
        AclFailure: 100000 for an address that is not the device's, 500002 for a short buffer.
    """
    needs = []
    for info, dims, (address, size) in zip(infos, all_dims, given, strict=True):
        need = info.size_bytes(dims)
        check_device_address(side, info, address)
        if size < need:
            sentence = f"{side} {info.name}: buffer of {size} bytes, the gear needs {need}"
            raise AclFailure(codes.GE_FAILURE, sentence)
        needs.append((address, need))
    return needs


def check_device_address(side: str, info: TensorInfo, address: int) -> None:
    """Raises 100000 for an address that models cannot use."""
    if not is_device_address(address):
        sentence = f"{side} {info.name}: {address:#x} is not a device address"
        raise AclFailure(codes.INVALID_PARAM, sentence)


def check_aliasing(inputs: Sequence[Range], outputs: Sequence[Range]) -> None:
    """Refuses an output that overlaps an input or another output.

    Raises:
        AclFailure: 100000.
    """
    for index, (address, size) in enumerate(outputs):
        for other, other_size in (*inputs, *outputs[:index]):
            if address < other + other_size and other < address + size:
                sentence = f"output {index} at {address:#x} overlaps another buffer of the run"
                raise AclFailure(codes.INVALID_PARAM, sentence)


def memory_needs(header: OmHeader) -> tuple[int, int]:
    """(work bytes, weight bytes) that a load takes from the device, external weights excluded."""
    return header.workspace_bytes, charged_bytes(header.weights.length)


def charged_bytes(length: int) -> int:
    """What an internal buffer of `length` bytes costs the device, in huge pages; 0 for none."""
    return round_up(length + TAIL_BYTES, HUGE_PAGE_BYTES) if length else 0
