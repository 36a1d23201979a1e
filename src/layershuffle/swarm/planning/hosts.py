"""The hosts of a placement, as users describe them (HOSTS.yaml), and the needs of the model.

block_ms: 8.0                  # a block on a host of speed 1; else as measured here
hosts:
  pi: {count: 4, memory_mb: 512, speed: 0.25, link_ms: 6, bandwidth_mbit: 50,
       battery_wh: 20, watts: 4, joules_per_mb: 0.4, availability: 0.9}
  box: {memory_mb: 4000, blocks_per_s: 400}

Plain data, no torch. MB are 10^6 bytes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, model_validator

from layershuffle.errors import SettingsError, UsageError
from layershuffle.settings import Above, Name, NotBelow, Positive, Settings, read_recipe
from layershuffle.swarm.messages import Wire, pack
from layershuffle.swarm.rounds import QUEUE, Cell, Rounds

Objective = Literal["throughput", "latency", "lifetime"]
OBJECTIVES: tuple[Objective, ...] = ("throughput", "latency", "lifetime")
Numbers = NDArray[np.float64]
Placement = NDArray[np.bool_]
"""[hosts, blocks]: whether the host holds the block."""
MEGA = 1e6
_JOULES_PER_WH = 3600.0


class HostSpec(Settings):
    """One host, or `count` equal hosts."""

    count: Positive = 1
    """Number of such hosts; several are named NAME-1, NAME-2 ..."""
    memory_mb: Above
    """Memory for blocks."""
    blocks_per_s: Above | None = None
    """Blocks that it runs per second; replaces `speed`."""
    speed: Above | None = None
    """Speed relative to the reference host; 2 is twice as fast (default: 1)."""
    link_ms: NotBelow = 1.0
    """Time of a visit beyond compute and transfer, both ways together."""
    bandwidth_mbit: Above | None = None
    """Megabits per second to and from it (default: transfer takes no time)."""
    battery_wh: Above | None = None
    """Energy that it may spend on requests (default: mains power, no limit)."""
    watts: Above | None = None
    """Power beyond idle while it computes; replaces `joules_per_block`."""
    joules_per_block: Above | None = None
    """Energy of one block of one request."""
    joules_per_mb: NotBelow = 0.0
    """Energy of a megabyte received or sent."""
    availability: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Share of the time in which it is reachable; hosts fail independently."""

    @model_validator(mode="after")
    def _consistent(self) -> HostSpec:
        if self.blocks_per_s is not None and self.speed is not None:
            raise ValueError("blocks_per_s and speed exclude each other: give one")
        if self.watts is not None and self.joules_per_block is not None:
            raise ValueError("watts and joules_per_block exclude each other: give one")
        if self.battery_wh is not None and self.watts is None and self.joules_per_block is None:
            raise ValueError("battery_wh needs watts or joules_per_block")
        return self


class HostsFile(Settings):
    """HOSTS.yaml."""

    hosts: Annotated[dict[Name, HostSpec], Field(min_length=1)]
    """Hosts by name."""
    block_ms: Above | None = None
    """Time of one block on a host of speed 1 (default: as measured with the model)."""


@dataclass(frozen=True, kw_only=True)
class ModelFacts:
    """Sizes, times and accuracy of a model, for planning.

    `block_bytes`: size of the weights of every different block. `places`: the places of the stack
    that each of them runs, several where places are tied (default: block b runs place b).
    `state_bytes`: size of one image's state on the wire, one way. `block_ms`: time of a block for
    one image on a host of speed 1. `accuracy`: percent by the number of blocks that ran, in
    arbitrary order (the calibration); empty if there is none. `cells`: the same by how they ran,
    also side by side and again. `rounds`: which blocks a router runs so.
    """

    block_bytes: tuple[int, ...]
    places: tuple[tuple[int, ...], ...] = ()
    state_bytes: int
    block_ms: float | None = None
    accuracy: Mapping[int, float] = field(default_factory=dict)
    cells: Mapping[Cell, float] = field(default_factory=dict)
    rounds: Rounds = QUEUE

    def __post_init__(self) -> None:
        if not self.places:
            alone = tuple((place,) for place in range(len(self.block_bytes)))
            object.__setattr__(self, "places", alone)  # the class is frozen

    @property
    def depth(self) -> int:
        """Number of places, which are the blocks that a request runs."""
        return sum(map(len, self.places))

    def accuracy_at(self, blocks: int) -> float:
        """Percent to expect with this number of blocks: linear between measured numbers.

        Below the fewest measured, the value of those. Raises `UsageError` without a calibration.
        """
        if not self.accuracy:
            raise UsageError(
                "Accuracy by number of blocks has not been measured for this model",
                hint="measure it: layershuffle swarm calibrate MODEL --data SPEC",
            )
        measured = sorted(self.accuracy)
        return float(np.interp(blocks, measured, [self.accuracy[k] for k in measured]))

    def blocks_for(self, floor: float) -> int:
        """Fewest blocks from which on the accuracy is at least `floor` percent.

        Raises `UsageError` if not even all blocks reach it.
        """
        values = [self.accuracy_at(blocks) for blocks in range(self.depth + 1)]
        # A curve may dip below the floor again, so the last number below it decides.
        below = [blocks for blocks, value in enumerate(values) if value < floor]
        if below and below[-1] == self.depth:
            raise UsageError(
                f"An accuracy of {floor:g} % is out of reach: all {self.depth} blocks "
                f"give {values[-1]:.1f} %",
                hint="lower the floor",
            )
        return max(1, below[-1] + 1 if below else 1)


def facts_of(
    tensors: Mapping[int, bytes],
    shape: Sequence[int],
    *,
    wire: Wire = "fp32",
    block_ms: float | None = None,
    accuracy: Mapping[int, float] | None = None,
) -> ModelFacts:
    """Facts of a model from its bundle: `tensors` are the weights by place, `shape` is that of a
    state without the batch."""
    # Places with the same weights are tied: a host stores them once and can run all the places.
    places: dict[bytes, list[int]] = {}
    for place in sorted(tensors):
        places.setdefault(tensors[place], []).append(place)
    # Packed and measured, because only `pack` knows what a wire format adds.
    state = np.zeros((1, *shape), dtype=np.float32)
    return ModelFacts(
        block_bytes=tuple(map(len, places)),
        places=tuple(map(tuple, places.values())),
        state_bytes=pack(state, wire).nbytes,
        block_ms=block_ms,
        accuracy=dict(accuracy or {}),
    )


@dataclass(frozen=True, kw_only=True)
class PlannedHost:
    """One host in numbers: bytes, seconds, joules.

    `link`: time of a visit beyond transfer. `transfer`: time of a state there and back. `battery`:
    infinite on mains power.
    """

    name: str
    memory: float
    block: float
    link: float
    transfer: float
    block_energy: float
    visit_energy: float
    battery: float
    availability: float


def read_hosts(path: Path) -> HostsFile:
    """The hosts in a YAML file. Raises `UsageError` or `SettingsError` with the file's path."""
    try:
        return HostsFile(**read_recipe(path))
    except SettingsError as error:
        hint = error.hint or "docs/swarm.md has an example of such a file"
        raise SettingsError(error.cause, place=path, hint=hint) from error


def hosts_of(file: HostsFile, facts: ModelFacts) -> tuple[PlannedHost, ...]:
    """All hosts, in the file's order, in numbers for this model.

    Raises `UsageError` for a relative speed without a reference, and for equal names.
    """
    hosts = tuple(
        _host(name, spec, block=_block_seconds(name, spec, file, facts), facts=facts)
        for group, spec in file.hosts.items()
        for name in _names(group, spec.count)
    )
    names: set[str] = set()
    for host in hosts:
        if host.name in names:
            raise UsageError(f"Two hosts are named {host.name!r}", hint="rename one of them")
        names.add(host.name)
    return hosts


def _names(group: str, count: int) -> Iterator[str]:
    if count == 1:
        yield group
    else:
        yield from (f"{group}-{number}" for number in range(1, count + 1))


def _block_seconds(name: str, spec: HostSpec, file: HostsFile, facts: ModelFacts) -> float:
    if spec.blocks_per_s is not None:
        return 1 / spec.blocks_per_s
    reference = file.block_ms or facts.block_ms
    if reference is None:
        raise UsageError(
            f"Nothing says how fast host {name} is",
            hint="give it blocks_per_s, or block_ms for all hosts in the file",
        )
    return reference / 1000 / (spec.speed or 1.0)


def _host(name: str, spec: HostSpec, *, block: float, facts: ModelFacts) -> PlannedHost:
    moved = 2 * facts.state_bytes
    rate = math.inf if spec.bandwidth_mbit is None else spec.bandwidth_mbit * MEGA / 8
    energy = spec.joules_per_block
    if energy is None:
        energy = (spec.watts or 0.0) * block
    return PlannedHost(
        name=name,
        memory=spec.memory_mb * MEGA,
        block=block,
        link=spec.link_ms / 1000,
        transfer=moved / rate,
        block_energy=energy,
        visit_energy=spec.joules_per_mb * moved / MEGA,
        battery=math.inf if spec.battery_wh is None else spec.battery_wh * _JOULES_PER_WH,
        availability=spec.availability,
    )


@dataclass(frozen=True)
class Load:
    """The use of one limited resource of each host per block run and per visit, [hosts] each."""

    per_block: Numbers
    per_visit: Numbers


@dataclass(frozen=True, kw_only=True)
class PlacementProblem:
    """Hosts, model and constraints of a placement.

    `replicas`: copies of every block, on different hosts. `reach`: smallest probability with which
    every single block has a reachable holder. `demand`: blocks that a request runs.
    """

    hosts: tuple[PlannedHost, ...]
    facts: ModelFacts
    replicas: int = 1
    reach: float | None = None
    demand: int

    @property
    def depth(self) -> int:
        """Number of places."""
        return self.facts.depth

    @cached_property
    def sizes(self) -> Numbers:
        """Bytes of every different block, [blocks]."""
        return np.array(self.facts.block_bytes, dtype=np.float64)

    @cached_property
    def runs(self) -> Numbers:
        """How many places every different block runs, [blocks]."""
        return np.array([len(places) for places in self.facts.places], dtype=np.float64)

    def column(self, name: str) -> Numbers:
        """One field of `PlannedHost` over all hosts, [hosts]."""
        return np.array([getattr(host, name) for host in self.hosts], dtype=np.float64)

    @cached_property
    def fitting(self) -> NDArray[np.int64]:
        """Most different blocks that fit each host, [hosts]."""
        # The smallest blocks first: no other choice fits more of them.
        filled = np.cumsum(np.sort(self.sizes))
        return np.searchsorted(filled, self.column("memory"), side="right")

    @cached_property
    def room(self) -> NDArray[np.int64]:
        """Most places that the blocks that fit each host can run, [hosts]."""
        # An upper bound: as if the smallest blocks were those that run most places.
        most = np.concatenate([[0.0], np.cumsum(np.sort(self.runs)[::-1])])
        return most[self.fitting].astype(np.int64)

    @cached_property
    def hop(self) -> Numbers:
        """Seconds that a visit takes beyond compute, [hosts]."""
        return self.column("link") + self.column("transfer")

    @cached_property
    def certainty(self) -> Numbers:
        """-ln of the probability that a host is unreachable, [hosts]; adds up over a block's
        hosts."""
        away = 1 - self.column("availability")
        # A host that is always available meets any target alone.
        return np.minimum(-np.log(np.maximum(away, 1e-300)), max(self.certainty_needed, 1.0))

    @cached_property
    def certainty_needed(self) -> float:
        """The sum of `certainty` that the holders of a block must reach."""
        return 0.0 if self.reach is None else -math.log(1 - self.reach)

    def loads(self, objective: Objective) -> tuple[Load, ...]:
        """The limited resources under `objective`: seconds per second, or shares of a battery."""
        nothing = np.zeros(len(self.hosts))
        if objective == "lifetime":
            battery = self.column("battery")
            return (
                Load(self.column("block_energy") / battery, self.column("visit_energy") / battery),
            )
        # Compute and network work at the same time: each is a bottleneck of its own.
        return (Load(self.column("block"), nothing), Load(nothing, self.column("transfer")))

    def fits(self, placement: Placement) -> bool:
        """Whether a placement satisfies memory, replicas and reach."""
        stored = bool((placement @ self.sizes <= self.column("memory")).all())
        copies = bool((placement.sum(axis=0) >= max(1, self.replicas)).all())
        # With a margin for the rounding of the logarithms' sum.
        certain = self.certainty @ placement >= self.certainty_needed - 1e-9
        return stored and copies and bool(certain.all())


def refuse_impossible(problem: PlacementProblem) -> None:
    """Raises `UsageError` if no placement can satisfy the constraints, with the shortage."""
    # First, because the sum of all memories ignores a block that fits nowhere.
    _refuse_large_blocks(problem)
    needed, there = problem.replicas * problem.sizes.sum(), _storable(problem)
    if there < needed:
        raise UsageError(
            f"Memory is short by {_megabytes(needed - there)}: {_copies(problem.replicas).lower()} "
            f"all blocks {'takes' if problem.replicas == 1 else 'take'} {_megabytes(needed)}, the "
            f"hosts have room for {_megabytes(there)}",
            hint="add hosts or memory, or ask for fewer replicas",
        )
    best = problem.certainty.sum()
    if best < problem.certainty_needed - 1e-9:
        raise UsageError(
            f"A reach of {problem.reach:g} is impossible: with a copy of a block on every host "
            f"it is {1 - math.exp(-best):.4f}",
            hint="add hosts, or lower the reach",
        )


def refuse_no_battery(problem: PlacementProblem) -> None:
    """Raises `UsageError` if no host has a battery, so that lifetime is no objective."""
    if not np.isfinite(problem.column("battery")).any():
        raise UsageError(
            "No host has a battery, so none runs out",
            hint="give hosts battery_wh, or choose another objective",
        )


def _storable(problem: PlacementProblem) -> float:
    """Most bytes of blocks that the hosts can hold; exact if all blocks have one size."""
    total, sizes = problem.sizes.sum(), problem.sizes
    if (sizes == sizes[0]).all():
        return float(sizes[0] * problem.fitting.sum())
    return float(np.minimum(problem.column("memory"), total).sum())


def _refuse_large_blocks(problem: PlacementProblem) -> None:
    memory = np.sort(problem.column("memory"))[::-1]
    largest = int(problem.sizes.argmax())
    size, fitting = problem.sizes[largest], int((memory >= problem.sizes[largest]).sum())
    if fitting >= problem.replicas:
        return
    # With too few hosts, more memory would not help.
    short = "" if len(memory) < problem.replicas else _megabytes(size - memory[fitting])
    raise UsageError(
        f"{_copies(problem.replicas)} block {problem.facts.places[largest][0]} cannot be held: "
        f"{fitting} of {len(memory)} hosts have room for its {_megabytes(size)}"
        + (f", short by {short}" if short else ""),
        hint="add hosts or memory, or ask for fewer replicas",
    )


def _copies(replicas: int) -> str:
    return "One copy of" if replicas == 1 else f"{replicas} copies of"


def _megabytes(size: float) -> str:
    return f"{size / MEGA:.2f} MB"
