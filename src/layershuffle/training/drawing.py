"""Which orders the forwards of a run go in: groups of a batch, micro-batches, processes."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

from layershuffle.orders import ExecutionOrder
from layershuffle.policies import OrderPolicy, Sequential, Shuffled

_CHECKED_STEPS = 16


@dataclass(frozen=True, kw_only=True)
class Orders:
    """The orders of a run, a pure function of (seed, step, micro-batch, group, rank).

    `per_batch`: how many groups a forward has. `rank` is that of the process where every process
    draws its own, else 0.
    """

    policy: OrderPolicy
    depth: int
    seed: int
    per_batch: int = 1
    rank: int = 0

    def draw(self, *, step: int, micro_batch: int) -> tuple[ExecutionOrder, ...]:
        """One order per group of a forward."""
        first = micro_batch * self.per_batch
        return tuple(
            self.policy.draw(
                self.depth, seed=self.seed, step=step, micro_batch=first + group, rank=self.rank
            )
            for group in range(self.per_batch)
        )

    def rehearsal(self) -> tuple[tuple[ExecutionOrder, ...], ...]:
        """Forwards in which every block runs: with all groups apart, then with all joined."""
        every = range(self.depth)
        apart = tuple(
            ExecutionOrder((*every[group:], *every[:group]), self.depth)
            for group in (one % self.depth for one in range(self.per_batch))
        )
        return (apart,) if self.per_batch == 1 else (apart, (apart[0],) * self.per_batch)

    def fingerprint(self) -> str:
        """A SHA-256 over the first orders: equal in processes that draw the same ones."""
        drawn = [self.draw(step=step, micro_batch=0) for step in range(_CHECKED_STEPS)]
        text = ";".join(str(order) for orders in drawn for order in orders)
        return hashlib.sha256(text.encode("ascii")).hexdigest()


def by_row(
    orders: Sequence[ExecutionOrder], images: int
) -> ExecutionOrder | tuple[ExecutionOrder, ...]:
    """What `layershuffle.running` takes for a batch of `images`: row i is in group i mod G.

    So a process that holds a part of the batch has, where G divides the part, its rows in the same
    groups as one process that holds it all.
    """
    if len(orders) == 1:
        return orders[0]
    return tuple(orders[row % len(orders)] for row in range(images))


def always_runs_all(policy: OrderPolicy) -> bool:
    """Whether no draw of `policy` leaves a block out."""
    if isinstance(policy, Shuffled):
        return policy.drop is None and policy.depth is None
    return isinstance(policy, Sequential)
