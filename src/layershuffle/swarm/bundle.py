"""The data that block hosts receive: one program for all blocks, and each block's weights.

`make_bundle` records one forward of the model to learn the arguments of its blocks, exports one
block with `torch.export`, and accepts the program only if every block gives the same result with
it, bit for bit. If a block needs more than the state (rotary tables, masks, its position), which a
host does not have, the model is refused with the reason.

Some operations of torch have two implementations that differ in the last bits: torchvision's
attention is fused when no gradient is needed, and torch.export takes the plain one. A program must
match one of the two.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn

from layershuffle.core.position import PositionedModel, backbone_of
from layershuffle.core.stack import blocks_of
from layershuffle.core.tensors import state_of
from layershuffle.errors import StackError, UsageError
from layershuffle.models.store import image_view
from layershuffle.swarm.export import UNSERVED, Alone, RecordedCall, export
from layershuffle.swarm.messages import State
from layershuffle.swarm.program import Block, BlockProgram, digest_of, pack_tensors, read_program

_SEED = 20407
_CHECKED = (1, 3)  # images per batch at which program and block are compared


@dataclass(frozen=True)
class Bundle:
    """The program and the weights with which hosts run the blocks of a model.

    `program` and `tensors` (by block) are what `BlockHost.load` takes. `shape`: shape of a
    state without its batch, (tokens, width). `sample`: the input of the first block for a
    noise image, float32 `[1, tokens, width]`.
    """

    program: bytes
    tensors: Mapping[int, bytes]
    depth: int
    shape: tuple[int, ...]
    sample: State

    @property
    def digests(self) -> dict[int, str]:
        """SHA-256 of each block's tensors, as `HostInfo.blocks` has them."""
        return {block: digest_of(content) for block, content in self.tensors.items()}

    def compute(self, block: int, state: State) -> State:
        """The state after `block`, computed as on a host; float32, in the shape of `state`."""
        run = bound_block(self.program, self.tensors[block])
        # A copy, because `state` may be read-only, or in use by the caller.
        return run(torch.from_numpy(state.copy())).numpy()


@lru_cache(maxsize=4)
def _program(content: bytes) -> BlockProgram:
    # Reading one generates and compiles Python, and canaries request the same one repeatedly.
    return read_program(content)


@lru_cache(maxsize=24)  # the blocks of a ViT-L; canaries use all of them in turn
def bound_block(program: bytes, tensors: bytes) -> Block:
    """The block of these bytes, ready to run; cached.

    Binding copies and hashes the weights, which takes longer than one image through the block.
    """
    return _program(program).bind(tensors)


def make_bundle(model: nn.Module) -> Bundle:
    """The bundle of a model from `layershuffle.load`.

    Raises `UsageError` for a model in training mode, with position encoding, not in float32 on the
    CPU; `StackError` with the reason if its blocks need more than the state or cannot be exported.
    """
    _check_servable(model)
    modules = blocks_of(backbone_of(model))
    calls = _listen(model)
    _check_calls(calls, depth=len(modules))
    states = calls[0].state
    # One program for all blocks: interchangeable blocks compute the same steps.
    program = export(Alone(modules[0], calls[0]), states)
    bound = read_program(program)
    tensors = dict[int, bytes]()
    for block, module in enumerate(modules):
        tensors[block] = pack_tensors(module.state_dict())
        program_block = bound.bind(tensors[block])
        # The program is accepted only if every block gives the same result with it (decision 009).
        _check_same(Alone(module, calls[block]), program_block, block=block, states=states)
    sample = states[:1].clone().numpy()
    return Bundle(program, tensors, len(modules), bound.shape, sample)


def _check_servable(model: nn.Module) -> None:
    """Refuse models that hosts cannot run, before anything is computed."""
    if isinstance(model, PositionedModel) and model.encoding is not None:
        raise UsageError(
            "The blocks of this model need a position encoding, which hosts do not have",
            hint="serve a model without position encoding (methods layershuffle, "
            "layershuffle-predict, anyorder)",
        )
    if any(module.training for module in model.modules()):
        raise UsageError("The model is in training mode", hint="call model.eval()")
    floating = [weight for weight in model.parameters() if weight.is_floating_point()]
    kinds = {(weight.device.type, weight.dtype) for weight in floating}
    if kinds != {("cpu", torch.float32)}:
        raise UsageError("Blocks travel as float32 from the CPU", hint="call model.float().cpu()")


# --- how the model calls its blocks ---------------------------------------------------------------


@torch.no_grad()
def _listen(model: nn.Module) -> list[RecordedCall]:
    """The calls of the blocks in a forward of noise images, in the order in which they ran."""
    view, calls = image_view(model), list[RecordedCall]()
    generator = torch.Generator().manual_seed(_SEED)
    images = torch.randn(
        max(_CHECKED), view.channels, view.height, view.width, generator=generator
    )  # normalised images have about this mean and spread

    def hook(block: int) -> Any:
        def note(_: nn.Module, args: tuple[Any, ...], named: dict[str, Any], answer: Any) -> None:
            if not args:
                raise StackError(
                    "The model hands its blocks the state by name, not in first place",
                    hint=UNSERVED,
                )
            # A copy, because a later block may write into its input.
            calls.append(RecordedCall(block, args[0].clone(), args[1:], named, state_of(answer)))

        return note

    with ExitStack() as hooks:
        for block, module in enumerate(blocks_of(backbone_of(model))):
            hooks.enter_context(module.register_forward_hook(hook(block), with_kwargs=True))
        backbone_of(model)(images)
    return calls


def _check_calls(calls: Sequence[RecordedCall], *, depth: int) -> None:
    """Raises `StackError` unless the blocks are a chain of functions of the state alone."""
    if [call.block for call in calls] != list(range(depth)):
        raise StackError(
            "The model does not run each of its blocks once, one after the other", hint=UNSERVED
        )
    first = calls[0]
    if first.state.dim() != 3 or first.state.dtype != torch.float32:
        raise StackError(
            f"The state between the blocks is {_describe(first.state)}; hosts take float32 "
            "(images, tokens, width)",
            hint=UNSERVED,
        )
    for call, after in zip(calls, [*calls[1:], None], strict=True):
        if not _is_plain(call) or (call.args, call.kwargs) != (first.args, first.kwargs):
            raise StackError(
                f"Block {call.block} gets more than the state: {_extras(call)}. A host has only "
                "the state",
                hint="serve a model whose position information enters before the blocks (ViT, "
                "DeiT, DINOv2)",
            )
        # A host would omit what a model computes between two blocks.
        if after is not None and not torch.equal(after.state, call.answer):
            raise StackError(
                f"The model changes the state between the blocks {call.block} and {after.block}",
                hint=UNSERVED,
            )


def _is_plain(value: object) -> bool:
    """Whether a value consists of numbers and strings, which the exported program keeps."""
    if isinstance(value, RecordedCall):
        return _is_plain((value.args, *value.kwargs.values()))
    if isinstance(value, tuple | list):
        return all(_is_plain(item) for item in value)
    return value is None or isinstance(value, bool | int | float | str)


def _extras(call: RecordedCall) -> str:
    keywords = [
        f"{name} {_describe(value)}" for name, value in call.kwargs.items() if not _is_plain(value)
    ]
    extras = [
        f"argument {i + 2} {_describe(v)}" for i, v in enumerate(call.args) if not _is_plain(v)
    ]
    return ", ".join([*extras, *keywords]) or "other arguments than the other blocks"


def _describe(value: object) -> str:
    if isinstance(value, Tensor):
        return f"{str(value.dtype).removeprefix('torch.')} {tuple(value.shape)}"
    return f"({type(value).__name__})"


def _check_same(module: Alone, program: Block, *, block: int, states: Tensor) -> None:
    for images in _CHECKED:
        answer = program(states[:images])
        own = _computed(module, states[:images], gradient=False)
        if torch.equal(own, answer):
            continue
        # torchvision's attention is fused without gradients and exported the plain way: either is
        # right.
        if not torch.equal(_computed(module, states[:images], gradient=True), answer):
            like = own.shape == answer.shape
            error = f"largest difference {(own - answer).abs().max()}" if like else "another shape"
            raise StackError(
                f"Block {block} gives different numbers as an exported program ({error} on "
                f"{images} image(s))",
                hint=UNSERVED,
            )


def _computed(module: nn.Module, state: Tensor, *, gradient: bool) -> Tensor:
    """The block's own output; some operations of torch depend on whether gradients are needed."""
    with torch.set_grad_enabled(gradient):
        leaf = state.clone().requires_grad_(gradient)
        # A clone, because torch refuses to change a leaf that requires gradients in place.
        answer: Tensor = module(leaf.clone())
    return answer.detach()
