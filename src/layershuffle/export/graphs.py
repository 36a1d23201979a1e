"""From torch to ONNX: the ends of a model, and one graph for its blocks with their weights apart.

`torch.onnx.export` traces a block once. Its weights are inputs while the graph is simplified, so
that no number of them shapes it; then every block has the same graph, and a file of weights. The
tensors of all files have the same names and shapes, hence the same offsets, which is what the
graph's references to them name.
"""

from __future__ import annotations

import json
import logging
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import onnx
import onnxscript.optimizer
import torch
from numpy.typing import NDArray
from onnx import ModelProto, TensorProto, helper, numpy_helper
from safetensors.numpy import save
from torch import Tensor, nn

from layershuffle.core.tensors import state_of
from layershuffle.ground.errors import StackError
from layershuffle.ground.text import one_line
from layershuffle.models.manifest import WEIGHTS_LOCATION

BlockPrecision = Literal["fp32", "fp16", "int8"]
OPSET = 20
_MOST_IMAGES = 4096  # far more than anybody sends at once
_UNEXPORTED = (
    "use a model whose blocks compute the same steps for every state; layershuffle predict and "
    "eval run this one on this machine"
)
# What torch.export, torch.onnx and onnxruntime raise for what they cannot follow.
_REFUSED = (
    RuntimeError, ValueError, TypeError, AttributeError, AssertionError, LookupError,
    NotImplementedError,
)  # fmt: skip


class ModelPart(nn.Module):
    """A part of `model` as a function of one tensor, which torch.export takes as a module."""

    def __init__(self, model: nn.Module, call: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.model = model
        self._call = call

    def forward(self, values: Tensor) -> Tensor:
        """What `call` makes of `values`."""
        return self._call(values)


def block_alone(block: nn.Module, others: tuple[tuple[Any, ...], dict[str, Any]]) -> ModelPart:
    """A block as a function of the state; its other arguments are constants."""
    args, kwargs = others
    return ModelPart(block, lambda state: state_of(block(state, *args, **kwargs)))


def graph_of(module: nn.Module, example: Tensor, *, names: tuple[str, str]) -> ModelProto:
    """The ONNX graph of `module`, for batches of any size, with its weights in it.

    `example`: an input of two rows or more; `names`: of input and output. Raises `StackError` for
    what torch cannot export.
    """
    return _simplified(_traced(module, example, names))


def _simplified(graph: ModelProto) -> ModelProto:
    with _quiet():
        simplified: ModelProto = onnxscript.optimizer.optimize(graph)
    return simplified


def _traced(module: nn.Module, example: Tensor, names: tuple[str, str]) -> ModelProto:
    images = torch.export.Dim("images", min=1, max=_MOST_IMAGES)
    try:
        with _quiet(), torch.no_grad():
            exported = torch.export.export(
                module, (example.clone(),), dynamic_shapes=({0: images},), strict=False
            )
            program = torch.onnx.export(
                exported,
                dynamo=True,
                input_names=names[:1],
                output_names=names[1:],
                opset_version=OPSET,
                optimize=False,
                verbose=False,
            )
    except _REFUSED as error:
        raise StackError(
            f"torch.onnx cannot export the model ({type(error).__name__}: {one_line(error)})",
            hint=_UNEXPORTED,
        ) from error
    assert program is not None
    proto: ModelProto = program.model_proto
    # Every node has the stack of Python's calls, with the paths of this machine.
    for part in (proto, proto.graph, *proto.graph.node, *proto.graph.value_info):
        part.ClearField("metadata_props")
        part.ClearField("doc_string")
    return proto


@contextmanager
def _quiet() -> Iterator[None]:
    """Without what the libraries log and warn of, for each graph again."""
    levels: dict[logging.Logger, int] = {}
    for name in ("torch.onnx", "onnxscript", "onnx_ir", "root"):
        log = logging.getLogger(name)
        levels[log] = log.level
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for log in levels:
            log.setLevel(logging.ERROR)
        try:
            yield
        finally:
            for log, level in levels.items():
                log.setLevel(level)


# --- blocks ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class BlockForm:
    """What all blocks of one graph share: the traced graph, without weights.

    `sources`: for each weight of the graph the tensor of the block's `state_dict`, and whether it
    is transposed. `shapes`: those of all tensors of the block's `state_dict`, by name.
    """

    graph: ModelProto
    sources: Mapping[str, tuple[str, bool]]
    shapes: Mapping[str, tuple[int, ...]]

    def fits(self, block: nn.Module) -> bool:
        """Whether a block has the tensors of this form; it may compute in another way all the
        same."""
        return _shapes_of(block) == self.shapes

    def files(self, block: nn.Module, precision: BlockPrecision) -> tuple[bytes, bytes]:
        """The graph, and the weights as safetensors, of a block of this form."""
        state = block.state_dict()
        weights = dict[str, NDArray[Any]]()
        for name, (source, transposed) in self.sources.items():
            array = state[source].detach().numpy()
            weights[name] = np.ascontiguousarray(array.T if transposed else array)
        graph = ModelProto()
        graph.CopyFrom(self.graph)
        if precision == "int8":
            graph, weights = _quantised(graph, weights)
        elif precision == "fp16":
            graph, weights = _halved(graph, weights)
        content = save(weights)
        _refer(graph, weights, content)
        return graph.SerializeToString(deterministic=True), content


def form_of(module: ModelPart, example: Tensor) -> BlockForm:
    """The form of a block and of all that compute as it does. Raises as `graph_of`."""
    graph = _traced(module, example, ("state", "out"))
    prefix = "model."
    state = module.model.state_dict()
    sources: dict[str, tuple[str, bool]] = {}
    # As inputs, no rule of the optimiser sees their numbers (zero biases would become one tensor).
    for tensor in list(graph.graph.initializer):
        path = tensor.name.removeprefix(prefix)
        if path == tensor.name or path not in state:
            continue
        sources[tensor.name] = (path, False)
        graph.graph.initializer.remove(tensor)
        entry = helper.make_tensor_value_info(tensor.name, tensor.data_type, tensor.dims)
        graph.graph.input.append(entry)
    graph = _simplified(graph)
    for entry in list(graph.graph.input):
        if entry.name in sources:
            graph.graph.input.remove(entry)
    _transpose_ahead(graph, sources)
    names: dict[str, str] = {}
    for name, (path, transposed) in sources.items():
        names[name] = f"{path}.T" if transposed else path
    used: set[str] = set()
    for node in graph.graph.node:
        for place, name in enumerate(node.input):
            if name in names:
                used.add(name)
                node.input[place] = names[name]
    own: dict[str, tuple[str, bool]] = {}
    for name, source in sources.items():
        if name in used:
            own[names[name]] = source
    return BlockForm(graph, own, _shapes_of(module.model))


def _shapes_of(block: nn.Module) -> dict[str, tuple[int, ...]]:
    return {name: tuple(tensor.shape) for name, tensor in block.state_dict().items()}


def _transpose_ahead(graph: ModelProto, sources: dict[str, tuple[str, bool]]) -> None:
    """Store matrices as their product needs them: int8 quantises no transposed one."""
    for node in list(graph.graph.node):
        if node.op_type != "Transpose" or node.input[0] not in sources:
            continue
        if len(node.attribute) == 1 and list(node.attribute[0].ints) == [1, 0]:
            source, transposed = sources[node.input[0]]
            sources[node.output[0]] = source, not transposed
            graph.graph.node.remove(node)


def _halved(
    graph: ModelProto, weights: Mapping[str, NDArray[Any]]
) -> tuple[ModelProto, dict[str, NDArray[Any]]]:
    """Weights in float16, which the graph turns into float32 once, when it is loaded."""
    halves = dict[str, NDArray[Any]]()
    casts = []
    for name, array in weights.items():
        if array.dtype != np.float32:
            halves[name] = array
            continue
        with np.errstate(over="ignore"):
            halves[f"{name}.half"] = array.astype(np.float16)
        if not np.isfinite(halves[f"{name}.half"]).all():
            raise StackError(
                f"The weights {name} are beyond the range of float16", hint="take --precision fp32"
            )
        casts.append(helper.make_node("Cast", [f"{name}.half"], [name], to=TensorProto.FLOAT))
    nodes = [*casts, *graph.graph.node]
    del graph.graph.node[:]
    graph.graph.node.extend(nodes)
    return graph, halves


def _quantised(
    graph: ModelProto, weights: Mapping[str, NDArray[Any]]
) -> tuple[ModelProto, dict[str, NDArray[Any]]]:
    """Matrices in int8 with a scale per column; states are quantised as they come."""
    from onnxruntime.quantization import QuantType, quantize_dynamic

    constants = {tensor.name for tensor in graph.graph.initializer}
    for name, array in weights.items():
        graph.graph.initializer.append(numpy_helper.from_array(array, name))
    with tempfile.TemporaryDirectory() as place, _quiet():
        path = Path(place) / "block.onnx"
        quantize_dynamic(
            graph,
            path,
            per_channel=True,
            # 7 bits: with 8, sums of two products saturate on x86 processors without VNNI, and
            # nothing says so.
            reduce_range=True,
            weight_type=QuantType.QInt8,
        )
        graph = onnx.load(path)
    moved = dict[str, NDArray[Any]]()
    for tensor in list(graph.graph.initializer):
        if tensor.name not in constants:
            moved[tensor.name] = numpy_helper.to_array(tensor)
            graph.graph.initializer.remove(tensor)
    return graph, moved


def _refer(graph: ModelProto, weights: Mapping[str, NDArray[Any]], content: bytes) -> None:
    """Add the weights to the graph, as references into the file `content`."""
    # safetensors: 8 bytes give the length of a JSON header, which has the offsets behind it.
    start = 8 + int.from_bytes(content[:8], "little")
    header = json.loads(content[8:start])
    for name in sorted(weights):
        first, end = header[name]["data_offsets"]
        tensor = graph.graph.initializer.add(
            name=name,
            data_type=helper.np_dtype_to_tensor_dtype(weights[name].dtype),
            dims=weights[name].shape,
            data_location=TensorProto.EXTERNAL,
        )
        facts = {"location": WEIGHTS_LOCATION, "offset": start + first, "length": end - first}
        for key, value in facts.items():
            tensor.external_data.add(key=key, value=str(value))
