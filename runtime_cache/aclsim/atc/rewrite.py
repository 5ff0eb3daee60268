"""What the command line changes in a graph: which tensors are outputs, their names and types."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import onnx
from onnx import TensorProto, helper

from runtime_cache.aclsim.atc.error import AtcError
from runtime_cache.aclsim.atc.graph import model_inputs
from runtime_cache.aclsim.atc.infer import infer
from runtime_cache.aclsim.atc.options import OUTPUT_TYPES, AtcOptions
from runtime_cache.aclsim.external_data import all_nodes


def rewrite(model: onnx.ModelProto, options: AtcOptions) -> None:
    """Applies `--out_nodes`, `--output_type` and `--input_fp16_nodes`.

    Raises:
        AtcError: E10016 for a node or input that the model does not have, E10001 for an output
            that cannot be cast.
    """
    if options.out_nodes:
        _choose_outputs(model, options.out_nodes)
    for index, onnx_type in _types_by_output(options.output_types, options.out_nodes, model):
        _cast_output(model, index, onnx_type)
    for name in options.input_fp16_nodes:
        _cast_input(model, name)


def output_names(model: onnx.ModelProto, out_nodes: Sequence[tuple[str, int]]) -> list[str]:
    """What pyACL calls each output: `operator:edge:name`, or `operator:edge` for `--out_nodes`.

    On a card the operator may be another one, which the compiler made of several, or a subgraph.

    Source: get_output_name_by_index, aclpythondevg_01_0214 of CANN 8.0; aclcppdevg_03_1457 of 8.5.
    """
    makers = {
        name: f"{node.name or f'{node.op_type}_{place}'}:{edge}"
        for place, node in enumerate(model.graph.node)
        for edge, name in enumerate(node.output)
    }
    if out_nodes:
        return [f"{node}:{edge}" for node, edge in out_nodes]
    names = [value.name for value in model.graph.output]
    return [f"{makers[name]}:{name}" if name in makers else name for name in names]


def _choose_outputs(model: onnx.ModelProto, chosen: Sequence[tuple[str, int]]) -> None:
    """Makes outputs of nodes the outputs of the model."""
    nodes = {node.name: node for node in model.graph.node}
    names = []
    for name, index in chosen:
        node = nodes.get(name)
        if node is None or index >= len(node.output) or not node.output[index]:
            raise AtcError("E10016", f"--out_nodes: the model has no output {index} of [{name}]")
        names.append(node.output[index])
    known = {value.name: value for value in (*model.graph.output, *infer(model).graph.value_info)}
    del model.graph.output[:]
    for name in names:
        value = known.get(name)
        if value is None:
            raise AtcError("E10001", f"--out_nodes: the type of [{name}] is not known")
        model.graph.output.append(value)


def _types_by_output(
    types: Mapping[tuple[str, int], str],
    out_nodes: Sequence[tuple[str, int]],
    model: onnx.ModelProto,
) -> list[tuple[int, int]]:
    """(output, ONNX type) of what `--output_type` names."""
    everywhere = types.get(("", 0))
    if everywhere is not None:
        onnx_type = OUTPUT_TYPES[everywhere]
        return [(index, onnx_type) for index in range(len(model.graph.output))]
    return [(out_nodes.index(node), OUTPUT_TYPES[name]) for node, name in types.items()]


def _cast_output(model: onnx.ModelProto, index: int, onnx_type: int) -> None:
    """Puts a Cast behind an output; the output keeps its name."""
    value = model.graph.output[index]
    if value.type.tensor_type.elem_type == onnx_type:
        return
    makers = [node for node in model.graph.node if value.name in node.output]
    if not makers:
        raise AtcError("E10001", f"--output_type: no node makes the output [{value.name}]")
    inner = f"{value.name}/before_output_type"
    makers[0].output[list(makers[0].output).index(value.name)] = inner
    _rename_uses(model, value.name, inner)
    name = f"{value.name}/output_type"
    model.graph.node.append(
        helper.make_node("Cast", [inner], [value.name], name=name, to=onnx_type)
    )
    value.type.tensor_type.elem_type = onnx_type


def _cast_input(model: onnx.ModelProto, name: str) -> None:
    """Takes an input as fp16 and casts it to what the graph wants."""
    value = model_inputs(model).get(name)
    if value is None:
        raise AtcError("E10016", f"--input_fp16_nodes: the model has no input [{name}]")
    onnx_type = value.type.tensor_type.elem_type
    if onnx_type == TensorProto.FLOAT16:
        return
    inner = f"{name}/after_input_fp16"
    _rename_uses(model, name, inner)
    cast = helper.make_node("Cast", [name], [inner], name=f"{name}/input_fp16", to=onnx_type)
    model.graph.node.insert(0, cast)
    value.type.tensor_type.elem_type = TensorProto.FLOAT16


def _rename_uses(model: onnx.ModelProto, old: str, new: str) -> None:
    for node in all_nodes(model.graph):
        for position, name in enumerate(node.input):
            if name == old:
                node.input[position] = new
