"""Trial runs of a model that is being compiled: what its output shapes are for made-up data.

For shapes that inference does not find. Two runs, on zeros and on ones: where their shapes differ,
or one of them fails, the shapes depend on the data.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx

from runtime_cache.aclsim.atc.error import AtcError
from runtime_cache.aclsim.atc.infer import Dims
from runtime_cache.aclsim.atc.weights import Weight
from runtime_cache.aclsim.external_data import all_initializers, refer_to
from runtime_cache.aclsim.om import TensorInfo
from runtime_cache.aclsim.onnx_runtime import ort

_QUIET = 4
#: numpy type that holds an ONNX type, and the bits of 1 where numpy has no such type.
_NUMPY = {
    1: "f4",
    2: "u1",
    3: "i1",
    4: "u2",
    5: "i2",
    6: "i4",
    7: "i8",
    9: "u1",
    10: "f2",
    11: "f8",
    12: "u4",
    13: "u8",
    16: "u2",
}
_BFLOAT16, _BFLOAT16_ONE = 16, 0x3F80


class TrialRuns:
    """Runs a model on made-up data; the session is made when it is first needed.

    Args:
        model: with its weights already moved out.
        weights: those, still at their sources.
        directory: where the model's external data lie.
        inputs: what it takes.
    """

    def __init__(
        self,
        model: onnx.ModelProto,
        weights: Sequence[Weight],
        directory: Path,
        inputs: Sequence[TensorInfo],
    ) -> None:
        self._model = model
        self._weights = weights
        self._directory = directory
        self._inputs = inputs

    def __call__(self, dims: Sequence[Sequence[int]]) -> list[Dims]:
        """Output dims, None where they depend on the data.

        Raises:
            AtcError: E20001 if the model runs neither on zeros nor on ones.
        """
        seen, reason = [], ""
        for fill in (0, 1):
            try:
                seen.append(self._run(dims, fill))
            except Exception as error:  # ONNX Runtime raises many types
                reason = str(error)
        if not seen:
            raise AtcError("E20001", f"the model does not run with inputs {list(dims)}: {reason}")
        if len(seen) == 1:
            return [[None] * len(shape) for shape in seen[0]]
        return [_common(zeros, ones) for zeros, ones in zip(*seen, strict=True)]

    def _run(self, dims: Sequence[Sequence[int]], fill: int) -> list[list[int]]:
        binding = self._session.io_binding()
        arrays = [_array(info, shape, fill) for info, shape in zip(self._inputs, dims, strict=True)]
        for info, shape, array in zip(self._inputs, dims, arrays, strict=True):
            address = array.ctypes.data
            binding.bind_input(info.name, "cpu", 0, info.onnx_type, list(shape), address)
        for output in self._session.get_outputs():
            binding.bind_output(output.name, "cpu")
        self._session.run_with_iobinding(binding)
        return [list(value.shape()) for value in binding.get_outputs()]

    @functools.cached_property
    def _session(self) -> Any:
        model = onnx.ModelProto()
        model.CopyFrom(self._model)
        tensors = list(all_initializers(model.graph))
        for weight in self._weights:
            _point_at_source(tensors[weight.position], weight, self._directory)
        options = ort.SessionOptions()
        options.log_severity_level = _QUIET
        options.add_session_config_entry(
            "session.model_external_initializers_file_folder_path", str(self._directory)
        )
        return ort.InferenceSession(
            model.SerializeToString(), options, providers=["CPUExecutionProvider"]
        )


def _point_at_source(tensor: onnx.TensorProto, weight: Weight, directory: Path) -> None:
    if weight.data is None:
        refer_to(tensor, os.path.relpath(weight.path, directory), weight.start, weight.length)
        return
    refer_to(tensor, "", 0, 0)
    del tensor.external_data[:]
    tensor.data_location = onnx.TensorProto.DEFAULT
    tensor.raw_data = weight.data


def _array(info: TensorInfo, shape: Sequence[int], fill: int) -> npt.NDArray[Any]:
    value = _BFLOAT16_ONE * fill if info.onnx_type == _BFLOAT16 else fill
    return np.full(tuple(shape), value, _NUMPY[info.onnx_type])


def _common(zeros: Sequence[int], ones: Sequence[int]) -> Dims:
    """What two shapes have in common; nothing but the rank if that differs."""
    if len(zeros) != len(ones):
        return [None] * len(ones)
    return [one if one == zero else None for zero, one in zip(zeros, ones, strict=True)]
