"""Ensembles: the mean of the outputs of several models (paper, section 4.4: of their logits)."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from layershuffle.core.evaluation import Batches, Draw, Score, Tally, micro_batches
from layershuffle.core.forwards import run_many
from layershuffle.core.orders import ExecutionOrder
from layershuffle.core.policies import Mode, parse_modes
from layershuffle.core.runs import in_eval
from layershuffle.core.sharing import forget
from layershuffle.core.stack import depth_of, stack_of
from layershuffle.errors import UsageError
from layershuffle.merging.compatibility import check_members
from layershuffle.merging.settings import Combine, EnsembleOrders
from layershuffle.stats import ImageGroups

Variant = tuple[Combine, EnsembleOrders]


@dataclass(frozen=True, kw_only=True)
class EnsembleScore(Score):
    """A score of an ensemble. `member_orders`: those of the members; empty if drawn per batch."""

    member_orders: tuple[ExecutionOrder, ...] = ()


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
    groups: Tensor | None = None,
) -> list[EnsembleScore]:
    """The scores of the ensemble of `donors`, one for each of `num_orders` draws.

    `orders`: all members run in one order, or each in its own. `combine`: the mean of logits, or of
    probabilities. `groups` as in `evaluate`; `mode` is a single mode. Raises `UsageError` for an
    unsuitable mode and for donors with other classes (by name, where both have names) or another
    image view, `DataError` if there is no image.
    """
    return evaluate_ensembles(
        donors, batches, mode=mode, num_orders=num_orders, seed=seed, draw=draw,
        variants=[(combine, orders)], groups=groups,
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
    groups: Tensor | None = None,
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
    depths = tuple(map(depth_of, donors))
    passes = [
        _Pass(modes[0], depths, seed, draw, index, orders)
        for orders in dict.fromkeys(orders for _, orders in variants)
        for index in range(modes[0].draws(num_orders, depth=max(depths)))
    ]
    image_groups = None if groups is None else ImageGroups(groups.numpy())
    # A sum per (combination, pass): both combinations read the same logits.
    tallies = {
        (combine, run): Tally(image_groups) for run in passes for combine, orders in variants
        if orders == run.orders
    }  # fmt: skip
    for donor in donors:
        forget(stack_of(donor))
    with in_eval(*donors), torch.no_grad():
        for number, batch in enumerate(batches):
            orders = [run.at(number) for run in passes]
            for images, labels in micro_batches(donors[0], batch):
                logits = dict(zip(passes, _all_logits(donors, images, orders=orders), strict=True))
                for (combine, run), tally in tallies.items():
                    tally.add(combined(logits[run], combine), labels)
                if on_images is not None:
                    on_images(next(iter(tallies.values())).images)
    for tally in tallies.values():
        tally.check()
    scores: dict[Variant, list[EnsembleScore]] = {variant: [] for variant in variants}
    for (combine, run), tally in tallies.items():
        scores[combine, run.orders].append(_score(run, tally))
    return scores


@dataclass(frozen=True)
class _Pass:
    """One pass of an ensemble over the images, with the orders of its members."""

    mode: Mode
    depths: tuple[int, ...]
    seed: int
    draw: Draw
    index: int
    orders: EnsembleOrders

    @property
    def is_drawn(self) -> bool:
        # By the deepest member, because a shallower one may have only one order.
        return self.mode.is_drawn(max(self.depths))

    @property
    def per_batch(self) -> bool:
        return self.draw == "batch" and self.is_drawn

    def at(self, batch: int) -> tuple[ExecutionOrder, ...]:
        """The order of every member for batch number `batch`."""
        # As in `evaluate`, so the members of an ensemble run in the orders of single models.
        step, micro = (batch, self.index) if self.per_batch else (self.index, 0)
        return tuple(
            self.mode.policy().draw(
                depth, seed=self.seed, step=step, micro_batch=micro,
                # The rank of the stream, otherwise that of a process, distinguishes members.
                rank=member if self.orders == "independent" else 0,
            )
            for member, depth in enumerate(self.depths)
        )  # fmt: skip


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


def _score(run: _Pass, tally: Tally) -> EnsembleScore:
    orders = run.at(0)
    shared = run.orders == "same" or not run.is_drawn
    return EnsembleScore(
        mode=run.mode,
        index=run.index,
        # The order of the ensemble, if all members have the same.
        order=orders[0] if shared and not run.per_batch else None,
        images=tally.images,
        top1=tally.top1,
        top5=tally.top5,
        cross_entropy=tally.cross_entropy,
        member_orders=() if run.per_batch else orders,
        top1_n=tally.top1_n,
        top5_n=tally.top5_n,
    )
