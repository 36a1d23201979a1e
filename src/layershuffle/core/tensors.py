"""The tensors in what a backbone passes to its blocks, and in what they and it return."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from layershuffle.core.checks.outputs import refused_output
from layershuffle.ground.errors import StackError

Logits = Callable[[Any], Tensor]
"""Takes the logits out of what a model returns, as in `lambda output: output[0]`."""


def logits_of(output: Any, model: nn.Module) -> Tensor:
    """Logits `[batch, classes]` from the output of `model`.

    For timm's distilled models in training, which return those of two heads, it is their mean, as
    at evaluation. Raises `UsageError` for anything else, where the caller has to say what to use.
    """
    # transformers returns an object with logits, timm and torchvision the tensor.
    logits = getattr(output, "logits", output)
    if isinstance(logits, tuple) and len(logits) == 2 and _is_distilled(model):
        logits = torch.stack(logits).mean(dim=0)
    if not (isinstance(logits, Tensor) and logits.dim() == 2 and logits.is_floating_point()):
        raise refused_output(logits, model)
    return logits


def _is_distilled(model: nn.Module) -> bool:
    """Whether a module of `model` has the second head that timm gives models for distillation."""
    return any(
        isinstance(getattr(module, "head_dist", None), nn.Module)
        and getattr(module, "distilled_training", False)
        for module in model.modules()
    )


def state_of(out: Any) -> Tensor:
    """The state in a block's output; raises `StackError` if it holds none."""
    # Blocks of older transformers releases return tuples whose first entry is the state.
    state = out[0] if isinstance(out, tuple | list) and out else out
    if not isinstance(state, Tensor):
        raise StackError(
            f"A block returned a {type(out).__name__}; a tensor is needed, or a tuple that begins "
            "with one",
            hint="let the block return its state first; one order for the whole batch "
            "(layershuffle.running) works without a change",
        )
    return state


def tensor_of(state: Any) -> Tensor:
    """`state` itself; raises `StackError` unless it is a tensor."""
    if not isinstance(state, Tensor):
        raise StackError(
            f"The backbone passes a {type(state).__name__} to its blocks; rounds, older versions, "
            "an order per sample and branch_scale need a tensor",
            hint="pass the state to the blocks first and other values after it; one order for the "
            "whole batch in which every step reads the newest state works without a change",
        )
    return state


def map_tensors(value: Any, function: Callable[[Tensor], Any]) -> Any:
    """`value` with `function` applied to every tensor in its tuples, lists and dictionaries."""
    if isinstance(value, Tensor):
        return function(value)
    if isinstance(value, dict):
        return {key: map_tensors(item, function) for key, item in value.items()}
    if isinstance(value, tuple | list):
        return type(value)([map_tensors(item, function) for item in value])
    return value


def tensors_of(value: Any) -> list[Tensor]:
    """The tensors in nested tuples, lists and dictionaries."""
    tensors: list[Tensor] = []
    map_tensors(value, tensors.append)
    return tensors


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """`tensor` of the CPU on `device`, without waiting for what runs there."""
    if device.type == "cuda":
        # A copy from pageable memory waits in spite of `non_blocking`.
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)


def in_float64(tensor: Tensor) -> Tensor:
    """`tensor` in float64, on the CPU where its device has no such numbers: the GPU of a Mac."""
    return (tensor.cpu() if tensor.device.type == "mps" else tensor).double()
