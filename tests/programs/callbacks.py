"""Runs a batch of pictures asynchronously; a callback of the stream collects each result.

usage: callbacks.py MODEL.om PICTURES.npy SCORES.npy [--every N] [--python-thread]
"""

import argparse
import threading

import acl
import numpy as np

MALLOC_NORMAL_ONLY = 2
HOST_TO_DEVICE, DEVICE_TO_HOST = 1, 2
REPORT_TIMEOUT_MS = 50
BLOCKS_STREAM = 1


def check(what, ret):
    if ret != 0:
        raise RuntimeError(f"{what} returned {ret}")


class ReportThread:
    """The thread in which the callbacks of a stream run."""

    def __init__(self, context, is_python_thread):
        self.context = context
        self.is_over = False
        self.thread = None
        if is_python_thread:
            self.thread = threading.Thread(target=self.serve, args=([context],))
            self.thread.start()
            self.thread_id = self.thread.ident
        else:
            self.thread_id, ret = acl.util.start_thread(self.serve, [context])
            check("start_thread", ret)

    def serve(self, args):
        acl.rt.set_context(args[0])
        while not self.is_over:
            acl.rt.process_report(REPORT_TIMEOUT_MS)

    def stop(self):
        self.is_over = True
        if self.thread is not None:
            self.thread.join()
        else:
            check("stop_thread", acl.util.stop_thread(self.thread_id))


class Pipeline:
    def __init__(self, model_path, every):
        self.every = every
        self.results = {}
        self.pending = []
        self.done = []
        check("init", acl.init())
        check("set_device", acl.rt.set_device(0))
        self.context, ret = acl.rt.create_context(0)
        check("create_context", ret)
        self.stream, ret = acl.rt.create_stream()
        check("create_stream", ret)
        self.model_id, ret = acl.mdl.load_from_file(model_path)
        check("load_from_file", ret)
        self.desc = acl.mdl.create_desc()
        check("get_desc", acl.mdl.get_desc(self.desc, self.model_id))

    def dataset(self, size):
        ptr, ret = acl.rt.malloc(size, MALLOC_NORMAL_ONLY)
        check("malloc", ret)
        dataset = acl.mdl.create_dataset()
        _, ret = acl.mdl.add_dataset_buffer(dataset, acl.create_data_buffer(ptr, size))
        check("add_dataset_buffer", ret)
        return dataset

    def submit(self, index, picture):
        size = picture.nbytes
        inputs = self.dataset(size)
        outputs = self.dataset(acl.mdl.get_output_size_by_index(self.desc, 0))
        ptr = acl.get_data_buffer_addr(acl.mdl.get_dataset_buffer(inputs, 0))
        data = picture.tobytes()
        check("memcpy", acl.rt.memcpy(ptr, size, acl.util.bytes_to_ptr(data), size, HOST_TO_DEVICE))
        check("execute_async", acl.mdl.execute_async(self.model_id, inputs, outputs, self.stream))
        self.pending.append((index, inputs, outputs))
        if len(self.pending) == self.every:
            self.flush()

    def flush(self):
        batch, self.pending = self.pending, []
        if batch:
            check(
                "launch_callback",
                acl.rt.launch_callback(self.collect, batch, BLOCKS_STREAM, self.stream),
            )

    def collect(self, batch):
        for index, inputs, outputs in batch:
            buffer = acl.mdl.get_dataset_buffer(outputs, 0)
            ptr, size = acl.get_data_buffer_addr(buffer), acl.get_data_buffer_size_v2(buffer)
            host, ret = acl.rt.malloc_host(size)
            check("malloc_host", ret)
            check("memcpy", acl.rt.memcpy(host, size, ptr, size, DEVICE_TO_HOST))
            self.results[index] = np.frombuffer(acl.util.ptr_to_bytes(host, size), np.float32)
            check("free_host", acl.rt.free_host(host))
            self.done.append((inputs, outputs))

    def run(self, pictures, is_python_thread):
        reports = ReportThread(self.context, is_python_thread)
        check("subscribe_report", acl.rt.subscribe_report(reports.thread_id, self.stream))
        for index, picture in enumerate(pictures):
            self.submit(index, picture)
        self.flush()
        check("synchronize_stream", acl.rt.synchronize_stream(self.stream))
        check("unsubscribe_report", acl.rt.unsubscribe_report(reports.thread_id, self.stream))
        reports.stop()
        return np.stack([self.results[index] for index in range(len(pictures))])

    def close(self):
        for datasets in self.done:
            for dataset in datasets:
                buffer = acl.mdl.get_dataset_buffer(dataset, 0)
                check("free", acl.rt.free(acl.get_data_buffer_addr(buffer)))
                check("destroy_data_buffer", acl.destroy_data_buffer(buffer))
                check("destroy_dataset", acl.mdl.destroy_dataset(dataset))
        check("unload", acl.mdl.unload(self.model_id))
        check("destroy_desc", acl.mdl.destroy_desc(self.desc))
        check("destroy_stream", acl.rt.destroy_stream(self.stream))
        check("destroy_context", acl.rt.destroy_context(self.context))
        check("reset_device", acl.rt.reset_device(0))
        check("finalize", acl.finalize())


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("pictures")
    parser.add_argument("scores")
    parser.add_argument("--every", type=int, default=1)
    parser.add_argument("--python-thread", action="store_true")
    args = parser.parse_args()
    pipeline = Pipeline(args.model, args.every)
    np.save(args.scores, pipeline.run(np.load(args.pictures), args.python_thread))
    pipeline.close()


if __name__ == "__main__":
    main()
