"""Ensembles: the mean of the outputs of several models (paper, section 4.4: of their logits)."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

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
    """A score of an ensemble. `member_orders`: those of the members; empty if drawn per batch, and
    then `batch_orders` are those of the first member."""

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
    probabilities. `mode` is a single mode. Raises `UsageError` for an
    unsuitable mode, for a model without a classifier and for donors with other classes (by name,
    where both have names) or another image view, `DataError` if there is no image.
    """
    return evaluate_ensembles(
        donors, batches, mode=mode, num_orders=num_orders, seed=seed, draw=draw,
        variants=[(combine, orders)],
    )[combine, orders]  # fmt: skip


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
    """As `evaluate_ensemble`, for several variants, of which those with equal orders share work.

    "same": the orders of a single model in `evaluate` with the same seed. `on_images` as in
    `evaluate`.
    """
    check_members(donors, names=tuple(map(str, range(len(donors)))))
    modes = parse_modes(mode) if isinstance(mode, str) else (mode,)
    if len(modes) != 1:
        raise UsageError(
            f"An ensemble is scored in one mode, not in {len(modes)}",
            hint="name one mode, such as arbitrary",
        )
    (mode,) = modes
    depths, ends = tuple(map(depth_of, donors)), tuple(map(fixed_of, donors))
    drawn = any(mode.is_drawn(d, fixed=fixed) for d, fixed in zip(depths, ends, strict=True))
    draws = num_orders if drawn else 1
    per_batch = draw == "batch" and drawn

    def drawn_for(kind: EnsembleOrders, index: int, batch: int) -> tuple[ExecutionOrder, ...]:
        """The order of every member in pass `index`, for batch number `batch`."""
        # As in `evaluate`, so the members of an ensemble run in the orders of single models.
        step, micro = (batch, index) if per_batch else (index, 0)
        return tuple(
            mode.policy(fixed=ends[member]).draw(
                depth, seed=seed, step=step, micro_batch=micro,
                # The rank of the stream, otherwise that of a process, distinguishes members.
                rank=member if kind == "independent" else 0,
            )
            for member, depth in enumerate(depths)
        )  # fmt: skip

    kinds = dict.fromkeys(kind for _, kind in variants)
    passes = [(kind, index) for kind in kinds for index in range(draws)]
    tallies = {variant: [Tally() for _ in range(draws)] for variant in variants}
    for donor in donors:
        check_classifier(donor)
        forget(stack_of(donor))
    with in_eval(*donors), torch.no_grad():
        for number, batch in enumerate(batches):
            orders = [drawn_for(kind, index, number) for kind, index in passes]
            for images, labels in micro_batches(donors[0], batch, one_order=len(passes) == 1):
                logits = dict(zip(passes, _all_logits(donors, images, orders=orders), strict=True))
                for (combine, kind), sums in tallies.items():  # both combinations share logits
                    for index, tally in enumerate(sums):
                        tally.add(combined(logits[kind, index], combine), labels)
                if on_images is not None:
                    on_images(sums[0].images)
    scores: dict[Variant, list[EnsembleScore]] = {variant: [] for variant in variants}
    for (combine, kind), sums in tallies.items():
        for index, tally in enumerate(sums):
            tally.check()
            members = drawn_for(kind, index, 0)
            score = EnsembleScore(
                mode=mode,
                index=index,
                # The order of the ensemble, if all members have the same.
                order=members[0] if (kind == "same" or not drawn) and not per_batch else None,
                member_orders=() if per_batch else members,
                batch_orders=tuple(
                    drawn_for(kind, index, batch)[0]
                    for batch in range(number + 1 if per_batch else 0)
                ),
                fixed=ends[0],
                **tally.values(),
            )
            scores[combine, kind].append(score)
    return scores


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
        for index, logits in run_many(
            donor, images, orders=[members[member] for members in orders]
        ):
            outputs[index][member] = logits.float()
    return [torch.stack(members) for members in outputs]


def combined(logits: Tensor, combine: Combine) -> Tensor:
    """Logits `[batch, classes]` of the ensemble, from its members' `[members, batch, classes]`.

    For probabilities it is the logarithm of their mean, whose softmax is this mean.
    """
    if combine == "logits":
        return logits.mean(dim=0)
    # logsumexp, because the exponentials of large negative logits underflow.
    return logits.log_softmax(dim=-1).logsumexp(dim=0) - math.log(len(logits))
