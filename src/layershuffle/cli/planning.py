"""`layershuffle swarm plan`, `simulate` and `calibrate`: what to expect before a swarm runs."""

from __future__ import annotations

import math
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter
from cyclopts.validators import Number

from layershuffle.cli.command import AtLeastOne, Command, ComputingCommand, Reporting
from layershuffle.ground.extras import require
from layershuffle.ground.text import counted, table
from layershuffle.swarm.faults import SCENARIOS, ScenarioName
from layershuffle.swarm.settings import DEFAULT_MODEL, ROUTINGS

if TYPE_CHECKING:
    from layershuffle.swarm.calibration import Calibration

AboveZero = Annotated[float, Parameter(validator=Number(gt=0, lt=math.inf))]


@dataclass(frozen=True)
class DevicesCommand(Command):
    """Flags about devices, and a model whose blocks they hold as a gateway would assign them."""

    devices: Path
    """YAML file with the devices: an entry for each under hosts, such as
    pi: {count: 4, memory_mb: 500, speed: 0.2, link_ms: 6}."""
    _: KW_ONLY
    model: str = DEFAULT_MODEL
    """Model to serve."""
    copies: AtLeastOne = 2
    """Hosts that hold each block, where memory allows."""


@dataclass(frozen=True, kw_only=True)
class PlanCommand(DevicesCommand):
    """Show which device would hold which blocks of a model, and how many requests that allows."""

    def run(self) -> int:
        """Plan and print."""
        require("swarm")

        from layershuffle.swarm.planning import model_facts, plan_for, plan_report, read_hosts

        file, facts = read_hosts(self.devices), model_facts(self.model)
        print(plan_report(plan_for(file, facts, copies=self.copies), facts))
        print(f"Next: layershuffle swarm simulate {self.devices} --churn 60 30")
        return 0


@dataclass(frozen=True, kw_only=True)
class SimulateCommand(DevicesCommand, Reporting):
    """Run devices in virtual time, with the policy of the real router.

    The flags set how hosts fail and how requests arrive; free order and a pipeline get the same
    requests, and the same failures at the same simulated times.
    """

    requests: AtLeastOne = 1000
    """Number of requests."""
    scenario: ScenarioName | None = None
    """What fails after a quarter of the requests, as in swarm drill (default: nothing)."""
    churn: tuple[AboveZero, AboveZero] | None = None
    """Mean seconds for which a host is up, and for which it is down (default: hosts stay up). With
    --rate both routings meet the same failures."""
    rate: AboveZero | None = None
    """Requests per second, at random times; replaces --clients."""
    clients: AtLeastOne = 4
    """Clients, each of which sends its next request when the last one has ended, and has waited for
    as long as the gateway asks (Retry-After) if that one failed."""
    min_blocks: int = 1
    """Fewest blocks of an answer."""
    confidence: float | None = None
    """End requests at this chance of being right, one that the calibration measured (0.98).
    Default: all blocks run."""
    seed: int = 0
    """Seed of arrivals and failures."""

    def run(self) -> int:
        """Simulate every routing, and print them side by side."""
        require("swarm")

        from layershuffle.swarm.planning import devices_of, model_facts, read_hosts
        from layershuffle.swarm.simulation.outcome import outcome_report
        from layershuffle.swarm.simulation.run import simulate

        file, facts = read_hosts(self.devices), model_facts(self.model)
        stop = facts.stop(self.confidence)
        devices = devices_of(file, facts, copies=self.copies)
        scenario = None if self.scenario is None else SCENARIOS[self.scenario]
        outcomes = [
            simulate(
                devices,
                requests=self.requests,
                seed=self.seed,
                routing=routing,
                clients=self.clients,
                rate=self.rate,
                churn=self.churn,
                faults=scenario.faults([*devices], requests=self.requests) if scenario else (),
                min_blocks=self.min_blocks,
                top1=facts.cells,
                rounds=facts.rounds,
                stop=stop,
            )
            for routing in ROUTINGS
        ]
        routings = [
            {"routing": o.routing, **o.figures, "answers_by_blocks": o.blocks} for o in outcomes
        ]
        head = f"{counted(len(devices), 'host')}, seed {self.seed}"
        self.show(
            {"hosts": len(devices), "seed": self.seed, "routings": routings},
            f"{head}\n{outcome_report(outcomes)}",
        )
        return 0


@dataclass(frozen=True)
class CalibrateCommand(ComputingCommand, Reporting):
    """Measure the accuracy of a model with 1 to all blocks in arbitrary order on test images:
    one block after the other and several side by side, in one pass and in two.

    The result is stored beside the model. A swarm reports it with its answers, and uses it to
    decide how many blocks run side by side and whether they run twice.
    """

    model: str
    """Model to measure: the directory of a fit or of an export."""
    _: KW_ONLY
    data: str = "digit-pairs"
    """Test images: the test split of this data."""
    num_orders: int = 20
    """Random orders for every number of blocks."""
    max_images: int = 2000
    """Number of images, at most."""
    seed: int = 0
    """Seed of the orders."""

    def run(self) -> int:
        """Measure, store, and print the table."""
        from layershuffle.models import load
        from layershuffle.swarm.calibration import calibration_path, write_calibration
        from layershuffle.swarm.measuring import calibrate

        # First: a model without a directory of its own is refused before minutes of work.
        path = calibration_path(self.model)
        with self.computing("calibrate") as progress:
            calibration = calibrate(
                load(self.model),
                self.data,
                orders=self.num_orders,
                images=self.max_images,
                seed=self.seed,
                device=self.device,
                progress=progress,
            )
        write_calibration(calibration, path)
        text = f"{_calibrated(calibration)}\nIn {path}"
        self.show(calibration.model_dump(mode="json", by_alias=True), text)
        return 0


def _calibrated(calibration: Calibration) -> str:
    """A row for each number of blocks, from all downwards, as they are lost; and where it stops."""
    from layershuffle.swarm.calibration import expected_at, rounds_of

    rounds, rows = rounds_of(calibration), []
    for row in reversed(calibration.queue):
        cell = rounds.cell(row.kept)
        chosen = expected_at(calibration, cell)
        then = "-" if chosen is None else f"{chosen.top1:.1f}"
        measured = (f"{row.top1:.1f}", f"{row.low:.1f} to {row.high:.1f}")
        rows.append((str(row.kept), *measured, str(cell.parallel), str(cell.passes), then))
    columns = ("blocks", "top-1 %", "95 % interval", "side by side", "passes", "then, %")
    lines = [
        table(columns, rows),
        f"{calibration.images:,} images of {calibration.data} ({calibration.split}), "
        f"{calibration.orders} orders each",
    ]
    if (sure := calibration.sureness) is not None:
        lines += [
            f"Ending at a chance of {100 * stop.confidence:g} %: {stop.blocks:.1f} blocks, "
            f"{stop.top1:.1f} % right"
            + (" (the default of requests)" if stop.confidence == sure.confidence else "")
            for stop in sure.stops
        ]
    return "\n".join(lines)
