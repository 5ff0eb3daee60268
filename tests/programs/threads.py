"""Several workers share one context; each has its own stream and its own load of the model.

usage: threads.py MODEL.om INPUTS.npy OUTPUTS.npy [NUM_WORKERS]
"""

import queue
import sys
import threading

import acl
import numpy as np

MALLOC_HUGE_FIRST = 0
HOST_TO_DEVICE, DEVICE_TO_HOST = 1, 2


def check(what, ret):
    if ret != 0:
        raise RuntimeError(f"{what} returned {ret}: {acl.get_recent_err_msg()}")


class Worker(threading.Thread):
    def __init__(self, context, path, jobs, results):
        super().__init__()
        self.context, self.path = context, path
        self.jobs, self.results = jobs, results
        self.error = None

    def run(self):
        try:
            # A new thread has no context.
            check("set_context", acl.rt.set_context(self.context))
            self.open()
            for index, array in iter(self.jobs.get, None):
                self.results[index] = self.infer(array)
            self.close()
        except Exception as error:
            self.error = error

    def open(self):
        self.stream, ret = acl.rt.create_stream()
        check("create_stream", ret)
        self.model_id, ret = acl.mdl.load_from_file(self.path)
        check("load_from_file", ret)
        self.desc = acl.mdl.create_desc()
        check("get_desc", acl.mdl.get_desc(self.desc, self.model_id))
        self.sides = [
            self._side(acl.mdl.get_input_size_by_index(self.desc, 0)),
            self._side(acl.mdl.get_output_size_by_index(self.desc, 0)),
        ]

    def _side(self, size):
        ptr, ret = acl.rt.malloc(size, MALLOC_HUGE_FIRST)
        check("malloc", ret)
        host, ret = acl.rt.malloc_host(size)
        check("malloc_host", ret)
        buffer, dataset = acl.create_data_buffer(ptr, size), acl.mdl.create_dataset()
        _, ret = acl.mdl.add_dataset_buffer(dataset, buffer)
        check("add_dataset_buffer", ret)
        return ptr, host, size, buffer, dataset

    def infer(self, array):
        (in_ptr, in_host, in_size, _, inputs), (out_ptr, out_host, out_size, _, outputs) = (
            self.sides
        )
        data = array.tobytes()
        source = acl.util.bytes_to_ptr(data)
        check("memcpy", acl.rt.memcpy(in_host, in_size, source, in_size, 0))
        steps = (
            acl.rt.memcpy_async(in_ptr, in_size, in_host, in_size, HOST_TO_DEVICE, self.stream),
            acl.mdl.execute_async(self.model_id, inputs, outputs, self.stream),
            acl.rt.memcpy_async(out_host, out_size, out_ptr, out_size, DEVICE_TO_HOST, self.stream),
            acl.rt.synchronize_stream(self.stream),
        )
        for ret in steps:
            check("a step", ret)
        return np.frombuffer(acl.util.ptr_to_bytes(out_host, out_size), np.float32)

    def close(self):
        for ptr, host, _, buffer, dataset in self.sides:
            check("destroy_dataset", acl.mdl.destroy_dataset(dataset))
            check("destroy_data_buffer", acl.destroy_data_buffer(buffer))
            check("free", acl.rt.free(ptr))
            check("free_host", acl.rt.free_host(host))
        check("unload", acl.mdl.unload(self.model_id))
        check("destroy_desc", acl.mdl.destroy_desc(self.desc))
        check("destroy_stream", acl.rt.destroy_stream(self.stream))


def main():
    path, inputs_path, outputs_path = sys.argv[1:4]
    num_workers = int(sys.argv[4]) if len(sys.argv) > 4 else 3
    check("init", acl.init())
    check("set_device", acl.rt.set_device(0))
    context, ret = acl.rt.create_context(0)
    check("create_context", ret)
    arrays = np.load(inputs_path)
    jobs, results = queue.Queue(), [None] * len(arrays)
    workers = [Worker(context, path, jobs, results) for _ in range(num_workers)]
    for worker in workers:
        worker.start()
    for job in enumerate(arrays):
        jobs.put(job)
    for _ in workers:
        jobs.put(None)
    for worker in workers:
        worker.join()
        if worker.error is not None:
            raise worker.error
    np.save(outputs_path, np.stack(results))
    check("destroy_context", acl.rt.destroy_context(context))
    check("reset_device", acl.rt.reset_device(0))
    check("finalize", acl.finalize())


if __name__ == "__main__":
    main()
