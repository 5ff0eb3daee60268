"""Frees an input while a run that reads it is queued."""

import sys

import acl
from one_model import OneModel, check

model = OneModel(sys.argv[1])
for _ in range(20):
    check("execute_async", model.launch())
check("free", acl.rt.free(model.in_ptr))
print("synchronize_stream returned", acl.rt.synchronize_stream(model.stream))
model.close_model()
check("free", acl.rt.free(model.out_ptr))
model.close_device()
