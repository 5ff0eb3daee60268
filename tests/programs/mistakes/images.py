"""Asks for what decodes pictures, which the software device does not have."""

import acl

acl.init()
acl.rt.set_device(0)
acl.media.dvpp_create_channel_desc()
