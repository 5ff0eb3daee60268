"""Takes device memory for host memory, in a call of the library."""

import sys

import acl
from one_model import OneModel, check

model = OneModel(sys.argv[1])
check("execute", model.execute())
try:
    print(acl.util.ptr_to_bytes(model.out_ptr, model.out_size)[:4])
except Exception as error:
    print(type(error).__name__, error)
model.close()
