"""The command lines for real SoCs, written down, and held against the table of ATC's options.

The table is made from ATC's pages and says nothing of our own compiler. A changed line is a
decision: look at the difference, then write it anew with `python -m tests.unit.test_atc_golden`.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from om_models.atc import atc_arguments
from om_models.atc_table import Release, complaints, known_releases, split_options
from om_models.gears import model_gears
from om_models.manifest import FORMAT, Manifest
from om_models.plan import ConvertOptions, make_plan
from om_models.socs import SOCS
from runtime_cache.aclsim.atc.compiler import tables
from runtime_cache.aclsim.atc.options import parse_options
from tests.support.tiny import tiny_spec

GOLDEN = Path(__file__).parents[1] / "golden" / "atc"

#: Llama-3.2-1B.
SPEC = tiny_spec(
    vocab_size=128256,
    hidden_size=2048,
    intermediate_size=8192,
    num_layers=16,
    num_heads=32,
    num_kv_heads=8,
    head_dim=64,
    rope_theta=500000.0,
    max_position=131072,
)
#: SoCs whose lines must not change unseen.
NAMED = (
    "Ascend310B1",
    "Ascend310B4",
    "Ascend310P3",
    "Ascend910B1",
    "Ascend910B2",
    "Ascend910B3",
    "Ascend910B4",
    *(name for name, soc in SOCS.items() if soc.family == "910_93"),
)
ALL = tuple(str(release) for release in known_releases())


@dataclass(frozen=True)
class Case:
    """One conversion.

    Attributes:
        releases: the CANN releases that take its lines; all others must refuse it.
    """

    soc: str
    options: dict[str, Any]
    releases: tuple[str, ...] = ALL

    def lines(self) -> dict[str, list[str]]:
        """Arguments by the name of the `.om`."""
        plan = make_plan(SPEC, ConvertOptions("ascend", self.soc, **self.options))
        manifest = Manifest(
            format=FORMAT,
            name="llama",
            digest="00",
            target="ascend",
            soc_version=plan.soc_version,
            layout=plan.layout,
            dtype=plan.dtype,
            index_dtype=plan.index_dtype,
            model=SPEC,
            kv=plan.kv,
            oms=plan.oms,
            bos_token_id=None,
            eos_token_ids=(),
            chat_template=None,
            files={},
            made_by={},
            atc_options=plan.atc_options,
        )
        return {
            om.path: atc_arguments(manifest, om, "model.onnx", om.path.removesuffix(".om"))
            for om in plan.oms
        }


CASES = {
    **{name: Case(name, {}) for name in NAMED},
    "Ascend310B4-board": Case(
        "Ascend310B4", {"gears": "small", "kv_bytes": 512 << 20, "context": 1024, "max_batch": 1}
    ),
    "Ascend310P3-split": Case("Ascend310P3", {"layout": "split"}),
    "Ascend310P3-one-shape": Case(
        "Ascend310P3",
        {"layout": "split", "gears": "prefill=64@512 decode=1@512", "kv_tokens": 1024},
    ),
    "Ascend910B3-fine": Case("Ascend910B3", {"gears": "fine", "index_dtype": "int64"}),
    "Ascend910B3-weights-beside": Case("Ascend910B3", {"external_weight": 1}),
    "Ascend910B3-weights-in-one": Case("Ascend910B3", {"external_weight": 2}, ("8.5", "9.0")),
    "Ascend910B4-options": Case(
        "Ascend910B4", {"atc_options": {"deterministic": "1", "log": "info"}}
    ),
    "Ascend310P3-op-precision": Case(
        "Ascend310P3", {"atc_options": {"op_precision_mode": "/srv/op_precision.ini"}}
    ),
}


def text_of(case: Case) -> str:
    """All lines of a case, an argument a line."""
    return "".join(
        f"# {path}\natc\n" + "".join(f"  {argument}\n" for argument in arguments)
        for path, arguments in case.lines().items()
    )


@pytest.mark.parametrize("name", CASES)
def test_the_line_is_the_one_written_down(name: str):
    assert text_of(CASES[name]) == (GOLDEN / f"{name}.txt").read_text("utf-8")


def test_nothing_else_is_written_down():
    assert {path.stem for path in GOLDEN.iterdir()} == set(CASES)


@pytest.mark.parametrize("release", ALL)
@pytest.mark.parametrize("name", CASES)
def test_every_release_claimed_takes_the_line(name: str, release: str):
    case = CASES[name]
    found = [
        text for line in case.lines().values() for text in complaints(line, Release.parse(release))
    ]
    assert bool(found) is (release not in case.releases), found


@pytest.mark.parametrize("name", CASES)
def test_the_software_devices_compiler_reads_the_line_too(name: str):
    for line in CASES[name].lines().values():
        parse_options(line, tables().soc_versions)


@pytest.mark.parametrize("name", CASES)
def test_what_holds_for_every_line(name: str):
    case = CASES[name]
    plan = make_plan(SPEC, ConvertOptions("ascend", case.soc, **case.options))
    for om in plan.oms:
        flags = split_options(case.lines()[om.path])
        assert flags["soc_version"] == case.soc
        assert flags["precision_mode"] == "must_keep_origin_dtype", "islands of float32 stay"
        asked = case.options.get("atc_options", {}).get("op_precision_mode")
        assert flags.get("op_precision_mode") == asked, "else the casts in the graph decide"
        assert flags["framework"] == "5"
        num_gears = len(model_gears(om.prefill, om.decode))
        assert len(flags.get("dynamic_dims", "").split(";")) == num_gears
        assert ("-1" in flags["input_shape"]) is (num_gears > 1)


def test_the_lines_of_a_family_differ_in_the_name_alone():
    for family in ("310B", "910B", "910_93"):
        texts = {
            text_of(CASES[name]).replace(name, "SOC")
            for name in NAMED
            if SOCS[name].family == family
        }
        assert len(texts) == 1


if __name__ == "__main__":
    GOLDEN.mkdir(parents=True, exist_ok=True)
    for old in GOLDEN.iterdir():
        old.unlink()
    for title, case in CASES.items():
        (GOLDEN / f"{title}.txt").write_text(text_of(case), "utf-8")
