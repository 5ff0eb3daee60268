"""The do-nothing model keeps the contract and answers reproducibly."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from om_models.graph import GraphOptions
from om_models.manifest import Gear
from om_models.null_model import NULL_DIGEST, NULL_SPEC, null_tokenizer, write_null_model
from om_models.plan import ConvertOptions, make_plan
from om_models.sources import source_defaults
from tests.support.graph_runner import GraphRunner, Row


@pytest.fixture
def graph(tmp_path: Path) -> GraphRunner:
    options = source_defaults("null", ConvertOptions(target="sim", kv_tokens=4096))
    plan = make_plan(NULL_SPEC, options)
    graph_options = GraphOptions(plan.dtype, plan.index_dtype, plan.kv, plan.gears.max_model_len)
    path = tmp_path / "model.onnx"
    assert write_null_model(graph_options, path, lambda done, total: None) == NULL_DIGEST
    return GraphRunner(path, plan.kv)


def test_a_token_takes_128_bytes_of_kv(graph: GraphRunner):
    assert sum(pool[0].nbytes for pool in graph.pools) == 128


def test_logits_depend_on_token_and_position_only(graph: GraphRunner):
    slots = graph.take_slots(20)
    chunk = graph.run(Gear(1, 16, 64), [Row([9, 8, 7], [], slots[:3])])
    rows = [Row([7], slots[:2], [slots[2]]), Row([7], slots[:3], [slots[3]])]
    decoded = graph.run(Gear(4, 1, 64), rows)
    np.testing.assert_array_equal(decoded[0], chunk[0])
    assert not np.array_equal(decoded[1], chunk[0])
    candidates = np.arange(1, 258)
    expected = np.cos((0.7548777 * 7 + 0.5698403 * 2) * candidates)
    np.testing.assert_allclose(chunk[0], expected, atol=1e-3, rtol=0)


def test_greedy_answers_wander(graph: GraphRunner):
    slots, token, answer = graph.take_slots(64), 65, []
    for position in range(64):
        row = Row([token], slots[:position], [slots[position]])
        token = int(graph.run(Gear(1, 1, 64), [row])[0].argmax())
        answer.append(token)
    assert len(set(answer)) > 20


def test_new_kv_holds_the_token(graph: GraphRunner):
    slots = graph.take_slots(2)
    graph.run(Gear(1, 16, 64), [Row([5, 200], [], slots)])
    assert np.unique(graph.pools[0][slots[0]]).tolist() == [5]
    assert np.unique(graph.pools[0][slots[1]]).tolist() == [200]


def test_the_tokenizer_has_one_token_a_byte():
    tokenizer = null_tokenizer().tokenizer()
    ids = tokenizer.encode("né\n", add_bos=False)
    assert len(ids) == 4
    assert max(ids) < 256
    assert tokenizer.decode(ids) == "né\n"
    assert (tokenizer.bos_token_id, tokenizer.eos_token_ids) == (None, frozenset({256}))
    assert tokenizer.vocab_size == NULL_SPEC.vocab_size
