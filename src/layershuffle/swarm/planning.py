"""`swarm plan`: which of the described devices holds which blocks, and what to expect of that.

The blocks are assigned as a gateway assigns them (`assignment`). Beside the throughput of that
assignment stands what no assignment can exceed, the bound of a linear program. `swarm simulate`
runs the same devices in virtual time. MB are 10^6 bytes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import numpy as np
from numpy.typing import NDArray
from pydantic import Field
from scipy import sparse
from scipy.optimize import linprog

from layershuffle.ground.errors import SettingsError, UsageError
from layershuffle.ground.settings import Above, Name, NotBelow, Positive, Settings, read_recipe
from layershuffle.ground.text import counted, listing
from layershuffle.swarm.assignment import COPIES, BlockFile, Holder, assign
from layershuffle.swarm.calibration import calibration_of, rounds_of
from layershuffle.swarm.rounds import QUEUE, Cell, Rounds
from layershuffle.swarm.served import ServedModel, served_directory
from layershuffle.swarm.simulation.hosts import SimulatedDevice
from layershuffle.swarm.sureness import Stop, Sureness

MEGA = 1e6
_MILLI = 1000.0
_SHOWN = 20
"""Most hosts that are listed by name."""


class HostSpec(Settings):
    """One device, or `count` equal ones."""

    count: Positive = 1
    """Number of such devices; several are named NAME-1, NAME-2 ..."""
    memory_mb: Above
    """Memory for blocks."""
    speed: Above = 1.0
    """Speed relative to the reference; 2 is twice as fast."""
    link_ms: NotBelow = 1.0
    """Time of a visit beyond compute, both ways together."""


class HostsFile(Settings):
    """HOSTS.yaml."""

    hosts: Annotated[dict[Name, HostSpec], Field(min_length=1)]
    """Devices by name."""

    def named(self) -> dict[str, HostSpec]:
        """Every single device by its name. Raises `UsageError` for equal names."""
        names = [
            (name if spec.count == 1 else f"{name}-{number + 1}", spec)
            for name, spec in self.hosts.items()
            for number in range(spec.count)
        ]
        twice = [name for name, times in Counter(name for name, _ in names).items() if times > 1]
        if twice:
            raise UsageError(f"Two hosts are named {twice[0]!r}", hint="rename one of them")
        return dict(names)


@dataclass(frozen=True, kw_only=True)
class ModelFacts:
    """A model as plans and simulations need it.

    `blocks`: the weights of every place. `block_ms`: time of a block for one image here. `cells`:
    percent right by how the blocks ran (the calibration), empty without one. `rounds`: how a router
    runs them. `sureness`: what ending requests early costs, if it was measured.
    """

    blocks: Sequence[BlockFile]
    block_ms: float
    cells: Mapping[Cell, float] = field(default_factory=dict)
    rounds: Rounds = QUEUE
    sureness: Sureness | None = None

    def stop(self, confidence: float | None) -> Stop | None:
        """What ending requests at this chance costs; `None`: they run all blocks.

        Raises `UsageError` for a chance that was not measured.
        """
        if confidence is None:
            return None
        stops = () if self.sureness is None else self.sureness.stops
        measured = {stop.confidence: stop for stop in stops}
        if confidence not in measured:
            hint = "layershuffle swarm calibrate MODEL --data SPEC measures it"
            if measured:
                hint = f"name one of {', '.join(f'{c:g}' for c in measured)} (--confidence)"
            raise UsageError(
                f"What ending requests at a chance of {confidence:g} costs was not measured",
                hint=hint,
            )
        return measured[confidence]


@dataclass(frozen=True, kw_only=True)
class Planned:
    """Devices with their blocks, those without blocks left out, and requests per second: the most
    of this plan, and the most of any."""

    devices: Mapping[str, SimulatedDevice]
    most: float
    bound: float


def model_facts(spec: str) -> ModelFacts:
    """The facts of the model `spec`, which is exported if it is not.

    Raises the errors of `served_directory`.
    """
    model = ServedModel(served_directory(spec))
    calibration = calibration_of(model)
    return ModelFacts(
        blocks=model.weights,
        block_ms=model.manifest.speed.block_ms,
        cells={} if calibration is None else {row.cell: row.top1 for row in calibration.rows},
        rounds=rounds_of(calibration),
        sureness=None if calibration is None else calibration.sureness,
    )


def read_hosts(path: Path) -> HostsFile:
    """The hosts in a YAML file. Raises `UsageError` or `SettingsError` with the file's path."""
    try:
        return HostsFile(**read_recipe(path))
    except SettingsError as error:
        hint = error.hint or "docs/swarm.md has an example of such a file"
        raise SettingsError(error.cause, place=path, hint=hint) from error


def devices_of(
    file: HostsFile, facts: ModelFacts, *, copies: int = COPIES
) -> dict[str, SimulatedDevice]:
    """The devices by name with the blocks that a gateway would give them, those without left out.

    Raises `UsageError` if their memory is too small for all blocks.
    """
    hosts = file.named()
    holders = [
        Holder(name, memory=int(spec.memory_mb * MEGA), speed=spec.speed)
        for name, spec in hosts.items()
    ]
    blocks_of = assign(holders, facts.blocks, copies=copies)
    if missing := sorted({*range(len(facts.blocks))}.difference(*blocks_of.values())):
        sizes = {file.digest: file.size for file in facts.blocks}
        needed, there = sum(sizes.values()), sum(holder.memory for holder in holders)
        raise UsageError(
            f"No host has room for block {missing[0]}: all blocks take {needed / MEGA:.2f} MB, the "
            f"hosts have {there / MEGA:.2f} MB",
            hint="add hosts or memory",
        )
    return {
        name: SimulatedDevice(blocks_of[name], facts.block_ms / spec.speed, spec.link_ms)
        for name, spec in hosts.items()
        if blocks_of[name]
    }


def plan_for(file: HostsFile, facts: ModelFacts, *, copies: int = COPIES) -> Planned:
    """The plan for these devices. Raises what `devices_of` raises.

    >>> planned = plan_for(HostsFile(hosts={"pi": {"memory_mb": 1}}), facts)  # doctest: +SKIP
    """
    hosts, devices = file.named(), devices_of(file, facts, copies=copies)
    blocks_of = [devices[name].blocks if name in devices else () for name in hosts]
    allowed = np.array([[n in blocks for n in range(len(facts.blocks))] for blocks in blocks_of])
    seconds = np.array([facts.block_ms / spec.speed / _MILLI for spec in hosts.values()])
    memory = np.array([float(int(spec.memory_mb * MEGA)) for spec in hosts.values()])
    return Planned(
        devices=devices,
        most=most_per_second(seconds, facts.blocks, memory=memory, allowed=allowed),
        bound=most_per_second(seconds, facts.blocks, memory=memory, allowed=np.ones_like(allowed)),
    )


def most_per_second(
    seconds: NDArray[np.float64],
    blocks: Sequence[BlockFile],
    *,
    memory: NDArray[np.float64],
    allowed: NDArray[np.bool_],
) -> float:
    """The most requests per second of all plans that give a host only `allowed` blocks.

    `seconds`, `memory` `[hosts]`: time of a block, and bytes; `allowed` `[hosts, places]`. An upper
    bound, because a host may hold a part of a block: with y_hf, the share of the requests that run
    file f (r_f places, s_f bytes) on host h, it minimises the fullest load L subject to

        sum_h y_hf = 1,    sum_f s_f y_hf <= memory_h,    sum_f seconds_h r_f y_hf <= L.

    It is exact if `allowed` is a plan: whatever a plan holds fits the memory.
    """
    files = {file.digest: place for place, file in enumerate(blocks)}
    runs = Counter(file.digest for file in blocks)
    first, hosts = list(files.values()), len(seconds)
    size = np.array([blocks[place].size for place in first], dtype=np.float64)
    count = np.array([runs[digest] for digest in files], dtype=np.float64)
    # In units around 1, because the solver's tolerances are absolute.
    unit = float(seconds.min())
    each_host = sparse.identity(hosts)
    stored = sparse.kron(each_host, size[None] / size.max())
    load = sparse.kron(sparse.diags(seconds / unit), count[None])
    most = sparse.csr_matrix(np.concatenate([np.zeros(hosts), -np.ones(hosts)])[:, None])
    answer = linprog(
        np.append(np.zeros(hosts * len(first)), 1.0),
        A_ub=sparse.hstack([sparse.vstack([stored, load]), most], format="csr"),
        b_ub=np.concatenate([memory / size.max(), np.zeros(hosts)]),
        A_eq=sparse.hstack(
            [
                sparse.kron(np.ones((1, hosts)), sparse.identity(len(first))),
                sparse.csr_matrix((len(first), 1)),
            ],
            format="csr",
        ),
        b_eq=np.ones(len(first)),
        bounds=[*((0.0, float(may)) for may in allowed[:, first].ravel()), (0.0, None)],
    )
    return float(1 / (answer.fun * unit))


def plan_report(planned: Planned, facts: ModelFacts) -> str:
    """The blocks of every host, the most requests per second, and what single hosts hold."""
    devices = planned.devices
    blocks = [(name, ", ".join(map(str, sorted(d.blocks)))) for name, d in devices.items()]
    lines = [
        f"A block of one image took {facts.block_ms:.3g} ms where the model was exported: that is "
        "`speed: 1`.\n",
        listing(blocks[:_SHOWN]),
    ]
    if len(devices) > _SHOWN:
        lines.append(f"  and {len(devices) - _SHOWN} more hosts")
    lines.append(
        f"\nThese blocks on these hosts: at most {planned.most:.1f} requests/s. No plan can give "
        f"more than {planned.bound:.1f} (linear program)."
    )
    copies = Counter(block for device in devices.values() for block in device.blocks)
    single = sum(times == 1 for times in copies.values())
    if single:
        lines.append(
            f"{counted(single, 'block')} on one host only: while it is away, answers lack them. "
            "More memory gives every block a second host."
        )
    if facts.cells:
        top1 = facts.cells[Cell(len(facts.blocks))]
        lines.append(f"With all blocks {top1:.1f} % of the calibration's images are right.")
    if facts.sureness and (stop := facts.stop(facts.sureness.confidence)):
        most = planned.most * len(facts.blocks) / stop.blocks
        lines.append(
            f"By default requests end when they are sure, after {stop.blocks:.1f} blocks on "
            f"average: about {most:.1f} requests/s, {stop.top1:.1f} % right."
        )
    return "\n".join(lines)
