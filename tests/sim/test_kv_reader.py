"""KV brought to the host: what is read, in which order, and what happens if it cannot be."""

from __future__ import annotations

import numpy as np
import pytest

from runtime_cache.aclsim import faults, inspect
from runtime_cache.device import kv_reader
from runtime_cache.device.acl_device import AclDevice
from runtime_cache.device.kv_layout import KvLayout
from runtime_cache.device.kv_pool import KvPool
from runtime_cache.device.kv_reader import KvReader
from runtime_cache.errors import AclError, InternalError
from tests.sim.conftest import Opener
from tests.support.aclsim import download, put
from tests.support.devices import num_leaked
from tests.support.sum_chat import BLOCK, ONE, SMALL, Chat, step
from tests.support.sum_model import SPEC, VARIANTS, SumModel

LAYOUT = KvLayout(
    num_slots=12, num_groups=2, layers_per_group=1, row_elements=32, dtype="float16", block_size=4
)


@pytest.mark.parametrize(
    ("piece_bytes", "num_tokens"),
    [(1, 1), (255, 1), (256, 1), (511, 1), (512, 2), (1024, 4), (4096, 4)],
)
def test_a_piece_is_a_token_at_least_and_a_block_at_most(
    sum_device: AclDevice, monkeypatch: pytest.MonkeyPatch, piece_bytes: int, num_tokens: int
) -> None:
    monkeypatch.setattr(kv_reader, "_PIECE_BYTES", piece_bytes)
    pool = KvPool(sum_device, LAYOUT)
    reader = KvReader(sum_device, pool)
    assert reader.max_tokens == num_tokens
    with pytest.raises(InternalError, match="are read at once"):
        reader.queue(4, num_tokens + 1)
    reader.close()
    pool.close()


@pytest.mark.parametrize("num_tokens", [1, 3, 4])
def test_the_rows_of_every_group_side_by_side(sum_device: AclDevice, num_tokens: int) -> None:
    pool = KvPool(sum_device, LAYOUT)
    content = np.arange(2 * 4 * 128, dtype=np.uint8).reshape(2, 4, 128)
    content[1] += 1
    for group in (0, 1):
        put(pool.run_ptr(group, 8, 4), content[group])
    reader = KvReader(sum_device, pool)
    rows = reader.queue(8, num_tokens)
    sum_device.synchronize(10_000)
    assert (rows == content[:, :num_tokens]).all()
    reader.close()
    reader.close()
    pool.close()
    assert num_leaked() == 0


def test_only_blocks_of_tokens_are_read(sum_device: AclDevice) -> None:
    pool = KvPool(sum_device, LAYOUT)
    reader = KvReader(sum_device, pool)
    for first_slot, num_tokens in ((3, 1), (11, 2), (4, 0)):
        with pytest.raises(InternalError, match="are not for tokens"):
            reader.queue(first_slot, num_tokens)
    reader.close()
    pool.close()


@pytest.mark.parametrize("model", VARIANTS, ids=str)
def test_the_executor_reads_what_its_steps_wrote(model: SumModel, open_executor: Opener) -> None:
    executor, chat = open_executor(model), Chat(model, [2])
    executor.run(step(SMALL, chat.feed(5, 3)))
    assert executor.max_read_tokens == BLOCK
    rows = executor.read(2 * BLOCK, 2)
    per_group = [
        download(
            executor._pool.run_ptr(group, 2 * BLOCK, 2),
            model.kv_dtype,
            2 * model.rows_per_slot * SPEC.kv_dim,
        )
        for group in range(model.num_groups)
    ]
    assert rows == b"".join(part.tobytes() for part in per_group)
    assert np.isfinite(np.frombuffer(rows, model.kv_dtype)).all()
    # Reading changed nothing, and is not a step.
    assert executor.read(2 * BLOCK, 2) == rows
    assert executor.run(step(ONE, chat.feed(1))).tolist() == [chat.logits()]
    assert executor.counters["prefill"].num_steps == executor.counters["decode"].num_steps == 1


def test_what_nobody_wrote_is_no_number(open_executor: Opener) -> None:
    executor = open_executor()
    values = np.frombuffer(executor.read(BLOCK, BLOCK), VARIANTS[0].kv_dtype)
    assert np.isnan(values).all()


@pytest.mark.parametrize("when", ["call", "run"])
def test_a_read_that_fails_changes_nothing(when: faults.When, open_executor: Opener) -> None:
    model = VARIANTS[0]
    executor, chat = open_executor(model), Chat(model, [1])
    executor.run(step(SMALL, chat.feed(5, 3)))
    fault = faults.inject("acl.rt.memcpy_async", code=507015, when=when)
    with pytest.raises(AclError, match="507015"):
        executor.read(BLOCK, 2)
    assert (fault.has_fired, executor.is_in_flight) == (True, False)
    assert np.isfinite(np.frombuffer(executor.read(BLOCK, 2), model.kv_dtype)).all()
    assert executor.run(step(ONE, chat.feed(1))).tolist() == [chat.logits()]


def test_a_read_waits_for_a_step_that_did_not_end_and_a_step_for_a_read(
    sum_device: AclDevice, open_executor: Opener
) -> None:
    model = VARIANTS[0]
    executor, chat = open_executor(model, step_timeout_ms=20), Chat(model, [3])
    with inspect.hold(sum_device.stream):
        with pytest.raises(AclError, match="507046"):
            executor.run(step(ONE, Chat(model, [1]).feed(1)))
        inspect.clear()
        with pytest.raises(AclError, match="507046"):
            executor.read(BLOCK, 1)
        assert "acl.rt.memcpy_async" not in inspect.report().calls
    sum_device.synchronize(30_000)
    with inspect.hold(sum_device.stream):
        with pytest.raises(AclError, match="507046"):
            executor.read(BLOCK, 1)
        assert executor.is_in_flight
    sum_device.synchronize(30_000)
    assert executor.run(step(ONE, chat.feed(9))).tolist() == [chat.logits()]
    assert not executor.is_in_flight
    inspect.clear()  # expired waits count as misuses
