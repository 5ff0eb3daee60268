"""Warms up with `execute`, and then serves with `execute_async`."""

import sys

import acl
from one_model import OneModel, check

model = OneModel(sys.argv[1])
check("execute", model.execute())
print("execute_async returned", model.launch())
check("synchronize_stream", acl.rt.synchronize_stream(model.stream))
model.close()
