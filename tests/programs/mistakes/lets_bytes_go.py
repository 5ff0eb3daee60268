"""Takes the address of bytes that nobody holds any more."""

import sys

import acl
import numpy as np
from one_model import HOST_TO_DEVICE, OneModel, check

model = OneModel(sys.argv[1])
ptr = acl.util.bytes_to_ptr(np.ones(model.in_size, np.uint8).tobytes())
check("memcpy", acl.rt.memcpy(model.in_ptr, model.in_size, ptr, model.in_size, HOST_TO_DEVICE))
check("execute", model.execute())
model.close()
