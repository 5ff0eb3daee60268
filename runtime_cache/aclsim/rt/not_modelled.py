"""Functions of `acl.rt` that the software device has in name only: the convention, and 207000.

Neither the driver nor the public sample programs read for this project call them.
"""

from __future__ import annotations

from runtime_cache.aclsim.calling import not_modelled

# Devices: counts of cores, links, task abort.
device_task_abort = not_modelled("acl.rt.device_task_abort", "iI")
get_device_info = not_modelled("acl.rt.get_device_info", "II", 0)
device_get_stream_priority_range = not_modelled("acl.rt.device_get_stream_priority_range", "", 0, 0)
get_device_capability = not_modelled("acl.rt.get_device_capability", "iI", 0)
get_device_res_limit = not_modelled("acl.rt.get_device_res_limit", "iI", 0)
set_device_res_limit = not_modelled("acl.rt.set_device_res_limit", "iII")
reset_device_res_limit = not_modelled("acl.rt.reset_device_res_limit", "i")
device_enable_peer_access = not_modelled("acl.rt.device_enable_peer_access", "iI")
device_disable_peer_access = not_modelled("acl.rt.device_disable_peer_access", "i")
device_get_bare_tgid = not_modelled("acl.rt.device_get_bare_tgid", "", 0)

# Contexts and streams.
ctx_get_current_default_stream = not_modelled("acl.rt.ctx_get_current_default_stream", "", 0)
set_stream_attribute = not_modelled("acl.rt.set_stream_attribute", "kiO", takes={2: dict})
get_stream_attribute = not_modelled("acl.rt.get_stream_attribute", "ki", {})
set_stream_res_limit = not_modelled("acl.rt.set_stream_res_limit", "kiI")
get_stream_res_limit = not_modelled("acl.rt.get_stream_res_limit", "ki", 0)

# Memory for the task scheduler, memory mapped into both sides, copies with a condition.
malloc_for_task_scheduler = not_modelled(
    "acl.rt.malloc_for_task_scheduler", "kiO", 0, takes={2: dict}
)
memcpy_async_with_condition = not_modelled("acl.rt.memcpy_async_with_condition", "kkkkik")
host_register = not_modelled("acl.rt.host_register", "kki", 0)
host_register_v2 = not_modelled("acl.rt.host_register_v2", "KKI")
host_get_device_pointer = not_modelled("acl.rt.host_get_device_pointer", "KI", 0)
host_unregister = not_modelled("acl.rt.host_unregister", "k")

# Virtual memory.
reserve_mem_address = not_modelled("acl.rt.reserve_mem_address", "kkkK", 0)
release_mem_address = not_modelled("acl.rt.release_mem_address", "k")
malloc_physical = not_modelled("acl.rt.malloc_physical", "kOK", 0, takes={1: dict})
free_physical = not_modelled("acl.rt.free_physical", "k")
map_mem = not_modelled("acl.rt.map_mem", "kkkkK")
unmap_mem = not_modelled("acl.rt.unmap_mem", "k")
mem_get_allocation_granularity = not_modelled(
    "acl.rt.mem_get_allocation_granularity", "Oi", 0, takes={0: dict}
)

# Memory shared between processes.
mem_export_to_shareable_handle = not_modelled("acl.rt.mem_export_to_shareable_handle", "kiK", 0)
mem_import_from_shareable_handle = not_modelled("acl.rt.mem_import_from_shareable_handle", "Ki", 0)
mem_set_pid_to_shareable_handle = not_modelled(
    "acl.rt.mem_set_pid_to_shareable_handle", "KO", takes={1: list}
)
ipc_mem_get_export_key = not_modelled("acl.rt.ipc_mem_get_export_key", "kkkK", "")
ipc_mem_set_import_pid = not_modelled("acl.rt.ipc_mem_set_import_pid", "sO", takes={1: list})
ipc_mem_import_by_key = not_modelled("acl.rt.ipc_mem_import_by_key", "sK", 0)
ipc_mem_close = not_modelled("acl.rt.ipc_mem_close", "s")

# Uncorrectable memory errors; the pages of CANN 9.0 call these reserved.
get_mem_uce_info = not_modelled("acl.rt.get_mem_uce_info", "iI", [])
mem_uce_repair = not_modelled("acl.rt.mem_uce_repair", "iO", takes={1: list})
