"""`layershuffle swarm drill` rehearses failures on a running swarm, and judges its answers; `swarm
demo` shows one of them on a swarm of its own."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from shlex import quote
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter
from cyclopts.validators import Number

from layershuffle.cli.asking import OperatorCommand, ServerOptions, describe_answer
from layershuffle.cli.command import Command
from layershuffle.errors import UsageError
from layershuffle.extras import require
from layershuffle.swarm.faults import SCENARIOS, ScenarioName
from layershuffle.swarm.settings import DEFAULT_MODEL
from layershuffle.text import table

if TYPE_CHECKING:
    from layershuffle.swarm.coordinator import Coordinator
    from layershuffle.swarm.drill import Labelled
    from layershuffle.swarm.remote_model import RemoteModel
    from layershuffle.swarm.server.operating import Operator

_HOSTS, _REQUESTS = 6, 200  # of the demo, in each of its phases


@dataclass(frozen=True, kw_only=True)
class DrillCommand(OperatorCommand, ServerOptions):
    """Send a running swarm the images of its calibration while its own hosts fail, in one way after
    the other.

    Prints how the requests ended, and how soon the swarm was whole again. Run this on the machine
    of the server.
    """

    requests: Annotated[int, Parameter(validator=Number(gte=4))] = 300
    """Number of requests, per scenario."""
    scenarios: tuple[ScenarioName, ...] = tuple(SCENARIOS)
    """What fails: a third of the hosts dies (third), or all but one, or all; one is frozen, slow,
    cut off, at the end of a bad link (lossy), back every second (restless) or leaving; one answers
    wrongly always (liar), in 1 % of its answers, or always except for canaries."""
    deadline_ms: float = 2000.0
    """Deadline of every request, in milliseconds."""
    concurrency: Annotated[int, Parameter(validator=Number(gte=1))] = 4
    """Number of requests at a time."""
    confidence: float | None = None
    """End requests with fewer blocks once the chance of being right is this (0.98). Default: all
    blocks run."""

    def run(self) -> int:
        """Drill; exit code 1 if the swarm did not recover, or lost a request needlessly."""
        require("swarm")

        from layershuffle.swarm.server.operating import Operator

        with closing(Operator(self.state)) as operator:
            return asyncio.run(self.drill(operator))

    async def drill(self, operator: Operator) -> int:
        """The drill of the swarm of `operator`; the exit code."""
        from layershuffle.models import load
        from layershuffle.swarm.calibration import calibration_of
        from layershuffle.swarm.client import AsyncSwarmClient
        from layershuffle.swarm.drill import Drill, asking, labelled_images, report
        from layershuffle.swarm.served import ServedModel, served_directory

        if not operator.hosts:
            raise UsageError(
                "The swarm has started no hosts, and others' are not broken",
                hint="layershuffle swarm up --hosts 4",
            )
        results = []
        async with AsyncSwarmClient(*self.address, patience=0, **self.client_options()) as client:
            spec = (await client.swarm()).model  # after a roll another one
            calibration = calibration_of(ServedModel(served_directory(spec)))
            if calibration is None:
                raise UsageError(
                    "The model was never calibrated, so it is not known which images it is for",
                    place=spec,
                    hint=f"layershuffle swarm calibrate {quote(spec)} --data SPEC",
                )
            images = labelled_images(load(spec), calibration.data, count=self.requests)
            drill = Drill(
                hosts=operator.hosts,
                operator=operator,
                client=client,
                ask=asking(
                    client,
                    images,
                    deadline_ms=self.deadline_ms,
                    patient=True,
                    confidence=self.confidence,
                ),
                requests=self.requests,
                calibration=calibration,
                concurrency=self.concurrency,
            )
            for scenario in self.scenarios:
                print(f"{scenario} ...", file=sys.stderr, flush=True)
                results.append(await drill.play(scenario))
        rows = [result.as_json() for result in results]
        self.show({"hosts": len(operator.hosts), "scenarios": rows}, report(results))
        return 0 if all(result.passed for result in results) else 1


@dataclass(frozen=True, kw_only=True)
class DemoCommand(Command):
    """Show what a swarm does when a third of its hosts dies.

    Starts processes on this machine, sends them handwritten digits, kills a third of the hosts,
    sends more, then does the same as a classical pipeline. Prints a table.
    """

    def run(self) -> int:
        """Run every phase."""
        require("swarm")
        # Ctrl-C is a usual end of a demo; the blocks below have ended the hosts by then.
        with suppress(KeyboardInterrupt):
            asyncio.run(self._start())
        return 0

    async def _start(self) -> None:
        import math
        import secrets

        from layershuffle.models import load
        from layershuffle.swarm.drill import labelled_images
        from layershuffle.swarm.served import ServedModel, served_directory
        from layershuffle.swarm.server.start import local_hosts
        from layershuffle.swarm.service import running_service

        model = ServedModel(served_directory(DEFAULT_MODEL))
        images = labelled_images(load(DEFAULT_MODEL), "digit-pairs", count=_REQUESTS)
        # Room for each block once, so that a dead host's blocks are lost.
        memory = math.ceil(model.depth / _HOSTS) * model.weights[0].size
        print(f"Starting {_HOSTS} hosts, each a process with its own blocks ...", flush=True)
        async with (
            running_service(model, token=secrets.token_hex(), copies=1) as (coordinator, remote),
            local_hosts(coordinator, _HOSTS, memory=memory),
        ):
            await coordinator.ready(_HOSTS, within=60, say=lambda _: None)
            await self._show(coordinator, remote, images=images)
        print("The swarm has ended. To keep one running: layershuffle swarm up")

    async def _show(
        self, coordinator: Coordinator, remote: RemoteModel, *, images: Sequence[Labelled]
    ) -> None:
        import httpx

        from layershuffle.swarm.client import AsyncSwarmClient
        from layershuffle.swarm.drill import COLUMNS, asking, cells, judged, sent
        from layershuffle.swarm.server.admission import GatewayLimits
        from layershuffle.swarm.server.app import create_app
        from layershuffle.swarm.server.gateway import Gateway

        limits, router = GatewayLimits(), coordinator.router
        gateway = Gateway(remote, coordinator, limits=limits, model=DEFAULT_MODEL)
        transport = httpx.ASGITransport(app=create_app(gateway))
        victims, rows = SCENARIOS["third"].victims(coordinator.children.names), []
        async with AsyncSwarmClient("http://127.0.0.1", patience=0, transport=transport) as client:
            ask = asking(client, images, deadline_ms=2000, patient=False)

            async def phase(name: str, before: Mapping[int, Any] | None = None) -> None:
                print(f"{_REQUESTS} requests: {name} ...", flush=True)
                replies = await sent(ask, _REQUESTS, before=before)
                rows.append((name, *cells(replies, judged(replies, remote.calibration))))

            async def kill() -> None:
                for host in victims:
                    await gateway.faults.inject(host, "crash")

            await phase("all hosts up")
            await phase(f"{', '.join(victims)} killed meanwhile", {_REQUESTS // 4: kill})
            await phase(f"{len(victims)} of {_HOSTS} hosts dead")
            # The hosts stay dead: a pipeline needs every block, so all its requests fail.
            router.routing = "sequential"
            await phase("as a fixed-order pipeline")
            router.routing = "order-free"
            # Asked while hosts are dead, so that the answer shows which blocks were skipped.
            answer = await client.classify(images[0].image, confidence="off", top=1)
        print(f"\n{table(('shares in %', *COLUMNS), rows)}\n")
        print(describe_answer(answer, f"One answer, to {images[0].label:02d}"))
