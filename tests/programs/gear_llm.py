"""Greedy decoding with a model of several shapes; keys and values stay on the device.

The model takes token ids, a mask over past and fed tokens, positions, and the past as
[1, tokens, rows, head size] in half precision; it gives logits and the rows of the fed tokens,
which are copied behind the past. A prompt is fed in pieces of 4, 2 and 1 tokens; the shorter of two
shapes of the past is used as long as it suffices.

usage: gear_llm.py MODEL.om PROMPT.npy ANSWER.npy NUM_TOKENS
"""

import sys

import acl
import numpy as np

MALLOC_HUGE_FIRST = 0
HOST_TO_DEVICE, DEVICE_TO_HOST, DEVICE_TO_DEVICE = 1, 2, 3
GEAR_INPUT = "ascend_mbatch_shape_data"
ALL_INPUTS = -1


def check(what, ret):
    if ret != 0:
        raise RuntimeError(f"{what} returned {ret}: {acl.get_recent_err_msg()}")


class Llm:
    def __init__(self, path):
        check("init", acl.init())
        check("set_device", acl.rt.set_device(0))
        self.context, ret = acl.rt.create_context(0)
        check("create_context", ret)
        self.model_id, ret = acl.mdl.load_from_file(path)
        check("load_from_file", ret)
        self.desc = acl.mdl.create_desc()
        check("get_desc", acl.mdl.get_desc(self.desc, self.model_id))
        self.inputs, self.input_dataset = self._dataset(
            acl.mdl.get_num_inputs(self.desc), acl.mdl.get_input_size_by_index
        )
        self.outputs, self.output_dataset = self._dataset(
            acl.mdl.get_num_outputs(self.desc), acl.mdl.get_output_size_by_index
        )
        # An output's name ends in the model's own: operator, number of its output, name.
        names = [
            acl.mdl.get_output_name_by_index(self.desc, index).split(":")[-1]
            for index in range(len(self.outputs))
        ]
        self.logits = self.outputs[names.index("logits")]
        self.new_rows = self.outputs[names.index("new_key_values")]
        self.gears = self._read_gears()
        self.room = max(gear["past"] for gear in self.gears)
        self.pieces = sorted({gear["fed"] for gear in self.gears}, reverse=True)
        self.logits_host, ret = acl.rt.malloc_host(self.logits[1])
        check("malloc_host", ret)
        self.forget()

    def _dataset(self, count, size_of):
        dataset, buffers = acl.mdl.create_dataset(), []
        for index in range(count):
            size = size_of(self.desc, index)
            ptr, ret = acl.rt.malloc(size, MALLOC_HUGE_FIRST)
            check("malloc", ret)
            buffer = acl.create_data_buffer(ptr, size)
            _, ret = acl.mdl.add_dataset_buffer(dataset, buffer)
            check("add_dataset_buffer", ret)
            buffers.append((ptr, size, buffer))
        return buffers, dataset

    def _read_gears(self):
        count, ret = acl.mdl.get_input_dynamic_gear_count(self.desc, ALL_INPUTS)
        check("get_input_dynamic_gear_count", ret)
        gears, ret = acl.mdl.get_input_dynamic_dims(self.desc, ALL_INPUTS, count)
        check("get_input_dynamic_dims", ret)
        # All dims of all inputs in a row: ids (1, fed), mask (1, past + fed), positions (1, fed),
        # past (1, past, rows, head size).
        return [{"fed": g["dims"][1], "past": g["dims"][7], "dims": g["dims"]} for g in gears]

    def forget(self):
        self.num_tokens = 0
        ptr, size, _ = self.inputs[3]
        check("memset", acl.rt.memset(ptr, size, 0, size))

    def feed(self, ids):
        """Logits of the last of the ids."""
        needed = self.num_tokens + len(ids)
        fitting = [g for g in self.gears if g["fed"] == len(ids) and g["past"] >= needed]
        gear = min(fitting, key=lambda g: g["past"])
        mask = np.ones((1, gear["past"] + len(ids)), np.int64)
        mask[:, self.num_tokens : gear["past"]] = 0
        positions = np.arange(self.num_tokens, needed, dtype=np.int64)
        for index, array in enumerate((np.array(ids, np.int64), mask, positions)):
            self._upload(index, array)
        selector, ret = acl.mdl.get_input_index_by_name(self.desc, GEAR_INPUT)
        check("get_input_index_by_name", ret)
        dims = {"name": "", "dimCount": len(gear["dims"]), "dims": gear["dims"]}
        check(
            "set_input_dynamic_dims",
            acl.mdl.set_input_dynamic_dims(self.model_id, self.input_dataset, selector, dims),
        )
        check("execute", acl.mdl.execute(self.model_id, self.input_dataset, self.output_dataset))
        self._append(len(ids))
        return self._last_logits(len(ids))

    def _upload(self, index, array):
        ptr, size, _ = self.inputs[index]
        data = array.tobytes()
        source = acl.util.bytes_to_ptr(data)
        check("memcpy", acl.rt.memcpy(ptr, size, source, array.nbytes, HOST_TO_DEVICE))

    def _append(self, count):
        past, size, _ = self.inputs[3]
        row = size // self.room
        check(
            "memcpy",
            acl.rt.memcpy(
                past + row * self.num_tokens,
                size - row * self.num_tokens,
                self.new_rows[0],
                row * count,
                DEVICE_TO_DEVICE,
            ),
        )
        self.num_tokens += count

    def _last_logits(self, count):
        dims, ret = acl.mdl.get_cur_output_dims(self.desc, 0)
        check("get_cur_output_dims", ret)
        assert dims["dims"][1] == count
        size = 4 * int(np.prod(dims["dims"]))
        ptr, room, _ = self.logits
        check("memcpy", acl.rt.memcpy(self.logits_host, room, ptr, size, DEVICE_TO_HOST))
        logits = np.frombuffer(acl.util.ptr_to_bytes(self.logits_host, size), np.float32)
        return logits.reshape(dims["dims"])[0, -1]

    def answer(self, prompt, num_tokens):
        ids, at = [], 0
        while at < len(prompt):
            piece = next(p for p in self.pieces if p <= len(prompt) - at)
            logits = self.feed(prompt[at : at + piece])
            at += piece
        while len(ids) < num_tokens:
            ids.append(int(np.argmax(logits)))
            if len(ids) < num_tokens:
                logits = self.feed(ids[-1:])
        return ids

    def close(self):
        for ptr, _, buffer in self.inputs + self.outputs:
            check("destroy_data_buffer", acl.destroy_data_buffer(buffer))
            check("free", acl.rt.free(ptr))
        check("destroy_dataset", acl.mdl.destroy_dataset(self.input_dataset))
        check("destroy_dataset", acl.mdl.destroy_dataset(self.output_dataset))
        check("free_host", acl.rt.free_host(self.logits_host))
        check("unload", acl.mdl.unload(self.model_id))
        check("destroy_desc", acl.mdl.destroy_desc(self.desc))
        check("destroy_context", acl.rt.destroy_context(self.context))
        check("reset_device", acl.rt.reset_device(0))
        check("finalize", acl.finalize())


def main():
    path, prompt_path, answer_path, num_tokens = sys.argv[1:]
    llm = Llm(path)
    prompt = np.load(prompt_path).tolist()
    first = llm.answer(prompt, int(num_tokens))
    llm.forget()
    assert llm.answer(prompt, int(num_tokens)) == first
    np.save(answer_path, np.array(first))
    llm.close()


if __name__ == "__main__":
    main()
