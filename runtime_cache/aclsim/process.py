"""What one process holds of the simulated host: devices, contexts, handles, the current thread.

Not part of pyACL's surface. `power_cycle` returns to the state of a fresh process.
"""

from __future__ import annotations

import itertools
import threading
from dataclasses import dataclass, field
from typing import Any

from runtime_cache.aclsim import codes, faults, settings
from runtime_cache.aclsim.callbacks import ExceptionCallback, Subscriptions
from runtime_cache.aclsim.datasets import DataBuffer, Dataset
from runtime_cache.aclsim.descs import Desc
from runtime_cache.aclsim.events import Event
from runtime_cache.aclsim.failure import AclFailure, last_error, recent_messages
from runtime_cache.aclsim.fault_script import read_script
from runtime_cache.aclsim.handles import HandleTable
from runtime_cache.aclsim.ledger import ledger
from runtime_cache.aclsim.memory import DeviceMemory, HostMemory
from runtime_cache.aclsim.model_configs import ExecConfig, LoadConfig
from runtime_cache.aclsim.models import LoadedModel
from runtime_cache.aclsim.races import unsettled
from runtime_cache.aclsim.streams import Stream, Task
from runtime_cache.aclsim.tensor_descs import TensorDesc
from runtime_cache.aclsim.timeouts import Timeouts

_stream_numbers = itertools.count(1)


@dataclass(eq=False)
class Context:
    """Owns a default stream and the streams created while it was current.

    Attributes:
        is_alive: not destroyed and its device not reset.
        stopped: the failure after which it takes no work, if a stream of it stops on failure.
        streams: the program's own streams, by handle.
    """

    device: Device
    handle: int = 0
    is_alive: bool = True
    stopped: AclFailure | None = None
    streams: dict[int, Stream] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.default_stream = self.new_stream()

    def new_stream(self) -> Stream:
        """A stream with its thread running; not entered anywhere."""
        number = next(_stream_numbers)
        stream = Stream(
            f"aclsim-stream-{number}",
            lambda failure: self._note_failure(stream, failure),
            self.device.lost_failure,
            self._stop,
            number,
        )
        if self.stopped is not None:
            stream.stop(self.stopped)
        return stream

    def stream(self, handle: int) -> Stream:
        """One of its streams; 0 is the default stream.

        Raises:
            AclFailure: 107003 if the stream belongs elsewhere or was destroyed.
        """
        if handle == 0:
            return self.default_stream
        found = self.streams.get(handle)
        if found is None:
            raise AclFailure(codes.RT_STREAM_CONTEXT, f"{handle:#x} is no stream of this context")
        return found

    def _note_failure(self, stream: Stream, failure: AclFailure) -> None:
        """A task failed: its device may be lost, and the program may want to be told."""
        self.device.note_failure(failure)
        this_process().exceptions.tell(failure, stream, self.device.device_id)

    def _stop(self, failure: AclFailure) -> None:
        """No stream takes or does work any more."""
        self.stopped = failure
        for stream in self.all_streams():
            stream.stop(failure)

    def all_streams(self) -> list[Stream]:
        """The default stream and the program's own."""
        return [self.default_stream, *self.streams.values()]

    def let_go(self) -> None:
        """Ends scripted hangs."""
        for stream in self.all_streams():
            stream.let_go()

    def close(self) -> None:
        """Waits for all work and ends the threads."""
        self.is_alive = False
        for stream in self.all_streams():
            stream.close()


class Device:
    """One simulated device.

    Attributes:
        contexts: the live ones on it.
        lost_code: sticky code that took it away, or 0.
        num_users: open `set_device` calls.
    """

    def __init__(self, device_id: int, config: settings.SimSettings, host: HostMemory) -> None:
        self.device_id = device_id
        self.memory = DeviceMemory(
            device_id, config.capacity_bytes, host, has_one_memory=config.has_one_memory
        )
        self.memory.charge(config.initial_use_bytes)
        self.contexts: list[Context] = []
        self.lost_code = 0
        self.num_users = 0
        self.default_context: Context | None = None

    def pending(self) -> list[Task]:
        """What its streams have queued and not done."""
        streams = [stream for context in self.contexts for stream in context.all_streams()]
        return [task for stream in streams for task in stream.pending()]

    def note_failure(self, failure: AclFailure) -> None:
        """Remembers a sticky failure."""
        if failure.code in codes.STICKY:
            self.lost_code = failure.code

    def lost_failure(self) -> AclFailure | None:
        """What every call gets once the device is lost."""
        if not self.lost_code:
            return None
        return AclFailure(self.lost_code, f"device {self.device_id} is lost ({self.lost_code})")


class Process:
    """The process-wide state behind the module functions."""

    def __init__(self) -> None:
        self.config = settings.SimSettings()  # until init
        self.num_inits = 0
        self.lock = threading.RLock()
        self.host_memory = HostMemory()
        self.devices: dict[int, Device] = {}
        self.contexts: HandleTable[Context] = HandleTable("context", codes.RT_CONTEXT_NULL)
        self.streams: HandleTable[Stream] = HandleTable("stream", codes.RT_STREAM_CONTEXT)
        self.events: HandleTable[Event] = HandleTable("event", codes.RT_PARAM_INVALID)
        self.buffers: HandleTable[DataBuffer] = HandleTable("data buffer", codes.INVALID_PARAM)
        self.datasets: HandleTable[Dataset] = HandleTable("dataset", codes.INVALID_PARAM)
        self.descs: HandleTable[Desc] = HandleTable("model description", codes.INVALID_PARAM)
        self.tensor_descs: HandleTable[TensorDesc] = HandleTable(
            "tensor description", codes.INVALID_PARAM
        )
        self.load_configs: HandleTable[LoadConfig] = HandleTable(
            "model config handle", codes.INVALID_PARAM
        )
        self.exec_configs: HandleTable[ExecConfig] = HandleTable(
            "execution config handle", codes.INVALID_PARAM
        )
        self.models: dict[int, LoadedModel] = {}
        self._model_ids = itertools.count(1)
        self.subscriptions = Subscriptions()
        self.exceptions = ExceptionCallback()
        self.timeouts = Timeouts()
        self.init_config: dict[str, Any] = {}
        self.default_device_id: int | None = None

    def start(self, config: settings.SimSettings) -> None:
        """Fixes the settings: the first `acl.init`."""
        self.config = config
        ledger.gil_limit_s = config.gil_limit_ms / 1000
        ledger.is_warning = config.misuse == "warn"
        faults.script.load(read_script(config.faults) if config.faults else [])

    def tables(self) -> list[HandleTable[Any]]:
        """All tables of handles."""
        return [value for value in vars(self).values() if isinstance(value, HandleTable)]

    def end(self) -> None:
        """The last `acl.finalize`: devices should have been reset, as far as they can be."""
        self.num_inits = 0
        for device in self.devices.values():
            if device.num_users and not device.lost_code:
                sentence = f"acl.finalize while device {device.device_id} is set: reset it first"
                ledger.note_misuse(sentence, "teardown_order")

    def require_init(self) -> None:
        """Raises 100001 unless `acl.init` was called."""
        if not self.num_inits:
            raise AclFailure(codes.UNINITIALIZE, "acl.init has not been called")

    def device(self, device_id: int) -> Device:
        """The device, brought up on first use.

        Raises:
            AclFailure: 100001 before init, 107001 for a bad id, the sticky code if it is lost.
        """
        self.require_init()
        if not 0 <= device_id < self.config.device_count:
            raise AclFailure(codes.RT_INVALID_DEVICE_ID, f"no device {device_id}")
        with self.lock:
            if device_id not in self.devices:
                self.devices[device_id] = Device(device_id, self.config, self.host_memory)
            device = self.devices[device_id]
        _raise_if_lost(device)
        return device

    def new_context(self, device: Device) -> Context:
        """A context, entered in the table."""
        context = Context(device)
        context.handle = self.contexts.add(context)
        device.contexts = [*device.contexts, context]
        return context

    def pending(self) -> list[Task]:
        """What is queued and not done, on any device."""
        return [task for device in list(self.devices.values()) for task in device.pending()]

    def add_model(self, model: LoadedModel) -> int:
        """Enters a model and returns its id."""
        model_id = next(self._model_ids)
        self.models[model_id] = model
        return model_id

    def clear_device(self, device: Device) -> None:
        """Unloads and frees what the program left on a device that is reset: leaks."""
        where = f"reset_device({device.device_id})"
        for model_id, model in list(self.models.items()):
            if model.memory is device.memory and self.models.pop(model_id, None) is not None:
                model.unload()
                ledger.note_misuse(f"{where} unloaded model {model_id}, still loaded", "leak")
        sizes = [allocation.size_bytes for allocation in device.memory.live]
        if sizes:
            sentence = f"{where} freed {len(sizes)} of malloc, {sum(sizes)} bytes, still allocated"
            ledger.note_misuse(sentence, "leak")
        device.memory.free_all()

    def destroy_context(self, context: Context) -> None:
        """As `close_context`, for one of the program's own: its models should be gone."""
        orphans = [key for key, model in self.models.items() if model.context == context.handle]
        for model_id in orphans:
            sentence = f"a context was destroyed under which model {model_id} is loaded"
            ledger.note_misuse(sentence, "teardown_order")
        self.close_context(context)

    def close_context(self, context: Context) -> None:
        """Waits for a context's work and forgets it."""
        self.contexts.remove(context.handle)
        context.device.contexts = [c for c in context.device.contexts if c is not context]
        context.close()
        for stream in context.all_streams():
            self.subscriptions.drop(stream)


class _Current(threading.local):
    """The calling thread's context."""

    context: Context | None = None


_process = Process()
_current = _Current()


def this_process() -> Process:
    """The one process state."""
    return _process


def set_current(context: Context | None) -> None:
    """Makes a context current in the calling thread."""
    _current.context = context


def open_device(device_id: int) -> Context:
    """Opens a device once more; its default context is the calling thread's from now on.

    Raises:
        AclFailure: as `Process.device`.
    """
    device = _process.device(device_id)
    with _process.lock:
        device.num_users += 1
        if device.default_context is None:
            device.default_context = _process.new_context(device)
        set_current(device.default_context)
        return device.default_context


def current_context() -> Context:
    """The calling thread's context; the default device's, if `acl.init` was told of one.

    Raises:
        AclFailure: 107002 if it has none or it is gone; the sticky code if the device is lost.
    """
    context = _current.context
    if context is None and _process.default_device_id is not None:
        context = open_device(_process.default_device_id)
    if context is None or not context.is_alive:
        what = "has no context" if context is None else "holds a context that was destroyed"
        raise AclFailure(codes.RT_CONTEXT_NULL, f"thread {threading.current_thread().name} {what}")
    if context.device.lost_code:
        _raise_if_lost(context.device)
    return context


def current_stream(handle: int) -> Stream:
    """A stream of the current context; 0 is its default stream.

    Raises:
        AclFailure: 107003 if the stream belongs elsewhere or was destroyed; as `current_context`.
    """
    return current_context().stream(handle)


def note_failure(failure: AclFailure) -> None:
    """Lets a scripted failure take effect: a sticky code takes the current device away."""
    if _current.context is not None:
        _current.context.device.note_failure(failure)


def power_cycle() -> None:
    """Forgets everything: threads joined, memory unmapped, settings read again at init.

    Scripted hangs end. Streams must be able to finish: release every gate and event first.
    """
    global _process
    faults.clear()
    _process.exceptions.set(None)
    _process.subscriptions.release_all()
    for context in _process.contexts.objects():
        context.let_go()
    for context in _process.contexts.objects():
        context.close()
    for device in _process.devices.values():
        device.memory.free_all()
    _process.host_memory.free_all()
    set_current(None)
    unsettled.settle()
    recent_messages.forget()
    last_error.take()
    _process = Process()


def _raise_if_lost(device: Device) -> None:
    failure = device.lost_failure()
    if failure is not None:
        raise failure
