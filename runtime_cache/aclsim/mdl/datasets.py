"""`acl.mdl` in software: datasets, and the tensor descriptions that belong to them."""

from __future__ import annotations

from runtime_cache.aclsim import codes
from runtime_cache.aclsim.calling import surface
from runtime_cache.aclsim.datasets import Dataset
from runtime_cache.aclsim.failure import AclFailure
from runtime_cache.aclsim.ledger import ledger
from runtime_cache.aclsim.process import this_process

acl_function = surface("acl.mdl")


@acl_function("", plain=0)
def create_dataset() -> int:
    """An empty dataset."""
    process = this_process()
    return process.datasets.add(Dataset(process.tensor_descs))


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
    handles = _with_buffer(dataset, index).handles
    return handles[index]


@acl_function("k", plain=0)
def get_dataset_num_buffers(dataset: int) -> int:
    """Number of buffers."""
    return len(this_process().datasets.get(dataset).buffers)


@acl_function("k")
def destroy_dataset(dataset: int) -> None:
    """Forgets the dataset and its tensor descriptions; its buffers and their memory stay."""
    found = this_process().datasets.remove(dataset)
    if found.num_queued:
        sentence = "acl.mdl.destroy_dataset of a dataset whose execution is queued"
        ledger.note_misuse(sentence, "teardown_order")
    found.drop_descs()


@acl_function("kkk", failed=(0,))
def set_dataset_tensor_desc(dataset: int, desc: int, index: int) -> int:
    """Gives a buffer a copy of a description, for a model with ranges; 0 takes it away.

    Returns the dataset again. Stricter than a card: 100000 while an execution of the dataset is
    queued.
    """
    target = _with_buffer(dataset, index)
    if target.num_queued:
        raise AclFailure(codes.INVALID_PARAM, "an execution of this dataset is queued")
    copied = this_process().tensor_descs.get(desc).copied() if desc else None
    target.set_desc(index, copied)
    return dataset


@acl_function("kk", plain=0)
def get_dataset_tensor_desc(dataset: int, index: int) -> int:
    """Handle of a buffer's description, 0 for none. It is the dataset's.

    After a run of a model with ranges, those of the outputs are new; the old handles are dead.
    """
    return _with_buffer(dataset, index).desc_handles.get(index, 0)


def _with_buffer(dataset: int, index: int) -> Dataset:
    """A dataset that has this buffer; 100000 for a bad index."""
    found = this_process().datasets.get(dataset)
    if index >= len(found.buffers):
        raise AclFailure(codes.INVALID_PARAM, f"index {index} of {len(found.buffers)} buffers")
    return found
