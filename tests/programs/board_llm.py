"""Decoding on a board, where host and device share one memory: the host writes the cache in place.

The model takes one token id, its past as [layers, 2, 1, heads, tokens, head size] in half precision
and a mask over it; it gives logits and the new column [layers, 2, 1, heads, 1, head size].

usage: board_llm.py MODEL.om PROMPT.npy ANSWER.npy NUM_TOKENS
"""

import os
import sys

import acl
import numpy as np

MALLOC_HUGE_FIRST = 0
HOST_TO_DEVICE, DEVICE_TO_HOST, DEVICE_TO_DEVICE = 1, 2, 3
RUNS_ON_DEVICE = 0
NPY_FLOAT32, NPY_FLOAT16 = 11, 23


def check(what, ret):
    if ret != 0:
        raise RuntimeError(f"{what} returned {ret}: {acl.get_recent_err_msg()}")


def load(path):
    """Reads the file piece by piece into device memory, from which the model is loaded."""
    size = os.path.getsize(path)
    base, ret = acl.rt.malloc(size, MALLOC_HUGE_FIRST)
    check("malloc", ret)
    at = 0
    with open(path, "rb") as file:
        while piece := file.read(1 << 16):
            ptr = acl.util.bytes_to_ptr(piece)
            check("memcpy", acl.rt.memcpy(base + at, size - at, ptr, len(piece), HOST_TO_DEVICE))
            at += len(piece)
    model_id, ret = acl.mdl.load_from_mem(base, size)
    check("load_from_mem", ret)
    check("free", acl.rt.free(base))
    return model_id


class Llm:
    def __init__(self, path):
        check("init", acl.init())
        check("set_device", acl.rt.set_device(0))
        mode, ret = acl.rt.get_run_mode()
        check("get_run_mode", ret)
        if mode != RUNS_ON_DEVICE:
            raise SystemExit("this program is for boards whose host and device share one memory")
        self.model_id = load(path)
        self.desc = acl.mdl.create_desc()
        check("get_desc", acl.mdl.get_desc(self.desc, self.model_id))
        self.ptrs, self.buffers = [], []
        self.input_dataset = self._dataset(
            acl.mdl.get_num_inputs(self.desc), acl.mdl.get_input_size_by_index
        )
        self.output_dataset = self._dataset(
            acl.mdl.get_num_outputs(self.desc), acl.mdl.get_output_size_by_index
        )
        shape = self._dims(acl.mdl.get_input_dims, 2)
        self.room = shape[4]
        self.cache = acl.util.ptr_to_numpy(self.ptrs[2], shape, NPY_FLOAT16)
        self.cache[:] = 0
        self.column = acl.util.ptr_to_numpy(
            self.ptrs[4], self._dims(acl.mdl.get_output_dims, 1), NPY_FLOAT16
        )
        self.num_tokens = 0

    def _dims(self, dims_of, index):
        dims, ret = dims_of(self.desc, index)
        check("dims", ret)
        return tuple(dims["dims"])

    def _dataset(self, count, size_of):
        dataset = acl.mdl.create_dataset()
        for index in range(count):
            size = size_of(self.desc, index)
            ptr, ret = acl.rt.malloc(size, MALLOC_HUGE_FIRST)
            check("malloc", ret)
            self.buffers.append(acl.create_data_buffer(ptr, size))
            _, ret = acl.mdl.add_dataset_buffer(dataset, self.buffers[-1])
            check("add_dataset_buffer", ret)
            self.ptrs.append(ptr)
        return dataset

    def feed(self, token):
        mask = np.zeros((1, self.room + 1), np.int64)
        mask[:, : self.num_tokens] = 1
        mask[:, self.room] = 1  # the token itself
        for ptr, array in zip(self.ptrs, (np.array([[token]], np.int64), mask), strict=False):
            data = array.tobytes()
            source = acl.util.bytes_to_ptr(data)
            check("memcpy", acl.rt.memcpy(ptr, len(data), source, len(data), DEVICE_TO_DEVICE))
        check("execute", acl.mdl.execute(self.model_id, self.input_dataset, self.output_dataset))
        self.cache[:, :, :, :, self.num_tokens] = self.column[:, :, :, :, 0]
        self.num_tokens += 1
        size = acl.mdl.get_output_size_by_index(self.desc, 0)
        return np.frombuffer(acl.util.ptr_to_bytes(self.ptrs[3], size), np.float32)

    def answer(self, prompt, num_tokens):
        for token in prompt:
            logits = self.feed(token)
        ids = [int(np.argmax(logits))]
        while len(ids) < num_tokens:
            ids.append(int(np.argmax(self.feed(ids[-1]))))
        return ids

    def close(self):
        del self.cache, self.column
        for ptr, buffer in zip(self.ptrs, self.buffers, strict=True):
            check("destroy_data_buffer", acl.destroy_data_buffer(buffer))
            check("free", acl.rt.free(ptr))
        check("destroy_dataset", acl.mdl.destroy_dataset(self.input_dataset))
        check("destroy_dataset", acl.mdl.destroy_dataset(self.output_dataset))
        check("unload", acl.mdl.unload(self.model_id))
        check("destroy_desc", acl.mdl.destroy_desc(self.desc))
        check("reset_device", acl.rt.reset_device(0))
        check("finalize", acl.finalize())


def main():
    path, prompt_path, answer_path, num_tokens = sys.argv[1:]
    llm = Llm(path)
    np.save(answer_path, np.array(llm.answer(np.load(prompt_path).tolist(), int(num_tokens))))
    llm.close()


if __name__ == "__main__":
    main()
