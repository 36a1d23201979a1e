"""Outputs and labels that a loss or a score cannot take by themselves, with what to write."""

from __future__ import annotations

from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn

from layershuffle.ground.errors import UsageError

# Stacks whose labels were looked at: a look waits for a GPU.
_LOOKED_AT: WeakSet[nn.Module] = WeakSet()
_PAIR = (
    "criterion=(criterion, divergence), where divergence(early, final) is the mean over the images "
    "of what the answers at an exit are from the final ones; or take a method without "
    'self-distillation, such as Method("layershuffle", orders_per_batch=4)'
)


def refused_output(output: Any, model: nn.Module) -> UsageError:
    """The error for an output that is not logits `[n, classes]`, with the callable to give."""
    if isinstance(output, Tensor):
        what = f"a tensor of shape {tuple(output.shape)}"
        if not output.is_floating_point():
            what += f" and {output.dtype}"
        part = "output"
    elif isinstance(output, dict):
        what = f"a {type(output).__name__} with {', '.join(map(str, output)) or 'nothing'}"
        part = f"output[{next(iter(output), 'logits')!r}]"
    elif isinstance(output, tuple | list):
        kinds = [str(tuple(v.shape)) if isinstance(v, Tensor) else type(v).__name__ for v in output]
        what = f"{len(output)} values ({', '.join(kinds)})"
        part = "output[0]"
    else:
        what = f"a {type(output).__name__}"
        part = "output.scores"
    return UsageError(
        f"{type(model).__name__} returned {what}, and only a tensor [n, classes], or an object "
        "with such logits, is taken as logits by itself",
        hint=f"say what to use, for example logits=lambda output: {part}; Method.loss, evaluate "
        "and running take it",
    )


def refuse_answers(logits: Tensor) -> None:
    """Raises `UsageError` for named logits that are not `[n, classes]`, which a score needs."""
    if logits.dim() != 2:
        raise UsageError(
            f"The named logits have the shape {tuple(logits.shape)}, and a score needs one row of "
            "classes for each image",
            hint="for example logits=lambda output: output.mean((2, 3)), or score with "
            "layershuffle.forward_many, whose forward= may return anything",
        )


def refuse_loss(
    stack: nn.Module,
    logits: Tensor,
    *,
    labels: Any,
    own_criterion: bool,
    softmax: bool,
) -> None:
    """Raises `UsageError` where a softmax over classes is wrong for these answers.

    `own_criterion`: the caller gave the criterion; `softmax`: the answers at an exit are compared
    with the final ones by the divergence of their softmax.
    """
    if softmax and logits.dim() != 2:
        raise UsageError(
            f"Self-distillation compares the softmax over the classes of logits [n, classes], and "
            f"these have the shape {tuple(logits.shape)}",
            hint=_PAIR,
        )
    if own_criterion and not softmax:
        return
    if not isinstance(labels, Tensor) or labels.shape != logits.shape or stack in _LOOKED_AT:
        return
    _LOOKED_AT.add(stack)
    rows = labels.detach().float().sum(-1)
    if torch.allclose(rows, torch.ones_like(rows), atol=1e-2):
        return
    _LOOKED_AT.discard(stack)
    if own_criterion:
        raise UsageError(
            "The labels name several classes of an image, or none, and self-distillation compares "
            "answers by a softmax over the classes",
            hint=_PAIR,
        )
    raise UsageError(
        "The labels name several classes of an image, or none, and the cross-entropy is for one",
        hint="give a criterion, for example torch.nn.functional.binary_cross_entropy_with_logits; "
        "soft labels have rows that sum to 1",
    )
