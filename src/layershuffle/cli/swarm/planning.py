"""`layershuffle swarm plan`, `simulate` and `calibrate`: what to expect before a swarm runs."""

from __future__ import annotations

import json
import math
from dataclasses import KW_ONLY, asdict, dataclass
from pathlib import Path

from layershuffle.cli.command import Command, ComputingCommand
from layershuffle.cli.swarm import CALIBRATED_MODEL, DEFAULT_MODEL, ROUTINGS, RoutingFlag
from layershuffle.errors import UsageError
from layershuffle.extras import require
from layershuffle.text import counted, counted_as, table

_SAME_TIME = 1.1
"""Largest ratio of simulated seconds at which routings count as having met the same failures."""


@dataclass(frozen=True)
class DevicesCommand(Command):
    """Flags about devices, and a model whose blocks they hold as a gateway would assign them."""

    devices: Path
    """YAML file with the devices: an entry for each under hosts, such as
    pi: {count: 4, memory_mb: 500, speed: 0.2, link_ms: 6}."""
    _: KW_ONLY
    model: str = DEFAULT_MODEL
    """Model to serve."""
    copies: int = 2
    """Hosts that hold each block, where memory allows."""


@dataclass(frozen=True, kw_only=True)
class PlanCommand(DevicesCommand):
    """Show which device would hold which blocks of a model, and how many requests that allows."""

    def run(self) -> int:
        """Plan and print."""
        require("swarm")

        from layershuffle.swarm.planning import model_facts, plan_for, plan_report, read_hosts

        file, facts = read_hosts(self.devices), model_facts(self.model)
        planned = plan_for(file, facts, copies=self.copies)
        print(
            # Printed, because speeds in the file are relative to this machine.
            f"A block of one image took {facts.block_ms:.3g} ms where the model was exported: that "
            "is `speed: 1` (block_ms in the file overrides it).\n"
        )
        print(f"{plan_report(planned, facts)}\nNext: layershuffle swarm simulate {self.devices}")
        return 0


@dataclass(frozen=True, kw_only=True)
class SimulateCommand(DevicesCommand):
    """Run devices in virtual time, with the policy of the real router.

    The flags set how hosts die and come back and how requests arrive; every routing gets the same
    requests, and the same failures at the same simulated times.
    """

    hosts: int | None = None
    """Number of hosts: the devices are repeated in turn, with their blocks, up to this number."""
    requests: int = 1000
    """Number of requests."""
    churn: tuple[float, float] | None = None
    """Mean seconds for which a host is up, and for which it is down (default: hosts stay up)."""
    rate: float | None = None
    """Requests per second, at random times; replaces --clients."""
    clients: int = 4
    """Clients, each of which sends its next request when the last one has ended, and has waited for
    as long as the gateway asks (Retry-After) if that one failed."""
    kill: float | None = None
    """Kill this share of the hosts at random moments, for good."""
    routings: tuple[RoutingFlag, ...] = ROUTINGS
    """Routings to compare."""
    min_blocks: int = 1
    """Fewest blocks of an answer."""
    seed: int = 0
    """Seed of arrivals and failures."""
    json: bool = False
    """Print JSON."""

    def run(self) -> int:
        """Simulate every routing, and print them side by side."""
        require("swarm")

        from layershuffle.swarm.planning import model_facts, plan_for, read_hosts
        from layershuffle.swarm.simulation.outcome import outcome_report
        from layershuffle.swarm.simulation.run import simulate
        from layershuffle.swarm.simulation.scenario import Arrivals, Churn, crashes, in_turn

        file, churn = read_hosts(self.devices), None
        if self.churn is not None:
            if self.kill is not None:
                raise UsageError("--churn and --kill exclude each other", hint="choose one")
            if not all(0 < seconds < math.inf for seconds in self.churn):
                raise UsageError(
                    "--churn takes two times above 0: the mean seconds for which a host is up, and "
                    "for which it is down",
                    hint="--churn 60 20",
                )
            churn = Churn(up_s=self.churn[0], down_s=self.churn[1])
        facts = model_facts(self.model)
        devices = plan_for(file, facts, copies=self.copies).devices
        if self.hosts is not None:
            devices = in_turn(devices, self.hosts)
        # The same failures for every routing, so that they can be compared.
        killed = self.kill is not None and crashes(
            list(devices), share=self.kill, requests=self.requests, seed=self.seed
        )
        outcomes = [
            simulate(
                devices,
                requests=self.requests,
                seed=self.seed,
                routing=routing,
                arrivals=Arrivals(rate=self.rate, clients=self.clients),
                churn=churn,
                faults=killed or (),
                min_blocks=self.min_blocks,
                top1=facts.cells,
                rounds=facts.rounds,
            )
            for routing in self.routings
        ]
        if self.json:
            report = {
                "hosts": len(devices),
                "seed": self.seed,
                "faults": [asdict(fault) for fault in killed or ()],
                "routings": [
                    {"routing": o.routing, **o.figures, "answers_by_blocks": o.blocks}
                    for o in outcomes
                ],
            }
            print(json.dumps(report, indent=2))
            return 0
        die = f", of which {len(killed)} die (--kill {self.kill:g}, rounded down)" if killed else ""
        print(f"{counted(len(devices), 'host')}{die}, seed {self.seed}\n{outcome_report(outcomes)}")
        seconds = [outcome.replies[-1].ended_at for outcome in outcomes]
        if churn is not None and max(seconds) > _SAME_TIME * min(seconds):
            print(
                f"\nThe routings ran for {min(seconds):.0f} to {max(seconds):.0f} s and so met "
                "different failures. Next: give --rate, so that all get their requests at the "
                "same times."
            )
        return 0


@dataclass(frozen=True)
class CalibrateCommand(ComputingCommand):
    """Measure the accuracy of a model with 1 to all blocks in arbitrary order on test images:
    one block after the other and several side by side, in one pass and in two.

    The result is stored beside the model. A swarm reports it with its answers, and uses it to
    decide how many blocks run side by side and whether they run twice.
    """

    model: str = CALIBRATED_MODEL
    """Model to measure: the directory of a fit, dir:PATH or bundled:NAME."""
    _: KW_ONLY
    data: str = "digit-pairs"
    """Test images: the test split of this data."""
    num_orders: int = 20
    """Random orders for every number of blocks."""
    max_images: int = 2000
    """Number of images, at most."""
    seed: int = 0
    """Seed of the orders."""
    json: bool = False
    """Print JSON: what is stored beside the model."""

    def run(self) -> int:
        """Measure, store, and print the table."""
        from layershuffle.models import load
        from layershuffle.swarm.calibration import calibration_path, write_calibration
        from layershuffle.swarm.expectations import expected_at, rounds_of
        from layershuffle.swarm.measuring import calibrate
        from layershuffle.swarm.rounds import Cell

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
        if self.json:
            print(calibration.model_dump_json(by_alias=True, indent=2))
            return 0
        rounds = rounds_of(calibration)
        rows = []
        # From all blocks downwards, as they are lost.
        for row in reversed(calibration.queue):
            way = rounds.way(row.kept)
            chosen = expected_at(calibration, Cell(row.kept, way.passes, way.parallel))
            rows.append(
                (
                    str(row.kept),
                    f"{row.top1:.1f}",
                    f"{row.low:.1f} to {row.high:.1f}",
                    str(way.parallel),
                    str(way.passes),
                    "-" if chosen is None else f"{chosen.top1:.1f}",
                )
            )
        columns = ("blocks", "top-1 %", "95 % interval", "side by side", "passes", "then, %")
        print(table(columns, rows))
        independent = counted_as(row.effective for row in calibration.rows)
        print(
            f"{calibration.images:,} images of {calibration.data} ({calibration.split}), "
            f"{independent}, {calibration.orders} orders each. In {path}"
        )
        sure = calibration.sureness
        default = None if sure is None else sure.confidence
        for stop in () if sure is None else sure.stops:
            note = " (the default of requests)" if stop.confidence == default else ""
            print(
                f"Ending at a chance of {100 * stop.confidence:g} %: {stop.blocks:.1f} blocks, "
                f"{stop.top1:.1f} % right{note}"
            )
        return 0
