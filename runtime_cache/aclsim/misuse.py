"""The report of what a card would not forgive: what was noted on the way, and what is left over."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from runtime_cache.aclsim.ledger import Misuse, ledger
from runtime_cache.aclsim.process import Process
from runtime_cache.aclsim.races import unsettled


def report(process: Process) -> list[Misuse]:
    """All misuse so far, taking the program for ended: what is alive is a leak.

    Sentences that repeat stand once, with their number. What a lost device keeps is no misuse:
    nothing on it can be given back.
    """
    counted = Counter(list(ledger.noted))
    noted = [Misuse(each.kind, _times(each.sentence, count)) for each, count in counted.items()]
    is_lost = any(device.lost_code for device in process.devices.values())
    left = [] if is_lost else [*_not_closed(process), *_leaks(process)]
    return [*noted, *left, *_slow_calls()]


def errors(misuses: list[Misuse]) -> list[Misuse]:
    """Without `gil`: such calls are right, and cost other threads their time."""
    return [misuse for misuse in misuses if misuse.kind != "gil"]


def _times(sentence: str, count: int) -> str:
    return sentence if count == 1 else f"{sentence} ({count} times)"


def _not_closed(process: Process) -> Iterator[Misuse]:
    for device in process.devices.values():
        if device.num_users:
            times = "once" if device.num_users == 1 else f"{device.num_users} times"
            yield Misuse(
                "teardown_order",
                f"device {device.device_id} was set {times} more than it was reset",
            )
    for function in unsettled.functions(process.pending()):
        yield Misuse("teardown_order", f"the program ended without waiting for {function}")
    if process.num_inits:
        yield Misuse("teardown_order", "acl.finalize was not called; it must be before the exit")


def _leaks(process: Process) -> Iterator[Misuse]:
    defaults = [device.default_context for device in process.devices.values()]
    num_defaults = sum(context is not None for context in defaults)
    for table in process.tables():
        count = len(table) - (num_defaults if table is process.contexts else 0)
        if count:
            yield Misuse("leak", f"{_counted(count, table.what)} never destroyed")
    for model_id in process.models:
        yield Misuse("leak", f"model {model_id} was never unloaded")
    device_sizes = [a.size_bytes for d in process.devices.values() for a in d.memory.live]
    host_sizes = [a.size_bytes for a in process.host_memory.live]
    for sizes, what in ((device_sizes, "device allocation"), (host_sizes, "pinned host buffer")):
        if sizes:
            yield Misuse("leak", f"{_counted(len(sizes), what)} never freed ({sum(sizes)} bytes)")


def _slow_calls() -> Iterator[Misuse]:
    for function, slow in sorted(ledger.slow_calls.items()):
        calls = "1 call" if slow.count == 1 else f"{slow.count} calls"
        yield Misuse(
            "gil",
            f"{function} kept the interpreter to itself for up to {slow.longest_s * 1000:.0f} ms"
            f" ({calls} above {ledger.gil_limit_s * 1000:.0f} ms): no other thread of the program"
            " runs meanwhile",
        )


def _counted(count: int, what: str) -> str:
    return f"1 {what} was" if count == 1 else f"{count} {what}s were"
