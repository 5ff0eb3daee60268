"""ATC's command line, and what of it is refused before any work."""

from __future__ import annotations

import shlex

import msgspec
import pytest

from om_models.atc import (
    atc_arguments,
    check_arguments,
    check_soc_version,
    dynamic_dims,
    input_shape,
    shell_script,
)
from om_models.atc_table import Release, atc_table
from om_models.contract import GraphContract
from om_models.manifest import FORMAT, Gear, KvSpec, Manifest, OmFile
from om_models.plan import FIXED_ATC_OPTIONS, PATH_ATC_OPTIONS, ConvertOptions, Plan, make_plan
from runtime_cache.errors import ConversionError
from tests.support.tiny import BASE_SPEC

KV = KvSpec(dtype="float16", num_slots=128, num_groups=2, layers_per_group=1, row_elements=32)
PREFILL = (Gear(1, 16, 64), Gear(1, 16, 128))
DECODE = (Gear(1, 1, 128), Gear(8, 1, 128))
OM = OmFile(path="model.om", prefill=PREFILL, decode=DECODE)
MANIFEST = Manifest(
    format=FORMAT,
    name="m",
    digest="00",
    target="ascend",
    soc_version="Ascend310B4",
    layout="fused",
    dtype="float16",
    index_dtype="int32",
    model=BASE_SPEC,
    kv=KV,
    oms=(OM,),
    bos_token_id=None,
    eos_token_ids=(),
    chat_template=None,
    files={},
    made_by={},
)


def test_the_command_line_is_exactly_this():
    assert atc_arguments(MANIFEST, OM, "/x/model.onnx", "/y/model") == [
        "--framework=5",
        "--model=/x/model.onnx",
        "--output=/y/model",
        "--input_format=ND",
        "--input_shape=input_ids:-1,-1;position_ids:-1,-1;past_rows:-1,-1;mask:-1,1,-1,-1;last:-1;"
        "kv_pool_0:256,32;kv_pool_1:256,32",
        "--dynamic_dims=1,16,1,16,1,64,1,16,80,1;1,16,1,16,1,128,1,16,144,1;"
        "1,1,1,1,1,128,1,1,129,1;8,1,8,1,8,128,8,1,129,8",
        "--soc_version=Ascend310B4",
        "--precision_mode=must_keep_origin_dtype",
        "--log=error",
    ]


def test_every_gear_gives_a_value_for_every_free_dimension():
    inputs = GraphContract.of(MANIFEST).inputs
    num_free = input_shape(inputs, PREFILL).count("-1")
    gears = dynamic_dims(inputs, PREFILL).split(";")
    assert [len(gear.split(",")) for gear in gears] == [num_free] * len(PREFILL)


def test_a_single_gear_is_compiled_as_a_fixed_shape():
    om = OmFile(path="prefill.om", prefill=(Gear(1, 16, 64),), decode=())
    arguments = atc_arguments(MANIFEST, om, "m.onnx", "prefill")
    assert arguments[4] == (
        "--input_shape=input_ids:1,16;position_ids:1,16;past_rows:1,64;mask:1,1,16,80;last:1;"
        "kv_pool_0:256,32;kv_pool_1:256,32"
    )
    assert not any(argument.startswith("--dynamic_dims") for argument in arguments)


def test_both_targets_get_the_same_command_line():
    sim = msgspec.structs.replace(MANIFEST, target="sim")
    assert atc_arguments(sim, OM, "a", "b") == atc_arguments(MANIFEST, OM, "a", "b")


def test_the_script_quotes_what_the_shell_would_split():
    script = shell_script("ascend", [["--model=a b.onnx", "--input_shape=x:1;y:2"]])
    assert script.splitlines()[:3] == ["#!/bin/sh", "set -e", 'cd "$(dirname "$0")"']
    assert shlex.split(script.splitlines()[3]) == [
        "atc",
        "--model=a b.onnx",
        "--input_shape=x:1;y:2",
    ]


def test_the_script_sets_what_the_compiler_needs():
    lines = shell_script("ascend", [["--x=1"]], {"TE_PARALLEL_COMPILER": "1"}).splitlines()
    assert lines[3:] == ["export TE_PARALLEL_COMPILER=1", "atc --x=1"]


def test_the_script_calls_the_compiler_of_its_target():
    line = shell_script("sim", [["--model=m.onnx"]]).splitlines()[3]
    assert line == "python3 -m runtime_cache.aclsim atc --model=m.onnx"


def test_a_soc_that_the_software_device_does_not_know():
    check_soc_version("sim", "Ascend310P3")
    check_soc_version("ascend", "Ascend999")  # the real compiler will say
    with pytest.raises(ConversionError, match=r"Ascend999 is not known .*; known: .*Ascend310P3"):
        check_soc_version("sim", "Ascend999")


def test_more_options_come_last_and_may_replace_ours():
    given = {"log": "info", "deterministic": "1"}
    arguments = atc_arguments(
        msgspec.structs.replace(MANIFEST, atc_options=given), OM, "m.onnx", "m"
    )
    assert arguments[-3:] == [
        "--precision_mode=must_keep_origin_dtype",
        "--log=info",
        "--deterministic=1",
    ]


def test_the_newer_way_to_say_the_precision_takes_the_place_of_the_older():
    given = {"precision_mode_v2": "origin"}
    arguments = atc_arguments(
        msgspec.structs.replace(MANIFEST, atc_options=given), OM, "m.onnx", "m"
    )
    assert arguments[-2:] == ["--log=error", "--precision_mode_v2=origin"]


# --- held against the table of options ------------------------------------------------------------


def planned(**options: object) -> Plan:
    wanted = {"target": "ascend", "soc_version": "Ascend310P3", "kv_tokens": 1024, "context": 256}
    return make_plan(BASE_SPEC, ConvertOptions(**{**wanted, **options}))  # type: ignore[arg-type]


def test_weights_in_one_file_before_they_were_known():
    plan = planned(external_weight=2)
    check_arguments(plan, BASE_SPEC, Release(8, 5))
    check_arguments(plan, BASE_SPEC, None)
    with pytest.raises(ConversionError) as caught:
        check_arguments(plan, BASE_SPEC, Release.parse("8.1.RC1"))
    assert caught.value.message == (
        "ATC would refuse its options: --external_weight=2 is known from CANN 8.5 on; this is"
        " 8.1.RC1"
    )


def test_all_faults_are_told_together():
    given = {"precision_mode": "allow_mix_precision_bf16", "logg": "x"}
    with pytest.raises(ConversionError, match=r"is not for Ascend310P3; .*; --logg: no such"):
        check_arguments(planned(atc_options=given), BASE_SPEC, Release(9, 0))


@pytest.mark.parametrize("name", sorted(FIXED_ATC_OPTIONS))
def test_what_follows_from_the_model_cannot_be_given(name: str):
    with pytest.raises(ConversionError, match=f"--atc-option {name}: follows from the model"):
        planned(atc_options={name: "1"})


@pytest.mark.parametrize("name", sorted(PATH_ATC_OPTIONS))
def test_a_path_is_whole_or_refused(name: str):
    assert planned(atc_options={name: "/etc/ops.ini"}).atc_options == {name: "/etc/ops.ini"}
    with pytest.raises(ConversionError, match=rf"{name}=ops\.ini: atc runs in .* whole path"):
        planned(atc_options={name: "ops.ini"})


def test_every_fixed_option_is_one_of_atc():
    assert atc_table().options.keys() >= FIXED_ATC_OPTIONS | PATH_ATC_OPTIONS
