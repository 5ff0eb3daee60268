"""Handles with options: how a model is to be loaded, how one execution is to wait.

Source: aclmdlSetConfigOpt and aclmdlSetExecConfigOpt, CANN 9.0; the types of the values as pyACL's
C++ source has them (hicann/runtime @134e2edb, `mdl_wrap.cpp`).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from runtime_cache.aclsim import codes
from runtime_cache.aclsim.failure import AclFailure

PRIORITY = 0
LOAD_TYPE = 1
PATH = 2
MEM_ADDRESS, MEM_SIZE = 3, 4
WEIGHT_ADDRESS, WEIGHT_SIZE = 5, 6
WORK_ADDRESS, WORK_SIZE = 7, 8
WEIGHT_PATH = 14
MEM_POLICY = 25
#: The last attribute of CANN 9.0 (8.1 ends at 27).
LAST_ATTRIBUTE = 28
#: Taken without effect: priority between models, I/O outside of work memory, page size, dropping
#: the graph after load.
_WITHOUT_EFFECT = frozenset((PRIORITY, 13, MEM_POLICY, LAST_ATTRIBUTE))
_WITH_EFFECT = frozenset(range(LOAD_TYPE, WORK_SIZE + 1)) | {WEIGHT_PATH}
# ACL reads priorities from 0 (highest) to 7.
_PRIORITIES = range(8)
_INT32 = 1 << 31

FROM_FILE, FROM_FILE_WITH_MEM, FROM_MEM, FROM_MEM_WITH_MEM = 1, 2, 3, 4

STREAM_TIMEOUT, EVENT_TIMEOUT = 0, 1
FOREVER_MS = 0xFFFFFFFF


@dataclass(slots=True)
class LoadConfig:
    """Options of `load_with_config`, by attribute number."""

    options: dict[int, int | str] = field(default_factory=dict)

    def set(self, attribute: int, value: Any) -> None:
        """Sets one option.

        Raises:
            TypeError: a value of another type than pyACL takes for the attribute.
            AclFailure: 100000 for an attribute that CANN 9.0 does not have, 207000 for one that
                is not modelled.
        """
        converted = _converted(attribute, value)
        if not 0 <= attribute <= LAST_ATTRIBUTE:
            raise AclFailure(codes.INVALID_PARAM, f"there is no config attribute {attribute}")
        if attribute not in _WITH_EFFECT | _WITHOUT_EFFECT:
            sentence = f"config attribute {attribute} is not modelled by the software device"
            raise AclFailure(codes.RT_FEATURE_NOT_SUPPORTED, sentence)
        if attribute == PRIORITY and converted not in _PRIORITIES:
            raise AclFailure(codes.INVALID_PARAM, f"priority {converted} is not in 0..7")
        self.options[attribute] = converted

    def text(self, attribute: int) -> str:
        """A str option that must be there; errors as `number`."""
        value = self._required(attribute)
        assert isinstance(value, str)
        return value

    def number(self, attribute: int) -> int:
        """An int option that must be there.

        Raises:
            AclFailure: 100000 if it was not set.
        """
        value = self._required(attribute)
        assert isinstance(value, int)
        return value

    def number_or_0(self, attribute: int) -> int:
        """An int option, 0 if it was not set."""
        return self.number(attribute) if attribute in self.options else 0

    def _required(self, attribute: int) -> int | str:
        if attribute not in self.options:
            sentence = f"the load needs config attribute {attribute}, which was not set"
            raise AclFailure(codes.INVALID_PARAM, sentence)
        return self.options[attribute]


def _converted(attribute: int, value: Any) -> int | str:
    """A value as pyACL parses it: a str for the path, else an int.

    Raises:
        TypeError: another type. Addresses and sizes are real Python ints, the priority is any
            integer that fits 32 bits.
    """
    if attribute == PATH:
        if not isinstance(value, str) or "\0" in value:
            raise TypeError("acl.mdl.set_config_opt args parse failed")
        return value
    if attribute == PRIORITY and hasattr(value, "__index__"):
        priority = int(value.__index__())
        if -_INT32 <= priority < _INT32:
            return priority
    elif isinstance(value, int):
        return value & ((1 << 64) - 1)
    raise TypeError("acl.mdl.set_config_opt args parse failed")


@dataclass(slots=True)
class ExecConfig:
    """Options of `execute_v2`.

    Attributes:
        stream_timeout_ms, event_timeout_ms: limits of the wait; 2^32 - 1 is none.
    """

    stream_timeout_ms: int = FOREVER_MS
    event_timeout_ms: int = FOREVER_MS

    def set(self, attribute: int, value: int) -> None:
        """Sets one option.

        Raises:
            AclFailure: 207000 for an attribute that is not modelled, 100000 for one that CANN 9.0
                does not have.
        """
        if attribute == STREAM_TIMEOUT:
            self.stream_timeout_ms = value
        elif attribute == EVENT_TIMEOUT:
            self.event_timeout_ms = value
        elif attribute <= _LAST_EXEC_ATTRIBUTE:
            sentence = f"execution attribute {attribute} is not modelled by the software device"
            raise AclFailure(codes.RT_FEATURE_NOT_SUPPORTED, sentence)
        else:
            raise AclFailure(codes.INVALID_PARAM, f"there is no execution attribute {attribute}")

    @property
    def timeout_s(self) -> float:
        """The shorter limit in seconds, -1 for none.

        The software device waits for a run as a whole, so it cannot tell an event inside of it.
        """
        shorter = min(self.stream_timeout_ms, self.event_timeout_ms)
        return -1 if shorter == FOREVER_MS else shorter / 1000


_LAST_EXEC_ATTRIBUTE = 7
