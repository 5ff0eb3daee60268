"""A model whose KV rows say what they are, and whose logits say whether the rows it read are right.

Every new KV row holds four codes, over and over: the token's position, the number of the row (layer
and K or V, over all groups), the token, and a taint. A past slot is expected to hold its own index
as position, the numbers of all rows, one token, and no taint. The first logits of a query report
what it saw, negated so that no report is ever the greedy answer:

    0  how far the positions of all visible past rows are from the slots' indices, added up
    1  the same for the numbers of the rows
    2  the checksum of all visible tokens, weighted by position
    3  rows that disagree about their token, taints, and a wrong position of the query itself

A query that saw anything wrong taints the rows it writes, so that a wrong read is found later even
if nobody asked for its logits. Memory that nobody wrote gives NaN. The other logits decide the
greedy answer, which follows from the checksum; the best two are 1 apart. All numbers are integers,
exact in the KV type and in float32.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import numpy as np

from om_models import convert
from om_models.bundle import Bundle
from om_models.contract import GraphContract
from om_models.graph import GraphOptions, Progress
from om_models.null_model import NUM_BYTE_TOKENS, null_tokenizer
from om_models.onnx_writer import ONNX_DTYPES, OnnxWriter, open_onnx
from om_models.plan import ConvertOptions
from om_models.spec import ModelSpec
from om_models.tokenizer import TokenizerSource
from tests.support.tiny import Silent

SPEC = ModelSpec(
    vocab_size=NUM_BYTE_TOKENS + 1,
    hidden_size=16,
    intermediate_size=16,
    num_layers=4,
    num_heads=1,
    num_kv_heads=1,
    head_dim=16,
    rms_eps=1e-5,
    rope_theta=10000.0,
    max_position=512,
    tie_embeddings=True,
)
_GEARS = "prefill=8,32@32,128 decode=1,2,4@32,128"
#: What it is tested in.
CODED_VARIANTS = {
    "fp32": ConvertOptions("sim", kv_tokens=512, dtype="float32", gears=_GEARS),
    "fp16, two groups, split, int64": ConvertOptions(
        "sim",
        kv_tokens=512,
        dtype="float16",
        gears=_GEARS,
        layout="split",
        num_kv_groups=2,
        index_dtype="int64",
    ),
}
#: Reports before the first token that can be an answer.
NUM_REPORTS = 4
#: Tokens that can be an answer; a power of 2, so that the division by it is exact.
NUM_ANSWERS = 128

_NUM_CODES = 4
_POSITION, _ROW, _TOKEN, _TAINT = range(_NUM_CODES)
_PERIOD = 31


def checksum(tokens: Sequence[int]) -> int:
    """What logit 2 reports, negated; every token counts with its position."""
    return sum(_weight(place) * (token + 1) for place, token in enumerate(tokens))


def right_report(tokens: Sequence[int]) -> list[float]:
    """The first logits after these tokens if every row read was the right one."""
    return [0.0, 0.0, float(-checksum(tokens)), 0.0]


def answer(prompt: Sequence[int], num_tokens: int) -> list[int]:
    """The greedy answer."""
    tokens = list(prompt)
    for _ in range(num_tokens):
        tokens.append(NUM_REPORTS + checksum(tokens) % NUM_ANSWERS)
    return tokens[len(prompt) :]


def make_coded_bundle(directory: Path, options: ConvertOptions) -> Bundle:
    """A bundle of the model, compiled by the software device's ATC."""
    with mock.patch.object(convert, "open_source", _open_coded):
        return convert.convert("coded", directory / "bundle", options, Silent())


class CodedModel:
    """A `ModelSource`."""

    label = "coded"
    spec = SPEC

    def write_graph(self, options: GraphOptions, onnx_path: Path, progress: Progress) -> str:
        """Write the graph, which has no weights."""
        with open_onnx(onnx_path) as writer:
            _CodedGraph(writer, options).build()
        progress(1, 1)
        return hashlib.sha256(b"coded model").hexdigest()

    def tokenizer(self) -> TokenizerSource:
        """A byte-level vocabulary; its end token is never an answer."""
        return null_tokenizer()


@contextmanager
def _open_coded(source: str, scratch: Path) -> Iterator[CodedModel]:
    yield CodedModel()


def _weight(position: int) -> int:
    """Odd, so that the answers depend on every token; 2^24 is not reached before 1000 tokens."""
    return 2 * (position % _PERIOD) + 1


class _CodedGraph:
    """B sequences, S fed tokens, P past slots, T = P + S, R rows a slot and group, E elements."""

    def __init__(self, writer: OnnxWriter, options: GraphOptions) -> None:
        self._w = writer
        self._options = options
        self._rows = 2 * options.kv.layers_per_group
        table = [_weight(position) for position in range(options.max_model_len)]
        self._weights = writer.constant(np.array(table, np.float32))

    def build(self) -> None:
        w, options = self._w, self._options
        contract = GraphContract(options.kv, options.index_dtype, SPEC.vocab_size)
        w.inputs(contract.inputs)
        seen = self._seen(w.op("Concat", self._past_keys(), self._fed_keys(), axis=1))
        new_kv = [self._new_kv(group, seen) for group in range(options.kv.num_groups)]
        w.outputs([self._logits(seen), *new_kv], contract.outputs)

    def _past_keys(self) -> str:
        """What each past slot would add to each report [B, P, 4]."""
        w = self._w
        ones = w.op("Add", w.op("Mul", "past_rows", self._index(0)), self._index(1))
        index = w.op("CumSum", ones, self._index(1), exclusive=1)  # [B, P]: 0, 1, 2, ...
        groups = range(self._options.kv.num_groups)
        rows = [self._pool_rows(group) for group in groups]
        tokens = w.op("Gather", rows[0], w.ints(0), axis=2)
        tokens = w.op("Gather", tokens, w.ints(_TOKEN), axis=3)  # [B, P, 1, 1]
        positions = self._each(self._float(w.op("Unsqueeze", index, w.ints(2, 3))), _POSITION)
        wrong_positions = self._sum([self._wrong(r, _POSITION, positions) for r in rows])
        wrong_rows = self._sum(
            [self._wrong(r, _ROW, w.constant(self._row_codes(g))) for g, r in enumerate(rows)]
        )
        no_taint = w.constant(np.zeros((1,), np.float32))
        others = [self._wrong(r, _TOKEN, self._each(tokens, _TOKEN)) for r in rows]
        others += [self._wrong(r, _TAINT, no_taint) for r in rows]
        token = w.op("Reshape", tokens, w.ints(0, 0))
        return self._columns(
            wrong_positions, wrong_rows, self._weighted(token, index), self._sum(others)
        )

    def _pool_rows(self, group: int) -> str:
        """All rows of the past slots [B, P, R, E], float32."""
        w = self._w
        offsets = w.constant(np.arange(self._rows, dtype=self._options.index_dtype)[None, None])
        slots = w.op("Add", w.op("Unsqueeze", "past_rows", w.ints(2)), offsets)
        return self._float(w.op("Gather", f"kv_pool_{group}", slots, axis=0))

    def _wrong(self, rows: str, code: int, expected: str) -> str:
        """How far one code is from what is expected in every element that holds it [B, P]."""
        w = self._w
        found = w.op("Mul", rows, w.constant(self._holders(code)))
        return w.op(
            "ReduceSum", w.op("Abs", w.op("Sub", found, expected)), w.ints(2, 3), keepdims=0
        )

    def _fed_keys(self) -> str:
        """The fed tokens: nothing is wrong with them, but they count for the checksum [B, S, 4]."""
        ids = self._float("input_ids")
        nothing = self._w.op("Mul", ids, self._w.constant(np.zeros((1,), np.float32)))
        return self._columns(nothing, nothing, self._weighted(ids, "position_ids"), nothing)

    def _weighted(self, tokens: str, positions: str) -> str:
        w = self._w
        one = w.constant(np.ones((1,), np.float32))
        weights = w.op("Gather", self._weights, positions, axis=0)
        return w.op("Mul", weights, w.op("Add", tokens, one))

    def _seen(self, keys: str) -> str:
        """The four reports of every query [B, S, 4]."""
        w = self._w
        visible = w.op("Exp", self._float("mask"))  # exactly 1 or 0
        visible = w.op("Reshape", visible, self._visible_shape())  # [B, S, T]
        reports = w.op("MatMul", visible, keys)
        num_before = w.op("ReduceSum", visible, w.ints(2), keepdims=1)
        one = w.constant(np.ones((1,), np.float32))
        position = w.op("Unsqueeze", self._float("position_ids"), w.ints(2))
        wrong = w.op("Abs", w.op("Sub", position, w.op("Sub", num_before, one)))
        return w.op("Add", reports, w.op("Mul", wrong, w.constant(_unit(3))))

    def _visible_shape(self) -> str:
        """Of the mask without its axis of heads; batch is told by the zero, S by the ids."""
        w = self._w
        fed, both = w.op("Shape", "input_ids"), w.op("Shape", "mask")
        return w.op("Concat", fed, w.op("Gather", both, w.ints(3), axis=0), axis=0)

    def _new_kv(self, group: int, seen: str) -> str:
        """The fed tokens' rows [B, S, R, E], KV type."""
        w = self._w
        is_bad = w.constant(np.array([[1], [1], [0], [1]], np.float32))
        taint = w.op("Min", w.op("MatMul", seen, is_bad), w.constant(np.ones((1,), np.float32)))
        codes = {_TAINT: w.op("Unsqueeze", taint, w.ints(3))}
        for code, name in ((_POSITION, "position_ids"), (_TOKEN, "input_ids")):
            codes[code] = w.op("Unsqueeze", self._float(name), w.ints(2, 3))  # [B, S, 1, 1]
        rows = w.constant(self._row_codes(group))
        for code, value in codes.items():
            rows = w.op("Add", self._each(value, code), rows)
        return w.op("Cast", rows, to=ONNX_DTYPES[self._options.kv.dtype])

    def _logits(self, seen: str) -> str:
        """Four reports, then the answers [B, vocab]."""
        w = self._w
        flat = w.op("Reshape", seen, w.ints(-1, NUM_REPORTS))
        asked = w.op("Gather", flat, "last", axis=0)  # [B, 4]
        total = w.op("Gather", asked, w.ints(2), axis=1)  # [B, 1]
        many = w.constant(np.array([NUM_ANSWERS], np.float32))
        rest = w.op("Sub", total, w.op("Mul", w.op("Floor", w.op("Div", total, many)), many))
        candidates = np.arange(SPEC.vocab_size, dtype=np.float32) - NUM_REPORTS
        distance = w.op("Abs", w.op("Sub", w.constant(candidates[None]), rest))
        closeness = w.op("Sub", w.constant(np.array([SPEC.vocab_size], np.float32)), distance)
        is_answer = (candidates >= 0).astype(np.float32)
        negated = -np.eye(NUM_REPORTS, SPEC.vocab_size, dtype=np.float32)
        return w.op(
            "Add",
            w.op("MatMul", asked, w.constant(negated)),
            w.op("Mul", closeness, w.constant(is_answer[None])),
        )

    # --- small parts -----------------------------------------------------------------------------

    def _columns(self, *values: str) -> str:
        """Four [B, N] side by side: [B, N, 4]."""
        w = self._w
        return w.op("Concat", *(w.op("Unsqueeze", v, w.ints(2)) for v in values), axis=2)

    def _sum(self, values: Sequence[str]) -> str:
        total, *others = values
        for value in others:
            total = self._w.op("Add", total, value)
        return total

    def _each(self, value: str, code: int) -> str:
        """`value` [..., 1] in every element that holds `code`, 0 elsewhere [..., E]."""
        return self._w.op("Mul", value, self._w.constant(self._holders(code)))

    def _holders(self, code: int) -> np.ndarray[tuple[int], np.dtype[np.float32]]:
        """1 in each of the E elements that hold `code`."""
        elements = np.arange(self._options.kv.row_elements)
        return (elements % _NUM_CODES == code).astype(np.float32)

    def _row_codes(self, group: int) -> np.ndarray[tuple[int, ...], np.dtype[np.float32]]:
        """The numbers of a group's rows, from 1 over all groups [R, E]; the null block has none."""
        first = 1 + group * self._rows
        numbers = np.arange(first, first + self._rows, dtype=np.float32)
        return numbers[:, None] * self._holders(_ROW)

    def _float(self, value: str) -> str:
        return self._w.op("Cast", value, to=ONNX_DTYPES["float32"])

    def _index(self, value: int) -> str:
        return self._w.constant(np.array(value, self._options.index_dtype))


def _unit(column: int) -> np.ndarray[tuple[int, ...], np.dtype[np.float32]]:
    return np.eye(NUM_REPORTS, dtype=np.float32)[column]
