"""How an embedded model comes and goes: threads, interrupts, several at once, and what is left."""

from __future__ import annotations

import asyncio
import gc
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from runtime_cache.aclsim import faults, inspect
from runtime_cache.aclsim.settings import SimSettings
from runtime_cache.device.acl_api import MemAttr
from runtime_cache.device.select import load_acl
from runtime_cache.engine.executor import Executor
from runtime_cache.engine.loop import EngineLoop
from runtime_cache.errors import (
    BundleError,
    ConfigError,
    DeviceError,
    InternalError,
    OutOfDeviceMemory,
    RuntimeCacheError,
)
from runtime_cache.llm import LLM, Closed, PrefixCachingConfig, Result, SomeFailed
from runtime_cache.llm.host import open_hosts
from runtime_cache.service import Service
from tests.support.embedded import (
    FOUR,
    fresh_device,
    make_talking_bundle,
    open_llm,
    opened_llm,
    pool_of,
)
from tests.support.served import random_prompt

#: Longer than anything here takes; only a test that fails reaches it [seconds].
PATIENCE_S = 20


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_talking_bundle(tmp_path_factory.mktemp("talking"))


class Gate:
    """Before the device: a step waits here until it may go.

    Attributes:
        reached: a step has come.
        may_go: it, and all that follow, need not wait.
    """

    def __init__(self) -> None:
        self.reached, self.may_go = threading.Event(), threading.Event()
        self._run = Executor.run

    def run(self, executor: Executor, batch: Any) -> Any:
        self.reached.set()
        self.may_go.wait(PATIENCE_S)  # a test that failed closes its model before it says so
        return self._run(executor, batch)


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    gate = Gate()
    monkeypatch.setattr(Executor, "run", lambda executor, batch: gate.run(executor, batch))
    yield gate
    gate.may_go.set()


@pytest.fixture
def elsewhere() -> Iterator[Callable[..., Any]]:
    """Starts a call on another thread; gives its future."""
    with ThreadPoolExecutor(2) as pool:
        yield pool.submit


def bytes_for(bundle: Path, num_models: float) -> str:
    """Device memory for so many models of this bundle, as an option has it."""
    system_bytes = SimSettings().initial_use_bytes
    with opened_llm(bundle):
        acl, _ = load_acl("sim:0")
        acl.rt.set_device(0)
        free_bytes, total_bytes, _ = acl.rt.get_mem_info(MemAttr.DDR)
        acl.rt.reset_device(0)
    one_bytes = total_bytes - free_bytes - system_bytes
    return str(system_bytes + int(num_models * one_bytes))


def assert_idle(llm: LLM) -> None:
    """Nothing is in work and no block is held."""
    while llm.stats()["engine"]["is_step_in_flight"]:
        pass
    engine = llm.stats()["engine"]
    assert (engine["num_waiting"], engine["num_running"]) == (0, 0)
    assert pool_of(llm)["live_blocks"] == 0


# --- the end -----------------------------------------------------------------------------------


def test_a_closed_model_says_so(bundle: Path) -> None:
    with fresh_device():
        llm = open_llm(bundle)
        llm.close()
        llm.close()
        assert inspect.report().num_alive == 0
        for call in (lambda: llm.generate("a"), llm.stats, lambda: llm.stream("a")):
            with pytest.raises(Closed, match="this LLM is closed"):
                call()
        assert "closed" in repr(llm)


def test_what_nobody_refers_to_is_closed(bundle: Path) -> None:
    with fresh_device():
        llm = open_llm(bundle)
        (opened,) = open_hosts()
        del llm
        gc.collect()
        opened.close()
        assert (opened.is_closed, open_hosts()) == (True, [])


def test_a_stream_keeps_its_model_open(bundle: Path) -> None:
    with fresh_device():
        stream = open_llm(bundle).stream("a", **FOUR)
        gc.collect()
        assert stream.result().usage.completion_tokens == 4
        del stream
        for opened in open_hosts():
            opened.close()


def test_closing_ends_what_others_wait_for(
    bundle: Path, gate: Gate, elsewhere: Callable[..., Any]
) -> None:
    with opened_llm(bundle) as llm:
        answer = elsewhere(llm.generate, "a", ignore_eos=True)
        assert gate.reached.wait(PATIENCE_S)
        llm._host.ask_to_close()
        gate.may_go.set()
        assert answer.result().finish_reason == "shutdown"


# --- several -----------------------------------------------------------------------------------


def test_two_models_on_one_device(bundle: Path) -> None:
    prompt = random_prompt(5, 30)
    with fresh_device():
        one = open_llm(bundle)
        two = open_llm(bundle)
        first = one.generate(prompt, **FOUR)
        second = two.generate(prompt, **FOUR)
        assert first.token_ids == second.token_ids
        assert second.usage.cached_tokens == 0  # each has a pool of its own
        one.close()
        assert two.generate(prompt, **FOUR).usage.cached_tokens == 29
        three = open_llm(bundle)
        two.close()
        assert three.generate(prompt, **FOUR).token_ids == first.token_ids
        three.close()


def test_a_second_model_that_does_not_fit(bundle: Path) -> None:
    for_one = bytes_for(bundle, 1.5)
    with fresh_device():
        one = open_llm(bundle, sim_memory=for_one)
        with pytest.raises(OutOfDeviceMemory, match="another LLM of this process is open"):
            open_llm(bundle)
        assert one.generate("a", **FOUR).usage.completion_tokens == 4
        del one  # what is on its way down is waited for
        open_llm(bundle).close()


def test_a_model_that_does_not_fit(bundle: Path) -> None:
    for_half = bytes_for(bundle, 0.5)
    with fresh_device(), pytest.raises(OutOfDeviceMemory, match=r"\): device memory is too small"):
        open_llm(bundle, sim_memory=for_half)


def test_several_threads_at_once(bundle: Path) -> None:
    prompts = [random_prompt(seed, 12) for seed in range(6)]
    with opened_llm(bundle) as llm:
        alone = [llm.generate(prompt, **FOUR).token_ids for prompt in prompts]
        llm.evict(all=True)

        def ask(number: int) -> list[tuple[int, ...]]:
            order = prompts[number:] + prompts[:number]
            found = [llm.generate(prompt, **FOUR).token_ids for prompt in order]
            return found[-number:] + found[:-number] if number else found

        with ThreadPoolExecutor(6) as pool:
            assert list(pool.map(ask, range(6))) == [alone] * 6
        assert_idle(llm)


async def test_inside_a_running_event_loop(bundle: Path) -> None:
    with opened_llm(bundle) as llm:
        assert llm.generate("a", **FOUR).usage.completion_tokens == 4
        answer = await asyncio.to_thread(llm.generate, "a", **FOUR)
        assert answer.usage.cached_tokens == 1


# --- interrupts --------------------------------------------------------------------------------


@pytest.fixture
def sigint() -> Iterator[None]:
    """Ctrl-C raises, also where these tests were started in the background, which ignores it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def interrupt_when(event: threading.Event) -> None:
    """Ctrl-C for the main thread, once the event has come."""

    def wait() -> None:
        if event.wait(PATIENCE_S):
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    threading.Thread(target=wait).start()


@pytest.mark.usefixtures("sigint")
@pytest.mark.parametrize("prompt", ["a", ["a", "b", "c"]])
def test_an_interrupt_cancels_what_is_waited_for(bundle: Path, gate: Gate, prompt: Any) -> None:
    with opened_llm(bundle) as llm:
        interrupt_when(gate.reached)
        with pytest.raises(KeyboardInterrupt):
            llm.generate(prompt, ignore_eos=True)
        gate.may_go.set()
        assert_idle(llm)
        assert llm.stats()["engine"]["cancelled"] == (3 if isinstance(prompt, list) else 1)
        assert llm.generate("a", **FOUR).usage.completion_tokens == 4


@pytest.mark.usefixtures("sigint")
def test_an_interrupt_while_it_opens(bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reached, may_go = threading.Event(), threading.Event()
    open_executor = Executor.open

    def slowly(*args: Any, **kwargs: Any) -> Executor:
        reached.set()
        may_go.wait(PATIENCE_S)
        return open_executor(*args, **kwargs)

    monkeypatch.setattr(Executor, "open", slowly)
    with fresh_device():
        interrupt_when(reached)
        with pytest.raises(KeyboardInterrupt):
            open_llm(bundle)
        (opening,) = open_hosts()
        may_go.set()
        opening.close()


def test_a_stream_that_is_left_is_cancelled(bundle: Path, gate: Gate) -> None:
    gate.may_go.set()
    with opened_llm(bundle) as llm:
        for piece in llm.stream("a", ignore_eos=True):
            assert piece.token_ids
            break
        unread = llm.stream("b", ignore_eos=True)
        del unread
        gc.collect()
        assert_idle(llm)
        assert llm.stats()["engine"]["cancelled"] == 2
        stream = llm.stream("c", ignore_eos=True)
        stream.cancel()
        assert list(stream) == []
        with pytest.raises(Closed, match="given up before its end"):
            stream.result()


# --- failures ----------------------------------------------------------------------------------


def test_a_stream_that_another_thread_gives_up_ends(
    bundle: Path, gate: Gate, elsewhere: Callable[..., Any]
) -> None:
    with opened_llm(bundle) as llm:
        stream = llm.stream("a", ignore_eos=True)
        reading = elsewhere(list, stream)
        assert gate.reached.wait(PATIENCE_S)
        stream.cancel()
        assert reading.result(timeout=60) == []
        gate.may_go.set()
        assert_idle(llm)


@pytest.mark.usefixtures("sigint")
def test_an_interrupt_while_the_thread_starts(
    bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(thread: threading.Thread) -> None:
        raise KeyboardInterrupt

    with fresh_device():
        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", interrupted)
            with pytest.raises(KeyboardInterrupt):
                open_llm(bundle)
        assert open_hosts() == []
        open_llm(bundle).close()  # and the next one opens


def test_what_cannot_be_opened_leaves_nothing(bundle: Path, tmp_path: Path) -> None:
    with fresh_device():
        with pytest.raises(BundleError):
            open_llm(tmp_path)
        with pytest.raises(ConfigError, match="are the least"):
            open_llm(bundle, PrefixCachingConfig(cache_capacity=1e-9))
        assert open_hosts() == []


def test_a_lost_device(bundle: Path) -> None:
    with fresh_device():
        llm = open_llm(bundle)
        faults.inject("acl.mdl.execute_async", code=507901)
        with pytest.raises(DeviceError) as caught:
            llm.generate("a", **FOUR)
        assert caught.value.code == "device_lost"
        with pytest.raises(DeviceError):
            llm.generate("a", **FOUR)
        with pytest.raises(DeviceError):
            llm.close()
        llm.close()  # it has been told
        inspect.reset()


def test_what_is_raised_in_a_block_is_not_hidden_by_the_close(bundle: Path) -> None:
    """A device that does not take everything back is told only if nothing went wrong before."""
    with fresh_device():
        faults.inject("acl.mdl.execute_async", code=507901, call=6)  # four steps an answer
        with pytest.raises(SomeFailed) as caught, open_llm(bundle, engine_max_running=1) as llm:
            llm.generate(["a", "b"], **FOUR)
        answered, failed = caught.value.results
        assert isinstance(answered, Result)
        assert isinstance(failed, DeviceError)
        inspect.reset()
        with pytest.raises(DeviceError, match="500003"), open_llm(bundle):
            faults.inject("acl.rt.destroy_stream", code=500003)
        inspect.reset()


def test_a_failure_that_nobody_waits_for_is_in_the_log(
    bundle: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with fresh_device():
        llm = open_llm(bundle)
        (opened,) = open_hosts()
        faults.inject("acl.rt.destroy_stream", code=500003)
        del llm
        gc.collect()
        with pytest.raises(DeviceError, match="500003"):
            opened.close()
        inspect.reset()
    assert '"event":"close_failed"' in capsys.readouterr().err


def test_a_service_that_raises(bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*args: Any) -> None:
        raise ZeroDivisionError

    with opened_llm(bundle) as llm:
        with monkeypatch.context() as patch:
            patch.setattr(Service, "on_message", broken)
            with pytest.raises(InternalError, match="its log has the details"):
                llm.generate("a")
        assert llm.generate("a", **FOUR).usage.completion_tokens == 4


def test_an_engine_that_does_not_drain(
    bundle: Path, gate: Gate, elsewhere: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A bug at the end costs nobody the answer that nothing comes."""

    async def broken(engine: EngineLoop, timeout_s: float) -> int:
        raise ZeroDivisionError

    monkeypatch.setattr(EngineLoop, "drain", broken)
    with fresh_device():
        llm = open_llm(bundle)
        answer = elsewhere(llm.generate, "a", ignore_eos=True)
        assert gate.reached.wait(PATIENCE_S)
        llm._host.ask_to_close()
        gate.may_go.set()
        with pytest.raises(ZeroDivisionError):
            llm.close()
        with pytest.raises(RuntimeCacheError):
            answer.result()
        inspect.reset()
