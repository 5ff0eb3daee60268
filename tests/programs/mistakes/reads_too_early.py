"""Copies the result back right after the launch: a synchronous copy does not wait for a stream."""

import sys

import acl
from one_model import OneModel, check

model = OneModel(sys.argv[1])
for _ in range(20):
    check("execute_async", model.launch())
print(model.read()[0])
check("synchronize_stream", acl.rt.synchronize_stream(model.stream))
model.close()
