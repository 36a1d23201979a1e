"""Placement of blocks on hosts, by a mixed-integer program and greedily.

The first is a mixed-integer linear program, solved by HiGHS (scipy's `milp`). For hosts h and
blocks b of size s_b, the unknowns are

    x_hb in {0, 1}   h holds b
    y_hb in [0, 1]   share of the requests whose block b runs on h
    z_h  in [0, 1]   share of the requests that visit h
    L                the fullest load

and the constraints

    sum_b s_b x_hb <= memory_h                    the blocks of a host fit its memory
    sum_h x_hb >= replicas                        every block has that many copies
    sum_h -ln(1 - availability_h) x_hb
        >= -ln(1 - reach)                         and is reachable with that probability (exact: a
                                                  block is out if all its holders are)
    y_hb <= x_hb                                  blocks run where they are held
    sum_h y_hb = 1                                every place runs once per request; or, if only
        (or <= 1, sum_hb r_b y_hb = demand)       `demand` places run, any of them
    z_h >= y_hb                                   a host runs all its blocks of a request in one
                                                  visit, which is possible because the order is free

throughput and lifetime minimise L subject to, for every host and every limited resource,

    sum_b load_h r_b y_hb + visit_load_h z_h <= L

with loads in seconds of compute and, separately, of transfer (throughput: 1 / L requests per
second), or in shares of the battery (lifetime: 1 / L requests until the first battery is empty, a
max-min problem over the hosts as in Gacoin et al., ISCAS 2019, here for blocks that run in any
order and may be left out). latency makes z binary and minimises
sum_h hop_h z_h + sum_hb block_h r_b y_hb, the time of one request alone. r_b is the number of
places that block b runs: one, or more where places are tied, whose weights a host then stores once.

z_h >= y_hb gives the fewest visits that the shares allow. Where hosts hold partly the same blocks
and visits cost, it may not be attainable on all hosts at once: then a throughput limited by
transfers, or a lifetime with radio energy, is an upper bound; else it is exact.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
from scipy import sparse
from scipy.optimize import Bounds, LinearConstraint, milp

from layershuffle.errors import UsageError
from layershuffle.swarm.planning.hosts import Numbers, Objective, Placement, PlacementProblem

Solver = Literal["exact", "greedy"]
GAP = 1e-6
"""Relative distance from the bound within which a placement counts as optimal."""
_INFEASIBLE = 2  # HiGHS's status


@dataclass(frozen=True, kw_only=True)
class Solution:
    """A placement, the shares of the requests on it, and its quality.

    `shares` `[hosts, blocks]`: share of the requests that run this block on this host. `value`:
    seconds (throughput: of the busiest host per request; latency: of a request) or the share of a
    battery per request (lifetime); smaller is better. `bound`: a lower bound over all placements.
    """

    placement: Placement
    shares: Numbers
    value: float
    bound: float
    solver: Solver


# --- exact ----------------------------------------------------------------------------------------


def solve(
    problem: PlacementProblem,
    objective: Objective,
    *,
    fixed: Placement | None = None,
    time_limit: float = 20.0,
) -> Solution | None:
    """The best placement, or the best use of `fixed`; `None` if `time_limit` (s) passed first.

    Raises `UsageError` if the constraints exclude each other.
    """
    least = least_load(problem, objective)
    # In units around 1, because the solver's tolerances are absolute.
    scale = least or _any_load(problem, objective)
    # With the closed-form bound as the least L the solver stops when it gets there.
    result = _solve_program(
        problem, objective, fixed=fixed, scale=scale, least=least / scale, time_limit=time_limit
    )
    if result.status == _INFEASIBLE:
        cause = f"{problem.replicas} copies of every block do not fit the hosts' memory together"
        hint = "add hosts or memory, or ask for fewer replicas"
        if problem.reach is not None:
            without = replace(problem, reach=None)
            if _solve_program(without, "latency", time_limit=time_limit).status != _INFEASIBLE:
                cause = f"A reach of {problem.reach:g} needs more copies than the memory holds"
                hint = "add hosts or memory, or lower the reach"
        raise UsageError(cause, hint=hint)
    if result.x is None:
        return None
    hosts, blocks = len(problem.hosts), len(problem.sizes)
    cells = hosts * blocks
    bound = result.fun if result.mip_dual_bound is None else result.mip_dual_bound
    return Solution(
        # The solver's integers are exact only up to a tolerance.
        placement=(result.x[:cells] > 0.5).reshape(hosts, blocks),
        shares=np.clip(result.x[cells : 2 * cells], 0, 1).reshape(hosts, blocks),
        value=float(result.fun) * scale,
        # Both are lower bounds; the larger one is tighter.
        bound=max(least, float(bound) * scale),
        solver="exact",
    )


def _any_load(problem: PlacementProblem, objective: Objective) -> float:
    """A load that occurs, as the unit if the least load is zero."""
    if objective == "latency":
        return float(problem.column("block").min())
    loads = np.concatenate(
        [x for a in problem.loads(objective) for x in (a.per_block, a.per_visit)]
    )
    return float(loads[loads > 0].min(initial=math.inf)) if (loads > 0).any() else 1.0


def _solve_program(
    problem: PlacementProblem,
    objective: Objective,
    *,
    time_limit: float,
    fixed: Placement | None = None,
    scale: float = 1.0,
    least: float = 0.0,
) -> Any:
    """The result of HiGHS. Columns: x, y (host by host), z, L; times or loads in units of
    `scale`."""
    hosts, blocks = len(problem.hosts), len(problem.sizes)
    cells = hosts * blocks
    widths = {"x": cells, "y": cells, "z": hosts, "most": 1}
    latency, constraints = objective == "latency", []

    def add(low: Any, high: Any, **columns: Any) -> None:
        height = next(iter(columns.values())).shape[0]
        parts = [
            columns.get(name, sparse.csr_matrix((height, width))) for name, width in widths.items()
        ]
        constraints.append(LinearConstraint(sparse.hstack(parts, format="csr"), low, high))

    each = sparse.identity(cells)
    block_sum = sparse.kron(np.ones((1, hosts)), sparse.identity(blocks))
    if fixed is None:  # a given placement need not satisfy memory, replicas and reach
        unit = problem.sizes.max()
        stored = sparse.kron(sparse.identity(hosts), problem.sizes[None] / unit)
        add(-np.inf, problem.column("memory") / unit, x=stored)
        add(max(1, problem.replicas), np.inf, x=block_sum)
        if problem.reach is not None:
            certain = sparse.kron(problem.certainty[None], sparse.identity(blocks))
            add(problem.certainty_needed, np.inf, x=certain)
    add(-np.inf, 0, x=-each, y=each)
    add(int(problem.demand == problem.depth), 1, y=block_sum)
    if problem.demand < problem.depth:
        add(problem.demand, np.inf, y=np.tile(problem.runs, hosts)[None])
    add(-np.inf, 0, y=each, z=-sparse.kron(sparse.identity(hosts), np.ones((blocks, 1))))
    costs = np.zeros(2 * cells + hosts + 1)
    low, high = np.zeros_like(costs), np.ones_like(costs)
    if latency:
        costs[cells : 2 * cells] = np.kron(problem.column("block"), problem.runs) / scale
        costs[2 * cells : -1] = problem.hop / scale
        high[-1] = 0
    else:
        costs[-1], low[-1], high[-1] = 1, least, np.inf
        for load in problem.loads(objective):
            per_block = sparse.diags(load.per_block / scale)
            add(
                -np.inf,
                0,
                y=sparse.kron(per_block, problem.runs[None]),
                z=sparse.diags(load.per_visit / scale),
                most=-np.ones((hosts, 1)),
            )
    if fixed is not None:
        low[:cells] = high[:cells] = fixed.ravel()
    whole = np.zeros_like(costs)
    whole[:cells] = fixed is None
    # Loads may be split, but a single request either visits a host or does not.
    whole[2 * cells : -1] = latency
    return milp(
        costs,
        integrality=whole,
        bounds=Bounds(low, high),
        constraints=constraints,
        options={"time_limit": time_limit, "mip_rel_gap": GAP},
    )


# --- greedy ---------------------------------------------------------------------------------------


def place(problem: PlacementProblem, objective: Objective) -> Solution:
    """A placement that satisfies all constraints. Raises `UsageError` if it finds none.

    throughput, lifetime   every block gets its copies on the hosts with most capacity; then every
                           host, by descending capacity, takes the blocks that lack most
    latency                the hosts with the least time per block take as many as they have room
                           for; further copies go where there is room
    """
    bound = least_load(problem, objective)
    placement = np.zeros((len(problem.hosts), len(problem.sizes)), dtype=bool)
    if objective == "latency":
        value = _route(problem, placement)
        _add_copies(problem, placement, give=-problem.column("block"))
        shares = np.zeros(())
        return Solution(
            placement=placement, shares=shares, value=value, bound=bound, solver="greedy"
        )
    give = _amounts(problem, objective, load=bound * (1 + 1e-9))
    _add_copies(problem, placement, give=give)
    loads = problem.loads(objective)
    visits_cost = any(bool(load.per_visit.any()) for load in loads)
    lack = problem.runs * (problem.demand / problem.depth)
    for host in np.argsort(-give, kind="stable"):
        # One block more than it can run leaves room to balance the loads. Where visits cost, a host
        # that holds many blocks needs fewer visits.
        most = int(problem.room[host]) if visits_cost else int(np.ceil(give[host])) + 1
        free = problem.hosts[host].memory - float(placement[host] @ problem.sizes)
        for block in np.argsort(-lack, kind="stable"):
            fits = problem.sizes[block] <= free
            if placement[host] @ problem.runs < most and fits and not placement[host, block]:
                placement[host, block] = True
                free -= problem.sizes[block]
        _drain(lack, placement[host], float(give[host]))
    used = solve(problem, objective, fixed=placement, time_limit=math.inf)  # without integers
    assert used is not None
    return replace(used, placement=placement, bound=bound, solver="greedy")


def least_load(problem: PlacementProblem, objective: Objective) -> float:
    """Lower bound of a solution's value, in closed form, whatever the size of the swarm.

    Of the blocks that a request runs, host h runs n_h on average. With memory for m_h blocks it
    needs at least n_h / m_h visits for them, so a load L allows

        n_h <= min(m_h, L / (load_h + visit_load_h / m_h))      for every limited resource.

    The bound is the least L for which these add up to the blocks of a request. For latency, the
    hosts are filled by ascending block_h + hop_h / m_h.
    """
    if objective == "latency":
        room = np.minimum(problem.room, problem.depth).astype(np.float64)
        able = room > 0
        per_block = problem.column("block")[able] + problem.hop[able] / room[able]
        order = np.argsort(per_block, kind="stable")
        before = np.concatenate([[0.0], np.cumsum(room[able][order])[:-1]])
        return float(np.clip(problem.demand - before, 0, room[able][order]) @ per_block[order])

    def too_small(load: float) -> bool:
        return bool(_amounts(problem, objective, load=load).sum() < problem.demand)

    low, high = 0.0, 1.0
    if not too_small(low):
        return 0.0
    while too_small(high):
        low, high = high, 2 * high
    for _ in range(200):  # halvings, beyond the precision of a float
        middle = (low + high) / 2
        low, high = (middle, high) if too_small(middle) else (low, middle)
    return low


def _amounts(problem: PlacementProblem, objective: Objective, *, load: float) -> Numbers:
    """Most blocks of a request that each host can run under a load, [hosts]."""
    room = np.minimum(problem.room, problem.depth).astype(np.float64)
    most = room.copy()
    for filled in problem.loads(objective):
        per_block = filled.per_block + filled.per_visit / np.maximum(room, 1)
        costs = per_block > 0
        most[costs] = np.minimum(most[costs], load / per_block[costs])
    return most


def _route(problem: PlacementProblem, placement: Placement) -> float:
    """Place every block once, for a request that visits few and fast hosts. Returns its seconds."""
    free, block_time = problem.column("memory").copy(), problem.column("block")
    missing, total, demand = list(range(len(problem.sizes))), 0.0, problem.demand
    open_hosts = problem.room > 0
    while missing and open_hosts.any():
        count = np.clip(np.minimum(problem.room, problem.runs[missing].sum()), 1, None)
        host = int(np.where(open_hosts, problem.hop / count + block_time, np.inf).argmin())
        open_hosts[host] = False
        runs = 0
        for block in missing.copy():
            if problem.sizes[block] <= free[host]:
                placement[host, block] = True
                free[host] -= problem.sizes[block]
                missing.remove(block)
                runs += int(problem.runs[block])
        if ran := min(runs, demand):
            total += float(problem.hop[host] + ran * block_time[host])
            demand -= ran
    return total


def _add_copies(problem: PlacementProblem, placement: Placement, *, give: Numbers) -> None:
    """Add copies until replicas and reach hold, on the hosts with most capacity left and room."""
    free = problem.column("memory") - placement @ problem.sizes
    while True:
        copies = placement.sum(axis=0)
        short = copies < max(1, problem.replicas)
        short |= problem.certainty @ placement < problem.certainty_needed - 1e-9
        if not short.any():
            return
        block = int(np.where(short, copies, problem.replicas + len(problem.hosts)).argmin())
        able = ~placement[:, block] & (free >= problem.sizes[block])
        if not able.any():
            raise UsageError(
                f"There is no memory for another copy of block {block}",
                hint="add hosts or memory, or ask for fewer replicas or a lower reach",
            )
        # The host with the most capacity left; of equal ones the most available.
        worth = np.where(able, give - placement @ problem.runs, -np.inf)
        best = np.flatnonzero(worth == worth.max())
        host = int(best[problem.certainty[best].argmax()])
        placement[host, block] = True
        free[host] -= problem.sizes[block]


def _drain(lack: Numbers, holding: Placement, amount: float) -> None:
    """Reduce the lack of the blocks in `holding` by `amount` in total, the largest lacks first."""
    order = sorted(np.flatnonzero(holding), key=lambda block: -lack[block])
    for count in range(1, len(order) + 1):
        top = order[:count]
        level = (sum(lack[top]) - amount) / count
        following = lack[order[count]] if count < len(order) else -np.inf
        if level >= following:
            lack[top] = np.minimum(lack[top], level)
            return
