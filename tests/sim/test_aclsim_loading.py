"""Loading models on the software device: from memory, into lent memory, by options, weights beside
the file, and files that do not fit the device."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

import runtime_cache.aclsim as acl
from runtime_cache.aclsim import inspect
from runtime_cache.aclsim.lent_memory import lending_of
from runtime_cache.aclsim.om import OmHeader, read_om
from runtime_cache.aclsim.om_writer import write_om
from runtime_cache.aclsim.process import this_process
from tests.support.aclsim import (
    GEARS,
    MIB,
    STATIC,
    Run,
    add_model,
    compile_om,
    fresh_process,
    ok,
    pinned,
    upload,
)
from tests.support.real_om import write_real_om

TABLE = np.arange(MIB, dtype=np.float32)


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    with fresh_process(memory_bytes=2 << 30):
        yield


def check_works(run: Run) -> None:
    run.feed([0, 1, 2, 3, 4, 5], [0.5, 0, 0])
    assert (run.launch(), run.finish()) == (0, 0)
    assert run.result(6) == [0.5, 1, 2, 3.5, 4, 5]


def in_host_memory(path: Path) -> tuple[int, int, Any]:
    """(pointer, size, what keeps it) of a file's bytes in pinned memory."""
    data = path.read_bytes()
    ptr, view = pinned(len(data))
    view[:] = np.frombuffer(data, np.uint8)
    return ptr, len(data), view


# --- from memory ---


def test_a_model_in_memory_may_be_freed_after_the_load(tmp_path: Path) -> None:
    path = compile_om(tmp_path, model=add_model(weight=TABLE))
    ptr, size, _ = in_host_memory(path)
    model = ok(acl.mdl.load_from_mem(ptr, size))
    ok(acl.rt.free_host(ptr))
    path.unlink()
    check_works(Run.of(model))


def test_no_room_on_the_host_for_a_model_in_memory_is_207001(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = compile_om(tmp_path, model=add_model(weight=TABLE))
    ptr, size, _ = in_host_memory(path)
    before = acl.rt.get_mem_info(0)
    monkeypatch.setattr("runtime_cache.aclsim.sessions.SECTION_NAME", "no/such")
    assert acl.mdl.load_from_mem(ptr, size) == (0, 207001)
    assert "no room for 4194304 bytes of weights" in acl.get_recent_err_msg()
    assert acl.rt.get_mem_info(0) == before


def test_bytes_of_the_program_can_be_loaded(tmp_path: Path) -> None:
    data = compile_om(tmp_path, GEARS).read_bytes()
    model = ok(acl.mdl.load_from_mem(acl.util.bytes_to_ptr(data), len(data)))
    run = Run.of(model)
    assert run.select(1, 2, 2) == 0
    run.feed([7, 8], [0.25, 0])
    assert (run.launch(), run.finish()) == (0, 0)
    assert run.result(2) == [7.25, 8]


@pytest.mark.parametrize("change", [-1, 1])
def test_a_size_that_is_not_the_models_is_145006(tmp_path: Path, change: int) -> None:
    data = compile_om(tmp_path).read_bytes() + b"x"
    size = len(data) - 1 + change
    assert acl.mdl.load_from_mem(acl.util.bytes_to_ptr(data), size) == (0, 145006)


def test_memory_that_holds_no_model_is_refused(tmp_path: Path) -> None:
    data = b"IMOD" + bytes(300)
    assert acl.mdl.load_from_mem(acl.util.bytes_to_ptr(data), len(data)) == (0, 545001)
    assert "compiled for a real SoC" in acl.get_recent_err_msg()
    assert acl.mdl.load_from_mem(0, 10) == (0, 100000)
    assert acl.mdl.load_from_mem(acl.util.bytes_to_ptr(data), 0) == (0, 100000)
    ptr, _ = pinned(64)
    assert acl.mdl.load_from_mem(ptr, 65) == (0, 100000)


def test_a_card_does_not_load_from_device_memory(tmp_path: Path) -> None:
    data = np.frombuffer(compile_om(tmp_path).read_bytes(), np.uint8)
    ptr = upload(data)
    assert acl.mdl.load_from_mem(ptr, data.nbytes) == (0, 100000)
    assert "on a card, models are loaded from host memory" in acl.get_recent_err_msg()
    assert acl.mdl.query_size_from_mem(ptr, data.nbytes) == (0, 0, 100000)


def test_a_board_loads_from_both_kinds_of_memory(tmp_path: Path) -> None:
    flags = (*STATIC, "--soc_version=Ascend310B4")
    data = np.frombuffer(compile_om(tmp_path, flags).read_bytes(), np.uint8)
    with fresh_process(soc_name="Ascend310B4"):
        on_device = upload(data)
        check_works(Run.of(ok(acl.mdl.load_from_mem(on_device, data.nbytes))))
        check_works(Run.of(ok(acl.mdl.load_from_mem(data.ctypes.data, data.nbytes))))
        assert acl.mdl.load_from_mem(on_device, data.nbytes + 4096)[1] == 100000


def test_sizes_and_descriptions_come_from_files_and_memory_alike(tmp_path: Path) -> None:
    path = compile_om(tmp_path, GEARS, add_model(weight=TABLE))
    data = path.read_bytes()
    ptr = acl.util.bytes_to_ptr(data)
    work, weights = ok(acl.mdl.query_size(str(path)))
    assert acl.mdl.query_size_from_mem(ptr, len(data)) == (work, weights, 0)
    assert weights == 6 * MIB  # 4 MiB and the 32-byte tail, in 2 MiB pages
    for fill in (
        lambda desc: acl.mdl.get_desc_from_file(desc, str(path)),
        lambda desc: acl.mdl.get_desc_from_mem(desc, ptr, len(data)),
    ):
        desc = acl.mdl.create_desc()
        ok(fill(desc))
        assert acl.mdl.get_num_inputs(desc) == 3
        assert acl.mdl.get_input_dims(desc, 0)[0]["dims"] == [-1, -1]
        assert acl.mdl.get_input_dynamic_gear_count(desc, -1) == (3, 0)
        assert acl.mdl.get_cur_output_dims(desc, 0) == ({}, 100000)
        ok(acl.mdl.destroy_desc(desc))


def test_descriptions_of_files_need_no_context(tmp_path: Path) -> None:
    path = compile_om(tmp_path)
    ok(acl.rt.reset_device(0))
    desc = acl.mdl.create_desc()
    assert acl.mdl.get_desc_from_file(desc, str(path)) == 0
    assert acl.mdl.get_num_inputs(desc) == 2
    assert acl.mdl.get_desc_from_file(desc, str(path) + "x") == 145002


# --- lent memory ---


def lent(path: Path) -> tuple[int, int, int, int]:
    """(work, its bytes, weights, their bytes) as `query_size` asks for them."""
    work, weights = ok(acl.mdl.query_size(str(path)))
    return ok(acl.rt.malloc(work, 0)), work, ok(acl.rt.malloc(weights, 0)), weights


def test_lent_memory_is_not_charged_again_and_stays_the_programs(tmp_path: Path) -> None:
    path = compile_om(tmp_path, model=add_model(weight=TABLE))
    given = lent(path)
    before, _ = ok(acl.rt.get_mem_info(0))
    model = ok(acl.mdl.load_from_file_with_mem(str(path), *given))
    assert ok(acl.rt.get_mem_info(0))[0] == before
    check_works(Run.of(model))
    ok(acl.mdl.unload(model))
    ok(acl.rt.free(given[0]))
    ok(acl.rt.free(given[2]))


def test_null_pointers_leave_memory_to_the_system(tmp_path: Path) -> None:
    path = compile_om(tmp_path, model=add_model(weight=TABLE))
    work, weights = ok(acl.mdl.query_size(str(path)))
    before, _ = ok(acl.rt.get_mem_info(0))
    ok(acl.mdl.load_from_file_with_mem(str(path), 0, 0, 0, 0))
    assert before - ok(acl.rt.get_mem_info(0))[0] == work + weights


@pytest.mark.parametrize("short", [1, 3])
def test_lent_memory_is_checked_to_the_byte(tmp_path: Path, short: int) -> None:
    path = compile_om(tmp_path, model=add_model(weight=TABLE))
    given = list(lent(path))
    before = acl.rt.get_mem_info(0)
    given[short] -= 1
    assert acl.mdl.load_from_file_with_mem(str(path), *given) == (0, 245000)
    given[short] += 2
    assert acl.mdl.load_from_file_with_mem(str(path), *given) == (0, 107000)
    assert acl.rt.get_mem_info(0) == before
    given[short] -= 1
    ok(acl.mdl.load_from_file_with_mem(str(path), *given))


def test_lent_memory_freed_too_early_fails_the_run(tmp_path: Path) -> None:
    path = compile_om(tmp_path, model=add_model(weight=TABLE))
    given = lent(path)
    run = Run.of(ok(acl.mdl.load_from_file_with_mem(str(path), *given)))
    check_works(run)
    ok(acl.rt.free(given[2]))
    assert (run.launch(), run.finish()) == (0, 507015)
    assert "use after free" in acl.get_recent_err_msg()


def test_loads_of_one_om_share_weights_and_those_of_another_may_not(tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    path = compile_om(tmp_path, model=add_model(weight=TABLE))
    other = compile_om(tmp_path / "other", model=add_model(weight=TABLE + 1))
    work, work_bytes, weights, weight_bytes = lent(path)
    first = ok(acl.mdl.load_from_file_with_mem(str(path), 0, 0, weights, weight_bytes))
    second = ok(acl.mdl.load_from_file_with_mem(str(path), work, work_bytes, weights, weight_bytes))
    args = (str(other), 0, 0, weights, weight_bytes)
    assert acl.mdl.load_from_file_with_mem(*args) == (0, 100000)
    assert "only loads of the same om may share it" in acl.get_recent_err_msg()
    for model in (first, second):
        check_works(Run.of(model))
        ok(acl.mdl.unload(model))
    assert acl.mdl.load_from_file_with_mem(*args)[1] == 0


def test_models_that_never_overlap_share_work_memory_and_two_at_once_do_not(
    tmp_path: Path,
) -> None:
    path = compile_om(tmp_path, model=add_model(weight=TABLE))
    work, size, _, _ = lent(path)
    runs = [
        Run.of(ok(acl.mdl.load_from_file_with_mem(str(path), work, size, 0, 0))) for _ in range(2)
    ]
    for run in runs:
        check_works(run)
    model = this_process().models[runs[0].model]
    with lending_of(model.memory).working_in(model, (work, size)):  # as a long run does
        assert (runs[1].launch(), runs[1].finish()) == (0, 507011)
    assert "two models run at the same time in the work memory" in acl.get_recent_err_msg()
    assert any("work memory" in sentence for sentence in inspect.report().misuses)
    check_works(runs[1])


def test_a_model_in_memory_goes_into_lent_memory_too(tmp_path: Path) -> None:
    path = compile_om(tmp_path, model=add_model(weight=TABLE))
    ptr, size, _ = in_host_memory(path)
    check_works(Run.of(ok(acl.mdl.load_from_mem_with_mem(ptr, size, *lent(path)))))


# --- options ---


class Options:
    """A config handle."""

    def __init__(self, **values: Any) -> None:
        self.handle: int = acl.mdl.create_config_handle()
        for number, value in values.items():
            assert self.set(int(number.removeprefix("a")), value) == 0

    def set(self, attribute: int, value: Any) -> int:
        code: int = acl.mdl.set_config_opt(self.handle, attribute, value)
        return code

    def load(self) -> tuple[int, int]:
        result: tuple[int, int] = acl.mdl.load_with_config(self.handle)
        return result


def test_options_load_from_a_file_and_from_memory(tmp_path: Path) -> None:
    path = compile_om(tmp_path, model=add_model(weight=TABLE))
    ptr, size, _ = in_host_memory(path)
    work, work_bytes, weights, weight_bytes = lent(path)
    lending = {"a5": weights, "a6": weight_bytes, "a7": work, "a8": work_bytes}
    for options in (
        Options(a1=1, a2=str(path), a0=0),
        Options(a1=2, a2=str(path), **lending),
        Options(a1=3, a3=ptr, a4=size, a25=0),
        Options(a1=4, a3=ptr, a4=size, **lending),
    ):
        model = ok(options.load())
        check_works(Run.of(model))
        ok(acl.mdl.unload(model))
        assert acl.mdl.destroy_config_handle(options.handle) == 0
        assert options.load() == (0, 100000)


def test_options_have_pyacls_types(tmp_path: Path) -> None:
    options = Options()
    for attribute, wrong in (
        (2, 5),
        (2, b"path"),
        (1, "1"),
        (3, "x"),
        (14, "dir"),
        (0, "high"),
        (0, 1 << 31),
    ):
        with pytest.raises(TypeError):
            options.set(attribute, wrong)
    with pytest.raises(TypeError):
        options.set(3, np.int64(1))
    assert options.set(0, np.int32(7)) == 0
    assert options.set(0, 8) == 100000
    assert options.set(-1, 0) == 100000
    assert options.set(28, 1) == 0
    assert options.set(29, 1) == 100000
    assert options.set(9, 1) == 207000  # queues


def test_options_that_are_missing_or_contradict_are_100000(tmp_path: Path) -> None:
    path = compile_om(tmp_path)
    assert Options(a2=str(path)).load() == (0, 100000)
    assert "needs config attribute 1" in acl.get_recent_err_msg()
    assert Options(a1=1).load() == (0, 100000)
    assert Options(a1=3, a4=10).load() == (0, 100000)
    directory = acl.util.bytes_to_ptr(b"/tmp\0")
    assert Options(a1=1, a2=str(path), a14=directory).load() == (0, 100000)
    assert Options(a1=4, a3=directory, a4=4, a14=directory).load() == (0, 100000)
    assert Options(a1=5, a2=str(path)).load() == (0, 207000)


# --- weights beside the file ---


def test_each_weight_has_a_file_named_after_its_contents(tmp_path: Path) -> None:
    path = compile_om(tmp_path, (*STATIC, "--external_weight=1"), add_model(weight=TABLE))
    (file,) = (tmp_path / "weight").iterdir()
    assert file.read_bytes() == TABLE.tobytes()
    assert file.name == f"weight_{hashlib.sha256(TABLE.tobytes()).hexdigest()}"
    assert path.stat().st_size < 8192
    assert ok(acl.mdl.query_size(str(path)))[1] == 0
    before, _ = ok(acl.rt.get_mem_info(0))
    run = Run(path)
    assert before - ok(acl.rt.get_mem_info(0))[0] >= 6 * MIB
    check_works(run)


def test_combined_weights_are_512_byte_aligned(tmp_path: Path) -> None:
    path = compile_om(tmp_path, (*STATIC, "--external_weight=2"), add_model(weight=TABLE))
    assert (tmp_path / "model_weight_combined").read_bytes() == TABLE.tobytes()
    check_works(Run(path))


@pytest.mark.parametrize("kind", ["1", "2"])
def test_weights_that_are_not_beside_the_file_are_named(tmp_path: Path, kind: str) -> None:
    path = compile_om(tmp_path, (*STATIC, f"--external_weight={kind}"), add_model(weight=TABLE))
    file = tmp_path / read_om(str(path)).header.external[0].name
    file.write_bytes(file.read_bytes()[:-1])
    assert acl.mdl.load_from_file(str(path)) == (0, 145002)
    assert "has 4194303 bytes, not 4194304" in acl.get_recent_err_msg()
    file.unlink()
    assert acl.mdl.load_from_file(str(path)) == (0, 145002)
    assert f"weight file {file} is missing" in acl.get_recent_err_msg()


@pytest.mark.parametrize("kind", ["1", "2"])
def test_a_model_in_memory_finds_its_weights_through_an_option(tmp_path: Path, kind: str) -> None:
    path = compile_om(tmp_path, (*STATIC, f"--external_weight={kind}"), add_model(weight=TABLE))
    ptr, size, _ = in_host_memory(path)
    assert Options(a1=3, a3=ptr, a4=size).load() == (0, 145002)
    assert "attribute 14 (WEIGHT_PATH_PTR)" in acl.get_recent_err_msg()
    directory = str(tmp_path).encode() + b"\0"
    options = Options(a1=3, a3=ptr, a4=size, a14=acl.util.bytes_to_ptr(directory))
    check_works(Run.of(ok(options.load())))


# --- files that do not fit ---


def test_a_real_om_says_what_it_was_compiled_for_and_what_to_do(tmp_path: Path) -> None:
    path = write_real_om(tmp_path / "real.om")
    assert acl.mdl.load_from_file(str(path)) == (0, 545001)
    text = acl.get_recent_err_msg()
    assert "was compiled for Ascend310B4 by ATC 7.6.0.1.220" in text
    assert "convert it again with `rtcache-convert --target sim`" in text
    desc = acl.mdl.create_desc()
    assert acl.mdl.get_desc_from_file(desc, str(path)) == 545001


def test_damaged_real_oms_and_zips_are_recognised(tmp_path: Path) -> None:
    path = tmp_path / "real.om"
    path.write_bytes(b"IMOD" + bytes(300))
    assert acl.mdl.load_from_file(str(path)) == (0, 545001)
    assert "was compiled by ATC for a real SoC and is damaged" in acl.get_recent_err_msg()
    path.write_bytes(b"PK\x03\x04" + bytes(300))
    assert acl.mdl.load_from_file(str(path)) == (0, 545001)
    assert "OM2" in acl.get_recent_err_msg()


def changed(path: Path, **changes: Any) -> OmHeader:
    """Rewrites a file without weights with another header."""
    om = read_om(str(path))
    return write_om(path, msgspec.structs.replace(om.header, **changes), om.graph, [])


@pytest.mark.parametrize(
    ("soc", "changes", "sentence"),
    [
        (
            "Ascend310B4",
            {"gears": [], "ranges": [[(1, 2), (3, 3)], [(1, 2)]]},
            "has no dynamic shape",
        ),
        ("Ascend310P3", {"has_bfloat16": True}, "has no bfloat16"),
        ("Ascend310P3", {"host": "linux_riscv64"}, "holds code for linux_riscv64"),
    ],
)
def test_what_the_compiler_refuses_does_not_load_either(
    tmp_path: Path, soc: str, changes: dict[str, Any], sentence: str
) -> None:
    small = add_model(weight=np.arange(10, dtype=np.float32))
    path = compile_om(tmp_path, (*STATIC, f"--soc_version={soc}"), small)
    changed(path, **changes)
    with fresh_process(soc_name=soc):
        assert acl.mdl.load_from_file(str(path)) == (0, 545001)
        assert sentence in acl.get_recent_err_msg()


def test_files_of_format_1_still_load(tmp_path: Path) -> None:
    path = compile_om(tmp_path, GEARS)
    data = bytearray(path.read_bytes())
    assert data[8] == 2
    data[8] = 1
    path.write_bytes(data)
    assert Run(path).select(1, 2, 2) == 0
    data[8] = 3
    path.write_bytes(data)
    assert acl.mdl.load_from_file(str(path)) == (0, 545001)
    assert "has format 3" in acl.get_recent_err_msg()


# --- bundles ---


def test_bundles_are_not_modelled() -> None:
    assert acl.mdl.bundle_load_from_file("b.om") == (0, 207000)
    assert "not modelled" in acl.get_recent_err_msg()
    assert acl.mdl.bundle_load_from_mem(1, 1) == (0, 207000)
    assert acl.mdl.bundle_get_model_num(1) == (0, 207000)
    assert acl.mdl.bundle_get_model_id(1, 0) == (0, 207000)
    assert acl.mdl.bundle_unload(1) == 207000
