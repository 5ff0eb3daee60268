"""Runs batches of any size that the model was compiled for; a smaller rest is padded.

usage: batches.py MODEL.om ROWS.npy RESULTS.npy
"""

import sys

import acl
import numpy as np

MALLOC_HUGE_FIRST = 0
HOST_TO_DEVICE, DEVICE_TO_HOST = 1, 2
SHAPE_INPUT = "ascend_mbatch_shape_data"


def check(what, ret):
    if ret != 0:
        raise RuntimeError(f"{what} returned {ret}: {acl.get_recent_err_msg()}")


def make_dataset(desc, count, size_of):
    dataset = acl.mdl.create_dataset()
    for index in range(count):
        size = size_of(desc, index)
        ptr, ret = acl.rt.malloc(size, MALLOC_HUGE_FIRST)
        check("malloc", ret)
        _, ret = acl.mdl.add_dataset_buffer(dataset, acl.create_data_buffer(ptr, size))
        check("add_dataset_buffer", ret)
    return dataset


def free_dataset(dataset):
    for index in range(acl.mdl.get_dataset_num_buffers(dataset)):
        buffer = acl.mdl.get_dataset_buffer(dataset, index)
        check("free", acl.rt.free(acl.get_data_buffer_addr(buffer)))
        check("destroy_data_buffer", acl.destroy_data_buffer(buffer))
    check("destroy_dataset", acl.mdl.destroy_dataset(dataset))


def run(model_id, desc, inputs, outputs, rows, batch):
    buffer = acl.mdl.get_dataset_buffer(inputs, 0)
    ptr, room = acl.get_data_buffer_addr(buffer), acl.get_data_buffer_size(buffer)
    source, _ = acl.util.numpy_contiguous_to_ptr(rows)
    check("memcpy", acl.rt.memcpy(ptr, room, source, rows.nbytes, HOST_TO_DEVICE))
    index, ret = acl.mdl.get_input_index_by_name(desc, SHAPE_INPUT)
    check("get_input_index_by_name", ret)
    check(
        "set_dynamic_batch_size",
        acl.mdl.set_dynamic_batch_size(model_id, inputs, index, batch),
    )
    check("execute", acl.mdl.execute(model_id, inputs, outputs))
    dims, ret = acl.mdl.get_cur_output_dims(desc, 0)
    check("get_cur_output_dims", ret)
    result = np.empty(dims["dims"], np.float32)
    buffer = acl.mdl.get_dataset_buffer(outputs, 0)
    ptr = acl.get_data_buffer_addr(buffer)
    target = acl.util.numpy_to_ptr(result)
    check("memcpy", acl.rt.memcpy(target, result.nbytes, ptr, result.nbytes, DEVICE_TO_HOST))
    return result


def main():
    path, rows_path, results_path = sys.argv[1:]
    rows = np.load(rows_path)
    check("init", acl.init())
    check("set_device", acl.rt.set_device(0))
    model_id, ret = acl.mdl.load_from_file(path)
    check("load_from_file", ret)
    desc = acl.mdl.create_desc()
    check("get_desc", acl.mdl.get_desc(desc, model_id))
    inputs = make_dataset(desc, acl.mdl.get_num_inputs(desc), acl.mdl.get_input_size_by_index)
    outputs = make_dataset(desc, acl.mdl.get_num_outputs(desc), acl.mdl.get_output_size_by_index)
    known, ret = acl.mdl.get_dynamic_batch(desc)
    check("get_dynamic_batch", ret)
    sizes = sorted(known["batch"])
    print("batch sizes:", *sizes)
    results, at = [], 0
    while at < len(rows):
        left = len(rows) - at
        batch = max((size for size in sizes if size <= left), default=sizes[0])
        fed = np.zeros((batch, *rows.shape[1:]), rows.dtype)
        count = min(batch, left)
        fed[:count] = rows[at : at + count]
        results.append(run(model_id, desc, inputs, outputs, fed, batch)[:count])
        at += count
    np.save(results_path, np.concatenate(results))
    free_dataset(inputs)
    free_dataset(outputs)
    check("unload", acl.mdl.unload(model_id))
    check("destroy_desc", acl.mdl.destroy_desc(desc))
    check("reset_device", acl.rt.reset_device(0))
    check("finalize", acl.finalize())


if __name__ == "__main__":
    main()
