"""What no placement can beat, in closed form, whatever its size.

Of the blocks that a request runs, host h runs n_h on average. With memory for m_h blocks it needs
at least n_h / m_h visits for them, so that a load L allows

    n_h <= min(m_h, L / (load_h + visit_load_h / m_h))      for everything that fills up.

The least L for which these add up to what a request runs is a lower bound (throughput, lifetime);
so is filling the hosts by ascending block_h + hop_h / m_h (latency).
"""

from __future__ import annotations

import numpy as np

from layershuffle.swarm.planning.problem import Numbers, Objective, Problem

_HALVINGS = 200


def least_load(problem: Problem, objective: Objective) -> float:
    """Lower bound of a solution's value: seconds, or the share of a battery per request."""
    if objective == "latency":
        return _least_time(problem)
    if amounts(problem, objective, load=0.0).sum() >= problem.demand:
        return 0.0
    low, high = 0.0, 1.0
    while amounts(problem, objective, load=high).sum() < problem.demand:
        low, high = high, 2 * high
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        if amounts(problem, objective, load=middle).sum() < problem.demand:
            low = middle
        else:
            high = middle
    return low


def amounts(problem: Problem, objective: Objective, *, load: float) -> Numbers:
    """Most blocks of a request that each host can run under a load, [hosts]."""
    room = np.minimum(problem.room, problem.depth).astype(np.float64)
    most = room.copy()
    for one in problem.loads(objective):
        per_block = one.per_block + one.per_visit / np.maximum(room, 1)
        costs = per_block > 0
        most[costs] = np.minimum(most[costs], load / per_block[costs])
    return most


def _least_time(problem: Problem) -> float:
    room = np.minimum(problem.room, problem.depth).astype(np.float64)
    able = room > 0
    per_block = problem.column("block")[able] + problem.hop[able] / room[able]
    order = np.argsort(per_block, kind="stable")
    before = np.concatenate([[0.0], np.cumsum(room[able][order])[:-1]])
    taken = np.clip(problem.demand - before, 0, room[able][order])
    return float((taken * per_block[order]).sum())
