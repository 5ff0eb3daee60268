"""What is alive on the simulated host and what was done to it. For tests and diagnosis.

Not part of pyACL's surface.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from runtime_cache.aclsim import faults, settings
from runtime_cache.aclsim.ledger import ledger
from runtime_cache.aclsim.process import current_stream, power_cycle, this_process
from runtime_cache.aclsim.streams import Mark

__all__ = ["Report", "clear", "hold", "occupy", "power_cycle", "report", "reset"]


@dataclass(frozen=True, slots=True)
class Report:
    """A snapshot. Default streams and default contexts are not counted.

    Attributes:
        device_allocations, device_bytes: live `malloc`s; bytes as asked for.
        host_allocations: live `malloc_host`s.
        contexts, streams, events, models, descs, datasets, data_buffers: live handles.
        others: live handles of other kinds, by kind.
        calls: calls since the last `clear`, by full pyACL name.
        copies, copied_bytes: copies that took effect since then, by `H2D`, `D2H`, `D2D`.
        misuses: one sentence for each failure the program caused since then.
    """

    device_allocations: int
    device_bytes: int
    host_allocations: int
    contexts: int
    streams: int
    events: int
    models: int
    descs: int
    datasets: int
    data_buffers: int
    others: dict[str, int]
    calls: dict[str, int]
    copies: dict[str, int]
    copied_bytes: dict[str, int]
    misuses: tuple[str, ...]

    @property
    def num_alive(self) -> int:
        """Everything the program made and has not given back."""
        return (
            self.device_allocations
            + self.host_allocations
            + self.contexts
            + self.streams
            + self.events
            + self.models
            + self.descs
            + self.datasets
            + self.data_buffers
            + sum(self.others.values())
        )


def report() -> Report:
    """Takes a snapshot."""
    process = this_process()
    live = [allocation for device in process.devices.values() for allocation in device.memory.live]
    num_default = sum(device.default_context is not None for device in process.devices.values())
    named = {"context", "stream", "event", "model description", "dataset", "data buffer"}
    return Report(
        device_allocations=len(live),
        device_bytes=sum(allocation.size_bytes for allocation in live),
        host_allocations=len(process.host_memory.live),
        contexts=len(process.contexts) - num_default,
        streams=len(process.streams),
        events=len(process.events),
        models=len(process.models),
        descs=len(process.descs),
        datasets=len(process.datasets),
        data_buffers=len(process.buffers),
        others={table.what: len(table) for table in process.tables() if table.what not in named},
        calls=dict(ledger.calls),
        copies=dict(ledger.copies),
        copied_bytes=dict(ledger.copied_bytes),
        misuses=tuple(ledger.misuses),
    )


def clear() -> None:
    """Sets calls, copies and misuses back to nothing."""
    ledger.clear()


@contextmanager
def hold(stream: int) -> Iterator[None]:
    """Stops a stream of the current context at this point of its queue until the block ends."""
    gate = Mark()
    current_stream(stream).submit("inspect.hold", lambda: _wait(gate))
    try:
        yield
    finally:
        gate.reach()


def _wait(gate: Mark) -> None:
    gate.wait()


@contextmanager
def occupy(count_bytes: int, device_id: int = 0) -> Iterator[None]:
    """Another process takes device memory, as the driver counts it, until the block ends.

    Raises:
        AclFailure: 207001 if so much is not free.
    """
    memory = this_process().device(device_id).memory
    memory.charge(count_bytes)
    try:
        yield
    finally:
        memory.refund(count_bytes)


def reset() -> None:
    """A fresh process: devices off, counters, faults and settings forgotten."""
    power_cycle()
    faults.clear()
    ledger.clear()
    settings.configure()
