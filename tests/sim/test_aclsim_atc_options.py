"""ATC's command line: every option's values, shapes and gears, and the codes of what is wrong."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from om_models.socs import SOCS as SOCS_OF_THE_PROJECT
from runtime_cache.aclsim.atc import compiler
from runtime_cache.aclsim.atc.flags import known_flags, split_flags
from runtime_cache.aclsim.atc.options import AtcError, parse_options
from runtime_cache.aclsim.atc.shapes import (
    GearKind,
    Gears,
    fill_gear,
    parse_batches,
    parse_dims,
    parse_images,
    parse_input_shape,
)

BASE = ("--framework=5", "--model=m.onnx", "--output=out", "--soc_version=Ascend310P3")
SOCS = ("Ascend310P3", "Ascend910B4", "Ascend310B4")


@pytest.mark.parametrize(
    ("arguments", "code", "names"),
    [
        (BASE[1:], "E10007", "--framework"),
        (BASE[:3], "E10007", "--soc_version"),
        ((*BASE, "--framwork=5"), "E10003", "--framwork"),
        ((*BASE, "model.onnx"), "E10003", "model.onnx"),
        ((*BASE, "--log="), "E10004", "--log"),
        ((*BASE, "--log"), "E10004", "--log"),
        ((*BASE, "--log=loud"), "E10001", "loud"),
        ((*BASE, "--log=info", "--log=info"), "E10001", "--log"),
        (("--framework=1", *BASE[1:]), "E10001", "framework"),
        ((*BASE[:3], "--soc_version=Ascend310P9"), "E10001", "Ascend310P9"),
        ((*BASE, "--precision_mode=fp16"), "E10001", "precision_mode"),
        ((*BASE, "--precision_mode=force_fp16", "--precision_mode_v2=fp16"), "E10001", "_v2"),
        ((*BASE, "--input_shape=a:-1", "--dynamic_dims=1,2;3,4"), "E10045", "2 values"),
        ((*BASE, "--input_shape=a:-1,1,1,1,1", "--dynamic_dims=1;2"), "E10001", "at most 4"),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_a_wrong_command_line_is_refused_by_code_and_name(
    arguments: Sequence[str], code: str, names: str
) -> None:
    with pytest.raises(AtcError) as caught:
        parse_options(arguments, SOCS)
    assert caught.value.code == code
    assert names in caught.value.reason


def test_a_full_command_line_is_read() -> None:
    options = parse_options(
        [
            *BASE[:3],
            "--soc_version",
            "Ascend910B4",
            "--input_format=ND",
            "--input_shape=ids:-1,-1;pool:100,64;n:",
            "--dynamic_dims=1,16;4,1",
            "--precision_mode_v2=origin",
            "--op_precision_mode=any.ini",
            "--log=error",
        ],
        SOCS,
    )
    assert options.soc_version == "Ascend910B4"
    assert options.input_shape == {"ids": [-1, -1], "pool": [100, 64], "n": []}
    assert options.gears == Gears("dims", [[1, 16], [4, 1]])


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("a", "E10002"),
        (":1", "E10002"),
        ("a:1;a:2", "E10002"),
        ("a:x", "E10002"),
        ("a:0", "E10011"),
        ("a:-2", "E10011"),
        ("a:-1", "E10011"),
        ("a:1~8", "E10001"),
    ],
)
def test_input_shape_refusals(text: str, code: str) -> None:
    with pytest.raises(AtcError, match=f"^{code}"):
        parse_input_shape(text, has_gears=False, has_dynamic_shape=False)


@pytest.mark.parametrize(("text", "code"), [("a:1~8", "E10040"), ("a:1", "E10040")])
def test_input_shape_refusals_with_gears(text: str, code: str) -> None:
    with pytest.raises(AtcError, match=f"^{code}"):
        parse_input_shape(text, has_gears=True)


def test_names_with_colons_keep_them() -> None:
    assert parse_input_shape("a:0:1,2", has_gears=False).dims == {"a:0": [1, 2]}


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("1,2", "E10035"),
        (";".join(str(i) for i in range(1, 102)), "E10036"),
        ("1,2;3", "E10037"),
        ("1;0", "E10038"),
        ("1;-1", "E10038"),
        ("1;x", "E10038"),
        ("1,2;3,4;1,2", "E10039"),
    ],
)
def test_gear_refusals(text: str, code: str) -> None:
    with pytest.raises(AtcError, match=f"^{code}"):
        parse_dims(text)


def test_two_and_a_hundred_gears_are_allowed() -> None:
    assert parse_dims("1;2") == [[1], [2]]
    assert len(parse_dims(";".join(str(i) for i in range(1, 101)))) == 100


# --- every option ---


@pytest.mark.parametrize("name", sorted(known_flags()))
def test_every_option_takes_its_values_and_refuses_others(name: str) -> None:
    flag = known_flags()[name]
    good = {"choice": flag.values, "flag01": ["0", "1"], "bool": ["true", "false"]}
    values = good.get(
        flag.kind, {"number": ["-1", "8"], "bools": ["false,false"]}.get(flag.kind, [])
    )
    bad = {"choice": "E10001", "flag01": "E10006", "bool": "E10005", "bools": "E10005"}
    bad["number"] = "E10001"
    for value in values if flag.effect != "refused" else []:
        assert split_flags([f"--{name}={value}"]) == {name: value}
    if flag.effect == "refused":
        assert flag.why
        assert code_of(lambda: split_flags([f"--{name}=1"])) == "E10003"
    elif flag.kind in bad:
        assert code_of(lambda: split_flags([f"--{name}=2.5"])) == bad[flag.kind]


def code_of(action: Callable[[], object]) -> str:
    with pytest.raises(AtcError) as caught:
        action()
    return caught.value.code


def test_layouts_of_the_hardware_are_refused() -> None:
    flag = "--is_input_adjust_hw_layout"
    assert split_flags([f"{flag}=false,false"])
    assert code_of(lambda: split_flags([f"{flag}=false,true"])) == "E10001"


def test_help_names_every_option(capsys: pytest.CaptureFixture[str]) -> None:
    assert compiler.main(["--help"]) == 0
    text = capsys.readouterr().out
    assert all(f"--{name}" in text for name in (*known_flags(), "no-atc-rules"))
    assert max(map(len, text.splitlines())) <= 80


@pytest.mark.parametrize(
    ("flags", "code"),
    [
        (("--mode=3",), "E10001"),
        (("--mode=1",), "E10007"),
        (("--mode=1", "--om=a.om"), "E10007"),
        (("--mode=6",), "E10007"),
        (("--mode=6", "--om=a.om"), None),
        ((*BASE, "--modify_mixlist=m.json"), "E10001"),
        ((*BASE, "--modify_mixlist=m.json", "--precision_mode_v2=mixed_float16"), None),
        ((*BASE, "--precision_mode_v2=mixed_bfloat16"), "E10001"),
        ((*BASE[:3], "--soc_version=Ascend910B4", "--precision_mode_v2=mixed_bfloat16"), None),
        ((*BASE, "--precision_mode=allow_mix_precision_bf16"), "E10001"),
        ((*BASE, "--external_weight=3"), "E10001"),
        ((*BASE, "--external_weight=2"), None),
        ((*BASE, "--out_nodes=a"), "E10001"),
        ((*BASE, "--output_type=FP64"), "E10001"),
        ((*BASE, "--output_type=a:0:FP16"), "E10001"),
        ((*BASE, "--out_nodes=a:0", "--output_type=a:0:FP16"), None),
        ((*BASE, "--host_env_cpu=riscv"), "E10001"),
    ],
)
def test_options_that_have_to_do_with_each_other(flags: Sequence[str], code: str | None) -> None:
    if code is None:
        parse_options(flags, SOCS)
    else:
        assert code_of(lambda: parse_options(flags, SOCS)) == code


def test_what_the_command_records_names_no_directory() -> None:
    flags = ("--framework=5", "--model=/a/b/m.onnx", "--output=/c/out", "--no-atc-rules")
    options = parse_options((*flags, "--soc_version=Ascend310P3"), SOCS)
    assert options.command == (
        "--framework=5 --model=m.onnx --output=out --no-atc-rules --soc_version=Ascend310P3"
    )
    assert not options.has_atc_rules


# --- kinds of gears and ranges ---


@pytest.mark.parametrize(
    ("flags", "code"),
    [
        (("--input_shape=a:-1,3", "--dynamic_batch_size=1,2"), None),
        (("--input_shape=a:-1,3", "--dynamic_batch_size=1"), "E10035"),
        (("--input_shape=a:-1,3", "--dynamic_batch_size=1,1"), "E10039"),
        (("--input_shape=a:-1,3", "--dynamic_batch_size=0,1"), "E10038"),
        (("--input_shape=a:-1,3", "--dynamic_batch_size=1.1,2"), "E10003"),
        (("--input_shape=a:1,3", "--dynamic_batch_size=1,2"), "E10040"),
        (("--input_shape=a:1,-1", "--dynamic_batch_size=1,2"), "E10018"),
        (("--input_shape=a:-1~4", "--dynamic_batch_size=1,2"), "E10001"),
        (("--input_shape=a:1~4,3", "--dynamic_batch_size=1,2"), "E10040"),
        (("--input_shape=a:1,3,-1,-1", "--dynamic_image_size=8,8;4,4"), None),
        (("--input_shape=a:1,3,-1,-1", "--dynamic_image_size=8,8,8;4,4,4"), "E10020"),
        (("--input_shape=a:-1,3,-1,-1", "--dynamic_image_size=8,8;4,4"), "E10019"),
        (("--input_shape=a:1,3,-1,4", "--dynamic_image_size=8,8;4,4"), "E10019"),
        (
            (
                "--input_shape=a:1,3,-1,-1",
                "--dynamic_image_size=8,8;4,4",
                "--input_format=ND",
            ),
            "E10001",
        ),
        (("--input_shape=a:-1", "--dynamic_batch_size=1,2", "--dynamic_dims=1;2"), "E10009"),
        (("--input_shape=a:-1,-1", "--dynamic_dims=1;2"), "E10045"),
        (("--input_shape=a:-1;b:-1", "--dynamic_dims=1;2"), "E10046"),
        (("--input_shape=a:-1", "--dynamic_dims=1,1;2,2"), "E10045"),
    ],
)
def test_gears_and_the_shapes_beside_them(flags: Sequence[str], code: str | None) -> None:
    if code is None:
        assert parse_options((*BASE, *flags), SOCS).gears is not None
    else:
        assert code_of(lambda: parse_options((*BASE, *flags), SOCS)) == code


@pytest.mark.parametrize("count", [1, 2, 100, 101])
@pytest.mark.parametrize("parse", [parse_dims, parse_batches, parse_images])
def test_limits_of_the_number_of_gears(parse: Callable[[str], list[list[int]]], count: int) -> None:
    separator = "," if parse is parse_batches else ";"
    form = "{0},{0}" if parse is parse_images else "{0}"
    text = separator.join(form.format(number) for number in range(1, count + 1))
    if 2 <= count <= 100:
        assert len(parse(text)) == count
    else:
        assert code_of(lambda: parse(text)) == ("E10035" if count < 2 else "E10036")


def test_ranges_are_read_with_their_ends() -> None:
    shapes = parse_input_shape("a:1~10,3;b:-1;c:2;d:", has_gears=False)
    assert shapes.dims == {"a": [-1, 3], "b": [-1], "c": [2], "d": []}
    assert shapes.ranges == {"a": [(1, 10), (3, 3)], "b": [(0, -1)]}


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("a:1~1", None),
        ("a:2~1", "E10001"),
        ("a:-2~1", "E10001"),
        ("a:0~0", "E10001"),
        ("a:1~-1", None),
        ("a:1~x", "E10002"),
        ("a:~", "E10002"),
        ("a:1~2~3", "E10002"),
    ],
)
def test_refusals_of_ranges(text: str, code: str | None) -> None:
    if code is None:
        parse_input_shape(text, has_gears=False)
    else:
        assert code_of(lambda: parse_input_shape(text, has_gears=False)) == code


def test_a_board_of_the_310b_family_takes_gears_but_no_ranges() -> None:
    flags = (*BASE[:3], "--soc_version=Ascend310B4")
    assert code_of(lambda: parse_options((*flags, "--input_shape=a:-1"), SOCS)) == "E10011"
    assert code_of(lambda: parse_options((*flags, "--input_shape=a:1~2"), SOCS)) == "E10001"
    assert parse_options((*flags, "--input_shape=a:-1", "--dynamic_dims=1;2"), SOCS).gears


@pytest.mark.parametrize(
    ("dims", "values", "kind", "filled"),
    [
        ([[-1, 2], [-1]], [3, 4], "dims", [[3, 2], [4]]),
        ([[-1, 2], [-1], []], [3], "batch", [[3, 2], [3], []]),
        ([[1, 3, -1, -1], [4]], [5, 6], "image", [[1, 3, 5, 6], [4]]),
    ],
)
def test_filling_a_gear(
    dims: list[list[int]], values: list[int], kind: GearKind, filled: list[list[int]]
) -> None:
    assert fill_gear(dims, values, kind) == filled


def test_both_tables_of_socs_are_equal() -> None:
    assert sorted(compiler.tables().soc_versions) == sorted(SOCS_OF_THE_PROJECT)


SHAPE_TEXTS = st.text("ab:;,~-0123456789 ", max_size=40)


@given(text=SHAPE_TEXTS, has_gears=st.booleans())
def test_any_text_is_shapes_or_refused(text: str, has_gears: bool) -> None:
    try:
        shapes = parse_input_shape(text, has_gears=has_gears)
    except AtcError:
        return
    for name, dims in shapes.dims.items():
        assert f"{name}:" in text
        assert all(dim > 0 or dim == -1 for dim in dims)
        assert (name in shapes.ranges) == (-1 in dims and not has_gears)
    for bounds in shapes.ranges.values():
        assert all(least >= 0 and (most == -1 or most >= max(least, 1)) for least, most in bounds)


@given(text=SHAPE_TEXTS)
@pytest.mark.parametrize("parse", [parse_dims, parse_batches, parse_images])
def test_any_text_is_gears_or_refused(parse: Callable[[str], list[list[int]]], text: str) -> None:
    try:
        gears = parse(text)
    except AtcError:
        return
    assert 2 <= len(gears) <= 100
    assert len({len(gear) for gear in gears}) == 1
    assert all(value > 0 for gear in gears for value in gear)


def test_numbers_that_nothing_holds_are_refused() -> None:
    for digits in (19, 5000):
        with pytest.raises(AtcError, match=r"^E10002"):
            parse_input_shape("a:" + "9" * digits, has_gears=False)
        with pytest.raises(AtcError, match=r"^E10038"):
            parse_dims("1;" + "9" * digits)
