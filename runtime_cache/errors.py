"""The errors of daemon and converter: whose fault, may one try again, what state is left.

Pure. Foreign errors (zmq, acl, msgspec, OS) are translated to one of these once, at the boundary
where they arise, with `from`. `code` is the word that crosses the wire; no traceback ever does.
"""

from __future__ import annotations

from typing import Any


class RuntimeCacheError(Exception):
    """Base of the tree; never raised itself.

    Attributes:
        code: the word clients and programs match on.
        retryable: whether the same call can succeed later without a change by the caller.
        retry_after_ms: when a new try is worthwhile, if that is known [milliseconds].
    """

    code = "internal"
    retryable = False
    retry_after_ms: int | None = None

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message

    def __reduce__(self) -> tuple[Any, ...]:
        """An error comes whole out of another process, whatever its constructor takes."""
        return _restored, (type(self), self.args, self.__dict__)


def _restored(
    kind: type[RuntimeCacheError], args: tuple[Any, ...], state: dict[str, Any]
) -> RuntimeCacheError:
    error = kind.__new__(kind)
    error.args = args
    error.__dict__.update(state)
    return error


class ConfigError(RuntimeCacheError):
    """The operator's input is wrong: configuration, bundle, paths. Nothing has started."""

    code = "config"


class BundleError(ConfigError):
    """A bundle is missing, damaged, or made for another device. Nothing has started."""

    code = "bundle"


class ConversionError(ConfigError):
    """A checkpoint cannot be converted: unknown, damaged or incomplete. No bundle was written."""

    code = "conversion"


class RequestError(RuntimeCacheError):
    """The request is wrong or was ended by its owner. Its blocks are released."""

    code = "request"


class InvalidRequest(RequestError):
    """A field is missing, has a wrong type or value. The request was not admitted."""

    code = "invalid_request"


class TooLong(RequestError):
    """The prompt leaves no room for an answer. The request was not admitted."""

    code = "too_long"


class DuplicateId(RequestError):
    """The `id` names an unfinished request of the same client. That one goes on."""

    code = "duplicate_id"


class UnknownPrefix(RequestError):
    """The `prefix_id` names no registered prefix. The request was not admitted."""

    code = "unknown_prefix"


class UnknownEntry(RequestError):
    """The digest names no cached prefix of this tenant. Nothing has changed."""

    code = "unknown_entry"


class InvalidConfig(RequestError):
    """What is to be reloaded is wrong. Nothing has changed."""

    code = "invalid_config"


class CapacityError(RuntimeCacheError):
    """The daemon is full for now. The request was not admitted, or is released."""

    code = "capacity"
    retryable = True

    def __init__(self, message: str, *, retry_after_ms: int) -> None:
        super().__init__(message)
        self.retry_after_ms = retry_after_ms


class QueueFull(CapacityError):
    """The waiting queue is at `max_waiting`. The request was not admitted."""

    code = "queue_full"


class OverQuota(CapacityError):
    """The client's key has used its quota up. The request was not admitted."""

    code = "quota"


class Draining(CapacityError):
    """The daemon is shutting down and takes no new requests."""

    code = "draining"


class DeviceError(RuntimeCacheError):
    """The device or its driver failed. The step's blocks are suspect and dropped."""

    code = "device"
    retryable = True


class AclError(DeviceError):
    """One pyACL call returned a code other than 0.

    Attributes:
        function: the pyACL name, such as `acl.rt.malloc`.
        acl_code: the number it returned.
        acl_name: the constant's name in the manual, or `unknown`.
        detail: the driver's own words, or ours; may be empty.
    """

    code = "acl"

    def __init__(self, function: str, acl_code: int, acl_name: str, detail: str = "") -> None:
        text = f"{function} failed: {acl_code} ({acl_name})"
        super().__init__(f"{text}: {detail}" if detail else text)
        self.function = function
        self.acl_code = acl_code
        self.acl_name = acl_name
        self.detail = detail


class OutOfDeviceMemory(AclError):
    """The device has no room for an allocation. Can only happen before READY."""

    code = "device_out_of_memory"


class StepTimeout(AclError):
    """A step did not end in time. Its work goes on, so its blocks stay held until it is over."""

    code = "step_timeout"


class DeviceLost(AclError):
    """A sticky failure: nothing in this process can use the device again. The daemon exits.

    Retryable all the same: by the daemon that the service manager starts in its place.
    """

    code = "device_lost"


class DeviceHung(DeviceLost):
    """Work on the device does not end. Nothing it uses can be given back; the daemon exits."""

    code = "device_hung"


class InternalError(RuntimeCacheError):
    """Our own bug: an invariant does not hold. The message carries the request's story."""

    code = "internal"
