"""NewTypes that keep one kind of number from being passed for another. Pure."""

from __future__ import annotations

from typing import NewType

#: Index of a block in the KV pool; 0 is the null block.
BlockId = NewType("BlockId", int)
#: SHA-256 chain digest of a full block [32 bytes].
BlockHash = NewType("BlockHash", bytes)
#: The engine's name of a request, given by the service, never reused in one incarnation.
RequestId = NewType("RequestId", int)
#: The number of a step, increasing by one.
StepId = NewType("StepId", int)
#: The public name of a registered prefix (hexadecimal).
PrefixId = NewType("PrefixId", str)
#: Whose part of the cache a request uses, by its socket.
TenantName = NewType("TenantName", str)

NULL_BLOCK = BlockId(0)
#: Of the main socket, the admin socket and the embedded API.
DEFAULT_TENANT = TenantName("")
