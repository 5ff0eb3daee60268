"""What the programs beside this one share: a device and a model with one input and one output."""

import acl
import numpy as np

MALLOC_HUGE_FIRST = 0
HOST_TO_DEVICE, DEVICE_TO_HOST = 1, 2


def check(what, ret):
    if ret != 0:
        raise RuntimeError(f"{what} returned {ret}: {acl.get_recent_err_msg()}")


def made(result):
    handle, ret = result
    check("create", ret)
    return handle


class OneModel:
    def __init__(self, path):
        check("init", acl.init())
        check("set_device", acl.rt.set_device(0))
        self.context = made(acl.rt.create_context(0))
        self.stream = made(acl.rt.create_stream())
        self.model_id = made(acl.mdl.load_from_file(path))
        self.desc = acl.mdl.create_desc()
        check("get_desc", acl.mdl.get_desc(self.desc, self.model_id))
        self.in_size = acl.mdl.get_input_size_by_index(self.desc, 0)
        self.out_size = acl.mdl.get_output_size_by_index(self.desc, 0)
        self.in_ptr = made(acl.rt.malloc(self.in_size, MALLOC_HUGE_FIRST))
        self.out_ptr = made(acl.rt.malloc(self.out_size, MALLOC_HUGE_FIRST))
        self.in_buffer = acl.create_data_buffer(self.in_ptr, self.in_size)
        self.out_buffer = acl.create_data_buffer(self.out_ptr, self.out_size)
        self.inputs, self.outputs = acl.mdl.create_dataset(), acl.mdl.create_dataset()
        check("add", acl.mdl.add_dataset_buffer(self.inputs, self.in_buffer)[1])
        check("add", acl.mdl.add_dataset_buffer(self.outputs, self.out_buffer)[1])
        ones = np.ones(self.in_size // 4, np.float32)
        check(
            "memcpy",
            acl.rt.memcpy(
                self.in_ptr, self.in_size, ones.ctypes.data, self.in_size, HOST_TO_DEVICE
            ),
        )

    def execute(self):
        return acl.mdl.execute(self.model_id, self.inputs, self.outputs)

    def launch(self):
        return acl.mdl.execute_async(self.model_id, self.inputs, self.outputs, self.stream)

    def read(self):
        """The output, as it is in device memory at this moment."""
        result = np.zeros(self.out_size // 4, np.float32)
        check(
            "memcpy",
            acl.rt.memcpy(
                result.ctypes.data, self.out_size, self.out_ptr, self.out_size, DEVICE_TO_HOST
            ),
        )
        return result

    def close_model(self):
        check("destroy_dataset", acl.mdl.destroy_dataset(self.inputs))
        check("destroy_dataset", acl.mdl.destroy_dataset(self.outputs))
        check("destroy_data_buffer", acl.destroy_data_buffer(self.in_buffer))
        check("destroy_data_buffer", acl.destroy_data_buffer(self.out_buffer))
        check("unload", acl.mdl.unload(self.model_id))
        check("destroy_desc", acl.mdl.destroy_desc(self.desc))

    def close_memory(self):
        check("free", acl.rt.free(self.in_ptr))
        check("free", acl.rt.free(self.out_ptr))

    def close_device(self):
        check("destroy_stream", acl.rt.destroy_stream(self.stream))
        check("destroy_context", acl.rt.destroy_context(self.context))
        check("reset_device", acl.rt.reset_device(0))
        check("finalize", acl.finalize())

    def close(self):
        self.close_model()
        self.close_memory()
        self.close_device()
