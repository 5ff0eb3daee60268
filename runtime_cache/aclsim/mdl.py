"""`acl.mdl` in software: models, descriptions, datasets, gears, execution."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from functools import partial
from typing import Any

from runtime_cache.aclsim import codes
from runtime_cache.aclsim.calling import surface
from runtime_cache.aclsim.datasets import Dataset
from runtime_cache.aclsim.descs import Desc, DescEntry
from runtime_cache.aclsim.failure import AclFailure
from runtime_cache.aclsim.models import LoadedModel, Plan, charged_bytes, check_soc
from runtime_cache.aclsim.om import read_om
from runtime_cache.aclsim.process import current_context, current_stream, this_process

acl_function = surface("acl.mdl")

_ALL_INPUTS = (1 << 64) - 1
_MAX_GEARS_ASKED = 4096


def _model(model_id: int) -> LoadedModel:
    """A model loaded under the current context.

    Raises:
        AclFailure: 145003 for an unknown id, 107004 for another context's model.
    """
    context = current_context()
    model = this_process().models.get(model_id)
    if model is None:
        raise AclFailure(codes.GE_MODEL_ID_INVALID, f"no model {model_id}")
    if model.context != context.handle:
        raise AclFailure(codes.RT_MODEL_CONTEXT, f"model {model_id} belongs to another context")
    return model


# --- loading ---


@acl_function("s", failed=(0,))
def load_from_file(model_path: str) -> int:
    """Loads an `.om` of the software device."""
    context, process = current_context(), this_process()
    om = read_om(model_path)
    check_soc(om.header, process.config.soc_name, om.path)
    model = LoadedModel(om, context.device.memory, process.config, context.handle)
    return process.add_model(model)


@acl_function("I")
def unload(model_id: int) -> None:
    """Unloads a model; 500002 while an execution is queued."""
    model = _model(model_id)
    if model.num_queued:
        raise AclFailure(codes.GE_FAILURE, f"model {model_id} has {model.num_queued} runs queued")
    del this_process().models[model_id]
    model.unload()


@acl_function("s", failed=(0, 0))
def query_size(model_path: str) -> tuple[int, int]:
    """(work bytes, weight bytes) that loading the file takes."""
    header = read_om(model_path).header
    return header.workspace_bytes, charged_bytes(header.weights.length)


# --- description ---


def _desc(handle: int) -> Desc:
    return this_process().descs.get(handle)


@acl_function("", plain=0)
def create_desc() -> int:
    """An empty description."""
    return this_process().descs.add(Desc())


@acl_function("kI")
def get_desc(desc: int, model_id: int) -> None:
    """Fills a description from a loaded model."""
    target = _desc(desc)
    target.describe(_model(model_id))


@acl_function("k")
def destroy_desc(desc: int) -> None:
    """Forgets a description."""
    this_process().descs.remove(desc)


@acl_function("k", plain=0)
def get_num_inputs(desc: int) -> int:
    """Inputs, the gear selector included."""
    return len(_desc(desc).inputs)


@acl_function("k", plain=0)
def get_num_outputs(desc: int) -> int:
    """Outputs."""
    return len(_desc(desc).outputs)


@acl_function("kk", plain=0)
def get_input_size_by_index(desc: int, index: int) -> int:
    """Bytes of an input in its largest gear; 0 for a bad index."""
    return _entry(_desc(desc).inputs, index).size_bytes


@acl_function("kk", plain=0)
def get_output_size_by_index(desc: int, index: int) -> int:
    """Bytes of an output in its largest gear; 0 for a bad index."""
    return _entry(_desc(desc).outputs, index).size_bytes


@acl_function("kk", plain="")
def get_input_name_by_index(desc: int, index: int) -> str:
    """Name of an input; "" for a bad index."""
    return _entry(_desc(desc).inputs, index).name


@acl_function("kk", plain="")
def get_output_name_by_index(desc: int, index: int) -> str:
    """Name of an output; "" for a bad index."""
    return _entry(_desc(desc).outputs, index).name


@acl_function("ks", failed=(0,))
def get_input_index_by_name(desc: int, name: str) -> int:
    """Index of an input; 100000 for an unknown name."""
    return _index(_desc(desc).inputs, name)


@acl_function("ks", failed=(0,))
def get_output_index_by_name(desc: int, name: str) -> int:
    """Index of an output; 100000 for an unknown name."""
    return _index(_desc(desc).outputs, name)


@acl_function("kk", failed=({},))
def get_input_dims(desc: int, index: int) -> dict[str, Any]:
    """{name, dimCount, dims} of an input; -1 where gears decide."""
    entry = _entry(_desc(desc).inputs, index)
    return _dims(entry.name, entry.dims)


@acl_function("kk", failed=({},))
def get_output_dims(desc: int, index: int) -> dict[str, Any]:
    """{name, dimCount, dims} of an output in the largest gear."""
    entry = _entry(_desc(desc).outputs, index)
    return _dims(entry.name, entry.dims)


@acl_function("kk", failed=({},))
def get_cur_output_dims(desc: int, index: int) -> dict[str, Any]:
    """{name, dimCount, dims} of an output in the gear set last, else in the largest."""
    found = _desc(desc)
    entry = _entry(found.outputs, index)
    return _dims(entry.name, found.current_output_dims(index))


@acl_function("kk", plain=-1)
def get_input_data_type(desc: int, index: int) -> int:
    """ACL data type of an input; -1 for a bad index."""
    return _entry(_desc(desc).inputs, index).acl_dtype


@acl_function("kk", plain=-1)
def get_output_data_type(desc: int, index: int) -> int:
    """ACL data type of an output; -1 for a bad index."""
    return _entry(_desc(desc).outputs, index).acl_dtype


@acl_function("kk", plain=-1)
def get_input_format(desc: int, index: int) -> int:
    """ND for every input; -1 for a bad index."""
    _entry(_desc(desc).inputs, index)
    return codes.FORMAT_ND


@acl_function("kk", plain=-1)
def get_output_format(desc: int, index: int) -> int:
    """ND for every output; -1 for a bad index."""
    _entry(_desc(desc).outputs, index)
    return codes.FORMAT_ND


def _entry(entries: Sequence[DescEntry], index: int) -> DescEntry:
    if index >= len(entries):
        raise AclFailure(codes.INVALID_PARAM, f"index {index} of {len(entries)}")
    return entries[index]


def _index(entries: Sequence[DescEntry], name: str) -> int:
    for index, entry in enumerate(entries):
        if entry.name == name:
            return index
    raise AclFailure(codes.INVALID_PARAM, f"no input or output is called {name!r}")


def _dims(name: str, dims: Sequence[int]) -> dict[str, Any]:
    return {"name": name, "dimCount": len(dims), "dims": list(dims)}


# --- gears ---


@acl_function("kk", failed=(0,))
def get_input_dynamic_gear_count(desc: int, index: int) -> int:
    """Number of gears; 0 for a static model. The index is -1."""
    if index != _ALL_INPUTS:
        raise AclFailure(codes.INVALID_PARAM, "the index must be -1")
    return len(_desc(desc).gears)


@acl_function("kkk", failed=(None,))
def get_input_dynamic_dims(desc: int, index: int, gear_count: int) -> list[dict[str, Any]]:
    """One dims dict for each gear, over all inputs."""
    gears = _desc(desc).gears
    if index != _ALL_INPUTS or gear_count > _MAX_GEARS_ASKED or gear_count < len(gears):
        sentence = f"index must be -1 and gear_count {len(gears)}..{_MAX_GEARS_ASKED}"
        raise AclFailure(codes.INVALID_PARAM, sentence)
    return [_dims("", gear.flat_dims) for gear in gears]


@acl_function("IkkO")
def set_input_dynamic_dims(model_id: int, dataset: int, index: int, dims: object) -> None:
    """Chooses a gear by writing the selector buffer, now.

    Stricter than a card: 100000 while an execution of the dataset is queued, where a card would
    let the two race.
    """
    flat = _flat_dims(dims)
    model = _model(model_id)
    inputs = this_process().datasets.get(dataset)
    if inputs.num_queued:
        raise AclFailure(codes.INVALID_PARAM, "an execution of this dataset is queued")
    if not model.header.has_gears or index != len(model.header.inputs):
        raise AclFailure(codes.INVALID_PARAM, f"input {index} is no gear selector")
    if index >= len(inputs.buffers):
        raise AclFailure(codes.INVALID_PARAM, f"the dataset has no buffer {index}")
    gear = model.find_gear(flat)
    buffer = inputs.buffers[index]
    if buffer.size_bytes < model.selector_bytes:
        sentence = f"selector buffer of {buffer.size_bytes} bytes, {model.selector_bytes} needed"
        raise AclFailure(codes.GE_SELECTOR_LENGTH_INVALID, sentence)
    values = model.header.gears[gear].values
    data = struct.pack(f"<{len(values)}i", *values)
    model.memory.write(buffer.address, data, codes.GE_SELECTOR_ADDRESS_INVALID)
    model.selected_gear = gear


def _flat_dims(dims: object) -> list[int]:
    """The dims of a dims dict.

    Raises:
        TypeError: not a dict, or dims that are no list of real ints.
        AclFailure: 100000 for a count that is 0 or not the list's length.
    """
    if not isinstance(dims, dict) or not isinstance(dims.get("dims"), list):
        raise TypeError("dims must be a dict with a list under 'dims'")
    flat: list[int] = dims["dims"]
    if not all(type(dim) is int for dim in flat):
        raise TypeError("dims must be Python ints")
    if dims.get("dimCount") != len(flat) or not flat:
        raise AclFailure(codes.INVALID_PARAM, f"dimCount {dims.get('dimCount')}, {len(flat)} dims")
    return flat


# --- datasets ---


@acl_function("", plain=0)
def create_dataset() -> int:
    """An empty dataset."""
    return this_process().datasets.add(Dataset())


@acl_function("kk", failed=(0,))
def add_dataset_buffer(dataset: int, buffer: int) -> int:
    """Appends a buffer; returns the dataset again."""
    process = this_process()
    target = process.datasets.get(dataset)
    target.buffers.append(process.buffers.get(buffer))
    target.handles.append(buffer)
    return dataset


@acl_function("kk", plain=0)
def get_dataset_buffer(dataset: int, index: int) -> int:
    """Handle of a buffer; 0 for a bad index."""
    handles = this_process().datasets.get(dataset).handles
    if index >= len(handles):
        raise AclFailure(codes.INVALID_PARAM, f"index {index} of {len(handles)} buffers")
    return handles[index]


@acl_function("k", plain=0)
def get_dataset_num_buffers(dataset: int) -> int:
    """Number of buffers."""
    return len(this_process().datasets.get(dataset).buffers)


@acl_function("k")
def destroy_dataset(dataset: int) -> None:
    """Forgets the dataset; its buffers and their memory stay."""
    this_process().datasets.remove(dataset)


# --- execution ---


def _planned(model: LoadedModel, inputs: Dataset, outputs: Dataset) -> Plan:
    return model.plan(
        tuple((buffer.address, buffer.size_bytes) for buffer in inputs.buffers),
        tuple((buffer.address, buffer.size_bytes) for buffer in outputs.buffers),
    )


@acl_function("Ikk")
def execute(model_id: int, input: int, output: int) -> None:
    """Runs now. Holds the GIL on a card: not for a daemon."""
    model, datasets = _model(model_id), this_process().datasets
    plan = _planned(model, datasets.get(input), datasets.get(output))
    model.enter_mode("sync")
    model.run(plan)


@acl_function("Ikkk")
def execute_async(model_id: int, input: int, output: int, stream: int) -> None:
    """Queues a run; failures surface when the stream is synchronised."""
    model, target, process = _model(model_id), current_stream(stream), this_process()
    inputs, outputs = process.datasets.get(input), process.datasets.get(output)
    plan = _planned(model, inputs, outputs)
    model.enter_mode("async")
    with process.lock:
        if model.num_queued and model.stream != stream:
            raise AclFailure(codes.GE_FAILURE, f"model {model_id} is queued on another stream")
        model.stream = stream
        for counted in (model, inputs, outputs):
            counted.num_queued += 1
    target.submit(
        "acl.mdl.execute_async",
        partial(model.run, plan),
        on_done=partial(_uncount, model, inputs, outputs),
    )


def _uncount(*counted: LoadedModel | Dataset) -> None:
    """Ends one queued execution of a model and its datasets."""
    with this_process().lock:
        for item in counted:
            item.num_queued -= 1
