"""ONNX Runtime sessions over `.om` files: what executes a model on the software device."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import onnx
from onnx.external_data_helper import ExternalDataInfo, uses_external_data

from runtime_cache.aclsim import codes
from runtime_cache.aclsim.external_data import all_initializers, refer_to
from runtime_cache.aclsim.failure import AclFailure
from runtime_cache.aclsim.om import SECTION_NAME, OmFile
from runtime_cache.aclsim.onnx_runtime import ort
from runtime_cache.aclsim.settings import SimSettings

# Severity "fatal": what ONNX Runtime has to say comes back as an exception.
_QUIET = 4
# Falling back, if it were on, would be to this one again, with words on standard output.
_PROVIDERS = ["CPUExecutionProvider"]


def new_session(om: OmFile, config: SimSettings) -> Any:
    """An ONNX Runtime session over the model.

    Weights in a file are mapped in place. Those of a model in memory are copied once, into a file
    without a name: the program may free its copy when the load returns.

    Raises:
        AclFailure: 545001 if ONNX Runtime refuses the graph; 145002 if external weights are not
            where they should be; 207001 if the host has no room for those of a model in memory.
    """
    _check_external_weights(om)
    with _weights_file(om) as (directory, name, offset):
        options = _session_options(config, _utf8(directory))
        try:
            graph = _pointing_into(om.graph, name, offset)
            session = ort.InferenceSession(graph, options, providers=_PROVIDERS, enable_fallback=0)
        except Exception as error:  # ONNX and ONNX Runtime raise many types: all mean the same
            raise AclFailure(codes.GE_LOAD_MODEL, f"{om.label} does not load: {error}") from error
    _check_names(om, session)
    return session


def _check_names(om: OmFile, session: Any) -> None:
    """The header and the graph of a file that ATC made name the same tensors."""
    in_graph = [{value.name for value in session.get_inputs()}]
    in_graph.append({value.name for value in session.get_outputs()})
    in_header = [{info.name for info in side} for side in (om.header.inputs, om.header.outputs)]
    if in_graph != in_header:
        sentence = f"{om.label} is damaged: its header names {in_header}, its graph {in_graph}"
        raise AclFailure(codes.GE_LOAD_MODEL, sentence)


def _utf8(directory: Path) -> str:
    """Raises 145002 for a name that ONNX Runtime cannot be told."""
    text = str(directory)
    if text != text.encode("utf-8", "replace").decode():
        sentence = f"the name of the directory {text!a} is not UTF-8"
        raise AclFailure(codes.GE_MODEL_PATH_INVALID, sentence)
    return text


def _session_options(config: SimSettings, directory: str) -> Any:
    options = ort.SessionOptions()
    options.log_severity_level = _QUIET
    options.intra_op_num_threads = config.threads or os.cpu_count() or 1
    options.add_session_config_entry("session.intra_op.allow_spinning", str(int(config.spin)))
    if config.weights_in_place:
        options.add_session_config_entry("session.disable_prepacking", "1")
        options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.add_session_config_entry(
        "session.model_external_initializers_file_folder_path", directory
    )
    return options


def _check_external_weights(om: OmFile) -> None:
    for file in om.header.external:
        if om.weight_directory is None:
            sentence = (
                f"{om.label} has its weights in files beside it: for a model in memory, name their "
                "directory with set_config_opt, attribute 14 (WEIGHT_PATH_PTR)"
            )
            raise AclFailure(codes.GE_MODEL_PATH_INVALID, sentence)
        path = om.weight_directory / file.name
        found = path.stat().st_size if path.is_file() else None
        if found != file.length:
            what = "is missing" if found is None else f"has {found} bytes, not {file.length}"
            raise AclFailure(codes.GE_MODEL_PATH_INVALID, f"{om.label}: weight file {path} {what}")


@contextmanager
def _weights_file(om: OmFile) -> Iterator[tuple[Path, str, int]]:
    """Where the weights lie while the session is made: directory, file name, offset in it."""
    if om.path is not None:
        yield om.path.parent, om.path.name, om.weights_offset
    elif om.image is None or om.header.weights.length == 0:
        yield om.weight_directory or Path(), SECTION_NAME, 0
    else:
        with tempfile.TemporaryDirectory(prefix="aclsim-") as scratch:
            path = Path(scratch) / SECTION_NAME
            _copy(om.image[om.weights_offset :], path)
            yield path.parent, path.name, 0


def _copy(weights: memoryview, path: Path) -> None:
    try:
        with path.open("wb") as file:
            file.write(weights)
    except OSError as error:
        sentence = f"the host has no room for {len(weights)} bytes of weights: {error}"
        raise AclFailure(codes.RT_MEMORY_ALLOCATION, sentence) from error


def _pointing_into(graph: bytes, name: str, offset: int) -> bytes:
    """The graph with references to the weights section pointing at a file."""
    model = onnx.load_model_from_string(graph)
    for tensor in all_initializers(model.graph):
        if uses_external_data(tensor):
            info = ExternalDataInfo(tensor)
            if info.location == SECTION_NAME:
                refer_to(tensor, name, offset + (info.offset or 0), info.length or 0)
    return bytes(model.SerializeToString())
