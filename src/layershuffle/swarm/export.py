"""Convert a block to a program: `torch.export` traces it, and its graph is written to bytes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.export import ExportedProgram
from torch.export.graph_signature import InputSpec

from layershuffle.core.tensors import state_of
from layershuffle.errors import StackError
from layershuffle.swarm.program import (
    ARITHMETIC,
    FORMAT,
    METADATA_KEY,
    NAMED,
    kind_of,
    pack_tensors,
)
from layershuffle.text import one_line

UNSERVED = "no swarm serves such a model; layershuffle predict and eval run it on this machine"
# Far more than the largest batch of a host (`Limits.max_batch`).
_MOST_IMAGES = 4096
# Errors of torch.export for a block that it cannot trace.
_REFUSED = (
    RuntimeError, ValueError, TypeError, AttributeError, AssertionError, KeyError, IndexError,
    NotImplementedError,
)  # fmt: skip


@dataclass(frozen=True)
class RecordedCall:
    """One block's call in a forward of its model: state, other arguments, and result."""

    block: int
    state: Tensor
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    answer: Tensor


class Alone(nn.Module):
    """A block as a function of the state, with its other arguments fixed."""

    def __init__(self, block: nn.Module, call: RecordedCall) -> None:
        super().__init__()
        self.block, self._args, self._kwargs = block, call.args, dict(call.kwargs)

    def forward(self, state: Tensor) -> Tensor:
        """The state after the block, `[images, tokens, width]`."""
        return state_of(self.block(state, *self._args, **self._kwargs))


def export(module: Alone, states: Tensor) -> bytes:
    """The program of a block (`layershuffle.swarm.program`), for batches of any size.

    `states`: float32 `[images, tokens, width]`, two images or more, to trace the block with.
    Raises `StackError` for a block that torch.export cannot trace or that does not fit into a
    program, because of operations that are not torch's own or buffers that change.
    """
    images = torch.export.Dim("images", min=1, max=_MOST_IMAGES)
    try:
        with torch.no_grad():
            # Two images, because torch.export treats a size of 1 as a constant.
            exported = torch.export.export(
                module, (states[:2].clone(),), dynamic_shapes=({0: images},), strict=False
            )
    except _REFUSED as error:
        raise StackError(
            f"torch.export cannot follow the blocks ({type(error).__name__}: {one_line(error)})",
            hint="serve a model whose blocks compute the same steps for every state",
        ) from error
    return _written(exported, prefix="block.")


def _written(exported: ExportedProgram, *, prefix: str) -> bytes:
    number = {node: index for index, node in enumerate(exported.graph.nodes)}
    inputs = [_source(spec) for spec in exported.graph_signature.input_specs]
    stored = {**exported.constants, **exported.state_dict}
    steps = [node for node in exported.graph.nodes if node.op not in ("placeholder", "output")]
    data = {
        "format": FORMAT,
        "shape": _state_shape(exported),
        "weights": sorted(
            [name.removeprefix(prefix), *kind_of(stored[name])]
            for kind, name in inputs
            if kind == "weight"
        ),
        # A weight's `requires_grad` decides which matrix product torch uses, hence the last bits.
        "trained": sorted(
            name.removeprefix(prefix)
            for kind, name in inputs
            if kind == "weight" and stored[name].requires_grad
        ),
        "inputs": [[kind, name.removeprefix(prefix)] for kind, name in inputs],
        "steps": [
            [_target(node), _encoded(node.args, number), _encoded(dict(node.kwargs), number)]
            for node in steps
        ],
        "output": number[_output(exported)],
    }
    constants = {
        name.removeprefix(prefix): stored[name] for kind, name in inputs if kind == "constant"
    }
    return pack_tensors(constants, metadata={METADATA_KEY: json.dumps(data)})


def _source(spec: InputSpec) -> tuple[str, str]:
    """The kind of an input ("state", "weight", "constant"), and its name."""
    kind = spec.kind.name
    if kind == "USER_INPUT":
        return "state", ""
    # A buffer that is not in the state_dict is not among a block's weights: it becomes a constant
    # of the program.
    if kind == "PARAMETER" or (kind == "BUFFER" and spec.persistent):
        return "weight", str(spec.target)
    if kind in ("BUFFER", "CONSTANT_TENSOR"):
        return "constant", str(spec.target)
    raise StackError(
        f"A block cannot travel as a program: it takes a {kind.lower()}", hint=UNSERVED
    )


def _state_shape(exported: ExportedProgram) -> list[int]:
    # The graph's first nodes are its inputs, in the order of the specs.
    states = [
        node
        for node, spec in zip(
            exported.graph.nodes, exported.graph_signature.input_specs, strict=False
        )
        if _source(spec)[0] == "state"
    ]
    if len(states) != 1:
        raise StackError(
            f"A block cannot travel as a program: it has {len(states)} inputs", hint=UNSERVED
        )
    return [int(size) for size in states[0].meta["val"].shape[1:]]


def _output(exported: ExportedProgram) -> fx.Node:
    kinds = [spec.kind.name for spec in exported.graph_signature.output_specs]
    # A buffer that changes while the block runs appears here as a second output.
    if kinds != ["USER_OUTPUT"]:
        names = ", ".join(kind.lower() for kind in kinds)
        raise StackError(
            f"A block cannot travel as a program: its outputs are {names}", hint=UNSERVED
        )
    node: fx.Node = exported.graph.output_node().args[0][0]
    return node


def _target(node: fx.Node) -> str:
    if isinstance(node.target, torch._ops.OpOverload) and node.target.namespace == "aten":
        return str(node.target)
    name = getattr(node.target, "__name__", str(node.target))
    # By identity, because any library may have a function named `add`.
    if ARITHMETIC.get(name) is node.target:
        return name
    raise StackError(
        f"A block cannot travel as a program: it needs {node.target}, which is not one of torch's "
        "own operations",
        hint=UNSERVED,
    )


def _encoded(value: object, number: Mapping[fx.Node, int]) -> Any:
    if isinstance(value, fx.Node):
        return {"value": number[value]}
    if isinstance(value, list | tuple):
        return [_encoded(item, number) for item in value]
    if isinstance(value, dict):
        return {key: _encoded(item, number) for key, item in value.items()}
    if isinstance(value, torch.device):
        return {"device": str(value)}
    if isinstance(value, NAMED):
        return {"torch": str(value).removeprefix("torch.")}
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise StackError(
        f"A block cannot travel as a program: an operation takes a {type(value).__name__}",
        hint=UNSERVED,
    )
