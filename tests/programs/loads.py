"""Loads one model in every way there is, runs each, and says how much memory each way took.

usage: loads.py MODEL.om INPUT.npy OUTPUT.npy
"""

import sys

import acl
import numpy as np

MALLOC_HUGE_FIRST = 0
HOST_TO_DEVICE, DEVICE_TO_HOST = 1, 2
RUNS_ON_HOST = 1
DDR, HBM = 0, 1


def check(what, ret):
    if ret != 0:
        raise RuntimeError(f"{what} returned {ret}: {acl.get_recent_err_msg()}")


def device_memory(size):
    ptr, ret = acl.rt.malloc(size, MALLOC_HUGE_FIRST)
    check("malloc", ret)
    return ptr


def free_memory():
    for attr in (HBM, DDR):
        free, total, ret = acl.rt.get_mem_info(attr)
        check("get_mem_info", ret)
        if total:
            return free
    raise RuntimeError("neither HBM nor DDR")


def run(model_id, array):
    desc = acl.mdl.create_desc()
    check("get_desc", acl.mdl.get_desc(desc, model_id))
    sizes = [acl.mdl.get_input_size_by_index(desc, 0), acl.mdl.get_output_size_by_index(desc, 0)]
    ptrs = [device_memory(size) for size in sizes]
    datasets, buffers = [], []
    for ptr, size in zip(ptrs, sizes, strict=True):
        buffers.append(acl.create_data_buffer(ptr, size))
        datasets.append(acl.mdl.create_dataset())
        _, ret = acl.mdl.add_dataset_buffer(datasets[-1], buffers[-1])
        check("add_dataset_buffer", ret)
    data = array.tobytes()
    source = acl.util.bytes_to_ptr(data)
    check("memcpy", acl.rt.memcpy(ptrs[0], sizes[0], source, sizes[0], HOST_TO_DEVICE))
    check("execute", acl.mdl.execute(model_id, *datasets))
    result = np.zeros(sizes[1] // 4, np.float32)
    check(
        "memcpy",
        acl.rt.memcpy(result.ctypes.data, sizes[1], ptrs[1], sizes[1], DEVICE_TO_HOST),
    )
    for dataset in datasets:
        check("destroy_dataset", acl.mdl.destroy_dataset(dataset))
    for buffer in buffers:
        check("destroy_data_buffer", acl.destroy_data_buffer(buffer))
    for ptr in ptrs:
        check("free", acl.rt.free(ptr))
    check("destroy_desc", acl.mdl.destroy_desc(desc))
    return result


def main():
    path, input_path, output_path = sys.argv[1:]
    array = np.load(input_path)
    with open(path, "rb") as file:
        om = file.read()
    check("init", acl.init())
    check("set_device", acl.rt.set_device(0))
    mode, ret = acl.rt.get_run_mode()
    check("get_run_mode", ret)
    work_size, weight_size, ret = acl.mdl.query_size(path)
    check("query_size", ret)
    # Nothing may be asked of a size of 0.
    work, weights = device_memory(max(work_size, 1)), device_memory(max(weight_size, 1))
    blob = acl.util.bytes_to_ptr(om)
    if mode != RUNS_ON_HOST:  # on a board the model has to lie in device memory
        blob = device_memory(len(om))
        check(
            "memcpy",
            acl.rt.memcpy(blob, len(om), acl.util.bytes_to_ptr(om), len(om), HOST_TO_DEVICE),
        )
    assert acl.mdl.query_size_from_mem(blob, len(om)) == (work_size, weight_size, 0)
    given = (work, work_size, weights, weight_size)
    ways = {
        "file": lambda: acl.mdl.load_from_file(path),
        "memory": lambda: acl.mdl.load_from_mem(blob, len(om)),
        "file, memory given": lambda: acl.mdl.load_from_file_with_mem(path, *given),
        "memory, memory given": lambda: acl.mdl.load_from_mem_with_mem(blob, len(om), *given),
    }
    results = []
    for name, load in ways.items():
        before = free_memory()
        model_id, ret = load()
        check(f"load from {name}", ret)
        print(f"{name}: {before - free_memory()} bytes, given {work_size} and {weight_size}")
        results.append(run(model_id, array))
        check("unload", acl.mdl.unload(model_id))
    # Two of one file at once, with one copy of the weights; they never run at the same time.
    first, ret = acl.mdl.load_from_file_with_mem(path, *given)
    check("load", ret)
    second, ret = acl.mdl.load_from_file_with_mem(path, *given)
    check("load", ret)
    results += [run(first, array), run(second, array)]
    check("unload", acl.mdl.unload(first))
    results.append(run(second, array))
    check("unload", acl.mdl.unload(second))
    np.save(output_path, np.stack(results))
    if mode != RUNS_ON_HOST:
        check("free", acl.rt.free(blob))
    check("free", acl.rt.free(work))
    check("free", acl.rt.free(weights))
    check("reset_device", acl.rt.reset_device(0))
    check("finalize", acl.finalize())


if __name__ == "__main__":
    main()
