"""A step that comes again: an epoch that counts from 0 repeats the orders of the last one."""

from __future__ import annotations

import logging
from collections.abc import Hashable
from dataclasses import dataclass
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

_log = logging.getLogger("layershuffle")
_VALUES = 1024


@dataclass
class _First:
    """The first step of a training, and some values of its images."""

    step: Hashable
    values: Tensor
    said: bool = False


# By stack and by method. The first step is enough: whoever counts again comes by it again.
_FIRST: WeakKeyDictionary[nn.Module, dict[Hashable, _First]] = WeakKeyDictionary()


def warn_of_step_again(
    stack: nn.Module, images: Tensor, *, method: Hashable, step: Hashable
) -> None:
    """Warn once if `step` of `method`, its first one, comes again in training with other images."""
    if not (stack.training and torch.is_grad_enabled()):
        return
    firsts = _FIRST.setdefault(stack, {})
    first = firsts.get(method)
    if first is None:
        firsts[method] = _First(step, _some_values(images).clone())
    elif first.step == step and not first.said and _differ(first.values, _some_values(images)):
        first.said = True
        _log.warning(
            "The (step, micro-batch, rank) %s comes again with other images, and so do its orders, "
            "which are drawn from the seed and the step. Count steps over all epochs (step += 1, "
            "not enumerate(loader) in each), and the forwards of one step in micro_batch",
            step,
        )


def _some_values(images: Tensor) -> Tensor:
    flat = images.detach().flatten()
    return flat[:: max(1, len(flat) // _VALUES)]


def _differ(values: Tensor, others: Tensor) -> bool:
    # Only where a step comes again, as the comparison waits for a GPU.
    return values.device != others.device or not torch.equal(values, others)
