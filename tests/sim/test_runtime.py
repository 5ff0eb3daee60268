"""Opening and closing everything below the service: what fails leaves nothing open."""

from __future__ import annotations

import asyncio

import msgspec
import pytest
from structlog.testing import capture_logs

from ipc.messages import MessageId
from om_models.bundle import Bundle
from runtime_cache.aclsim import faults, inspect
from runtime_cache.cache.listing import EntryQuery
from runtime_cache.config import Config
from runtime_cache.errors import AclError, BundleError, ConfigError, OutOfDeviceMemory
from runtime_cache.facts import DaemonFacts
from runtime_cache.runtime import Runtime
from tests.support.devices import num_leaked
from tests.support.served import (
    check_idle,
    config_for,
    opened_runtime,
    random_prompt,
    served,
)

pytestmark = pytest.mark.asyncio(loop_factories=["uvloop"])


def changed(config: Config, section: str, **fields: object) -> Config:
    inner = msgspec.structs.replace(getattr(config, section), **fields)
    return msgspec.structs.replace(config, **{section: inner})


def nothing_is_open() -> bool:
    return num_leaked() == -2


async def test_close_may_be_called_twice(tiny_bundle: Bundle) -> None:
    inspect.reset()
    runtime = await Runtime.open(config_for(tiny_bundle))
    assert runtime.soc_name == tiny_bundle.manifest.soc_version
    check_idle(runtime)
    await runtime.close()
    await runtime.close()
    assert nothing_is_open()


@pytest.mark.parametrize(
    ("section", "fields", "error", "sentence"),
    [
        ("model", {"bundle": ""}, ConfigError, "model.bundle is not set"),
        ("device", {"device": ""}, ConfigError, "device.device is not set"),
        ("device", {"device": "npu:0"}, BundleError, "the bundle was made with --target sim"),
        ("cache", {"block_size": 1024}, ConfigError, "at least 2 are needed"),
        # Found only when the device is open already.
        ("cache", {"cache_capacity": 1e-9}, ConfigError, "two are the least"),
        ("sim", {"memory": "301MiB"}, OutOfDeviceMemory, "device memory is too small"),
    ],
)
async def test_what_fails_leaves_nothing_open(
    tiny_bundle: Bundle,
    section: str,
    fields: dict[str, object],
    error: type[Exception],
    sentence: str,
) -> None:
    inspect.reset()
    with pytest.raises(error, match=sentence):
        await Runtime.open(changed(config_for(tiny_bundle), section, **fields))
    assert nothing_is_open()


@pytest.mark.parametrize("code", [200000, 207001, 207018, 245000, 245002])
@pytest.mark.parametrize(
    ("function", "kind"),
    [
        ("acl.rt.malloc", "device"),
        ("acl.rt.malloc_host", "pinned host"),
        ("acl.mdl.load_from_file", "device"),
    ],
)
async def test_no_room_at_the_start_is_explained_by_the_plan(
    tiny_bundle: Bundle, function: str, kind: str, code: int
) -> None:
    inspect.reset()
    faults.inject(function, code=code)
    with pytest.raises(OutOfDeviceMemory, match=f"{kind} memory is too small") as caught:
        await Runtime.open(config_for(tiny_bundle))
    assert caught.value.acl_code == code
    assert f"The driver says: {function}: injected fault" in caught.value.detail
    assert "\n  KV pool    " in caught.value.detail
    assert caught.value.detail.endswith("free now   724 MiB of 1.00 GiB")
    assert nothing_is_open()


async def test_no_room_on_a_device_that_does_not_say_how_much_it_has(tiny_bundle: Bundle) -> None:
    inspect.reset()
    faults.inject("acl.rt.malloc", code=207001)
    faults.inject("acl.rt.get_mem_info", code=107000, call=3)  # two before the load
    with pytest.raises(OutOfDeviceMemory, match="free now   the driver does not say"):
        await Runtime.open(config_for(tiny_bundle))
    assert nothing_is_open()


async def test_a_device_that_fails_at_the_start(tiny_bundle: Bundle) -> None:
    inspect.reset()
    faults.inject("acl.mdl.load_from_file", code=507899)
    with pytest.raises(AclError, match="507899"):
        await Runtime.open(config_for(tiny_bundle))
    inspect.reset()


@pytest.mark.parametrize(
    ("function", "code"), [("acl.rt.memset", 507010), ("acl.rt.malloc_host", 207001)]
)
async def test_what_failed_first_is_told_also_if_the_device_is_not_given_back(
    tiny_bundle: Bundle, function: str, code: int
) -> None:
    inspect.reset()
    faults.inject(function, code=code)
    faults.inject("acl.rt.reset_device", code=507899)
    with pytest.raises(AclError) as caught:
        await Runtime.open(config_for(tiny_bundle))
    assert (caught.value.function, caught.value.acl_code) == (function, code)
    inspect.reset()


async def test_the_cause_is_told_also_if_an_open_device_is_not_given_back(
    tiny_bundle: Bundle,
) -> None:
    inspect.reset()
    faults.inject("acl.rt.reset_device", code=507899)
    with pytest.raises(ConfigError, match="two are the least"):
        await Runtime.open(changed(config_for(tiny_bundle), "cache", cache_capacity=1e-9))
    inspect.reset()


async def test_a_capacity_beyond_what_was_compiled_is_capped(tiny_bundle: Bundle) -> None:
    async with served(tiny_bundle, num_blocks=10_000) as host:
        assert host.runtime.cache.num_usable == 255


async def test_facts_add_up(tiny_bundle: Bundle) -> None:
    prefix = random_prompt(1, 20)
    async with served(tiny_bundle, num_blocks=50) as host:
        await host.register("p", prefix)
        await host.greedy([*prefix, 1, 2], 2)
        facts = DaemonFacts(host.runtime, [])
        assert facts.info(MessageId("1")).limits["cache_tokens"] == 49 * 4
        stats = facts.stats()
        pool = stats["pool"]
        assert (pool["live_blocks"], pool["registered_prefixes"]) == (5, 1)
        assert pool["live_blocks"] + pool["cached_blocks"] + pool["free_blocks"] == 49
        assert stats["cache"]["hit_tokens"] == 20
        assert stats["engine"]["registered"] == stats["engine"]["finished"] == 1
        # 20 tokens of the prefix and 2 of the prompt; 1 answer token was fed back.
        assert stats["device"]["prefill"]["rows_appended"] == 22
        assert stats["device"]["decode"]["rows_appended"] == 1
        entries, total = facts.entries(EntryQuery(limit=1))
        assert (total, len(entries)) == (2, 1)
        assert (entries[0].num_tokens, entries[0].prefix_id, entries[0].hits) == (23, None, 1)
        ((entry,), _) = facts.entries(EntryQuery(limit=1, offset=1))
        assert (entry.num_tokens, entry.prefix_id, entry.kept) == (20, "p", "registered")
        assert not entry.in_use
        assert facts.entries(EntryQuery(limit=1, offset=2)) == ((), 2)


# --- free device memory ---------------------------------------------------------------------------


def memory_of(runtime: Runtime) -> dict[str, object]:
    found: dict[str, object] = DaemonFacts(runtime, []).stats()["device"]["memory"]
    return found


async def test_free_device_memory_is_a_gauge_and_an_alarm(tiny_bundle: Bundle) -> None:
    async with opened_runtime(config_for(tiny_bundle)) as runtime:
        total, low = 2**30, 256 * 2**20
        at_start = memory_of(runtime)
        free = at_start["free_bytes"]
        assert isinstance(free, int)
        assert low < free < total
        assert at_start["total_bytes"] == total
        assert not at_start["is_low"]
        with inspect.occupy(free - low):
            await runtime.memory.look()
            assert memory_of(runtime) == at_start | {"free_bytes": low}
            with inspect.occupy(1), capture_logs() as logs:
                await runtime.memory.look()
                assert memory_of(runtime)["is_low"]
                (warning,) = DaemonFacts(runtime, []).stats()["warnings"]
                assert warning.startswith("only 255 MiB of device memory are free")
            assert [entry["event"] for entry in logs] == ["device_memory_low"]
        await runtime.memory.look()
        assert memory_of(runtime) == at_start
        assert DaemonFacts(runtime, []).stats()["warnings"] == []


async def test_a_driver_that_does_not_say_how_much_is_free(
    tiny_bundle: Bundle, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("runtime_cache.aclsim.rt.get_mem_info", lambda attr: (0, 0, 0))
    async with opened_runtime(config_for(tiny_bundle)) as runtime:
        found = memory_of(runtime)
        assert [found[n] for n in ("free_bytes", "total_bytes", "loaded_bytes")] == [None] * 3
        assert not found["is_low"]


async def test_memory_is_looked_at_again_and_again_until_the_end(
    tiny_bundle: Bundle,
) -> None:
    config = changed(config_for(tiny_bundle), "device", memory_check_s=1e-6)
    async with opened_runtime(config):
        before = inspect.report().calls["acl.rt.get_mem_info"]
        while inspect.report().calls["acl.rt.get_mem_info"] < before + 5:  # noqa: ASYNC110
            await asyncio.sleep(0)
    after = inspect.report().calls["acl.rt.get_mem_info"]
    await asyncio.sleep(0)
    assert inspect.report().calls["acl.rt.get_mem_info"] == after  # it ends with the runtime


async def test_no_step_looks_at_the_memory(tiny_bundle: Bundle) -> None:
    async with served(tiny_bundle) as host:
        before = inspect.report().calls["acl.rt.get_mem_info"]
        await host.greedy(random_prompt(1, 20), 20)
        assert inspect.report().calls["acl.rt.get_mem_info"] == before
