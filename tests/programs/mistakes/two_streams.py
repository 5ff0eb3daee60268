"""Runs one model on two streams at once."""

import sys

import acl
from one_model import OneModel, check, made

model = OneModel(sys.argv[1])
other = made(acl.rt.create_stream())
check("execute_async", model.launch())
ret = acl.mdl.execute_async(model.model_id, model.inputs, model.outputs, other)
print("execute_async returned", ret)
acl.rt.synchronize_stream(model.stream)
acl.rt.synchronize_stream(other)
check("destroy_stream", acl.rt.destroy_stream(other))
model.close()
