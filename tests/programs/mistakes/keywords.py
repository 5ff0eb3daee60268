"""Names the arguments of a call."""

import acl

acl.init()
acl.rt.set_device(device_id=0)
