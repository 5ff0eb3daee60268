"""Two input buffers take turns: one is filled on its own stream while the other is being used.

Pinned memory is reached through ctypes; events say when a buffer is full and when it is free again.

usage: streaming.py MODEL.om FRAMES.npy RESULTS.npy
"""

import ctypes
import sys

import acl
import numpy as np

MALLOC_HUGE_FIRST = 0
HOST_TO_DEVICE, DEVICE_TO_HOST = 1, 2
EVENT_SYNC = 1
TIMEOUT_MS = 60_000
ALIGNMENT = 64  # of both ends of an asynchronous copy


def check(what, ret):
    if ret != 0:
        raise RuntimeError(f"{what} returned {ret}: {acl.get_recent_err_msg()}")


def made(result):
    handle, ret = result
    check("create", ret)
    return handle


class Pinned:
    """Pinned host memory, seen as an array."""

    def __init__(self, shape):
        self.size = 4 * int(np.prod(shape))
        self.ptr = made(acl.rt.malloc_host(self.size))
        raw = (ctypes.c_char * self.size).from_address(self.ptr)
        self.array = np.frombuffer(raw, np.float32).reshape(shape)

    def free(self):
        del self.array
        check("free_host", acl.rt.free_host(self.ptr))


class Stage:
    """One of the two input buffers, with the host memory it is filled from."""

    def __init__(self, shape):
        self.host = Pinned(shape)
        self.ptr = made(acl.rt.malloc(self.host.size, MALLOC_HUGE_FIRST))
        self.is_full = made(acl.rt.create_event_with_flag(EVENT_SYNC))
        self.is_free = made(acl.rt.create_event_with_flag(EVENT_SYNC))
        self.is_used = False

    def close(self):
        self.host.free()
        check("free", acl.rt.free(self.ptr))
        check("destroy_event", acl.rt.destroy_event(self.is_full))
        check("destroy_event", acl.rt.destroy_event(self.is_free))


def main():
    path, frames_path, results_path = sys.argv[1:]
    frames = np.load(frames_path)
    check("init", acl.init())
    check("set_device", acl.rt.set_device(0))
    context = made(acl.rt.create_context(0))
    copies, runs = made(acl.rt.create_stream()), made(acl.rt.create_stream())
    model_id = made(acl.mdl.load_from_file(path))
    desc = acl.mdl.create_desc()
    check("get_desc", acl.mdl.get_desc(desc, model_id))
    out_size = acl.mdl.get_output_size_by_index(desc, 0)
    stages = [Stage(frames.shape[1:]), Stage(frames.shape[1:])]
    stride = -(-out_size // ALIGNMENT) * ALIGNMENT
    results = Pinned((len(frames), stride // 4))
    out_ptr = made(acl.rt.malloc(out_size, MALLOC_HUGE_FIRST))
    inputs, outputs = acl.mdl.create_dataset(), acl.mdl.create_dataset()
    in_buffer = acl.create_data_buffer(stages[0].ptr, stages[0].host.size)
    out_buffer = acl.create_data_buffer(out_ptr, out_size)
    for dataset, buffer in ((inputs, in_buffer), (outputs, out_buffer)):
        _, ret = acl.mdl.add_dataset_buffer(dataset, buffer)
        check("add_dataset_buffer", ret)
    for index, frame in enumerate(frames):
        stage = stages[index % 2]
        size = stage.host.size
        if stage.is_used:
            check("synchronize_event", acl.rt.synchronize_event(stage.is_free))
            check("reset_event", acl.rt.reset_event(stage.is_free, runs))
            check("reset_event", acl.rt.reset_event(stage.is_full, copies))
        stage.is_used = True
        stage.host.array[:] = frame
        check(
            "memcpy_async",
            acl.rt.memcpy_async(stage.ptr, size, stage.host.ptr, size, HOST_TO_DEVICE, copies),
        )
        check("record_event", acl.rt.record_event(stage.is_full, copies))
        check("stream_wait_event", acl.rt.stream_wait_event(runs, stage.is_full))
        check("update_data_buffer", acl.update_data_buffer(in_buffer, stage.ptr, size))
        check("execute_async", acl.mdl.execute_async(model_id, inputs, outputs, runs))
        check("record_event", acl.rt.record_event(stage.is_free, runs))
        target = results.ptr + index * stride
        check(
            "memcpy_async",
            acl.rt.memcpy_async(target, out_size, out_ptr, out_size, DEVICE_TO_HOST, runs),
        )
    check("synchronize", acl.rt.synchronize_stream_with_timeout(runs, TIMEOUT_MS))
    check("synchronize", acl.rt.synchronize_stream_with_timeout(copies, TIMEOUT_MS))
    np.save(results_path, results.array[:, : out_size // 4])
    for stage in stages:
        stage.close()
    results.free()
    for dataset, buffer in ((inputs, in_buffer), (outputs, out_buffer)):
        check("destroy_dataset", acl.mdl.destroy_dataset(dataset))
        check("destroy_data_buffer", acl.destroy_data_buffer(buffer))
    check("free", acl.rt.free(out_ptr))
    check("unload", acl.mdl.unload(model_id))
    check("destroy_desc", acl.mdl.destroy_desc(desc))
    check("destroy_stream", acl.rt.destroy_stream(copies))
    check("destroy_stream", acl.rt.destroy_stream(runs))
    check("destroy_context", acl.rt.destroy_context(context))
    check("reset_device", acl.rt.reset_device(0))
    check("finalize", acl.finalize())


if __name__ == "__main__":
    main()
