"""The codes that users of ATC meet most, each at the limit where it begins.

The table is that of the public error pages (hicann/ge @ffdcbc9f, docs/en/user_guides/error_codes).
E10501 (no Ascend operator behind a parser) and E4xxxx (the Python of CANN) have no cause here.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import onnx
import pytest

from runtime_cache.aclsim.atc.compiler import compile_model, tables
from runtime_cache.aclsim.atc.graph import check_operators
from runtime_cache.aclsim.atc.options import AtcError, parse_options
from tests.support.aclsim import GEARS, STATIC, add_model, compile_om

#: Code: (flags that get it), (flags that just do not).
CASES: dict[str, tuple[Sequence[Sequence[str]], Sequence[Sequence[str]]]] = {
    "E10001": (
        [(*STATIC, "--log=loud"), ("--input_shape=x:2,3",), (*STATIC, "--soc_version=Ascend310P9")],
        [(*STATIC, "--log=info"), STATIC, (*STATIC, "--soc_version=Ascend310P7")],
    ),
    "E10002": (
        [("--input_shape=x,2,3;bias:3",), ("--input_shape=x:2,3;x:2,3;bias:3",)],
        [("--input_shape=x:2,3;bias:3;",)],
    ),
    "E10003": ([(*STATIC, "--lof=info")], [(*STATIC, "--log=info")]),
    "E10004": ([(*STATIC, "--log=")], [(*STATIC, "--log=null")]),
    "E10005": (
        [(*STATIC, "--enable_single_stream=1")],
        [(*STATIC, "--enable_single_stream=true")],
    ),
    "E10006": (
        [(*STATIC, "--deterministic=2"), (*STATIC, "--deterministic=true")],
        [(*STATIC, "--deterministic=1")],
    ),
    "E10011": (
        [("--input_shape=x:0,3;bias:3",), ("--input_shape=x:-2,3;bias:3",)],
        [("--input_shape=x:1,3;bias:3",)],
    ),
    "E10016": ([("--input_shape=x:2,3;bias:3;y:1",)], [STATIC]),
    "E10035": ([("--input_shape=x:-1,3;bias:3", "--dynamic_dims=1")], [GEARS]),
    "E10037": ([(GEARS[0], "--dynamic_dims=1,2,2;2,2")], [GEARS]),
    "E10038": (
        [(GEARS[0], "--dynamic_dims=1,2,2;0,2,2")],
        [(GEARS[0], "--dynamic_dims=2,2,2;1,2,2")],
    ),
    "E10039": (
        [(GEARS[0], "--dynamic_dims=1,2,2;1,2,2")],
        [(GEARS[0], "--dynamic_dims=1,2,2;1,3,3")],
    ),
    "E10040": (
        [
            ("--input_shape=x:2,3;bias:3", "--dynamic_dims=1;2"),
            ("--input_shape=x:-1,3~4;bias:3", "--dynamic_dims=1;2"),
        ],
        [("--input_shape=x:-1,3;bias:3", "--dynamic_dims=1;2")],
    ),
    "E10045": (
        [
            ("--input_shape=x:-1,-1;bias:3", "--dynamic_dims=1;2"),
            (GEARS[0], "--dynamic_dims=1,2,2,2;2,2,2,2"),
        ],
        [GEARS],
    ),
    "E10046": ([(GEARS[0], "--dynamic_dims=1,2;2,2")], [GEARS]),
    "E10049": (
        [("--input_shape=x:2;bias:3",), ("--input_shape=x:2,3,1;bias:3",)],
        [("--input_shape=x:2,3;bias:3",)],
    ),
    "E20001": ([("--input_shape=x:2,3;bias:4",)], [("--input_shape=x:2,4;bias:4",)]),
}


def code_of(directory: Path, flags: Sequence[str], model: onnx.ModelProto | None = None) -> str:
    with pytest.raises(AtcError) as caught:
        compile_om(directory, flags, model)
    return caught.value.code


@pytest.mark.parametrize("code", CASES)
def test_a_code_begins_where_it_should(tmp_path: Path, code: str) -> None:
    wrong, right = CASES[code]
    assert [code_of(tmp_path, flags) for flags in wrong] == [code] * len(wrong)
    for flags in right:
        assert compile_om(tmp_path, flags).is_file()


def gears_of(count: int) -> tuple[str, str]:
    values = ";".join(str(number) for number in range(1, count + 1))
    return "--input_shape=x:-1,3;bias:3", f"--dynamic_dims={values}"


def test_e10036_begins_above_100_gears(tmp_path: Path) -> None:
    assert code_of(tmp_path, gears_of(101)) == "E10036"
    assert compile_om(tmp_path, gears_of(100)).is_file()


@pytest.mark.parametrize("missing", ["--framework", "--model", "--output", "--soc_version"])
def test_e10007_names_what_is_missing(missing: str) -> None:
    flags = ["--framework=5", "--model=m", "--output=o", "--soc_version=Ascend310P3"]
    parse_options(flags, ["Ascend310P3"])
    rest = [flag for flag in flags if not flag.startswith(missing)]
    with pytest.raises(AtcError, match=f"^E10007.*{missing}"):
        parse_options(rest, ["Ascend310P3"])


@pytest.mark.parametrize(
    ("dim", "code"),
    [
        ("2", "E10050"),
        ("3", None),
        ("4", "E10050"),
        ("1~2", "E10050"),
        ("1~3", None),
        ("3~9", None),
        ("4~9", "E10050"),
        ("-1", None),
    ],
)
def test_e10050_begins_beside_the_models_own_size(
    tmp_path: Path, dim: str, code: str | None
) -> None:
    model = add_model()
    model.graph.input[1].type.tensor_type.shape.dim[0].dim_value = 3
    flags = (f"--input_shape=x:2,3;bias:{dim}",)
    if code is None:
        assert compile_om(tmp_path, flags, model).is_file()
    else:
        assert code_of(tmp_path, flags, model) == code


def test_e10011_is_a_lone_minus_one_where_the_soc_has_no_ranges(tmp_path: Path) -> None:
    flags = "--input_shape=x:-1,3;bias:3"
    assert code_of(tmp_path, (flags, "--soc_version=Ascend310B1")) == "E10011"
    for soc in ("Ascend310P3", "Ascend910B4", "Ascend910_9391"):
        assert compile_om(tmp_path, (flags, f"--soc_version={soc}")).is_file()


def test_e10014_is_a_model_that_cannot_be_read(tmp_path: Path) -> None:
    flags = ["--framework=5", f"--model={tmp_path / 'no.onnx'}", f"--output={tmp_path / 'o'}"]
    options = parse_options([*flags, "--soc_version=Ascend310P3"], ["Ascend310P3"])
    with pytest.raises(AtcError, match=r"^E10014"):
        compile_model(options)


def test_e1600x_are_what_the_parser_refuses(tmp_path: Path) -> None:
    two_imports, unknown, empty, nothing = (add_model() for _ in range(4))
    two_imports.opset_import.append(onnx.helper.make_opsetid("ai.onnx.ml", 3))
    unknown.graph.node[1].op_type = "RMSNormalization"
    del empty.graph.node[:]
    nothing.ClearField("graph")
    for model, code in (
        (two_imports, "E16005"),
        (unknown, "E16002"),
        (empty, "E16001"),
        (nothing, "E16004"),
    ):
        assert code_of(tmp_path, STATIC, model) == code


@pytest.mark.parametrize(
    ("op", "opset", "is_known"),
    [
        ("Trilu", 13, False),
        ("Trilu", 14, True),
        ("Trilu", 18, True),
        ("Trilu", 19, False),
        ("LayerNormalization", 16, False),
        ("LayerNormalization", 17, True),
        ("GreaterOrEqual", 11, False),
        ("GreaterOrEqual", 12, True),
    ],
)
def test_e16002_follows_the_opsets_of_each_operator(op: str, opset: int, is_known: bool) -> None:
    model = add_model(opset=opset)
    del model.graph.node[1]
    model.graph.node[0].op_type = op
    if is_known:
        check_operators(model, tables().ops)
    else:
        with pytest.raises(AtcError, match=f"^E16002.*ai.onnx::{opset}::{op}"):
            check_operators(model, tables().ops)
