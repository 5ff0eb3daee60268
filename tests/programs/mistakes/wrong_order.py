"""Gives the device back and finalises first, and destroys the stream and the context after that."""

import sys

import acl
from one_model import OneModel, check

model = OneModel(sys.argv[1])
check("execute", model.execute())
print(model.read()[0])
model.close_model()
model.close_memory()
# The codes are not looked at, as is usual at the end of a program.
acl.rt.reset_device(0)
acl.finalize()
acl.rt.destroy_stream(model.stream)
acl.rt.destroy_context(model.context)
