"""The loss of a forward along given orders."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any
from weakref import WeakSet

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from layershuffle.core.checks.outputs import refuse_loss
from layershuffle.core.orders import ExecutionOrder
from layershuffle.core.position import PositionedModel
from layershuffle.core.stack import fixed_of, running, stack_of
from layershuffle.core.tensors import Logits, logits_of, to_device
from layershuffle.ground.errors import StackError, UsageError

_log = logging.getLogger("layershuffle")
Criterion = Callable[[Tensor, Tensor], Tensor]
"""Takes logits [n, classes] and labels, and returns their mean loss."""
Divergence = Callable[[Tensor, Tensor], Tensor]
"""Takes logits at an exit and the final ones, and returns their mean divergence."""

# Stacks whose backbone cannot run several orders in one batch.
_NEVER_TOGETHER: WeakSet[nn.Module] = WeakSet()


def loss_of_orders(
    model: nn.Module,
    images: Tensor,
    *,
    labels: Tensor,
    orders: Sequence[ExecutionOrder],
    exit_after: int | None = None,
    exit_weight: float = 0.0,
    self_distillation: float = 0.0,
    criterion: Criterion | tuple[Criterion, Divergence] | None = None,
    logits: Logits | None = None,
) -> tuple[Tensor, Tensor]:
    """The loss of `images` `[n, channels, height, width]` and their logits `[n, classes]`, in fp32.

    Row i runs along `orders[i % len(orders)]`. The loss is `criterion` (the cross-entropy) of the
    logits, plus the position loss of a model that predicts positions, plus the loss of the logits
    after `exit_after` steps. That is `exit_weight` times the criterion, and `self_distillation`
    times the KL divergence from the softmax of the final logits (as in arXiv 2604.09168 for loops),
    or times the second function of both answers if `criterion` is a pair. The final logits get no
    gradient by it. Before its answer an exit passes through the last blocks of the model that keep
    their place. `model` may be inside wrappers of other libraries. `logits` takes the logits out of
    what the model returns; they then may have any shape that the criterion takes.

    A backbone that cannot run several orders in one batch, or has no state to take out between its
    blocks, runs the groups one after the other, and an exit as a forward of its own: the same loss,
    in more time. Raises `UsageError` for a batch without an image, and for answers or labels that
    the criterion cannot take.
    """
    if not len(images):
        raise UsageError(
            "The batch has no image, so it has no loss",
            hint="leave empty batches out, as drop_last=True of a DataLoader does with the last",
        )
    orders = orders[: len(images)]  # a batch may have fewer images than there are groups
    if exit_after is not None:  # and then only shorter orders than the exit was drawn for
        exit_after = min(exit_after, max(map(len, orders)))
    is_mixed = len(orders) > 1 or exit_after is not None
    stack = stack_of(model)
    own, divergence = criterion if isinstance(criterion, tuple) else (criterion, None)

    def checked(answers: Tensor, targets: Tensor) -> Tensor:
        # A row of classes and the number of one of them leave nothing to ask.
        if answers.dim() != 2 or not isinstance(targets, Tensor) or targets.dim() != 1:
            refuse_loss(
                stack,
                answers,
                labels=targets,
                own_criterion=own is not None,
                softmax=exit_after is not None and self_distillation > 0 and divergence is None,
            )
        return (own or F.cross_entropy)(answers, targets)

    exit_loss = partial(
        _exit_loss,
        criterion=own or F.cross_entropy,
        divergence=divergence or softmax_divergence,
        by_labels=exit_weight,
        by_itself=self_distillation,
    )

    def compute(walk: Callable[..., tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
        return walk(
            model,
            images,
            labels=labels,
            orders=orders,
            exit_after=exit_after,
            criterion=checked,
            exit_loss=exit_loss,
            logits=partial(_logits_of, model, logits),
        )

    if not is_mixed or stack in _NEVER_TOGETHER:
        return compute(_separate_forwards if is_mixed else _common_forward)
    try:
        return compute(_common_forward)
    # transformers' backbones record their states, which several orders do not allow.
    except (StackError, UsageError) as error:
        reason = error.cause
    # Outside of `except`: an error that follows is not one of handling the first.
    result = compute(_separate_forwards)
    _NEVER_TOGETHER.add(stack)
    _log.warning(
        "The groups of a batch run one after the other, because this model cannot run them "
        "together: %s",
        reason,
    )
    return result


def _common_forward(
    model: nn.Module,
    images: Tensor,
    *,
    labels: Tensor,
    orders: Sequence[ExecutionOrder],
    exit_after: int | None,
    criterion: Criterion,
    exit_loss: Callable[[Tensor, Tensor, Tensor], Tensor],
    logits: Logits,
) -> tuple[Tensor, Tensor]:
    """All groups in one forward."""
    given: ExecutionOrder | list[ExecutionOrder] = orders[0]
    if len(orders) > 1:
        # Samples of a group go side by side, so that the stack splits the batch without a copy.
        rows, back = _by_group(images, len(orders))
        given = [orders[row % len(orders)] for row in rows]
        images = images.index_select(
            0, to_device(torch.tensor(rows, dtype=torch.long), images.device)
        )
    # Not around the wrappers of other libraries, whose output holds the position loss as well.
    positioned = positioned_in(model)
    with running(positioned or model, given, exit_after=exit_after, logits=logits):
        output, position_loss = _forward(model, images, positioned)
    parts: tuple[Tensor, ...] = (logits(output),) if exit_after is None else output
    if len(orders) > 1:
        # Before the criterion, which may know its samples by their place in the batch.
        parts = tuple(part.index_select(0, back) for part in parts)
    final = parts[0].float()
    loss = criterion(final, labels)
    if exit_after is not None:
        loss = loss + exit_loss(parts[1].float(), final, labels)
    return (loss if position_loss is None else loss + position_loss), final


def _by_group(images: Tensor, groups: int) -> tuple[list[int], Tensor]:
    """The rows of a batch, group by group, and the index that puts such rows back into their order.

    Row i is in group i mod `groups`, counted from the first row of each process.
    """
    rows: list[int] = []
    for group in range(groups):
        rows += range(group, len(images), groups)
    back = torch.tensor(sorted(range(len(rows)), key=rows.__getitem__), dtype=torch.long)
    return rows, to_device(back, images.device)


def _separate_forwards(
    model: nn.Module,
    images: Tensor,
    *,
    labels: Tensor,
    orders: Sequence[ExecutionOrder],
    exit_after: int | None,
    criterion: Criterion,
    exit_loss: Callable[[Tensor, Tensor, Tensor], Tensor],
    logits: Logits,
) -> tuple[Tensor, Tensor]:
    """Each group in a forward of its own, and its exit in another one."""
    final: list[Tensor] = []
    early: list[Tensor] = []
    position_losses: list[Tensor] = []
    positioned = positioned_in(model)
    for group, order in enumerate(orders):
        own = images[group :: len(orders)]
        with running(model, order):
            output, position_loss = _forward(model, own, positioned)
        final.append(logits(output).float())
        if position_loss is not None:
            position_losses.append(position_loss * (len(own) / len(images)))
        if exit_after is not None:
            _, last = fixed_of(model)
            with running(model, order.beginning(exit_after, last=last)):
                early.append(logits(model(own)).float())
    _, back = _by_group(images, len(orders))
    answers = torch.cat(final).index_select(0, back)
    loss = criterion(answers, labels)
    if early:
        loss = loss + exit_loss(torch.cat(early).index_select(0, back), answers, labels)
    return torch.stack([loss, *position_losses]).sum(), answers


def _exit_loss(
    early: Tensor,
    final: Tensor,
    labels: Tensor,
    *,
    criterion: Criterion,
    divergence: Divergence,
    by_labels: float,
    by_itself: float,
) -> Tensor:
    """The loss of logits at an exit, `[n, classes]`, beside the final ones of the same run."""
    loss = by_labels * criterion(early, labels)
    if by_itself:
        loss = loss + by_itself * divergence(early, final.detach())
    return loss


def softmax_divergence(early: Tensor, final: Tensor) -> Tensor:
    """The KL divergence from the softmax of logits `final` to that of `early`, `[n, classes]`."""
    own = final.log_softmax(-1)
    taught = early.log_softmax(-1)
    return F.kl_div(taught, own, log_target=True, reduction="batchmean")


def _logits_of(model: nn.Module, logits: Logits | None, output: Any) -> Tensor:
    """What the loss is computed of, in what `model` returned."""
    return logits_of(output, model) if logits is None else logits(output)


def _forward(
    model: nn.Module, images: Tensor, positioned: PositionedModel | None
) -> tuple[Any, Tensor | None]:
    """What `model` returns for `images`, and its position loss if it predicts positions.

    `positioned`: the model with position parts in `model`, if there is one.
    """
    if positioned is None or positioned.prediction is None:
        return model(images), None
    # DDP treats parameters as unused if no output of the model's call depends on them. So the loss
    # of the position guesses must be an output: a hook inside the DDP wrapper adds it.
    with positioned.guessing() as guesses:
        hook = positioned.register_forward_hook(
            # The trial of an order per sample is not recorded, and nothing is guessed.
            lambda *call: (call[-1], guesses.loss() if guesses.items else None)
        )
        with hook:
            output, position_loss = model(images)
    return output, position_loss


def positioned_in(model: nn.Module) -> PositionedModel | None:
    """The model with position parts in `model`, which may be inside wrappers; `None` if none is."""
    stack = stack_of(model)
    waiting = [model]
    while waiting:
        module = waiting.pop()
        if isinstance(module, PositionedModel):
            return module
        # Most modules are inside blocks, and this runs in every forward.
        waiting += [child for child in module.children() if child is not stack]
    return None
