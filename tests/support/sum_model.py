"""A model whose every output a test can work out in its head, with the contract's inputs.

The new KV of a token is its id in every element (times the group's number, plus the row's). The
logits of a row are `[sum, position, 7, 0, ...]`: the sum of the ids it can see, past ones read from
the pool, and the position of the asked token. A wrong slot, mask, or append gives a wrong sum, and
memory that nobody wrote gives NaN.
"""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from om_models.manifest import FORMAT, FileEntry, Gear, KvSpec, Manifest, OmFile
from om_models.spec import ModelSpec
from runtime_cache.aclsim.atc.compiler import compile_model, tables
from runtime_cache.aclsim.atc.options import parse_options

SOC = "Ascend310P3"
SPEC = ModelSpec(
    vocab_size=12,
    hidden_size=32,
    intermediate_size=32,
    num_layers=2,
    num_heads=1,
    num_kv_heads=1,
    head_dim=32,
    rms_eps=1e-5,
    rope_theta=1e4,
    max_position=64,
    tie_embeddings=True,
)
PREFILL = (Gear(1, 4, 8), Gear(1, 8, 16))
DECODE = (Gear(1, 1, 16), Gear(4, 1, 16))


@dataclass(frozen=True)
class SumModel:
    """One variant of the model.

    Attributes:
        num_groups: 1 or 2: the two layers in one group, or one in each.
    """

    num_groups: int = 1
    kv_dtype: str = "float16"
    index_dtype: str = "int32"
    layout: str = "fused"
    num_slots: int = 32

    def __str__(self) -> str:
        return f"{self.layout}-{self.num_groups}-{self.kv_dtype}-{self.index_dtype}"

    @property
    def layers_per_group(self) -> int:
        return SPEC.num_layers // self.num_groups

    @property
    def rows_per_slot(self) -> int:
        return 2 * self.layers_per_group

    @property
    def id_weight(self) -> int:
        """What one token of id 1 adds to the sum: 1 + 2 + ... over the groups."""
        return self.num_groups * (self.num_groups + 1) // 2

    def manifest(self) -> Manifest:
        """The manifest of a bundle of this variant; no digests, since no one verifies it here."""
        fused = (OmFile("model.om", PREFILL, DECODE),)
        split = (OmFile("prefill.om", PREFILL, ()), OmFile("decode.om", (), DECODE))
        oms = fused if self.layout == "fused" else split
        return Manifest(
            format=FORMAT,
            name="sum",
            digest="0" * 64,
            target="sim",
            soc_version=SOC,
            layout="fused" if self.layout == "fused" else "split",
            dtype="float32",
            index_dtype="int32" if self.index_dtype == "int32" else "int64",
            model=SPEC,
            kv=KvSpec(
                dtype="float16" if self.kv_dtype == "float16" else "float32",
                num_slots=self.num_slots,
                num_groups=self.num_groups,
                layers_per_group=self.layers_per_group,
                row_elements=SPEC.kv_dim,
            ),
            oms=oms,
            bos_token_id=None,
            eos_token_ids=(),
            chat_template=None,
            files={om.path: FileEntry(0, "0" * 64) for om in oms},
            made_by={},
        )

    def onnx_model(self) -> onnx.ModelProto:
        """The graph; opset 17."""
        return _Graph(self).build()

    def atc_arguments(self, source: Path, om: OmFile, output: Path, soc: str) -> list[str]:
        """The command line of ATC, the real one and the software device's."""
        shapes = [
            "input_ids:-1,-1",
            "position_ids:-1,-1",
            "past_rows:-1,-1",
            "mask:-1,1,-1,-1",
            "last:-1",
            *(
                f"kv_pool_{group}:{self.num_slots * self.rows_per_slot},{SPEC.kv_dim}"
                for group in range(self.num_groups)
            ),
        ]
        gears = dict.fromkeys(om.prefill + om.decode)
        return [
            "--framework=5",
            f"--model={source}",
            f"--output={output.with_suffix('')}",
            f"--soc_version={soc}",
            "--input_format=ND",
            f"--input_shape={';'.join(shapes)}",
            f"--dynamic_dims={';'.join(_dynamic_dims(gear) for gear in gears)}",
            "--precision_mode=must_keep_origin_dtype",
        ]


#: The variants that the executor is tested with.
VARIANTS = (
    SumModel(),
    SumModel(num_groups=2),
    SumModel(layout="split"),
    SumModel(num_groups=2, kv_dtype="float32", index_dtype="int64", layout="split"),
    SumModel(kv_dtype="float32", num_slots=35),
)


def _dynamic_dims(gear: Gear) -> str:
    b, s, p = gear.batch, gear.chunk, gear.past
    return ",".join(str(dim) for dim in (b, s, b, s, b, p, b, s, p + s, b))


class _Graph:
    """Builds the graph node by node."""

    def __init__(self, model: SumModel) -> None:
        self._model = model
        self._nodes: list[onnx.NodeProto] = []
        self._constants: list[onnx.TensorProto] = []
        self._kv = TensorProto.FLOAT16 if model.kv_dtype == "float16" else TensorProto.FLOAT
        self._index = TensorProto.INT32 if model.index_dtype == "int32" else TensorProto.INT64

    def build(self) -> onnx.ModelProto:
        ids = self._node("Cast", ["input_ids"], to=TensorProto.FLOAT)
        self._new_kv(ids)
        self._logits(self._past_sums(), ids)
        graph = helper.make_graph(
            self._nodes, "sum", self._inputs(), self._outputs(), self._constants
        )
        return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)

    def _past_sums(self) -> str:
        """[B, P]: what each past slot holds, over all groups."""
        total = ""
        for group in range(self._model.num_groups):
            rows = self._node("Gather", [f"kv_pool_{group}", "past_rows"], axis=0)
            first = self._node("Gather", [rows, self._const(np.int64(0))], axis=2)
            value = self._node("Cast", [first], to=TensorProto.FLOAT)
            total = self._node("Add", [total, value]) if total else value
        return total

    def _logits(self, past: str, ids: str) -> None:
        """Everything visible summed per query, then the asked row of each batch entry."""
        weight = self._const(np.float32(self._model.id_weight))
        keys = self._node("Concat", [past, self._node("Mul", [ids, weight])], axis=1)
        keys4d = self._node("Unsqueeze", [keys, self._const(np.array([1, 2]))])
        mask = self._node("Cast", ["mask"], to=TensorProto.FLOAT)
        seen = self._node("Mul", [self._node("Exp", [mask]), keys4d])
        sums = self._node("ReduceSum", [seen, self._const(np.array([3]))], keepdims=0)
        positions = self._node("Cast", ["position_ids"], to=TensorProto.FLOAT)
        parts = [self._asked(sums, 0), self._asked(positions, 1)]
        sevens = self._const(np.eye(SPEC.vocab_size, dtype=np.float32)[2] * 7)
        self._nodes.append(helper.make_node("Add", [self._node("Add", parts), sevens], ["logits"]))

    def _asked(self, values: str, column: int) -> str:
        """[B, vocab]: each entry's asked value in one column."""
        flat = self._node("Reshape", [values, self._const(np.array([-1, 1]))])
        asked = self._node("Gather", [flat, "last"], axis=0)
        unit = np.eye(SPEC.vocab_size, dtype=np.float32)[column]
        return self._node("Mul", [asked, self._const(unit)])

    def _new_kv(self, ids: str) -> None:
        rows = np.arange(self._model.rows_per_slot, dtype=np.float32)
        ramp = np.repeat(rows[:, None], SPEC.kv_dim, axis=1)
        ids4d = self._node("Unsqueeze", [ids, self._const(np.array([2, 3]))])
        for group in range(self._model.num_groups):
            scaled = self._node("Mul", [ids4d, self._const(np.float32(group + 1))])
            value = self._node("Add", [scaled, self._const(ramp)])
            self._nodes.append(helper.make_node("Cast", [value], [f"new_kv_{group}"], to=self._kv))

    def _inputs(self) -> list[onnx.ValueInfoProto]:
        info, index = helper.make_tensor_value_info, self._index
        pool = [self._model.num_slots * self._model.rows_per_slot, SPEC.kv_dim]
        groups = range(self._model.num_groups)
        return [
            info("input_ids", index, ["B", "S"]),
            info("position_ids", index, ["B", "S"]),
            info("past_rows", index, ["B", "P"]),
            info("mask", self._kv, ["B", 1, "S", "K"]),
            info("last", index, ["B"]),
            *(info(f"kv_pool_{group}", self._kv, pool) for group in groups),
        ]

    def _outputs(self) -> list[onnx.ValueInfoProto]:
        info = helper.make_tensor_value_info
        new_kv = ["B", "S", self._model.rows_per_slot, SPEC.kv_dim]
        return [
            info("logits", TensorProto.FLOAT, ["B", SPEC.vocab_size]),
            *(info(f"new_kv_{group}", self._kv, new_kv) for group in range(self._model.num_groups)),
        ]

    def _node(self, operator: str, inputs: Sequence[str], **attributes: Any) -> str:
        name = f"{operator}_{len(self._nodes)}"
        self._nodes.append(helper.make_node(operator, inputs, [name], name=name, **attributes))
        return name

    def _const(self, value: np.ndarray | np.generic) -> str:
        name = f"const_{len(self._constants)}"
        self._constants.append(numpy_helper.from_array(np.asarray(value), name))
        return name


def compile_sum_model(model: SumModel, directory: Path) -> None:
    """Writes the `.om` file(s) of a variant, with the software device's compiler.

    Raises:
        AtcError: the compiler refused.
    """
    for arguments in _command_lines(model, directory, SOC):
        compile_model(parse_options(arguments, tables().soc_versions))


def compile_sum_model_with_atc(model: SumModel, directory: Path, soc: str) -> None:
    """The same for a card, with the vendor's compiler.

    Raises:
        CalledProcessError: the compiler refused.
    """
    for arguments in _command_lines(model, directory, soc):
        subprocess.run(["atc", *arguments], check=True)


def _command_lines(model: SumModel, directory: Path, soc: str) -> list[list[str]]:
    source = directory / "sum.onnx"
    onnx.save(model.onnx_model(), source)
    return [
        model.atc_arguments(source, om, directory / om.path, soc) for om in model.manifest().oms
    ]
