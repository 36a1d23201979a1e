"""The tensors in what a backbone passes to its blocks, and in what they and it return."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from layershuffle.ground.errors import StackError, UsageError


def logits_of(output: Any) -> Tensor:
    """Logits `[batch, classes]` from the output of a backbone.

    For two heads (timm's distilled models in training) it is their mean, as at evaluation.
    """
    # transformers returns an object with logits, timm and torchvision the tensor.
    logits = getattr(output, "logits", output)
    if isinstance(logits, tuple) and all(isinstance(head, Tensor) for head in logits):
        logits = torch.stack(logits).mean(dim=0)
    if not isinstance(logits, Tensor):
        raise UsageError(
            f"The model returned a {type(output).__name__}, which has no logits",
            hint="use a model for image classification",
        )
    return logits


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
            f"The backbone passes a {type(state).__name__} to its blocks; rounds, older versions "
            "and an order per sample need a tensor",
            hint="pass the state to the blocks first and other values after it; one order for the "
            "whole batch in which every step reads the newest state works without a change",
        )
    return state


def mapped(value: Any, function: Callable[[Tensor], Any]) -> Any:
    """`value` with `function` applied to every tensor in its tuples, lists and dictionaries."""
    if isinstance(value, Tensor):
        return function(value)
    if isinstance(value, dict):
        return {key: mapped(item, function) for key, item in value.items()}
    if isinstance(value, tuple | list):
        return type(value)([mapped(item, function) for item in value])
    return value


def tensors_of(value: Any) -> list[Tensor]:
    """The tensors in nested tuples, lists and dictionaries."""
    tensors: list[Tensor] = []
    mapped(value, tensors.append)
    return tensors


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """`tensor` of the CPU on `device`, without waiting for what runs there."""
    if device.type == "cuda":
        # A copy from pageable memory waits in spite of `non_blocking`.
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)
