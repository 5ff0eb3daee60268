"""Programs that say `import acl`, run on the software device; small models for them.

A model comes with the numpy function that says what it has to give. Numbers are small whole ones
where a model works in half precision, so that results are exact in any order of additions.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
from onnx import TensorProto, helper, numpy_helper

from runtime_cache.aclsim.atc import compiler
from runtime_cache.aclsim.atc.options import parse_options

ROOT = Path(__file__).parents[2]
PROGRAMS = ROOT / "tests" / "programs"
CARD, BOARD = "Ascend310P3", "Ascend310B4"
Array = npt.NDArray[Any]


@dataclass(frozen=True, slots=True)
class Ended:
    """A program that has ended.

    Attributes:
        err: with the report of misuse at its end.
    """

    code: int
    out: str
    err: str

    @property
    def misuses(self) -> list[tuple[str, str]]:
        """(kind, sentence) of each misuse in the report at its end."""
        found = json.loads(self.err.splitlines()[-1])
        return [(one["kind"], one["sentence"]) for one in found["misuses"]]


def run_program(
    name: str | Path,
    *args: str | Path,
    soc: str = CARD,
    flags: Sequence[str] = (),
    gil_limit_ms: int = 600_000,
) -> Ended:
    """Runs a program of `tests/programs` on the software device, to its end.

    Args:
        name: in that directory, or the path of another one.
        flags: of `python -m runtime_cache.aclsim run`.
        gil_limit_ms: from when on a call is named slow; by default none is, on a busy machine too.
    """
    command = [sys.executable, "-m", "runtime_cache.aclsim", "run", "--json", "--soc", soc, *flags]
    env = {k: v for k, v in os.environ.items() if not k.startswith("RTCACHE_")}
    done = subprocess.run(
        [*command, str(PROGRAMS / name), *map(str, args)],
        cwd=ROOT,
        env=env | {"RTCACHE_ACLSIM_GIL_LIMIT_MS": str(gil_limit_ms)},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    return Ended(done.returncode, done.stdout, done.stderr)


def compile_model(
    model: onnx.ModelProto, directory: Path, *flags: str, soc: str = CARD, name: str = "model"
) -> Path:
    """Compiles in this process, for speed; one test does it by command."""
    source = directory / f"{name}.onnx"
    onnx.save_model(model, source)
    base = ["--framework=5", f"--model={source}", f"--output={directory / name}"]
    options = [*base, f"--soc_version={soc}", "--input_format=ND", *flags]
    return Path(compiler.compile_model(parse_options(options, compiler.tables().soc_versions)))


# --- a classifier: scores = flat(picture) · weights + bias ---

PICTURE = (3, 8, 8)
NUM_CLASSES = 10


def classifier_weights() -> tuple[Array, Array]:
    random = np.random.RandomState(1)
    weights = random.standard_normal((int(np.prod(PICTURE)), NUM_CLASSES)).astype(np.float32)
    return weights, random.standard_normal(NUM_CLASSES).astype(np.float32)


def classifier(batch: int | str = 1) -> onnx.ModelProto:
    """[batch, 3, 8, 8] fp32 pictures to [batch, 10] fp32 scores."""
    weights, bias = classifier_weights()
    nodes = [
        helper.make_node("Reshape", ["picture", "flat"], ["row"], name="flatten"),
        helper.make_node("Gemm", ["row", "weights", "bias"], ["scores"], name="classify"),
    ]
    flat = np.array([-1, int(np.prod(PICTURE))], np.int64)
    constants = {"weights": weights, "bias": bias, "flat": flat}
    return _model(
        nodes,
        {"picture": (TensorProto.FLOAT, [batch, *PICTURE])},
        {"scores": (TensorProto.FLOAT, [batch, NUM_CLASSES])},
        constants,
    )


def difference() -> onnx.ModelProto:
    """[1, 10] fp32, twice, to what the first has more than the second."""
    kind = (TensorProto.FLOAT, [1, NUM_CLASSES])
    nodes = [helper.make_node("Sub", ["left", "right"], ["more"], name="compare")]
    return _model(nodes, {"left": kind, "right": kind}, {"more": kind}, {})


def classify(pictures: Array) -> Array:
    """[n, 3, 8, 8] to [n, 10]."""
    weights, bias = classifier_weights()
    scores: Array = pictures.reshape(len(pictures), -1) @ weights + bias
    return scores


def pictures(count: int, seed: int = 2) -> Array:
    """[count, 3, 8, 8] fp32."""
    random = np.random.RandomState(seed)
    return random.standard_normal((count, *PICTURE)).astype(np.float32)


# --- a language model that sums what it has seen: exact in half precision ---

VOCAB, ROWS, HEAD_SIZE = 32, 4, 4


def llm_tables() -> tuple[Array, Array, Array]:
    """Rows of tokens and of positions [.., rows · head size] fp16 of -3..3, output matrix fp32."""
    random = np.random.RandomState(3)
    width = ROWS * HEAD_SIZE
    tokens = random.randint(-3, 4, (VOCAB, width)).astype(np.float16)
    positions = random.randint(-3, 4, (64, width)).astype(np.float16)
    return tokens, positions, random.standard_normal((width, VOCAB)).astype(np.float32)


def answer(prompt: Sequence[int], num_tokens: int) -> list[int]:
    """Greedy: the next token is the best one for the sum of the rows so far, positions added."""
    tokens, positions, output = llm_tables()
    ids = list(prompt)
    while len(ids) < len(prompt) + num_tokens:
        seen = tokens[ids].astype(np.float32) + positions[: len(ids)]
        ids.append(int(np.argmax(seen.sum(axis=0) @ output)))
    return ids[len(prompt) :]


def token_major_llm() -> onnx.ModelProto:
    """ids, mask over past and fed, positions, past [1, P, rows, head size]; logits, new rows."""
    nodes = [
        *_embed("input_ids", "position_ids"),
        helper.make_node("Reshape", ["embedded", "row_shape"], ["new_key_values"], name="shape"),
        helper.make_node("Concat", ["past_key_values", "new_key_values"], ["seen"], axis=1),
        helper.make_node("Reshape", ["seen", "flat"], ["seen_rows"], name="flatten"),
        *_sum_up("seen_rows"),
        # One row of logits for each fed token; all but the last would be wrong, and are unused.
        helper.make_node("Cast", ["embedded"], ["fed"], to=TensorProto.FLOAT),
        helper.make_node("Mul", ["fed", "zero"], ["nothing"]),
        helper.make_node("Add", ["nothing", "total"], ["repeated"]),
        helper.make_node("MatMul", ["repeated", "output"], ["logits"]),
    ]
    width = ROWS * HEAD_SIZE
    constants = _llm_constants() | {
        "row_shape": np.array([1, -1, ROWS, HEAD_SIZE], np.int64),
        "flat": np.array([1, -1, width], np.int64),
        "zero": np.zeros(1, np.float32),
    }
    inputs = {
        "input_ids": (TensorProto.INT64, [1, "S"]),
        "attention_mask": (TensorProto.INT64, [1, "PS"]),
        "position_ids": (TensorProto.INT64, [1, "S"]),
        "past_key_values": (TensorProto.FLOAT16, [1, "P", ROWS, HEAD_SIZE]),
    }
    outputs = {
        "logits": (TensorProto.FLOAT, [1, "S", VOCAB]),
        "new_key_values": (TensorProto.FLOAT16, [1, "S", ROWS, HEAD_SIZE]),
    }
    return _model(nodes, inputs, outputs, constants)


def token_major_gears(fed: Sequence[int], past: Sequence[int]) -> tuple[str, str]:
    """ATC's flags for `token_major_llm`: every number of fed tokens with every past."""
    shapes = f"input_ids:1,-1;attention_mask:1,-1;position_ids:1,-1;past_key_values:1,-1,{ROWS},4"
    gears = [f"{s},{p + s},{s},{p}" for p in past for s in fed]
    return f"--input_shape={shapes}", f"--dynamic_dims={';'.join(gears)}"


LAYERS, HEADS = 2, 1


def board_llm(room: int) -> onnx.ModelProto:
    """One token, a mask, and a past of six dimensions, [layers, 2, 1, heads, room, head size]."""
    column = [LAYERS, 2, 1, HEADS, 1, HEAD_SIZE]
    nodes = [
        helper.make_node(
            "ReduceSum", ["attention_mask", "axes"], ["count"], keepdims=1, name="count"
        ),
        helper.make_node("Sub", ["count", "one"], ["position"]),
        *_embed("input_ids", "position"),
        helper.make_node("Reshape", ["embedded", "column_shape"], ["new_key_values"]),
        helper.make_node("Concat", ["past", "new_key_values"], ["seen"], axis=4),
        # [layers, 2, 1, heads, room + 1, head] to [room + 1, layers · 2 · heads · head]
        helper.make_node("Transpose", ["seen"], ["turned"], perm=[2, 4, 0, 1, 3, 5]),
        helper.make_node("Reshape", ["turned", "flat"], ["seen_rows"], name="flatten"),
        *_sum_up("seen_rows"),
        helper.make_node("MatMul", ["total", "output"], ["logits"]),
    ]
    constants = _llm_constants() | {
        "axes": np.array([1], np.int64),
        "one": np.ones(1, np.int64),
        "column_shape": np.array(column, np.int64),
        "flat": np.array([1, room + 1, ROWS * HEAD_SIZE], np.int64),
    }
    inputs = {
        "input_ids": (TensorProto.INT64, [1, 1]),
        "attention_mask": (TensorProto.INT64, [1, room + 1]),
        "past": (TensorProto.FLOAT16, [LAYERS, 2, 1, HEADS, room, HEAD_SIZE]),
    }
    outputs = {
        "logits": (TensorProto.FLOAT, [1, 1, VOCAB]),
        "new_key_values": (TensorProto.FLOAT16, column),
    }
    return _model(nodes, inputs, outputs, constants)


def _embed(ids: str, positions: str) -> list[onnx.NodeProto]:
    """embedded [1, S, rows · head size] fp16: the token's row plus its position's."""
    return [
        helper.make_node("Gather", ["tokens", ids], ["token_rows"], axis=0),
        helper.make_node("Gather", ["positions", positions], ["placed"], axis=0),
        helper.make_node("Add", ["token_rows", "placed"], ["embedded"]),
    ]


def _sum_up(seen: str) -> list[onnx.NodeProto]:
    """total [1, 1, rows · head size] fp32: the sum of all rows that the mask shows."""
    return [
        helper.make_node("Cast", [seen], ["seen_wide"], to=TensorProto.FLOAT),
        helper.make_node("Cast", ["attention_mask"], ["shown"], to=TensorProto.FLOAT),
        helper.make_node("Reshape", ["shown", "as_row"], ["mask_row"], name="mask_row"),
        helper.make_node("MatMul", ["mask_row", "seen_wide"], ["total"], name="sum"),
    ]


def _llm_constants() -> dict[str, Array]:
    tokens, positions, output = llm_tables()
    as_row = np.array([1, 1, -1], np.int64)
    return {"tokens": tokens, "positions": positions, "output": output, "as_row": as_row}


# --- a model of no fixed shape ---


def any_shape(rows: int | str = "rows", columns: int | str = "columns") -> onnx.ModelProto:
    """y [columns, rows] = 2 · transposed x [rows, columns], fp32."""
    nodes = [
        helper.make_node("Transpose", ["x"], ["turned"], perm=[1, 0], name="turn"),
        helper.make_node("Mul", ["turned", "two"], ["y"], name="double"),
    ]
    return _model(
        nodes,
        {"x": (TensorProto.FLOAT, [rows, columns])},
        {"y": (TensorProto.FLOAT, [columns, rows])},
        {"two": np.array([2], np.float32)},
    )


def _model(
    nodes: Sequence[onnx.NodeProto],
    inputs: dict[str, tuple[int, list[Any]]],
    outputs: dict[str, tuple[int, list[Any]]],
    constants: dict[str, Array],
) -> onnx.ModelProto:
    graph = helper.make_graph(
        list(nodes),
        "small",
        [helper.make_tensor_value_info(k, *v) for k, v in inputs.items()],
        [helper.make_tensor_value_info(k, *v) for k, v in outputs.items()],
        [numpy_helper.from_array(v, k) for k, v in constants.items()],
    )
    for index, node in enumerate(graph.node):
        node.name = node.name or f"{node.op_type}_{index}"
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
