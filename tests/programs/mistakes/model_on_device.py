"""Hands the loader a model in device memory, which is right on a board and wrong with a card."""

import os
import sys

import acl
from one_model import HOST_TO_DEVICE, check, made

check("init", acl.init())
check("set_device", acl.rt.set_device(0))
size = os.path.getsize(sys.argv[1])
ptr = made(acl.rt.malloc(size, 0))
with open(sys.argv[1], "rb") as file:
    data = file.read()
check("memcpy", acl.rt.memcpy(ptr, size, acl.util.bytes_to_ptr(data), size, HOST_TO_DEVICE))
model_id, ret = acl.mdl.load_from_mem(ptr, size)
print("load_from_mem returned", ret)
if ret == 0:
    check("unload", acl.mdl.unload(model_id))
check("free", acl.rt.free(ptr))
check("reset_device", acl.rt.reset_device(0))
check("finalize", acl.finalize())
