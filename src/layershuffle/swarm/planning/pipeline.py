"""The best classical pipeline: every block in its place, each host one interval of neighbours.

With blocks of one size any interval of n blocks costs a host the same, so that only the number of
blocks per host is to be chosen: one exact dynamic programme over hosts and blocks done, for the
largest load or for the sum of the times. Blocks of several sizes all count as the largest.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from layershuffle.swarm.planning.problem import Numbers, Objective, Placement, Problem


@dataclass(frozen=True)
class Pipeline:
    """Blocks per host, `[hosts]`; hosts with none are not part of it."""

    counts: NDArray[np.int64]

    def load(self, problem: Problem, objective: Objective) -> float:
        """The largest load, or for latency the seconds of a request alone."""
        used = self.counts > 0
        if objective == "latency":
            return float((problem.hop * used + problem.column("block") * self.counts).sum())
        return max(
            float((one.per_block * self.counts + one.per_visit * used).max())
            for one in problem.loads(objective)
        )

    def placement(self, depth: int) -> Placement:
        """Its intervals, host after host."""
        table = np.zeros((len(self.counts), depth), dtype=bool)
        ends = np.cumsum(self.counts)
        for host in np.flatnonzero(self.counts):
            table[host, ends[host] - self.counts[host] : ends[host]] = True
        return table


def best_pipeline(problem: Problem, objective: Objective) -> Pipeline | None:
    """The pipeline with the least largest load, or the least time; `None` if memory is short."""
    prices = _prices(problem, objective)
    depth = problem.depth
    best = np.full(depth + 1, np.inf)
    best[0] = 0
    chosen = np.zeros((len(prices), depth + 1), dtype=np.int64)
    useful = _useful(prices, depth)
    for host in useful:
        after = best.copy()
        for count in range(1, depth + 1):
            price = prices[host, count]
            so_far = best[: depth + 1 - count]
            total = so_far + price if objective == "latency" else np.maximum(so_far, price)
            better = total < after[count:]
            after[count:][better] = total[better]
            chosen[host, count:][better] = count
        best = after
    return _traced(chosen, useful) if np.isfinite(best[depth]) else None


def _prices(problem: Problem, objective: Objective) -> Numbers:
    """Load or time of every host with every number of blocks, `[hosts, depth + 1]`."""
    counts = np.arange(problem.depth + 1)
    visited = counts > 0
    if objective == "latency":
        prices = problem.column("block")[:, None] * counts + problem.hop[:, None] * visited
    else:
        loads = problem.loads(objective)
        prices = np.maximum.reduce(
            [one.per_block[:, None] * counts + one.per_visit[:, None] * visited for one in loads]
        )
    held = counts[None] * problem.sizes.max() > problem.column("memory")[:, None]
    return np.where(held, np.inf, prices)


def _useful(prices: Numbers, depth: int) -> list[int]:
    """Hosts to look at: of those alike no more than there are blocks."""
    _, which = np.unique(prices, axis=0, return_inverse=True)
    seen: dict[int, int] = {}
    useful = []
    for host, kind in enumerate(which.ravel().tolist()):
        seen[kind] = seen.get(kind, 0) + 1
        if seen[kind] <= depth:
            useful.append(host)
    return useful


def _traced(chosen: NDArray[np.int64], useful: list[int]) -> Pipeline:
    """The counts that led to all blocks being placed."""
    counts = np.zeros(len(chosen), dtype=np.int64)
    left = chosen.shape[1] - 1
    for host in reversed(useful):
        counts[host] = chosen[host, left]
        left -= counts[host]
    return Pipeline(counts)
