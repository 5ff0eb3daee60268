"""Uses the device in a thread that has no context."""

import sys
import threading

import acl
from one_model import OneModel, check

model = OneModel(sys.argv[1])
thread = threading.Thread(target=lambda: print("malloc returned", acl.rt.malloc(64, 0)))
thread.start()
thread.join()
check("execute", model.execute())
model.close()
