"""Residual branches, and how much they add to the state when a training begins.

Blocks that add little nearly commute: the state that reaches a block is about the same in every
order. Networks without normalisation are started like that (SkipInit, arXiv 2002.10444).
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from layershuffle.core.policies import drawn_blocks
from layershuffle.core.stack import blocks_of, depth_of, fixed_of, wrap
from layershuffle.core.tensors import state_of
from layershuffle.ground.errors import StackError

_LayerCall = tuple[str, nn.Module, torch.Size]
"""A layer that ran: its name in the block, itself, and the shape of its output."""


@torch.no_grad()
def scale_branches(model: nn.Module, images: Tensor, *, factor: float) -> nn.Module:
    """Multiply what the drawn blocks of `model` add to the state by `factor`, in place.

    Call it once, before the first step. A block adds what the last linear layers of its attention
    and of its MLP return, so their weights and biases are multiplied. Blocks that keep their place
    stay as they are. Returns the model, wrapped.

    `images` `[n, channels, height, width]` run through a copy, which shows which layers these are;
    the values do not matter. Raises `StackError`, and leaves the model as it is, if a block does
    not return its state unchanged once those layers return zero.

        model = ls.Method("anyorder").prepare(timm.create_model("vit_small_patch16_224"))
        ls.scale_branches(model, torch.zeros(1, 3, 224, 224), factor=0.1)
    """
    model = wrap(model)
    tried = copy.deepcopy(model).eval()
    drawn = drawn_blocks(depth_of(model), fixed_of(model))
    blocks = [blocks_of(tried)[place] for place in drawn]
    names = _last_layers(tried, blocks, images)
    for block in blocks:
        for name in names[block]:
            for weight in block.get_submodule(name).parameters(recurse=False):
                weight.zero_()
    unchanged = _returning_their_state(tried, blocks, images)
    for block in blocks:
        if not names[block] or block not in unchanged:
            raise StackError(
                f"A block of {type(model).__name__} does not add to the state what the last "
                f"linear layers of its branches return ({', '.join(names[block]) or 'none found'})",
                hint="train without a branch scale",
            )
    weights: dict[int, nn.Parameter] = {}  # blocks that are tied share theirs
    for place, block in zip(drawn, blocks, strict=True):
        for name in names[block]:
            layer = blocks_of(model)[place].get_submodule(name)
            weights |= {id(weight): weight for weight in layer.parameters(recurse=False)}
    for weight in weights.values():
        weight.mul_(factor)
    return model


def _last_layers(
    model: nn.Module, blocks: Sequence[nn.Module], images: Tensor
) -> dict[nn.Module, list[str]]:
    """For each of `blocks` the names of the linear layers that run last in its branches."""
    calls: dict[nn.Module, list[_LayerCall]] = {block: [] for block in blocks}
    with ExitStack() as hooks:
        for block in blocks:
            for name, module in block.named_modules():
                if _is_norm(module) or isinstance(module, nn.Linear | nn.MultiheadAttention):
                    note = partial(_note_layer, calls=calls[block], name=name)
                    hooks.callback(module.register_forward_hook(note).remove)
        model(images)
    return {block: _ends_of_branches(calls[block]) for block in blocks}


def _note_layer(
    module: nn.Module, _args: Any, output: Any, *, calls: list[_LayerCall], name: str
) -> None:
    """Add a call to those of its block: a forward hook, once the last two are given."""
    calls.append((name, module, state_of(output).shape))


def _ends_of_branches(calls: Sequence[_LayerCall]) -> list[str]:
    """The names of the linear layers that run last in the branches of a block.

    A branch begins with a normalisation of the state, and ends before the next one.
    """
    last: list[str] = []
    candidate = None
    for name, module, shape in calls:
        # Wider layers, and the norms of queries and keys; the first norm has the state's shape.
        if shape != calls[0][2]:
            continue
        if not _is_norm(module):
            # torch's attention calls a function with the weights of its last layer.
            is_attention = isinstance(module, nn.MultiheadAttention)
            candidate = f"{name}.out_proj" if is_attention else name
        elif candidate is not None:
            last.append(candidate)
            candidate = None
    if candidate is not None:
        last.append(candidate)
    return last


def _is_norm(module: nn.Module) -> bool:
    return "Norm" in type(module).__name__


def _returning_their_state(
    model: nn.Module, blocks: Sequence[nn.Module], images: Tensor
) -> set[nn.Module]:
    """Those of `blocks` that return the state that they get in a forward of `images`."""
    unchanged: set[nn.Module] = set()

    def compare(block: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if torch.equal(state_of(output), args[0]):
            unchanged.add(block)

    with ExitStack() as hooks:
        for block in blocks:
            hooks.callback(block.register_forward_hook(compare).remove)
        model(images)
    return unchanged
