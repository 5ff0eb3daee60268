"""Passes a size that numpy computed."""

import acl
import numpy as np

acl.init()
acl.rt.set_device(0)
size = np.prod([2, 3]) * 4
try:
    acl.rt.malloc(size, 0)
except TypeError as error:
    print("TypeError:", error)
acl.rt.reset_device(0)
acl.finalize()
