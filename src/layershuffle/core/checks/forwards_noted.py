"""What the forwards of a stack were: for replays, and for a training without an order.

BatchNorm layers in training mode are named here, too: they see other batches than usual.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from weakref import WeakKeyDictionary

import torch
from torch import nn

from layershuffle.core.runs import PLAIN, Run, in_backward
from layershuffle.ground.errors import StackError

_log = logging.getLogger("layershuffle")
_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)


@dataclass
class _Forwards:
    """Facts about the forwards of a stack: whether one ever had an order, and for replays.

    `orders` are those of the forwards since the last replay that gradient checkpointing may rerun.
    """

    ordered: bool = False
    warned: bool = False
    replayed: bool = False
    orders: set[object] = field(default_factory=set)


# Stored outside of the stack, because a copy of a model has not run anything.
_FORWARDS: WeakKeyDictionary[nn.Module, _Forwards] = WeakKeyDictionary()
_BATCH_NORM_SAID: WeakKeyDictionary[nn.Module, bool] = WeakKeyDictionary()


def share_notes(part: nn.Module, stack: nn.Module) -> None:
    """Let a slice of `stack` share what is noted of its forwards, so that a warning comes once."""
    _FORWARDS[part] = _FORWARDS.setdefault(stack, _Forwards())


def note_forward(stack: nn.Module, run: Run) -> None:
    """Note a forward of `stack`, in training or with gradients: a replay needs its order, and a
    training without one is named."""
    forwards = _FORWARDS.setdefault(stack, _Forwards())
    if in_backward():
        forwards.replayed = True
        _refuse_lost_order(run, forwards)
        return
    if forwards.replayed:
        forwards.replayed = False
        forwards.orders = set()
    # Two orders are enough for the error; those of a long training would fill the memory.
    if len(forwards.orders) < 2:
        forwards.orders.add(run.order)
    learns = stack.training and torch.is_grad_enabled()
    forwards.ordered |= learns and run.order is not None
    if learns and not forwards.ordered and not forwards.warned:
        forwards.warned = True
        _log.warning(
            "A wrapped model runs in training mode without an execution order, so it learns "
            "the sequential order alone. Write `loss = layershuffle.Method().loss(model, "
            "images, labels, step=step)`, or run it inside `with layershuffle.running(model, "
            "order):`; model.eval() ends this warning where nothing is trained"
        )


def _refuse_lost_order(run: Run, forwards: _Forwards) -> None:
    # If the whole stack is checkpointed, the backward pass needs the order again, where it may not
    # be set: after `running`, or always on GPUs (autograd has its own threads). The blocks have
    # equal shapes, so torch's own check of the replay would not notice.
    if run is PLAIN and forwards.orders - {None}:
        raise StackError(
            "Gradient checkpointing reruns the whole stack in the backward pass, where its "
            "execution order is not set",
            hint="checkpoint the blocks one by one; on a CPU, calling backward() inside "
            "`with running(...)` is enough",
        )
    if forwards.orders - {run.order}:
        raise StackError(
            "Gradient checkpointing reruns the whole stack in the backward pass, and its forwards "
            "had several execution orders, of which only one is set now",
            hint="checkpoint the blocks one by one, or call backward() after each forward, inside "
            "its `with running(...)`, and put other forwards into eval mode and torch.no_grad()",
        )


def say_batch_norm(stack: nn.Module, consequence: str) -> None:
    """Log once that BatchNorm layers of blocks in training mode see other batches than usual."""
    if stack in _BATCH_NORM_SAID:
        return
    norms = [module for module in stack.modules() if isinstance(module, _BATCH_NORMS)]
    if not norms or any(norm.training for norm in norms):
        _BATCH_NORM_SAID[stack] = bool(norms)
    if _BATCH_NORM_SAID.get(stack):
        _log.warning("The blocks hold BatchNorm layers in training mode: %s", consequence)
