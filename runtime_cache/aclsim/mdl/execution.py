"""`acl.mdl` in software: executing models, at once or in a stream."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

from runtime_cache.aclsim import codes, races
from runtime_cache.aclsim.calling import surface
from runtime_cache.aclsim.datasets import Dataset
from runtime_cache.aclsim.failure import AclFailure
from runtime_cache.aclsim.geared_models import GearedModel
from runtime_cache.aclsim.loading import model_of
from runtime_cache.aclsim.model_configs import ExecConfig
from runtime_cache.aclsim.models import LoadedModel, Plan
from runtime_cache.aclsim.process import current_stream, this_process
from runtime_cache.aclsim.streams import Stream

acl_function = surface("acl.mdl")

_MALLOC_POLICY = 0


@acl_function("Ikk")
def execute(model_id: int, input: int, output: int) -> None:
    """Runs now. Holds the GIL on a card: not for a daemon.

    An output buffer (0, 0) gets memory of the run, which is the program's to free.
    """
    model, datasets = model_of(model_id), this_process().datasets
    inputs, outputs = datasets.get(input), datasets.get(output)
    with _outputs_filled(model, outputs):
        plan = model.plan(inputs, outputs, can_allocate=True)
        model.enter_mode("sync")
        races.note_run(this_process().pending(), "acl.mdl.execute", plan.reads, plan.writes)
        plan.run()


@acl_function("Ikkk")
def execute_async(model_id: int, input: int, output: int, stream: int) -> None:
    """Queues a run; failures surface when the stream is synchronised."""
    model, target, datasets = model_of(model_id), current_stream(stream), this_process().datasets
    inputs, outputs = datasets.get(input), datasets.get(output)
    plan = model.plan(inputs, outputs)
    model.enter_mode("async")
    _count(model, inputs, outputs, stream)
    _submit("acl.mdl.execute_async", target, plan, (model, inputs, outputs))


@acl_function("Ikkkk")
def execute_v2(model_id: int, input: int, output: int, stream: int, handle: int) -> None:
    """Runs in a stream and waits, for as long as the options allow; 507046 on expiry.

    The run goes on after an expiry. Output buffers (0, 0) as `execute`. A null handle is 100000,
    as in ACL's source, though its page allows one.
    """
    process = this_process()
    config = process.exec_configs.get(handle)
    model, target = model_of(model_id), current_stream(stream)
    inputs, outputs = process.datasets.get(input), process.datasets.get(output)
    with _outputs_filled(model, outputs):
        plan = model.plan(inputs, outputs, can_allocate=True)
        model.enter_mode("sync")
        _count(model, inputs, outputs, stream)
        _submit("acl.mdl.execute_v2", target, plan, (model, inputs, outputs))
        target.synchronize(config.timeout_s)


def _count(model: LoadedModel, inputs: Dataset, outputs: Dataset, stream: int) -> None:
    """Notes one more queued run of a model and its datasets.

    Raises:
        AclFailure: 500002 if the model has runs queued on another stream.
    """
    with this_process().lock:
        if model.num_queued and model.stream != stream:
            raise AclFailure(codes.GE_FAILURE, "the model is queued on another stream")
        model.stream = stream
        model.num_queued += 1
        inputs.num_queued += 1
        outputs.num_queued += 1


def _submit(
    function: str, target: Stream, plan: Plan, counted: tuple[LoadedModel | Dataset, ...]
) -> None:
    """Queues a run that was counted."""
    on_done = partial(_uncount, counted)
    try:
        target.submit(function, plan.run, on_done=on_done, reads=plan.reads, writes=plan.writes)
    except AclFailure:  # the stream went away, so that nobody else will uncount
        on_done()
        raise


def _uncount(counted: tuple[LoadedModel | Dataset, ...]) -> None:
    """Ends one queued run of a model and its datasets."""
    with this_process().lock:
        for item in counted:
            item.num_queued -= 1


@contextmanager
def _outputs_filled(model: LoadedModel, outputs: Dataset) -> Iterator[None]:
    """Gives empty output buffers (0, 0) of a model with compiled shapes memory.

    Taken back if the run fails, but not if it goes on. A model with ranges gives memory itself,
    when it knows the sizes.

    Source: `ModelExecute` in GE 9.0 (`api/acl/acl_model/model/model.cpp`): the size is the
    description's, that of the largest gear.
    """
    empty = [buffer for buffer in outputs.buffers if (buffer.address, buffer.size_bytes) == (0, 0)]
    if not empty or not isinstance(model, GearedModel):
        yield
        return
    try:
        for buffer, size in zip(outputs.buffers, model.output_sizes, strict=False):
            if buffer in empty:
                buffer.address = model.memory.malloc(size, _MALLOC_POLICY)
                buffer.size_bytes = size
        yield
    except AclFailure as failure:
        if failure.code == codes.RT_STREAM_SYNC_TIMEOUT:  # the run goes on, and writes there
            raise
        for buffer in empty:
            if buffer.address:
                model.memory.free(buffer.address)
            buffer.address = buffer.size_bytes = 0
        raise


# --- options ---


@acl_function("", plain=0)
def create_exec_config_handle() -> int:
    """Options without limits."""
    return this_process().exec_configs.add(ExecConfig())


@acl_function("kkI")
def set_exec_config_opt(handle: int, attr: int, value: int) -> None:
    """Sets a limit in ms: of the stream (0) or of an event (1); -1 is none."""
    this_process().exec_configs.get(handle).set(attr, value)


@acl_function("k")
def destroy_exec_config_handle(handle: int) -> None:
    """Forgets the options."""
    this_process().exec_configs.remove(handle)
