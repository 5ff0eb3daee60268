"""ONNX's own test cases, operators and networks, compiled and run on the software device."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

import runtime_cache.aclsim as acl
from runtime_cache.aclsim.atc.compiler import compile_model, tables
from runtime_cache.aclsim.atc.options import AtcError, parse_options
from runtime_cache.aclsim.om import read_om
from tests.support.aclsim import Array, download, fresh_process, ok, put

pytestmark = pytest.mark.long

NEWEST_OPSET = 18
# ATC refuses these; E20001 is ONNX Runtime's no.
REFUSALS = ("E16002", "E16005", "E10001", "E10011", "E20001")
#: Results that are random, or that ONNX's reference and ONNX Runtime do not agree on.
NOT_COMPARED = ("dropout", "bernoulli", "random", "multinomial", "bfloat16", "maxunpool")
DTYPES = {0: "f4", 1: "f2", 2: "i1", 3: "i4", 4: "u1", 6: "i2", 7: "u2", 8: "u4", 9: "i8"}
DTYPES |= {10: "u8", 11: "f8", 12: "?"}
Case = tuple[str, onnx.ModelProto, list[Array], list[Array]]


def cases() -> Iterator[Case]:
    """Those of plain tensors whose operators have not changed since the newest opset of ATC."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from onnx.backend.test.case.node import collect_testcases

        found = collect_testcases(None)
    for case in found:
        if len(case.data_sets) != 1 or any(name in case.name for name in NOT_COMPARED):
            continue
        inputs, outputs = map(list, case.data_sets[0])
        if all(isinstance(value, np.ndarray) for value in (*inputs, *outputs)) and is_old(case):
            yield case.name, case.model, inputs, outputs


def is_old(case: Any) -> bool:
    """Whether the case means the same in the newest opset of ATC; its model is set to that."""
    imports = case.model.opset_import
    if len(imports) != 1 or imports[0].domain:
        return False
    for node in case.model.graph.node:
        try:
            schema = onnx.defs.get_schema(node.op_type, imports[0].version, node.domain)
        except onnx.defs.SchemaError:
            return False
        if schema.since_version > NEWEST_OPSET:
            return False
    imports[0].version = min(imports[0].version, NEWEST_OPSET)
    case.model.ir_version = 8
    return True


def compiled(directory: Path, model: onnx.ModelProto, inputs: list[Array]) -> Path | None:
    """The `.om`, or None if the compiler refuses the model."""
    shapes = ";".join(
        f"{value.name}:{','.join(map(str, array.shape))}"
        for value, array in zip(model.graph.input, inputs, strict=False)
    )
    source = directory / "m.onnx"
    onnx.save_model(model, source)
    try:
        return compiled_file(source, directory, [f"--input_shape={shapes}"] if shapes else [])
    except AtcError as error:
        if error.code not in REFUSALS:
            raise
        return None


def compiled_file(source: Path, directory: Path, flags: list[str]) -> Path:
    own = ["--framework=5", f"--model={source}", f"--output={directory / 'm'}"]
    options = [*own, "--soc_version=Ascend910B4", *flags]
    return compile_model(parse_options(options, tables().soc_versions))


def run(path: Path, inputs: list[Array]) -> list[Array]:
    """The outputs, in memory of the system."""
    model, desc = ok(acl.mdl.load_from_file(str(path))), acl.mdl.create_desc()
    ok(acl.mdl.get_desc(desc, model))
    given, taken = acl.mdl.create_dataset(), acl.mdl.create_dataset()
    pointers = [ok(acl.rt.malloc(max(array.nbytes, 1), 0)) for array in inputs]
    for array, pointer in zip(inputs, pointers, strict=True):
        put(pointer, np.ascontiguousarray(array))
        ok(acl.mdl.add_dataset_buffer(given, acl.create_data_buffer(pointer, array.nbytes)))
    count = acl.mdl.get_num_outputs(desc)
    for _ in range(count):
        ok(acl.mdl.add_dataset_buffer(taken, acl.create_data_buffer(0, 0)))
    ok(acl.mdl.execute(model, given, taken))
    results = [result(desc, taken, index) for index in range(count)]
    ok(acl.mdl.unload(model))
    for pointer in pointers:
        ok(acl.rt.free(pointer))
    return results


def result(desc: int, dataset: int, index: int) -> Array:
    buffer = acl.mdl.get_dataset_buffer(dataset, index)
    pointer, size = acl.get_data_buffer_addr(buffer), acl.get_data_buffer_size_v2(buffer)
    array = download(pointer, np.uint8, size).view(
        DTYPES[acl.mdl.get_output_data_type(desc, index)]
    )
    ok(acl.rt.free(pointer))
    return array


def agree(got: Array, expected: Array) -> bool:
    flat = np.asarray(expected).ravel()
    if got.size != flat.size or got.dtype != flat.dtype:
        return False
    return bool(np.allclose(got, flat, rtol=1e-3, atol=1e-3, equal_nan=True))


def test_operators_that_atc_takes_give_what_onnx_says(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    checked, wrong = 0, []
    with fresh_process(memory_bytes=1 << 30, soc_name="Ascend910B4", threads=1):
        for name, model, inputs, outputs in cases():
            path = compiled(tmp_path, model, inputs)
            if path is None:
                continue
            checked += 1
            if not all(map(agree, run(path, inputs), outputs)):
                wrong.append(name)
            path.unlink()
    capsys.readouterr()
    assert wrong == []
    assert checked > 400


NETWORKS = sorted((Path(onnx.__file__).parent / "backend/test/data/light").glob("light_*.onnx"))


@pytest.mark.parametrize("source", NETWORKS, ids=lambda path: path.stem)
def test_well_known_networks_run(source: Path, tmp_path: Path) -> None:
    """Their weights are constants, their input ones, their results beside them."""
    expected = onnx.load_tensor(source.with_name(f"{source.stem}_output_0.pb"))
    path = compiled_file(source, tmp_path, [])
    (info,) = read_om(str(path)).header.inputs
    with fresh_process(memory_bytes=4 << 30, soc_name="Ascend910B4"):
        (got,) = run(path, [np.ones(info.dims, np.float32)])
    assert agree(got, onnx.numpy_helper.to_array(expected))


def test_the_networks_are_there() -> None:
    assert len(NETWORKS) >= 9
