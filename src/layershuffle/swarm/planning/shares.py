"""How requests are shared out over a placement that is given.

Shares `[hosts, blocks]`: of the requests, how many run this block on this host.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from scipy import sparse
from scipy.optimize import linprog

from layershuffle.swarm.planning.problem import Load, Numbers, Objective, Placement, Problem

_ROUNDS = 300


def balanced(problem: Problem, placement: Placement, *, objective: Objective) -> Numbers:
    """Shares that come near the least load, for swarms too large for a linear programme.

    Begins with shares by speed and moves them, round by round, from hosts that are fuller than the
    mean of their block's holders to those that are less full; keeps the best round.
    """
    rows, columns = np.nonzero(placement)
    loads = problem.loads(objective)
    costs = np.maximum.reduce([load.per_block + load.per_visit for load in loads])
    weights = _by_speed(costs, rows, columns)
    best, fewest = None, np.inf
    for _ in range(_ROUNDS):
        shares = _normalised(weights, columns, problem)
        full = _fullness(loads, shares, rows, len(placement))
        if full.max() < fewest * (1 - 1e-9):
            best, fewest = shares, full.max()
        if full.max() == 0:
            break
        weights = shares / np.sqrt(np.maximum(full / full.max(), 1e-3))[rows]
    table = np.zeros(placement.shape)
    table[rows, columns] = best
    return table


def _by_speed(costs: Numbers, rows: NDArray[np.int64], columns: NDArray[np.int64]) -> Numbers:
    """First weights: what costs nothing takes all of a block, else by speed."""
    free = costs[rows] == 0
    spared = np.isin(columns, columns[free])
    with np.errstate(divide="ignore"):
        return np.where(spared, free, 1 / costs[rows])


def _normalised(weights: Numbers, columns: NDArray[np.int64], problem: Problem) -> Numbers:
    """Each block's shares sum to what a request runs of it: all, or the same part of every one."""
    sums = np.bincount(columns, weights, minlength=problem.depth)
    return weights / sums[columns] * (problem.demand / problem.depth)


def _fullness(
    loads: tuple[Load, ...],
    shares: Numbers,
    rows: NDArray[np.int64],
    hosts: int,
) -> Numbers:
    """Of every host its largest load, [hosts]."""
    run = np.bincount(rows, shares, minlength=hosts).astype(np.float64)
    visits = np.zeros(hosts)
    np.maximum.at(visits, rows, shares)
    full: Numbers = np.maximum.reduce(
        [one.per_block * run + one.per_visit * visits for one in loads]
    )
    return full


def fullest(problem: Problem, shares: Numbers, *, objective: Objective, inorder: bool) -> float:
    """The largest load under these shares; `inorder`: with every block in its place.

    Free order: as many visits as the largest share of a host's blocks. In order: a visit for every
    stretch of neighbouring blocks; a host keeps min(y_hb, y_h,b+1) of its requests from b to b + 1.
    """
    visits = shares.max(axis=1)
    if inorder:
        visits = shares[:, 0] + np.maximum(np.diff(shares, axis=1), 0).sum(axis=1)
    run = shares.sum(axis=1)
    return max(
        float((one.per_block * run + one.per_visit * visits).max())
        for one in problem.loads(objective)
    )


def in_order_load(problem: Problem, placement: Placement, *, objective: Objective) -> float:
    """The least largest load with every block in its place, by linear programme; all blocks run."""
    hosts, depth = placement.shape
    cells = hosts * depth
    every = sparse.identity(cells, format="csr")
    before = sparse.kron(sparse.identity(hosts), sparse.eye(depth, k=-1))
    # starts >= y_hb - y_h,b-1: the requests that come to h with block b.
    blocks = [sparse.hstack([every - before, -every, sparse.csr_matrix((cells, 1))])]
    scale = _unit(problem, objective)
    ones = np.ones((1, depth))
    for load in problem.loads(objective):
        run = sparse.kron(sparse.diags(load.per_block / scale), ones)
        visits = sparse.kron(sparse.diags(load.per_visit / scale), ones)
        blocks.append(sparse.hstack([run, visits, -np.ones((hosts, 1))]))
    upper = sparse.vstack(blocks, format="csr")
    each = sparse.kron(np.ones((1, hosts)), sparse.identity(depth))
    result = linprog(
        np.concatenate([np.zeros(2 * cells), [1.0]]),
        A_ub=upper,
        b_ub=np.zeros(upper.shape[0]),
        A_eq=sparse.hstack([each, sparse.csr_matrix((depth, cells + 1))]),
        b_eq=np.ones(depth),
        bounds=[*((0, float(one)) for one in placement.ravel()), *[(0, 1)] * cells, (0, None)],
    )
    return float(result.fun) * scale


def _unit(problem: Problem, objective: Objective) -> float:
    """A load that occurs: programmes are solved in units of it."""
    loads = [part for one in problem.loads(objective) for part in (one.per_block, one.per_visit)]
    largest = float(np.concatenate(loads).max())
    return largest or 1.0


def in_order_time(problem: Problem, placement: Placement) -> float:
    """Seconds of one request alone, block by block in place, along the best path of hosts."""
    block, hop = problem.column("block"), problem.hop
    best = np.where(placement[:, 0], hop + block, np.inf)
    for number in range(1, problem.depth):
        arriving = best.min() + hop
        best = np.where(placement[:, number], np.minimum(best, arriving) + block, np.inf)
    return float(best.min())


def free_time(problem: Problem, placement: Placement) -> float:
    """Seconds of one request alone with the order free, by a greedy choice of hosts to visit.

    Next comes the host with the least time per block that it adds; as good as the best choice
    where holdings are disjoint.
    """
    block, hop = problem.column("block"), problem.hop
    missing = np.ones(problem.depth, dtype=bool)
    total, left = 0.0, problem.demand
    while left > 0:
        news = np.minimum((placement & missing).sum(axis=1), left)
        with np.errstate(divide="ignore", invalid="ignore"):
            price = np.where(news > 0, hop / np.maximum(news, 1) + block, np.inf)
        host = int(price.argmin())
        taken = np.flatnonzero(placement[host] & missing)[:left]
        total += float(hop[host] + block[host] * len(taken))
        missing[taken] = False
        left -= len(taken)
    return total
