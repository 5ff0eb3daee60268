"""Synchronous runs with limits on their time, set through a configuration handle.

usage: limits.py MODEL.om INPUT.npy OUTPUT.npy
"""

import sys

import acl
import numpy as np

MALLOC_HUGE_FIRST = 0
HOST_TO_DEVICE, DEVICE_TO_HOST = 1, 2
STREAM_SYNC_TIMEOUT, EVENT_SYNC_TIMEOUT = 0, 1
LIMIT_MS = 60_000


def check(what, ret):
    if ret != 0:
        raise RuntimeError(f"{what} returned {ret}: {acl.get_recent_err_msg()}")


def main():
    path, input_path, output_path = sys.argv[1:]
    array = np.load(input_path)
    check("init", acl.init())
    check("set_device", acl.rt.set_device(0))
    stream, ret = acl.rt.create_stream()
    check("create_stream", ret)
    model_id, ret = acl.mdl.load_from_file(path)
    check("load_from_file", ret)
    desc = acl.mdl.create_desc()
    check("get_desc", acl.mdl.get_desc(desc, model_id))
    out_size = acl.mdl.get_output_size_by_index(desc, 0)
    ptrs, datasets, buffers = [], [], []
    for size in (array.nbytes, out_size):
        ptr, ret = acl.rt.malloc(size, MALLOC_HUGE_FIRST)
        check("malloc", ret)
        ptrs.append(ptr)
        buffers.append(acl.create_data_buffer(ptr, size))
        datasets.append(acl.mdl.create_dataset())
        _, ret = acl.mdl.add_dataset_buffer(datasets[-1], buffers[-1])
        check("add_dataset_buffer", ret)
    check(
        "memcpy",
        acl.rt.memcpy(ptrs[0], array.nbytes, array.ctypes.data, array.nbytes, HOST_TO_DEVICE),
    )
    limits = acl.mdl.create_exec_config_handle()
    for attr in (STREAM_SYNC_TIMEOUT, EVENT_SYNC_TIMEOUT):
        check("set_exec_config_opt", acl.mdl.set_exec_config_opt(limits, attr, LIMIT_MS))
    result = np.zeros(out_size // 4, np.float32)
    for _ in range(3):
        check("execute_v2", acl.mdl.execute_v2(model_id, *datasets, stream, limits))
        check(
            "memcpy",
            acl.rt.memcpy(result.ctypes.data, out_size, ptrs[1], out_size, DEVICE_TO_HOST),
        )
    np.save(output_path, result)
    check("destroy_exec_config_handle", acl.mdl.destroy_exec_config_handle(limits))
    for ptr, dataset, buffer in zip(ptrs, datasets, buffers, strict=True):
        check("destroy_dataset", acl.mdl.destroy_dataset(dataset))
        check("destroy_data_buffer", acl.destroy_data_buffer(buffer))
        check("free", acl.rt.free(ptr))
    check("unload", acl.mdl.unload(model_id))
    check("destroy_desc", acl.mdl.destroy_desc(desc))
    check("destroy_stream", acl.rt.destroy_stream(stream))
    check("reset_device", acl.rt.reset_device(0))
    check("finalize", acl.finalize())


if __name__ == "__main__":
    main()
