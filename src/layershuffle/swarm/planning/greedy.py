"""Placements for swarms too large for the exact programme; how far off they are is measured.

throughput, lifetime   every block gets its copies on the hosts with most to give; then every host,
                       those with most to give first, takes the blocks that lack most
latency                the fewest and quickest hosts, by the pipeline's dynamic programme (exact for
                       blocks of one size and one copy each); further copies where there is room

Distance: the value over the closed-form bound of `bounds`.
"""

from __future__ import annotations

import numpy as np

from layershuffle.errors import UsageError
from layershuffle.swarm.planning.bounds import amounts, least_load
from layershuffle.swarm.planning.exact import Solution
from layershuffle.swarm.planning.pipeline import best_pipeline
from layershuffle.swarm.planning.problem import Numbers, Objective, Placement, Problem
from layershuffle.swarm.planning.shares import balanced, free_time, fullest


def place(problem: Problem, objective: Objective) -> Solution:
    """A placement that keeps all constraints. Raises `UsageError` if it finds no room for one."""
    bound = least_load(problem, objective)
    if objective == "latency":
        route = best_pipeline(problem, "latency")
        placement = (
            np.zeros((len(problem.hosts), problem.depth), dtype=bool)
            if route is None
            else route.placement(problem.depth)
        )
        _add_copies(problem, placement, give=-problem.column("block"))
        value = free_time(problem, placement)
        return Solution(placement=placement, shares=np.zeros(()), value=value, bound=bound)
    give = amounts(problem, objective, load=bound * (1 + 1e-9))
    placement = np.zeros((len(problem.hosts), problem.depth), dtype=bool)
    _add_copies(problem, placement, give=give)
    _fill(problem, placement, give=give, objective=objective)
    shares = balanced(problem, placement, objective=objective)
    value = fullest(problem, shares, objective=objective, inorder=False)
    return Solution(placement=placement, shares=shares, value=value, bound=bound)


def _add_copies(problem: Problem, placement: Placement, *, give: Numbers) -> None:
    """Add copies until replicas and reach hold; where most is left to give and room is free."""
    free = problem.column("memory") - placement @ problem.sizes
    while True:
        short = placement.sum(axis=0) < max(1, problem.replicas)
        short |= problem.certainty @ placement < problem.certainty_needed - 1e-9
        if not short.any():
            return
        copies = np.where(short, placement.sum(axis=0), problem.replicas + len(problem.hosts))
        block = int(copies.argmin())
        able = ~placement[:, block] & (free >= problem.sizes[block])
        if not able.any():
            raise UsageError(
                f"No room was found for another copy of block {block}",
                hint="add hosts or memory, or ask for fewer replicas or a lower reach",
            )
        held = placement.sum(axis=1)
        # Fewest blocks for what it can give first; of equals the one that is there most.
        worth = np.where(able, give - held, -np.inf)
        best = np.flatnonzero(worth == worth.max())
        host = int(best[problem.certainty[best].argmax()])
        placement[host, block] = True
        free[host] -= problem.sizes[block]


def _fill(problem: Problem, placement: Placement, *, give: Numbers, objective: Objective) -> None:
    """Every host takes the blocks that lack most, one more than it can run, if they fit."""
    visits_cost = any(bool(one.per_visit.any()) for one in problem.loads(objective))
    lack = np.full(problem.depth, problem.demand / problem.depth)
    for host in np.argsort(-give, kind="stable"):
        most = int(problem.room[host]) if visits_cost else int(np.ceil(give[host])) + 1
        free = problem.hosts[host].memory - float(placement[host] @ problem.sizes)
        for block in np.argsort(-lack, kind="stable"):
            fits = problem.sizes[block] <= free
            if placement[host].sum() < most and fits and not placement[host, block]:
                placement[host, block] = True
                free -= problem.sizes[block]
        _drain(lack, placement[host], float(give[host]))


def _drain(lack: Numbers, held: Placement, amount: float) -> None:
    """Take `amount` off what the held blocks lack, from those that lack most."""
    order = sorted(np.flatnonzero(held), key=lambda block: -lack[block])
    for count in range(1, len(order) + 1):
        top = order[:count]
        level = (sum(lack[top]) - amount) / count
        following = lack[order[count]] if count < len(order) else -np.inf
        if level >= following:
            lack[top] = np.minimum(lack[top], level)
            return
