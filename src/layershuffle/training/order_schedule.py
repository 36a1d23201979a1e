"""The execution orders of a run's forwards, by step, micro-batch, group and process."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

from layershuffle.core.draws import Stream
from layershuffle.core.orders import ExecutionOrder
from layershuffle.core.policies import OrderPolicy, Sequential, Shuffled

# Two policies or seeds that agree on the orders of 16 steps are the same ones, for all purposes:
# even with three blocks the chance is 6 ** -16.
_FINGERPRINT_STEPS = 16


@dataclass(frozen=True, kw_only=True)
class OrderSchedule:
    """The orders of a run, a pure function of (seed, step, micro-batch, group, rank).

    So nothing about orders needs saving: a resumed run draws the same ones again. `per_batch` is
    the number of groups in a forward. `rank` is the number of the process if every process draws
    its own orders, else 0. With `exits` every forward has an exit as well.
    """

    policy: OrderPolicy
    depth: int
    seed: int
    per_batch: int = 1
    rank: int = 0
    exits: bool = False

    def draw(self, *, step: int, micro_batch: int) -> tuple[ExecutionOrder, ...]:
        """One order per group of a forward."""
        # Every group of a step has a number of its own, so that no two draw from one stream.
        first = micro_batch * self.per_batch
        return tuple(
            self.policy.draw(
                self.depth, seed=self.seed, step=step, micro_batch=first + group, rank=self.rank
            )
            for group in range(self.per_batch)
        )

    def exit_after(
        self, orders: Sequence[ExecutionOrder], *, step: int, micro_batch: int
    ) -> int | None:
        """The number of steps of `orders` after which the states also go to the head.

        Uniform in 1 to one less than the longest order has; an order that is shorter than that
        counts with its end. `None` without exits.
        """
        if not self.exits:
            return None
        # No group has this number, so exits do not depend on the draws of the orders.
        stream = Stream(self.seed, step, micro_batch=-1 - micro_batch, rank=self.rank)
        return 1 + stream.below(max(1, max(map(len, orders)) - 1))

    def warmup(self) -> tuple[tuple[ExecutionOrder, ...], ...]:
        """Orders of forwards that run every block: with all groups apart, then with all joined.

        Groups that share a block at a position run it together, so these two are the smallest and
        the largest batches that a block meets.
        """
        every = range(self.depth)
        apart = tuple(
            ExecutionOrder((*every[shift:], *every[:shift]), self.depth)
            for shift in (group % self.depth for group in range(self.per_batch))
        )
        return (apart,) if self.per_batch == 1 else (apart, (apart[0],) * self.per_batch)

    def fingerprint(self) -> str:
        """A SHA-256 over the first orders: equal in processes that draw the same ones."""
        drawn = [self.draw(step=step, micro_batch=0) for step in range(_FINGERPRINT_STEPS)]
        text = ";".join(str(order) for orders in drawn for order in orders)
        return hashlib.sha256(text.encode("ascii")).hexdigest()


def orders_by_row(
    orders: Sequence[ExecutionOrder], images: int
) -> ExecutionOrder | tuple[ExecutionOrder, ...]:
    """What `layershuffle.running` takes for a batch of `images`: row i is in group i mod G.

    Rows are counted from the first row of each process. So a process that holds half of the batch
    puts its rows into the same groups as a process that holds all of it, if G divides the half.
    """
    if len(orders) == 1:
        return orders[0]
    return tuple(orders[row % len(orders)] for row in range(images))


def always_runs_all(policy: OrderPolicy) -> bool:
    """Whether no draw of `policy` leaves a block out."""
    if isinstance(policy, Shuffled):
        return policy.drop is None and policy.depth is None
    return isinstance(policy, Sequential)
