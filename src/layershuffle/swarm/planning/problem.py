"""The planning problem in arrays, and the reasons why it may have no answer."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from layershuffle.errors import UsageError
from layershuffle.swarm.planning.hosts import MEGA, Host, ModelFacts

Objective = Literal["throughput", "latency", "lifetime"]
OBJECTIVES: tuple[Objective, ...] = ("throughput", "latency", "lifetime")
Numbers = NDArray[np.float64]
Placement = NDArray[np.bool_]
"""[hosts, blocks]: whether the host holds the block."""


@dataclass(frozen=True)
class Load:
    """One thing that fills up: a host's share of it per block run and per visit, [hosts] each."""

    per_block: Numbers
    per_visit: Numbers


@dataclass(frozen=True, kw_only=True)
class Problem:
    """Hosts, model and what is asked of a placement.

    `replicas`: copies of every block, on hosts of their own. `reach`: smallest probability with
    which any one block has a reachable holder. `demand`: blocks that a request runs.
    """

    hosts: tuple[Host, ...]
    facts: ModelFacts
    replicas: int = 1
    reach: float | None = None
    demand: int

    @property
    def depth(self) -> int:
        """Number of blocks."""
        return self.facts.depth

    @cached_property
    def sizes(self) -> Numbers:
        """Bytes of every block, [blocks]."""
        return np.array(self.facts.block_bytes, dtype=np.float64)

    def column(self, name: str) -> Numbers:
        """One field of `Host` over all hosts, [hosts]."""
        return np.array([getattr(host, name) for host in self.hosts], dtype=np.float64)

    @cached_property
    def room(self) -> NDArray[np.int64]:
        """Most blocks that fit each host, [hosts]."""
        filled = np.cumsum(np.sort(self.sizes))
        return np.searchsorted(filled, self.column("memory"), side="right")

    @cached_property
    def hop(self) -> Numbers:
        """Seconds that a visit takes beyond compute, [hosts]."""
        return self.column("link") + self.column("transfer")

    @cached_property
    def certainty(self) -> Numbers:
        """-ln of the probability that a host is away, [hosts]; adds up over a block's holders."""
        away = 1 - self.column("availability")
        # A host that is always there fulfils any target alone.
        return np.minimum(-np.log(np.maximum(away, 1e-300)), max(self.certainty_needed, 1.0))

    @cached_property
    def certainty_needed(self) -> float:
        """What a block's holders must add up to."""
        return 0.0 if self.reach is None else -math.log(1 - self.reach)

    def loads(self, objective: Objective) -> tuple[Load, ...]:
        """What fills up under `objective`: seconds of a second, or shares of a battery."""
        nothing = np.zeros(len(self.hosts))
        if objective == "lifetime":
            battery = self.column("battery")
            return (
                Load(self.column("block_energy") / battery, self.column("visit_energy") / battery),
            )
        # Host and network work side by side: each is a bottleneck of its own.
        return (Load(self.column("block"), nothing), Load(nothing, self.column("transfer")))

    def fits(self, placement: Placement) -> bool:
        """Whether a placement keeps memory, replicas and reach."""
        held = bool((placement @ self.sizes <= self.column("memory")).all())
        copies = bool((placement.sum(axis=0) >= max(1, self.replicas)).all())
        certain = self.certainty @ placement >= self.certainty_needed - 1e-9
        return held and copies and bool(certain.all())


def refuse_impossible(problem: Problem) -> None:
    """Raises `UsageError` for what no placement can fulfil, with what is short and by how much."""
    _refuse_large_blocks(problem)
    needed, there = problem.replicas * problem.sizes.sum(), _storable(problem)
    if there < needed:
        raise UsageError(
            f"Memory is short by {_megabytes(needed - there)}: {_copies(problem.replicas).lower()} "
            f"all blocks take {_megabytes(needed)}, the hosts have room for {_megabytes(there)}",
            hint="add hosts or memory, or ask for fewer replicas",
        )
    best = problem.certainty.sum()
    if best < problem.certainty_needed - 1e-9:
        raise UsageError(
            f"A reach of {problem.reach:g} is impossible: with a copy of a block on every host "
            f"it is {1 - math.exp(-best):.4f}",
            hint="add hosts, or lower the reach",
        )


def refuse_no_battery(problem: Problem) -> None:
    """Raises `UsageError` if nothing can run out, so that there is no life to lengthen."""
    if not np.isfinite(problem.column("battery")).any():
        raise UsageError(
            "No host names a battery, so none runs out",
            hint="give hosts battery_wh, or choose another objective",
        )


def _storable(problem: Problem) -> float:
    """Most bytes of blocks that the hosts can hold; blocks of one size leave rests unused."""
    total, sizes = problem.sizes.sum(), problem.sizes
    if (sizes == sizes[0]).all():
        return float(sizes[0] * problem.room.sum())
    return float(np.minimum(problem.column("memory"), total).sum())


def _refuse_large_blocks(problem: Problem) -> None:
    memory = np.sort(problem.column("memory"))[::-1]
    largest = int(problem.sizes.argmax())
    size, fitting = problem.sizes[largest], int((memory >= problem.sizes[largest]).sum())
    if fitting >= problem.replicas:
        return
    short = "" if len(memory) < problem.replicas else _megabytes(size - memory[fitting])
    raise UsageError(
        f"{_copies(problem.replicas)} block {largest} cannot be held: {fitting} of {len(memory)} "
        f"hosts have room for its {_megabytes(size)}" + (f", short by {short}" if short else ""),
        hint="add hosts or memory, or ask for fewer replicas",
    )


def _copies(replicas: int) -> str:
    return "One copy of" if replicas == 1 else f"{replicas} copies of"


def _megabytes(size: float) -> str:
    return f"{size / MEGA:.2f} MB"
