"""`layershuffle swarm drill`: rehearse failures on a running swarm, and judge its answers."""

from __future__ import annotations

import asyncio
import json
import sys
from dataclasses import dataclass
from shlex import quote
from typing import TYPE_CHECKING, Any

from layershuffle.cli.swarm.asking import ServerOptions, client_options
from layershuffle.errors import UsageError
from layershuffle.extras import require
from layershuffle.swarm.faults import SCENARIOS, ScenarioName

if TYPE_CHECKING:
    from layershuffle.swarm.server.admin import Operator


@dataclass(frozen=True, kw_only=True)
class DrillCommand(ServerOptions):
    """Send labelled images to a running swarm while its own hosts fail, in one way after the other.

    Prints how the requests ended, and how soon the swarm was whole again. Run this on the machine
    of the server.
    """

    requests: int = 300
    """Number of requests, per scenario."""
    scenarios: tuple[ScenarioName, ...] = tuple(SCENARIOS)
    """What fails: a third of the hosts dies (third), or all but one, or all; one is frozen, slow,
    cut off, at the end of a bad link (lossy), back every second (restless) or leaving; one answers
    wrongly always (liar), in 1 % of its answers, or always except for canaries."""
    data: str | None = None
    """Labelled images: the test split of this data. Default: the data of the calibration; the
    accuracy on other images is not known."""
    deadline_ms: float = 2000.0
    """Deadline of every request, in milliseconds."""
    concurrency: int = 4
    """Number of requests at a time."""
    state: str | None = None
    """Directory of the operator's key (default: ~/.local/state/layershuffle/swarm)."""
    json: bool = False
    """Print JSON at the end; progress goes to standard error."""

    def run(self) -> int:
        """Drill; exit code 1 if the swarm did not recover, or lost a request needlessly."""
        require("swarm")

        from layershuffle.swarm.server.admin import operator_of

        with operator_of(self.state) as operator:
            return asyncio.run(self.drill(operator.command("facts"), operator))

    async def drill(self, facts: dict[str, Any], operator: Operator) -> int:
        """The drill of the swarm of `operator` with these facts; the exit code."""
        from layershuffle.models import load
        from layershuffle.swarm.calibration import calibration_of
        from layershuffle.swarm.client import AsyncSwarmClient
        from layershuffle.swarm.drill import Drill, asking, labelled_images, report
        from layershuffle.swarm.served import ServedModel, served_directory

        hosts, spec = facts["hosts"], facts["model"]
        if not hosts:
            raise UsageError(
                "The swarm has started no hosts, and others' are not broken",
                hint="layershuffle swarm up --hosts 4",
            )
        calibration = calibration_of(ServedModel(served_directory(spec)))
        data = self.data or (calibration and calibration.data)
        if not data:
            raise UsageError(
                "The model was never calibrated, so it is not known which images it is for",
                place=spec,
                hint="name some (--data SPEC), or calibrate it: layershuffle swarm calibrate "
                f"{quote(spec)} --data SPEC",
            )
        if calibration is None or calibration.data != data:
            print("Accuracy not judged: these images were not calibrated", file=sys.stderr)
            calibration = None
        images = labelled_images(load(spec), data, count=self.requests)
        results = []
        async with AsyncSwarmClient(*self.address, patience=0, **client_options(self)) as client:
            drill = Drill(
                hosts=hosts,
                operator=operator,
                client=client,
                ask=asking(client, images, deadline_ms=self.deadline_ms, patient=True),
                requests=self.requests,
                calibration=calibration,
                concurrency=self.concurrency,
            )
            for scenario in self.scenarios:
                print(f"{scenario} ...", file=sys.stderr, flush=True)
                results.append(await drill.play(scenario))
        rows = [result.as_json() for result in results]
        whole = {"hosts": len(hosts), "scenarios": rows}
        print(json.dumps(whole, indent=2) if self.json else report(results))
        return 0 if all(result.passed for result in results) else 1
