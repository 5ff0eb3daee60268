"""Launches a callback on a stream that no thread has subscribed to."""

import sys

import acl
from one_model import OneModel, check

model = OneModel(sys.argv[1])
check("execute_async", model.launch())
print("launch_callback returned", acl.rt.launch_callback(print, "done", 1, model.stream))
check("synchronize_stream", acl.rt.synchronize_stream(model.stream))
model.close()
