"""In service the daemon makes no call that keeps the interpreter to itself for long.

On a card every pyACL call but a few holds the GIL for as long as it takes: the loops of sockets and
signals stand still. So all calls between two answers are held against the two kinds that are short
by nature: those that only queue work, and questions to the driver. A copy only queues if its host
end is pinned memory; one of pageable memory keeps the interpreter until it is done.
"""

from __future__ import annotations

from pathlib import Path

import pytest

import runtime_cache.aclsim as acl
from om_models.bundle import Bundle
from runtime_cache.aclsim import faults, inspect
from runtime_cache.aclsim.calling import RELEASES_GIL
from runtime_cache.aclsim.ledger import ledger
from runtime_cache.aclsim.process import this_process
from tests.support.aclsim import (
    DEVICE_TO_HOST,
    HOST_TO_DEVICE,
    Run,
    compile_om,
    fresh_process,
    ok,
    pinned,
)
from tests.support.served import BLOCK, Served, random_prompt, served

QUEUES_ONLY = {"acl.mdl.execute_async", "acl.rt.memcpy_async"}
ASKS_ONLY = {"acl.rt.get_mem_info", "acl.rt.query_device_status", "acl.get_recent_err_msg"}


async def serve(host: Served) -> None:
    """Misses, hits inside a block, a registration, an eviction, several at once; what an operator
    reads, and a step that fails and is computed again."""
    prompt = random_prompt(1, 5 * BLOCK + 2)
    await host.register("system", prompt[: 3 * BLOCK])
    await host.greedy(prompt)
    await host.greedy(prompt[: 4 * BLOCK + 1])
    ears = [host.submit(random_prompt(seed, 10)) for seed in range(3)]
    for ear in ears:
        await ear.final
    host.engine.evict(None)
    await host.greedy(prompt)
    await host.runtime.memory.look()
    await host.runtime.read_kv(BLOCK, 2)
    fault = faults.inject("acl.mdl.execute_async", code=507015, when="run")
    await host.greedy(prompt)
    assert fault.has_fired


def listen_to_copies(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether the host's end is pinned memory, of each copy that has one."""
    queue, found = acl.rt.memcpy_async, list[bool]()

    def note(dst: int, room: int, src: int, size: int, kind: int, stream: int) -> int:
        if kind in (HOST_TO_DEVICE, DEVICE_TO_HOST):
            host_end = src if kind == HOST_TO_DEVICE else dst
            found.append(this_process().host_memory.is_pinned(host_end))
        return queue(dst, room, src, size, kind, stream)

    monkeypatch.setattr(acl.rt, "memcpy_async", note)
    return found


@pytest.mark.asyncio(loop_factories=["uvloop"])
async def test_in_service_no_call_can_keep_the_interpreter(
    tiny_bundle: Bundle, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with served(tiny_bundle) as host:
        are_pinned = listen_to_copies(monkeypatch)
        ledger.clear()
        ledger.gil_limit_s = 0.0  # every call that holds the GIL counts, however quick it was here
        await serve(host)
        calls, slow = set(ledger.calls), set(ledger.slow_calls)
    assert slow <= QUEUES_ONLY | ASKS_ONLY
    assert calls <= slow | RELEASES_GIL
    assert "acl.rt.synchronize_stream_with_timeout" in calls & RELEASES_GIL
    assert slow >= QUEUES_ONLY | ASKS_ONLY
    assert are_pinned
    assert all(are_pinned)


def test_the_calls_that_queue_do_not_wait_for_the_device(tmp_path: Path) -> None:
    with fresh_process():
        run = Run(compile_om(tmp_path))
        run.feed([1] * 6, [0, 0, 0])
        host, view = pinned(24)
        view[:] = 0
        with inspect.hold(run.stream):
            for _ in range(100):
                ptr = run.input_ptrs[0]
                ok(acl.rt.memcpy_async(ptr, 24, host, 24, HOST_TO_DEVICE, run.stream))
                assert run.launch() == 0
            assert acl.rt.stream_query(run.stream) == (1, 0)
        assert run.finish() == 0
