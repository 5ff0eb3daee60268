"""The table of ATC's options: what it refuses, for which release and SoC, in which words."""

from __future__ import annotations

import pytest

from om_models.atc_table import (
    MAX_GEARS,
    Release,
    atc_table,
    complaints,
    known_releases,
    split_options,
)
from om_models.socs import SOCS

SHAPE = "--input_shape=x:-1,8;y:-1"
GEARS = "--dynamic_dims=1,1;2,2"


def said(*arguments: str, release: str | None = "9.0", soc: str = "Ascend910B3") -> list[str]:
    return complaints(
        [*arguments, f"--soc_version={soc}"], Release.parse(release) if release else None
    )


# --- the table itself -----------------------------------------------------------------------------


def test_every_option_has_a_source_and_known_words():
    table = atc_table()
    families = {soc.family for soc in SOCS.values()}
    for name, option in table.options.items():
        assert option.source, name
        assert Release.parse(option.first), name
        named = [option.families or [], *option.value_families.values()]
        assert {family for group in named for family in group} <= families, name
        assert {*option.value_first, *option.value_families} <= set(option.values or ()), name
        assert all(Release.parse(first) for first in option.value_first.values()), name


def test_the_releases_ascend():
    assert [str(release) for release in known_releases()] == ["8.0", "8.1", "8.5", "9.0"]


# --- releases -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "numbers"),
    [("8.1.RC1", (8, 1)), ("8.5.0", (8, 5)), ("9.0.0-beta1", (9, 0)), (" 8.0 ", (8, 0))],
)
def test_releases_are_read(text: str, numbers: tuple[int, int]):
    release = Release.parse(text)
    assert release is not None
    assert (release.major, release.minor, str(release)) == (*numbers, text.strip())


@pytest.mark.parametrize("text", ["", "latest", "8", "RC1"])
def test_what_is_no_release(text: str):
    assert Release.parse(text) is None


def test_releases_compare_by_two_numbers():
    assert Release.parse("8.1.RC1") == Release.parse("8.1.0")
    assert Release(8, 5) < Release(8, 10) < Release(9, 0)


# --- refusals -------------------------------------------------------------------------------------


def test_weights_in_one_file_by_release():
    assert [bool(said("--external_weight=2", release=r)) for r in ("8.0", "8.4", "8.5", "9.2")] == [
        True,
        True,
        False,
        False,
    ]
    assert said("--external_weight=2", release="8.1.RC1") == [
        "--external_weight=2 is known from CANN 8.5 on; this is 8.1.RC1"
    ]
    assert said("--external_weight=1", release="8.0") == []


@pytest.mark.parametrize(
    ("option", "refused"),
    [
        ("--precision_mode=allow_mix_precision_bf16", ["Ascend310P3", "Ascend910A"]),
        ("--precision_mode_v2=mixed_bfloat16", ["Ascend310P3", "Ascend910A"]),
        ("--tiling_schedule_optimize=1", ["Ascend310B4", "Ascend910A"]),
        ("--input_shape_range=x:1~8", ["Ascend310B4"]),
        ("--deterministic=1", ["Ascend310B4"]),
        ("--sparsity=1", ["Ascend310P3", "Ascend910A"]),
        ("--enable_single_stream=true", ["Ascend310B4"]),
    ],
)
def test_what_a_soc_does_not_have(option: str, refused: list[str]):
    socs = ("Ascend310B4", "Ascend310P3", "Ascend910A", "Ascend910B3")
    found = {soc: said(option, soc=soc) for soc in socs}
    assert [soc for soc in socs if found[soc]] == refused
    assert all(f"is not for {soc}" in found[soc][0] for soc in refused)


def test_bfloat16_agrees_with_the_table_of_socs():
    for name, soc in SOCS.items():
        refused = bool(said("--precision_mode=allow_mix_precision_bf16", soc=name))
        assert refused is not soc.has_bfloat16, name


@pytest.mark.parametrize("dims", ["1~10", "-1"])
def test_dynamic_shape(dims: str):
    shape = f"--input_shape=x:{dims},8"
    assert said(shape) == []
    (complaint,) = said(shape, soc="Ascend310B4")
    assert "Ascend310B4 has no dynamic shape" in complaint
    assert said("--input_shape=x:4,8", soc="Ascend310B4") == []


@pytest.mark.parametrize(
    ("gears", "code"),
    [
        ("1,1", "E10035"),
        (";".join(f"{i},1" for i in range(1, MAX_GEARS + 2)), "E10036"),
        ("1,1;1,1", "E10039"),
        ("1,1;2", "E10045"),
        ("1,1;2,0", "E10038"),
        ("1,1;2,x", "E10038"),
    ],
)
def test_gears_that_atc_refuses(gears: str, code: str):
    (complaint,) = said(SHAPE, f"--dynamic_dims={gears}")
    assert code in complaint


def test_gears_at_the_limits():
    assert said(SHAPE, GEARS) == []
    assert said(SHAPE, "--dynamic_dims=" + ";".join(f"{i},1" for i in range(1, 101))) == []
    assert "E10040" in said("--input_shape=x:1,8", GEARS)[0]
    assert "E10040" in said("--input_shape=x:1~4,-1;y:-1", GEARS)[0]


def test_what_excludes_each_other():
    assert said("--precision_mode=force_fp16", "--precision_mode_v2=fp16") == [
        "--precision_mode and --precision_mode_v2 exclude each other"
    ]
    assert said(SHAPE, "--dynamic_batch_size=1,2", GEARS) == [
        "--dynamic_batch_size and --dynamic_dims exclude each other"
    ]


def test_words_that_are_no_options():
    assert said("--presicion_mode=fp16") == [
        "--presicion_mode: no such option of ATC is known here"
    ]
    assert "is none of debug, info" in said("--log=loud")[0]
    assert said("--out_nodes=") == ["--out_nodes has no value (ATC: E10004)"]


def test_an_option_that_came_later():
    assert "from CANN 9.0 on" in said("--raw_ge_options=f", release="8.5")[0]
    assert said("--raw_ge_options=f", release="9.0") == []


def test_a_release_before_the_table():
    (complaint,) = said("--log=error", release="7.0.0")
    assert "CANN 7.0.0 takes is not known here, only from 8.0 on" in complaint
    assert "--cann-release 8.0" in complaint


def test_without_a_release_only_what_no_release_takes_is_refused():
    assert said("--external_weight=2", release=None) == []
    assert said("--log=loud", release=None) != []


def test_a_soc_that_is_not_in_the_table_is_left_to_the_compiler():
    assert said("--tiling_schedule_optimize=1", soc="Ascend999") == []


def test_values_may_hold_an_equals_sign():
    assert split_options(["--a=b=c", "--d"]) == {"a": "b=c", "d": ""}
