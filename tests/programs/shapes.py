"""Runs a model of no fixed shape: each run is told its input's shape and asked for its output's.

The output's memory comes from the system, as its size is not known before.

usage: shapes.py MODEL.om OUTPUTS.npz INPUT.npy...
"""

import sys

import acl
import numpy as np

MALLOC_HUGE_FIRST = 0
HOST_TO_DEVICE, DEVICE_TO_HOST = 1, 2
FORMAT_ND = 2
ACL_FLOAT = 0


def check(what, ret):
    if ret != 0:
        raise RuntimeError(f"{what} returned {ret}: {acl.get_recent_err_msg()}")


def shape_of(desc):
    """Asked in both ways, which agree."""
    dims = []
    for index in range(acl.get_tensor_desc_num_dims(desc)):
        dim, ret = acl.get_tensor_desc_dim_v2(desc, index)
        check("get_tensor_desc_dim_v2", ret)
        assert dim == acl.get_tensor_desc_dim(desc, index)
        dims.append(dim)
    return dims


def set_shape(inputs, array):
    desc = acl.create_tensor_desc(ACL_FLOAT, list(array.shape), FORMAT_ND)
    _, ret = acl.mdl.set_dataset_tensor_desc(inputs, desc, 0)
    check("set_dataset_tensor_desc", ret)
    acl.destroy_tensor_desc(desc)


def take_output(outputs, buffer):
    desc = acl.mdl.get_dataset_tensor_desc(outputs, 0)
    assert acl.get_tensor_desc_type(desc) == ACL_FLOAT
    result = np.empty(shape_of(desc), np.float32)
    assert acl.get_tensor_desc_size(desc) == result.nbytes
    ptr = acl.get_data_buffer_addr(buffer)
    check(
        "memcpy",
        acl.rt.memcpy(result.ctypes.data, result.nbytes, ptr, result.nbytes, DEVICE_TO_HOST),
    )
    check("free", acl.rt.free(ptr))
    check("update_data_buffer", acl.update_data_buffer(buffer, 0, 0))
    return result


def main():
    path, outputs_path, *input_paths = sys.argv[1:]
    arrays = [np.load(input_path) for input_path in input_paths]
    check("init", acl.init())
    check("set_device", acl.rt.set_device(0))
    model_id, ret = acl.mdl.load_from_file(path)
    check("load_from_file", ret)
    desc = acl.mdl.create_desc()
    check("get_desc", acl.mdl.get_desc(desc, model_id))
    dims, ret = acl.mdl.get_input_dims(desc, 0)
    check("get_input_dims", ret)
    print("shape of the input:", *dims["dims"])
    # A model without bounds says 0, so the largest input decides.
    room = acl.mdl.get_input_size_by_index(desc, 0) or max(array.nbytes for array in arrays)
    ptr, ret = acl.rt.malloc(room, MALLOC_HUGE_FIRST)
    check("malloc", ret)
    inputs, outputs = acl.mdl.create_dataset(), acl.mdl.create_dataset()
    input_buffer, output_buffer = acl.create_data_buffer(ptr, room), acl.create_data_buffer(0, 0)
    for dataset, buffer in ((inputs, input_buffer), (outputs, output_buffer)):
        _, ret = acl.mdl.add_dataset_buffer(dataset, buffer)
        check("add_dataset_buffer", ret)
    results = []
    for array in arrays:
        set_shape(inputs, array)
        check("memcpy", acl.rt.memcpy(ptr, room, array.ctypes.data, array.nbytes, HOST_TO_DEVICE))
        check("execute", acl.mdl.execute(model_id, inputs, outputs))
        results.append(take_output(outputs, output_buffer))
    np.savez(outputs_path, *results)
    for dataset, buffer in ((inputs, input_buffer), (outputs, output_buffer)):
        check("destroy_dataset", acl.mdl.destroy_dataset(dataset))
        check("destroy_data_buffer", acl.destroy_data_buffer(buffer))
    check("free", acl.rt.free(ptr))
    check("unload", acl.mdl.unload(model_id))
    check("destroy_desc", acl.mdl.destroy_desc(desc))
    check("reset_device", acl.rt.reset_device(0))
    check("finalize", acl.finalize())


if __name__ == "__main__":
    main()
