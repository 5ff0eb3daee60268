"""Two branches run side by side on streams of their own; a third model takes both their outputs.

The outputs of the branches are the inputs of the third model: nothing is copied. Events keep
the order between the streams and take the time of the third.

usage: branches.py BRANCH.om HEAD.om LEFT.npy RIGHT.npy RESULTS.npy
"""

import sys

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


class Model:
    """A loaded model with a stream; inputs that are given belong to somebody else."""

    def __init__(self, path, given=()):
        self.stream = made(acl.rt.create_stream())
        self.model_id = made(acl.mdl.load_from_file(path))
        self.desc = acl.mdl.create_desc()
        check("get_desc", acl.mdl.get_desc(self.desc, self.model_id))
        self.owned, self.buffers = [], []
        self.input_dataset, self.inputs = self._bind(
            acl.mdl.get_num_inputs(self.desc), acl.mdl.get_input_size_by_index, given
        )
        self.output_dataset, self.outputs = self._bind(
            acl.mdl.get_num_outputs(self.desc), acl.mdl.get_output_size_by_index, ()
        )
        self.is_done = made(acl.rt.create_event())

    def _bind(self, count, size_of, given):
        dataset, ptrs = acl.mdl.create_dataset(), list(given)
        for index in range(count):
            size = size_of(self.desc, index)
            if index >= len(ptrs):
                ptrs.append(made(acl.rt.malloc(size, MALLOC_HUGE_FIRST)))
                self.owned.append(ptrs[-1])
            self.buffers.append(acl.create_data_buffer(ptrs[index], size))
            _, ret = acl.mdl.add_dataset_buffer(dataset, self.buffers[-1])
            check("add_dataset_buffer", ret)
        return dataset, ptrs

    def feed(self, array):
        data = array.tobytes()
        source = acl.util.bytes_to_ptr(data)
        check(
            "memcpy",
            acl.rt.memcpy(self.inputs[0], len(data), source, len(data), HOST_TO_DEVICE),
        )

    def launch(self):
        check(
            "execute_async",
            acl.mdl.execute_async(
                self.model_id, self.input_dataset, self.output_dataset, self.stream
            ),
        )
        check("record_event", acl.rt.record_event(self.is_done, self.stream))

    def close(self):
        for buffer in self.buffers:
            check("destroy_data_buffer", acl.destroy_data_buffer(buffer))
        check("destroy_dataset", acl.mdl.destroy_dataset(self.input_dataset))
        check("destroy_dataset", acl.mdl.destroy_dataset(self.output_dataset))
        check("destroy_event", acl.rt.destroy_event(self.is_done))
        check("destroy_stream", acl.rt.destroy_stream(self.stream))
        for ptr in self.owned:
            check("free", acl.rt.free(ptr))
        check("unload", acl.mdl.unload(self.model_id))
        check("destroy_desc", acl.mdl.destroy_desc(self.desc))


def main():
    branch_path, head_path, left_path, right_path, results_path = sys.argv[1:]
    check("init", acl.init())
    check("set_device", acl.rt.set_device(0))
    context = made(acl.rt.create_context(0))
    branches = [Model(branch_path), Model(branch_path)]
    head = Model(head_path, given=[branch.outputs[0] for branch in branches])
    started = made(acl.rt.create_event())
    size = acl.mdl.get_output_size_by_index(head.desc, 0)
    results = []
    for arrays in zip(np.load(left_path), np.load(right_path), strict=True):
        for branch, array in zip(branches, arrays, strict=True):
            branch.feed(array)
            branch.launch()
        for branch in branches:
            check("stream_wait_event", acl.rt.stream_wait_event(head.stream, branch.is_done))
            check("reset_event", acl.rt.reset_event(branch.is_done, head.stream))
        check("record_event", acl.rt.record_event(started, head.stream))
        head.launch()
        check("synchronize_stream", acl.rt.synchronize_stream(head.stream))
        took_ms, ret = acl.rt.event_elapsed_time(started, head.is_done)
        check("event_elapsed_time", ret)
        assert took_ms >= 0
        result = np.zeros(size // 4, np.float32)
        check(
            "memcpy",
            acl.rt.memcpy(result.ctypes.data, size, head.outputs[0], size, DEVICE_TO_HOST),
        )
        results.append(result)
    np.save(results_path, np.stack(results))
    check("destroy_event", acl.rt.destroy_event(started))
    for model in (head, *branches):
        model.close()
    check("destroy_context", acl.rt.destroy_context(context))
    check("reset_device", acl.rt.reset_device(0))
    check("finalize", acl.finalize())


if __name__ == "__main__":
    main()
