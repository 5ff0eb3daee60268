"""Reads pinned memory while the asynchronous copy into it is queued."""

import sys

import acl
from one_model import DEVICE_TO_HOST, OneModel, check, made

model = OneModel(sys.argv[1])
host = made(acl.rt.malloc_host(model.out_size))
for _ in range(20):
    check("execute_async", model.launch())
check(
    "memcpy_async",
    acl.rt.memcpy_async(
        host, model.out_size, model.out_ptr, model.out_size, DEVICE_TO_HOST, model.stream
    ),
)
print(len(acl.util.ptr_to_bytes(host, model.out_size)))
check("synchronize_stream", acl.rt.synchronize_stream(model.stream))
check("free_host", acl.rt.free_host(host))
model.close()
