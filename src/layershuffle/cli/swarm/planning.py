"""`layershuffle swarm plan`, `simulate` and `calibrate`: what to expect before a swarm runs."""

from __future__ import annotations

import json
import math
from dataclasses import KW_ONLY, asdict, dataclass
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING

from layershuffle.cli.command import Command, ComputingCommand
from layershuffle.cli.swarm import CALIBRATED_MODEL, DEFAULT_MODEL, ROUTINGS, RoutingFlag
from layershuffle.errors import UsageError
from layershuffle.extras import require
from layershuffle.text import counted, counted_as, table

if TYPE_CHECKING:
    from layershuffle.swarm.chaos import Fault

_SAME_TIME = 1.1
"""Largest ratio of simulated seconds at which routings count as having met the same failures."""


@dataclass(frozen=True)
class PlanCommand(Command):
    """Find which device should hold which blocks of a model, and what to expect of that plan.

    The figures come from a simulation of the plan, in free order and in sequence.
    """

    hosts: Path
    """YAML file with the devices: an entry for each under hosts, such as
    pi: {count: 4, memory_mb: 500, speed: 0.2, link_ms: 6}."""
    _: KW_ONLY
    model: str = DEFAULT_MODEL
    """Model to serve."""
    copies: int = 2
    """Hosts that hold each block, where memory allows."""
    out: Path | None = None
    """Write the plan to this file, for `swarm simulate`."""
    overwrite: bool = False
    """Replace an older file at --out."""

    def run(self) -> int:
        """Plan, print, and write."""
        require("swarm")

        from layershuffle.files import write_text
        from layershuffle.models.output import check_output
        from layershuffle.swarm.plan import plan_text
        from layershuffle.swarm.planning import model_facts, plan_for, plan_report, read_hosts

        hosts = read_hosts(self.hosts)
        if self.out is not None:
            # Before the model is loaded and timed.
            check_output(self.out, reads=(), overwrite=self.overwrite)
        facts = model_facts(self.model)
        planned = plan_for(hosts, facts, model=self.model, copies=self.copies)
        print(
            # Printed, because speeds in the file are relative to this machine.
            f"A block of one image took {facts.block_ms:.3g} ms where the model was exported: that "
            "is `speed: 1` (block_ms in the file overrides it).\n"
        )
        print(plan_report(planned, facts))
        if self.out is not None:
            write_text(self.out, plan_text(planned.plan))
            print(
                f"In {self.out}. Next: layershuffle swarm simulate {quote(str(self.out))} "
                f"--profile {quote(str(self.hosts))}"
            )
        return 0


@dataclass(frozen=True)
class SimulateCommand(Command):
    """Run a plan in virtual time with the policy of the real router.

    The flags set how hosts die and come back and how requests arrive; every routing gets the same
    requests, and the same failures at the same simulated times.
    """

    plan: Path
    """The plan, of `swarm plan --out`."""
    _: KW_ONLY
    profile: Path | None = None
    """HOSTS.yaml from which the plan was made, with the speeds of its hosts. Default: 5 ms per
    block, 5 ms per visit."""
    hosts: int | None = None
    """Number of hosts: the hosts of the plan are repeated in turn up to this number."""
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

        from layershuffle.swarm.chaos import crashes, crashes_text
        from layershuffle.swarm.plan import read_swarm_plan
        from layershuffle.swarm.planning import model_facts, profile_of, read_hosts
        from layershuffle.swarm.simulation.outcome import outcome_json, outcome_report
        from layershuffle.swarm.simulation.run import simulate
        from layershuffle.swarm.simulation.scenario import (
            Arrivals,
            Churn,
            Profile,
            scaled,
        )

        plan = read_swarm_plan(self.plan)
        facts = model_facts(plan.model, parallel=plan.parallel)
        profile = Profile()
        if self.profile is not None:
            file = read_hosts(self.profile)
            profile = profile_of(file.named(), file.block_ms or facts.block_ms)
        if self.hosts is not None:
            plan = scaled(plan, self.hosts)
        churn = None
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
        # The same failures for every routing, so that they can be compared.
        names: list[str] = list(plan.hosts)
        faults: tuple[Fault, ...] = ()
        if self.kill is not None:
            faults = crashes(names, share=self.kill, requests=self.requests, seed=self.seed)
        outcomes = {
            str(routing): simulate(
                plan,
                profile=profile,
                requests=self.requests,
                seed=self.seed,
                routing=routing,
                arrivals=Arrivals(rate=self.rate, clients=self.clients),
                churn=churn,
                faults=faults,
                min_blocks=self.min_blocks,
                accuracy=facts.cells or None,
                rounds=facts.rounds,
            )
            for routing in self.routings
        }
        if self.json:
            report = {
                "hosts": len(names),
                "seed": self.seed,
                "faults": [asdict(fault) for fault in faults],
                "routings": [outcome_json(outcome) for outcome in outcomes.values()],
            }
            print(json.dumps(report, indent=2))
            return 0
        killed = counted(len(names), "host")
        if self.kill is not None:
            killed = crashes_text(faults, share=self.kill, hosts=len(names))
        print(f"{killed}, seed {self.seed}\n{outcome_report(outcomes)}")
        seconds = [outcome.seconds for outcome in outcomes.values()]
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
        from layershuffle.swarm.calibration import calibrate, calibration_path, write_calibration
        from layershuffle.swarm.expectations import expected_at, rounds_of
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
            way = rounds.way(row.kept, enough=len(calibration.queue))
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
