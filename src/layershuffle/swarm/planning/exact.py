"""The planning problem as a mixed-integer linear programme, solved by HiGHS (scipy's `milp`).

For hosts h and blocks b of size s_b, the unknowns are

    x_hb in {0, 1}   h holds b
    y_hb in [0, 1]   share of the requests whose block b runs on h
    z_h  in [0, 1]   share of the requests that visit h
    L                the fullest load

and the constraints

    sum_b s_b x_hb <= memory_h                    what a host holds fits it
    sum_h x_hb >= replicas                        every block is somewhere, so often
    sum_h -ln(1 - availability_h) x_hb
        >= -ln(1 - reach)                         and reachable with this probability (exact: a
                                                  block is out if all its holders are)
    y_hb <= x_hb                                  blocks run where they are held
    sum_h y_hb = 1                                every block once per request; where only `demand`
        (or <= 1, sum_hb y_hb = demand)           of the blocks are to run, any so many of them
    z_h >= y_hb                                   all of a host's blocks of a request in one visit:
                                                  this is where the order is free

throughput and lifetime minimise L subject to, for every host and everything that fills up,

    sum_b load_h y_hb + visit_load_h z_h <= L

with loads in seconds of compute and, apart, of transfer (throughput: 1 / L requests per second), or
in shares of the battery (lifetime: 1 / L requests until the first one is empty, the largest minimum
over the hosts: the question of Gacoin et al., ISCAS 2019, put anew for blocks that run in any order
and may be left out). latency makes z binary and minimises sum_h hop_h z_h + sum_hb block_h y_hb,
the time of one request alone.

z_h >= y_hb is the fewest visits that the shares allow. Where holdings overlap in part and visits
weigh, no single way to share out requests may attain it on all hosts at once, so that a throughput
bound by transfers, or a life with radio energy, is then an upper bound; else it is exact.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy import sparse
from scipy.optimize import Bounds, LinearConstraint, milp

from layershuffle.errors import UsageError
from layershuffle.swarm.planning.bounds import least_load
from layershuffle.swarm.planning.problem import Numbers, Objective, Placement, Problem

_GAP = 1e-6
_INFEASIBLE = 2


@dataclass(frozen=True, kw_only=True)
class Solution:
    """A placement, the shares of the requests on it, and how good it is.

    `value`: seconds (throughput: of the busiest host per request; latency: of a request) or the
    share of a battery per request (lifetime); smaller is better. `bound`: no placement has less.
    """

    placement: Placement
    shares: Numbers
    value: float
    bound: float


def solve(
    problem: Problem,
    objective: Objective,
    *,
    fixed: Placement | None = None,
    time_limit: float = 20.0,
) -> Solution | None:
    """The best placement, or with `fixed` the best use of that one; `None` if time ran out first.

    Raises `UsageError` if the constraints exclude each other.
    """
    least = least_load(problem, objective)
    scale = least or _any_load(problem, objective)
    # With the closed-form bound as the least L the solver stops when it gets there.
    programme = _Programme(problem, objective, scale=scale, least=least / scale)
    result = programme.solve(fixed, time_limit)
    if result.status == _INFEASIBLE:
        _explain(problem, time_limit)
    if result.x is None:
        return None
    hosts, blocks = len(problem.hosts), problem.depth
    cells = hosts * blocks
    bound = result.mip_dual_bound
    return Solution(
        placement=(result.x[:cells] > 0.5).reshape(hosts, blocks),
        shares=np.clip(result.x[cells : 2 * cells], 0, 1).reshape(hosts, blocks),
        value=float(result.fun) * programme.scale,
        bound=max(least, (result.fun if bound is None else bound) * programme.scale),
    )


def _any_load(problem: Problem, objective: Objective) -> float:
    """A load that occurs, as the unit where the least one is zero."""
    if objective == "latency":
        return float(problem.column("block").min())
    loads = np.concatenate([x for one in problem.loads(objective) for x in _parts(one)])
    return float(loads[loads > 0].min(initial=math.inf)) if (loads > 0).any() else 1.0


def _parts(load: Any) -> tuple[Numbers, Numbers]:
    return load.per_block, load.per_visit


class _Programme:
    """The matrices. Columns: x, y (host by host), z, L; times or loads in units of `scale`."""

    def __init__(
        self, problem: Problem, objective: Objective, *, scale: float = 1.0, least: float = 0.0
    ) -> None:
        self.problem, self.objective, self.scale, self.least = problem, objective, scale, least
        self.hosts, self.blocks = len(problem.hosts), problem.depth
        self.each_host = sparse.identity(self.hosts, format="csr")
        self.each_block = sparse.identity(self.blocks, format="csr")

    def solve(self, fixed: Placement | None, time_limit: float) -> Any:
        """HiGHS's result; `fixed` holds x at that placement."""
        cells = self.hosts * self.blocks
        low, high = np.zeros(2 * cells + self.hosts + 1), np.ones(2 * cells + self.hosts + 1)
        if self.objective == "latency":
            high[-1] = 0
        else:
            low[-1], high[-1] = self.least, np.inf
        if fixed is not None:
            low[:cells] = high[:cells] = fixed.ravel()
        whole = np.zeros(len(low))
        whole[:cells] = fixed is None
        whole[2 * cells : -1] = self.objective == "latency"
        return milp(
            self._costs(),
            integrality=whole,
            bounds=Bounds(low, high),
            constraints=[*self._placing(fixed), *self._sharing(), *self._loading()],
            options={"time_limit": time_limit, "mip_rel_gap": _GAP},
        )

    def _costs(self) -> Numbers:
        cells = self.hosts * self.blocks
        costs = np.zeros(2 * cells + self.hosts + 1)
        if self.objective == "latency":
            costs[cells : 2 * cells] = np.repeat(self.problem.column("block"), self.blocks)
            costs[2 * cells : -1] = self.problem.hop
            return costs / self.scale
        costs[-1] = 1
        return costs

    def _placing(self, fixed: Placement | None) -> list[LinearConstraint]:
        """Memory, replicas and reach; they say nothing about a placement that is given."""
        if fixed is not None:
            return []
        unit = self.problem.sizes.max()
        held = sparse.kron(self.each_host, self.problem.sizes[None] / unit)
        copies = sparse.kron(np.ones((1, self.hosts)), self.each_block)
        rows = [
            LinearConstraint(self._row(x=held), -np.inf, self.problem.column("memory") / unit),
            LinearConstraint(self._row(x=copies), max(1, self.problem.replicas), np.inf),
        ]
        if self.problem.reach is not None:
            certain = sparse.kron(self.problem.certainty[None], self.each_block)
            needed = self.problem.certainty_needed
            rows.append(LinearConstraint(self._row(x=certain), needed, np.inf))
        return rows

    def _sharing(self) -> list[LinearConstraint]:
        """Blocks run where they are held, and as many as a request is to run."""
        cells = sparse.identity(self.hosts * self.blocks)
        each = sparse.kron(np.ones((1, self.hosts)), self.each_block)
        all_run = self.problem.demand == self.blocks
        rows = [
            LinearConstraint(self._row(x=-cells, y=cells), -np.inf, 0),
            LinearConstraint(self._row(y=each), 1 if all_run else 0, 1),
        ]
        if not all_run:
            total = np.ones((1, self.hosts * self.blocks))
            rows.append(LinearConstraint(self._row(y=total), self.problem.demand, np.inf))
        visits = sparse.kron(self.each_host, np.ones((self.blocks, 1)))
        return [*rows, LinearConstraint(self._row(y=cells, z=-visits), -np.inf, 0)]

    def _loading(self) -> list[LinearConstraint]:
        """No load is fuller than L."""
        if self.objective == "latency":
            return []
        return [
            LinearConstraint(
                self._row(
                    y=sparse.kron(
                        sparse.diags(load.per_block / self.scale), np.ones((1, self.blocks))
                    ),
                    z=sparse.diags(load.per_visit / self.scale),
                    most=-np.ones((self.hosts, 1)),
                ),
                -np.inf,
                0,
            )
            for load in self.problem.loads(self.objective)
        ]

    def _row(self, *, x: Any = None, y: Any = None, z: Any = None, most: Any = None) -> Any:
        """Coefficients over all columns, from those of some."""
        given = next(one for one in (x, y, z, most) if one is not None)
        cells = self.hosts * self.blocks
        widths = (cells, cells, self.hosts, 1)
        parts = [
            sparse.csr_matrix((given.shape[0], width)) if part is None else part
            for part, width in zip((x, y, z, most), widths, strict=True)
        ]
        return sparse.hstack(parts, format="csr")


def _explain(problem: Problem, time_limit: float) -> None:
    """Raises `UsageError` naming the constraint without which a placement exists."""
    hint = "add hosts or memory, or ask for fewer replicas"
    cause = f"{problem.replicas} copies of every block do not fit the hosts' memory together"
    if problem.reach is not None:
        from dataclasses import replace

        without = replace(problem, reach=None)
        result = _Programme(without, "latency").solve(None, time_limit)
        if result.status != _INFEASIBLE:
            cause = f"A reach of {problem.reach:g} needs more copies than the memory holds"
            hint = "add hosts or memory, or lower the reach"
    raise UsageError(cause, hint=hint)
