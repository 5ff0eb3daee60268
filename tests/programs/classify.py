"""Classifies pictures one after the other, with a synchronous run for each.

usage: classify.py MODEL.om PICTURES.npy SCORES.npy [--config ACL.json] [--old-helpers]
"""

import argparse

import acl
import numpy as np

MALLOC_HUGE_FIRST = 0
HOST_TO_DEVICE, DEVICE_TO_HOST = 1, 2
NPY_FLOAT32 = 11


def check(what, ret):
    if ret != 0:
        raise RuntimeError(f"{what} returned {ret}: {acl.get_recent_err_msg()}")


class Classifier:
    def __init__(self, model_path, config, has_old_helpers, device_id=0):
        self.device_id = device_id
        self.has_old_helpers = has_old_helpers
        check("init", acl.init(config) if config else acl.init())
        check("set_device", acl.rt.set_device(device_id))
        self.context, ret = acl.rt.create_context(device_id)
        check("create_context", ret)
        self.model_id, ret = acl.mdl.load_from_file(model_path)
        check("load_from_file", ret)
        self.desc = acl.mdl.create_desc()
        check("get_desc", acl.mdl.get_desc(self.desc, self.model_id))
        _, ret = acl.mdl.get_input_index_by_name(self.desc, "ascend_mbatch_shape_data")
        if ret == 0:
            raise SystemExit("this program is for models of one shape")
        self.inputs = self._buffers(
            acl.mdl.get_num_inputs(self.desc), acl.mdl.get_input_size_by_index
        )
        self.outputs = self._buffers(
            acl.mdl.get_num_outputs(self.desc), acl.mdl.get_output_size_by_index
        )

    def _buffers(self, count, size_of):
        buffers = []
        for index in range(count):
            size = size_of(self.desc, index)
            ptr, ret = acl.rt.malloc(size, MALLOC_HUGE_FIRST)
            check("malloc", ret)
            buffers.append((ptr, size))
        return buffers

    def _dataset(self, buffers):
        dataset = acl.mdl.create_dataset()
        for ptr, size in buffers:
            buffer = acl.create_data_buffer(ptr, size)
            _, ret = acl.mdl.add_dataset_buffer(dataset, buffer)
            check("add_dataset_buffer", ret)
        return dataset

    def _destroy(self, dataset):
        for index in range(acl.mdl.get_dataset_num_buffers(dataset)):
            buffer = acl.mdl.get_dataset_buffer(dataset, index)
            check("destroy_data_buffer", acl.destroy_data_buffer(buffer))
        check("destroy_dataset", acl.mdl.destroy_dataset(dataset))

    def classify(self, picture):
        self._upload(picture)
        inputs, outputs = self._dataset(self.inputs), self._dataset(self.outputs)
        check("execute", acl.mdl.execute(self.model_id, inputs, outputs))
        self._destroy(inputs)
        self._destroy(outputs)
        return self._download()

    def _upload(self, picture):
        ptr, size = self.inputs[0]
        if self.has_old_helpers:
            check(
                "memcpy",
                acl.rt.memcpy(ptr, size, acl.util.numpy_to_ptr(picture), size, HOST_TO_DEVICE),
            )
            return
        data = picture.tobytes()
        check("memcpy", acl.rt.memcpy(ptr, size, acl.util.bytes_to_ptr(data), size, HOST_TO_DEVICE))

    def _download(self):
        ptr, size = self.outputs[0]
        dims, ret = acl.mdl.get_cur_output_dims(self.desc, 0)
        check("get_cur_output_dims", ret)
        host, ret = acl.rt.malloc_host(size)
        check("malloc_host", ret)
        check("memcpy", acl.rt.memcpy(host, size, ptr, size, DEVICE_TO_HOST))
        shape = tuple(dims["dims"])
        if self.has_old_helpers:
            scores = acl.util.ptr_to_numpy(host, shape, NPY_FLOAT32).copy()
        else:
            scores = np.frombuffer(acl.util.ptr_to_bytes(host, size), np.float32).reshape(shape)
        check("free_host", acl.rt.free_host(host))
        return scores

    def close(self):
        check("unload", acl.mdl.unload(self.model_id))
        check("destroy_desc", acl.mdl.destroy_desc(self.desc))
        for ptr, _ in self.inputs + self.outputs:
            check("free", acl.rt.free(ptr))
        check("destroy_context", acl.rt.destroy_context(self.context))
        check("reset_device", acl.rt.reset_device(self.device_id))
        check("finalize", acl.finalize())


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("pictures")
    parser.add_argument("scores")
    parser.add_argument("--config", default="")
    parser.add_argument("--old-helpers", action="store_true")
    args = parser.parse_args()
    classifier = Classifier(args.model, args.config, args.old_helpers)
    scores = [classifier.classify(picture) for picture in np.load(args.pictures)]
    np.save(args.scores, np.stack(scores))
    for row in scores:
        best = np.argsort(row.ravel())[::-1][:3]
        print("best classes:", *best)
    classifier.close()


if __name__ == "__main__":
    main()
