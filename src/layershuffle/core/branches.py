"""Residual branches, and how much they add to the state when a training begins.

Blocks that add little nearly commute: the state that reaches a block is about the same in every
order. Networks without normalisation are started like that (SkipInit, arXiv 2002.10444).
"""

from __future__ import annotations

import copy
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn

from layershuffle.core.policies import drawn_blocks
from layershuffle.core.stack import blocks_of, depth_of, fixed_of, wrap
from layershuffle.core.tensors import state_of
from layershuffle.ground.errors import StackError


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
    names = {block: _last_layers(tried, block, images) for block in blocks}
    for block in blocks:
        for name in names[block]:
            for weight in block.get_submodule(name).parameters(recurse=False):
                weight.zero_()
    for block in blocks:
        if not names[block] or not _returns_its_state(tried, block, images):
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


def _last_layers(model: nn.Module, block: nn.Module, images: Tensor) -> list[str]:
    """The names in `block` of the linear layers that run last in its branches.

    A branch begins with a normalisation of the state, and ends before the next one.
    """
    calls: list[tuple[str, torch.Size]] = []
    with ExitStack() as hooks:
        for name, module in block.named_modules():
            is_norm = "Norm" in type(module).__name__
            if is_norm or isinstance(module, nn.Linear | nn.MultiheadAttention):

                def note(_module: nn.Module, _args: Any, output: Any, name: str = name) -> None:
                    calls.append((name, state_of(output).shape))

                hooks.callback(module.register_forward_hook(note).remove)
        model(images)
    state_shape = calls[0][1] if calls else None  # of the normalisation that runs first
    last: list[str] = []
    candidate = None
    for name, shape in calls:
        if shape != state_shape:  # wider layers, and the norms of queries and keys
            continue
        if "Norm" not in type(block.get_submodule(name)).__name__:
            candidate = name
        elif candidate is not None:
            last.append(candidate)
            candidate = None
    if candidate is not None:
        last.append(candidate)
    # torch's attention calls a function with the weights of its last layer, not the layer itself.
    return [
        f"{name}.out_proj" if isinstance(block.get_submodule(name), nn.MultiheadAttention) else name
        for name in last
    ]


def _returns_its_state(model: nn.Module, block: nn.Module, images: Tensor) -> bool:
    """Whether `block` returns the state that it gets in a forward of `images`."""
    same: list[bool] = []

    def compare(_module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        same.append(torch.equal(state_of(output), args[0]))

    hook = block.register_forward_hook(compare)
    model(images)
    hook.remove()
    return same == [True]
