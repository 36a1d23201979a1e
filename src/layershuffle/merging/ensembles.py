"""Ensembles: the mean of the outputs of several models (paper, section 4.4: of their logits)."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product

import torch
from torch import Tensor, nn

from layershuffle.core.checks.trials import forget
from layershuffle.core.evaluation import (
    Batches,
    Draw,
    Score,
    Tally,
    check_classifier,
    micro_batches,
)
from layershuffle.core.forwards import run_many
from layershuffle.core.orders import ExecutionOrder
from layershuffle.core.policies import Mode, parse_modes
from layershuffle.core.runs import in_eval
from layershuffle.core.stack import depth_of, fixed_of, stack_of
from layershuffle.ground.errors import UsageError
from layershuffle.merging.compatibility import check_members
from layershuffle.merging.settings import Combine, EnsembleOrders

Variant = tuple[Combine, EnsembleOrders]


@dataclass(frozen=True, kw_only=True)
class EnsembleScore(Score):
    """A score of an ensemble.

    `member_orders` has the order of every member. It is empty if orders are drawn for every batch;
    then `batch_orders` has the orders of the first member.
    """

    member_orders: tuple[ExecutionOrder, ...] = ()

    @property
    def kept(self) -> int:
        """The number of blocks that ran, each counted once, of the first member."""
        steps = len((self.member_orders or self.batch_orders)[0])
        return steps if self.mode is None else self.mode.kept_of(steps, fixed=self.fixed)


def evaluate_ensemble(
    donors: Sequence[nn.Module],
    batches: Batches,
    *,
    mode: str | Mode = "arbitrary",
    num_orders: int = 5,
    seed: int = 0,
    orders: EnsembleOrders = "independent",
    combine: Combine = "logits",
    draw: Draw = "pass",
) -> list[EnsembleScore]:
    """The scores of the ensemble of `donors`, one for each of `num_orders` draws.

    `orders`: all members run in one order, or each in its own. `combine`: the mean of logits, or of
    probabilities. `mode` is a single mode.

    Raises `UsageError` for an unsuitable mode, for a model without a classifier, and for donors
    with other classes (by name, where both have names) or another image view. Raises `DataError` if
    there is no image.
    """
    return evaluate_ensembles(
        donors,
        batches,
        mode=mode,
        num_orders=num_orders,
        seed=seed,
        draw=draw,
        variants=[(combine, orders)],
    )[combine, orders]


def evaluate_ensembles(
    donors: Sequence[nn.Module],
    batches: Batches,
    *,
    variants: Sequence[Variant],
    mode: str | Mode = "arbitrary",
    num_orders: int = 5,
    seed: int = 0,
    draw: Draw = "pass",
    on_images: Callable[[int], object] | None = None,
) -> dict[Variant, list[EnsembleScore]]:
    """The scores of several variants of an ensemble; those with equal orders share forwards.

    The arguments are those of `evaluate_ensemble`, and `on_images` is that of `evaluate`. With
    "same" orders the members run in the orders of a single model in `evaluate` with the same seed.
    """
    check_members(donors, names=tuple(map(str, range(len(donors)))))
    modes = parse_modes(mode) if isinstance(mode, str) else (mode,)
    if len(modes) != 1:
        raise UsageError(
            f"An ensemble is scored in one mode, not in {len(modes)}",
            hint="name one mode, such as arbitrary",
        )
    (mode,) = modes
    depths = tuple(map(depth_of, donors))
    ends = tuple(map(fixed_of, donors))
    drawn = False
    for depth, fixed in zip(depths, ends, strict=True):
        drawn = drawn or mode.is_drawn(depth, fixed=fixed)
    same = any(kind == "same" for _, kind in variants)
    if same and drawn:
        _refuse_other_shapes(list(zip(depths, ends, strict=True)))
    draws = num_orders if drawn else 1
    per_batch = draw == "batch" and drawn

    def member_orders(kind: EnsembleOrders, index: int, batch: int) -> tuple[ExecutionOrder, ...]:
        """The order of every member in pass `index`, for batch number `batch`."""
        # As in `evaluate`, so the members of an ensemble run in the orders of single models.
        step = batch if per_batch else index
        micro_batch = index if per_batch else 0
        orders: list[ExecutionOrder] = []
        for member, depth in enumerate(depths):
            # The rank of the stream, otherwise that of a process, distinguishes members.
            rank = member if kind == "independent" else 0
            policy = mode.policy(fixed=ends[member])
            order = policy.draw(depth, seed=seed, step=step, micro_batch=micro_batch, rank=rank)
            orders.append(order)
        return tuple(orders)

    kinds = dict.fromkeys(kind for _, kind in variants)
    passes = list(product(kinds, range(draws)))
    tallies: dict[Variant, list[Tally]] = {}
    for variant in variants:
        tallies[variant] = [Tally() for _ in range(draws)]
    for donor in donors:
        check_classifier(donor)
        forget(stack_of(donor))
    number = -1
    with in_eval(*donors), torch.no_grad():
        for number, batch in enumerate(batches):
            orders = [member_orders(kind, index, number) for kind, index in passes]
            for images, labels in micro_batches(donors[0], batch, one_order=len(passes) == 1):
                logits = dict(zip(passes, _all_logits(donors, images, orders=orders), strict=True))
                for (combine, kind), sums in tallies.items():  # both combinations share logits
                    for index, tally in enumerate(sums):
                        tally.add(combined(logits[kind, index], combine), labels)
                if on_images is not None:
                    on_images(sums[0].images)
    batches_drawn = range(number + 1 if per_batch else 0)
    scores: dict[Variant, list[EnsembleScore]] = {}
    for (combine, kind), sums in tallies.items():
        scores[combine, kind] = []
        for index, tally in enumerate(sums):
            tally.check()
            members = member_orders(kind, index, 0)
            score = EnsembleScore(
                mode=mode,
                index=index,
                # The order of the ensemble, if all members have the same.
                order=members[0] if (kind == "same" or not drawn) and not per_batch else None,
                member_orders=() if per_batch else members,
                batch_orders=tuple(member_orders(kind, index, b)[0] for b in batches_drawn),
                fixed=ends[0],
                **tally.values(),
            )
            scores[combine, kind].append(score)
    return scores


def _refuse_other_shapes(shapes: Sequence[tuple[int, tuple[int, int]]]) -> None:
    """Raises `UsageError` unless all members have one number of blocks and the same ends."""
    if len(set(shapes)) > 1:
        texts = [f"{depth} with ends {fixed}" for depth, fixed in shapes]
        raise UsageError(
            "The members cannot run in the same orders: their numbers of blocks, or those that "
            f"keep their place, differ ({', '.join(texts)})",
            hint="let each draw its own: orders='independent', --ensemble-orders independent",
        )


def _all_logits(
    donors: Sequence[nn.Module], images: Tensor, *, orders: Sequence[Sequence[ExecutionOrder]]
) -> list[Tensor]:
    """Logits `[members, batch, classes]` of every pass; `orders[pass][member]`.

    A member runs the orders of all passes, and common beginnings once. The first member's
    orders are the same in both kinds of orders, so it always shares them.
    """
    # Placeholders of the right length: every entry is replaced below.
    outputs = [[images] * len(donors) for _ in orders]
    for member, donor in enumerate(donors):
        own_orders = [members[member] for members in orders]
        for index, logits in run_many(donor, images, orders=own_orders):
            outputs[index][member] = logits.float()
    return list(map(torch.stack, outputs))


def combined(logits: Tensor, combine: Combine) -> Tensor:
    """Logits `[batch, classes]` of the ensemble, from its members' `[members, batch, classes]`.

    For probabilities it is the logarithm of their mean, whose softmax is this mean.
    """
    if combine == "logits":
        return logits.mean(dim=0)
    # logsumexp, because the exponentials of large negative logits underflow.
    return logits.log_softmax(dim=-1).logsumexp(dim=0) - math.log(len(logits))
