"""How much the drawn blocks add to the state when a training begins.

Blocks that add little nearly commute: the state that reaches a block is about the same in every
order. Networks without normalisation are started like that (SkipInit, arXiv 2002.10444).
"""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from layershuffle.core.entries import state_first
from layershuffle.core.policies import drawn_blocks
from layershuffle.core.runs import in_eval
from layershuffle.core.stack import blocks_of, depth_of, fixed_of
from layershuffle.core.tensors import map_tensors, state_of, tensor_of
from layershuffle.ground.errors import StackError


@torch.no_grad()
def last_layers(model: nn.Module, images: Tensor, *, block: int) -> list[str]:
    """The names in this block of the layers that say how much it adds to the state.

    A pre-norm block adds what the last layers of its attention and of its MLP return.

    The first of `images` `[n, channels, height, width]` runs once, to see what the block is called
    with; its values do not matter. Raises `StackError` if what the block adds is not proportional
    to the weights of such layers.
    """
    module = blocks_of(model)[block]
    args, kwargs = _call_of(module, model, images)
    return _last_layers(module, args, kwargs)


@torch.no_grad()
def scale_branches(model: nn.Module, names: Iterable[str], *, factor: float) -> None:
    """Multiply what the drawn blocks of a wrapped model add to the state by `factor`, in place.

    The weights and biases of the layers `names` (`last_layers`) of every drawn block are
    multiplied, but for those that are frozen: they could not grow again.
    """
    weights: dict[int, nn.Parameter] = {}  # blocks that are tied share theirs
    for place in drawn_blocks(depth_of(model), fixed_of(model)):
        for name in names:
            layer = blocks_of(model)[place].get_submodule(name)
            weights |= {id(weight): weight for weight in layer.parameters(recurse=False)}
    for weight in weights.values():
        if weight.requires_grad:
            weight.mul_(factor)


def _call_of(
    block: nn.Module, model: nn.Module, images: Tensor
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments that `block` gets in a forward of the first of `images`, the state first.

    They are on the CPU and in float64. Raises `StackError` if the state is no tensor.
    """
    calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = []

    def note(block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        calls.append((args, kwargs) if args else state_first(block, kwargs))

    first = next(model.parameters())
    with block.register_forward_pre_hook(note, with_kwargs=True), in_eval(model):
        model(images[:1].to(first.device, first.dtype))
    tensor_of(calls[0][0][0])
    args, kwargs = map_tensors(calls[0], _on_cpu)
    return args, kwargs


def _on_cpu(tensor: Tensor) -> Tensor:
    """`tensor` on the CPU; numbers in float64, which the GPU of a Mac does not have."""
    return tensor.cpu().double() if tensor.is_floating_point() else tensor.cpu()


def _last_layers(block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[str]:
    """The names of the layers of `block` that are the last ones of its branches.

    With the weights of all layers at zero a block has to return its state. A layer is a last one if
    it adds something alone, while the last ones that were found before it are at zero; then what it
    adds has to be proportional to its weights. Raises `StackError` for other blocks.
    """
    # In float64, because branches may add very little (LayerScale).
    tried = copy.deepcopy(block).cpu().double().eval()
    layers: dict[str, list[tuple[nn.Parameter, Tensor]]] = {}
    for name, module in tried.named_modules():
        weights = list(module.parameters(recurse=False))
        if any(weight.dim() > 1 for weight in weights):  # no norm, and no scale of a branch
            layers[name] = [(weight, weight.clone()) for weight in weights]

    def scale(name: str, factor: float) -> None:
        for weight, whole in layers[name]:
            weight.copy_(whole * factor)

    def added() -> Tensor:
        state: Tensor = args[0]
        return state_of(tried(state.clone(), *args[1:], **kwargs)) - state

    for name in layers:
        scale(name, 0)
    adds_otherwise = bool(added().any())
    last: list[str] = []
    for name in layers:
        scale(name, 1)
        whole = added()
        if not whole.any():
            continue
        scale(name, 0.5)
        difference = (2 * added() - whole).abs().max()
        adds_otherwise |= bool(difference > 1e-4 * whole.abs().max())
        scale(name, 0)
        last.append(name)
    if adds_otherwise or not last:
        raise StackError(
            f"No layers of a {type(block).__name__} say how much it adds to the state: with half "
            "of their weights it does not add half as much, as where a norm follows (post-norm)",
            hint="leave the weights as they are: branch_scale=1, or --branch-scale 1",
        )
    return last
