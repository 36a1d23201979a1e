"""A block as a list of torch operations, which a host runs with torch alone.

The head exports the list with `torch.export` (`layershuffle.swarm.export`); all blocks of a model
share one. It is sent as JSON in the header of a safetensors file, whose tensors are the constants,
and a block's weights as safetensors under their names in the block's `state_dict`. Nothing is
unpickled, no source code is sent, and the only operations are those of torch's `aten` and integer
arithmetic. research/decisions says why torch's own archive is not used.
"""

from __future__ import annotations

import hashlib
import json
import operator
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor, fx

from layershuffle.errors import ModelFileError

FORMAT = 1
METADATA_KEY = "program"
ARITHMETIC = {
    name: getattr(operator, name)
    for name in (
        "getitem", "add", "sub", "mul", "floordiv", "mod", "neg",
        "eq", "ne", "lt", "le", "gt", "ge",
    )
}  # fmt: skip
NAMED = (torch.dtype, torch.memory_format, torch.layout)
# Errors of reading a header that `export` did not write.
_MALFORMED = (KeyError, IndexError, TypeError, ValueError, AttributeError, RuntimeError)


@dataclass(frozen=True, eq=False)
class BlockProgram:
    """The computation of every block of one model, without weights.

    `shape`: shape of a state without its batch, (tokens, width). `weights`: type and shape of each
    tensor of a block.
    """

    digest: str
    shape: tuple[int, ...]
    weights: Mapping[str, tuple[str, tuple[int, ...]]]
    _trained: frozenset[str]
    _inputs: tuple[str | Tensor | None, ...]  # a weight's name, a constant, or None for the state
    _run: Callable[..., Tensor]

    def bind(self, content: bytes) -> Block:
        """The block whose weights `content` holds (safetensors).

        Raises `ModelFileError` if they are damaged, or not those of a block of this program.
        """
        tensors = _loaded(content)
        kinds = {name: kind_of(tensor) for name, tensor in tensors.items()}
        for name in sorted(kinds.keys() | self.weights.keys()):
            if kinds.get(name) != self.weights.get(name):
                raise ModelFileError(
                    f"These are not the weights of such a block: {name} is "
                    f"{_describe(kinds.get(name))}, the program needs "
                    f"{_describe(self.weights.get(name))}",
                    hint="take blocks of one model, or of siblings of it",
                )
        # Copies with the model's `requires_grad`: torch chooses its matrix product by memory
        # alignment and by whether gradients are needed, and the last bits depend on that choice.
        ready = {
            name: tensor.clone().requires_grad_(name in self._trained)
            for name, tensor in tensors.items()
        }
        values = [ready[source] if isinstance(source, str) else source for source in self._inputs]
        return Block(self, digest_of(content), tuple(values))


@dataclass(frozen=True, eq=False)
class Block:
    """One block, ready to run. `digest`: SHA-256 of its packed weights."""

    program: BlockProgram
    digest: str
    _values: tuple[Tensor | None, ...]

    def __call__(self, state: Tensor) -> Tensor:
        """The state after the block; both are float32 `[images, tokens, width]`."""
        with torch.inference_mode():
            return self.program._run(*(state if value is None else value for value in self._values))


def digest_of(content: bytes) -> str:
    """SHA-256 in hexadecimal."""
    return hashlib.sha256(content).hexdigest()


def pack_tensors(tensors: Mapping[str, Tensor], metadata: dict[str, str] | None = None) -> bytes:
    """Safetensors of a block's weights; equal weights give equal bytes."""
    # Copies: the format refuses tensors that share memory, and strided ones.
    plain = {name: t.detach().to("cpu", copy=True).contiguous() for name, t in tensors.items()}
    return safetensors.torch.save(plain, metadata)


def read_program(content: bytes) -> BlockProgram:
    """Read a program from `layershuffle.swarm.export`. Raises `ModelFileError` for other bytes."""
    constants = _loaded(content)
    try:
        # safetensors: the first 8 bytes give the length of a JSON header, which holds the metadata.
        header = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
        data = json.loads(header["__metadata__"][METADATA_KEY])
        if data["format"] != FORMAT:
            raise ValueError(f"format {data['format']}, this version reads {FORMAT}")
        weights = {name: (str(dtype), tuple(shape)) for name, dtype, shape in data["weights"]}
        inputs = tuple(_input(kind, name, constants) for kind, name in data["inputs"])
        run = _compiled(len(inputs), data["steps"], output=data["output"])
        return BlockProgram(
            digest_of(content),
            tuple(data["shape"]),
            weights,
            frozenset(data["trained"]),
            inputs,
            run,
        )
    except _MALFORMED as error:
        raise ModelFileError(
            f"This is not a block's program ({type(error).__name__}: {error})",
            hint="run the same versions of layershuffle and torch on the head and on its hosts",
        ) from error


def _loaded(content: bytes) -> dict[str, Tensor]:
    try:
        tensors: dict[str, Tensor] = safetensors.torch.load(content)
    except (SafetensorError, ValueError) as error:
        raise ModelFileError(f"These are not whole safetensors ({error})") from error
    return tensors


def _input(kind: str, name: str, constants: Mapping[str, Tensor]) -> str | Tensor | None:
    if kind == "state":
        return None
    return constants[name].clone() if kind == "constant" else name


def _compiled(inputs: int, steps: Sequence[Sequence[Any]], *, output: int) -> Callable[..., Tensor]:
    """One function of all inputs. The code of torch.fx frees values after their last use."""
    graph = fx.Graph()
    nodes = [graph.placeholder(f"input_{number}") for number in range(inputs)]
    for target, args, named in steps:
        if not all(name.isidentifier() for name in named):
            # torch.fx writes the name into source code.
            raise ValueError("an argument's name is not an identifier")
        kwargs = {name: _decoded(value, nodes) for name, value in named.items()}
        arguments = tuple(_decoded(value, nodes) for value in args)
        nodes.append(graph.call_function(_operation(target), arguments, kwargs))
    graph.output(nodes[output])
    return fx.GraphModule({}, graph)


def _operation(target: str) -> Callable[..., Any]:
    if target in ARITHMETIC:
        return ARITHMETIC[target]  # type: ignore[no-any-return]
    # Only names below torch.ops.aten: a program can call nothing else.
    name = re.fullmatch(r"aten\.([a-z0-9_]+)\.([A-Za-z0-9_]+)", target)
    if name is None:
        raise ValueError(f"{target[:80]!r} is not an operation of torch")
    operation: Callable[..., Any] = getattr(getattr(torch.ops.aten, name[1]), name[2])
    return operation


def _decoded(value: Any, nodes: Sequence[fx.Node]) -> Any:
    if isinstance(value, list):
        return [_decoded(item, nodes) for item in value]
    if not isinstance(value, dict):
        return value
    if "value" in value:
        return nodes[value["value"]]
    if "device" in value:
        return torch.device(value["device"])
    # The file may name anything in torch, so the object's type is checked before it is used.
    named = getattr(torch, value["torch"])
    if not isinstance(named, NAMED):
        raise ValueError(f"{value['torch']!r} is no type or layout of torch")
    return named


def kind_of(tensor: Tensor) -> tuple[str, tuple[int, ...]]:
    """Type ("float32") and shape."""
    return str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape)


def _describe(kind: tuple[str, tuple[int, ...]] | None) -> str:
    return "absent" if kind is None else f"{kind[0]} {kind[1]}"
