"""`layershuffle swarm demo`: what a swarm does when a third of its hosts dies."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from layershuffle.cli.command import Command
from layershuffle.cli.swarm import DEFAULT_MODEL
from layershuffle.cli.swarm.serving import ended_by_signals
from layershuffle.extras import require
from layershuffle.text import table

if TYPE_CHECKING:
    from layershuffle.swarm.calibration import Calibration
    from layershuffle.swarm.drill import Labelled, Reply
    from layershuffle.swarm.service import Service

_HEADER = ("", "answered", "blocks", "median ms", "right", "expected")


@dataclass(frozen=True, kw_only=True)
class DemoCommand(Command):
    """Show what a swarm does when a third of its hosts dies.

    Starts processes on this machine, sends them handwritten digits, kills a third of the hosts,
    sends more, then does the same as a classical pipeline. Prints a table.
    """

    hosts: int = 6
    """Number of block hosts, each a process of its own."""
    requests: int = 200
    """Number of requests in each of the phases."""
    deadline_ms: float = 2000.0
    """Deadline of every request, in milliseconds."""

    def run(self) -> int:
        """Run every phase."""
        require("swarm")
        # Ctrl-C is a usual end of a demo; the blocks below have ended the hosts by then.
        with ended_by_signals(), suppress(KeyboardInterrupt):
            asyncio.run(self._start())
        return 0

    async def _start(self) -> None:
        import math
        import secrets

        from layershuffle.models import load
        from layershuffle.swarm.drill import labelled_images
        from layershuffle.swarm.served import ServedModel, served_directory
        from layershuffle.swarm.server.start import local_hosts
        from layershuffle.swarm.service import SwarmSettings, running_service

        model = ServedModel(served_directory(DEFAULT_MODEL))
        images = labelled_images(load(DEFAULT_MODEL), "digit-pairs", count=self.requests)
        # Room for each block once, so that a dead host's blocks are lost.
        memory = math.ceil(model.depth / self.hosts) * model.weights[0].size
        print(f"Starting {self.hosts} hosts, each a process with its own blocks ...", flush=True)
        settings, token = SwarmSettings(copies=1), secrets.token_hex()
        async with (
            running_service(settings, model, token=token) as service,
            local_hosts(service, self.hosts, memory=memory),
        ):
            await service.coordinator.ready(self.hosts, within=60, say=lambda _: None)
            await self._show(service, images)
        print("The swarm has ended. To keep one running: layershuffle swarm up")

    async def _show(self, service: Service, images: Sequence[Labelled]) -> None:
        import httpx

        from layershuffle.swarm.client import AsyncSwarmClient
        from layershuffle.swarm.drill import SCENARIOS, asking, sent
        from layershuffle.swarm.server.admission import GatewayLimits
        from layershuffle.swarm.server.app import create_app
        from layershuffle.swarm.server.gateway import Gateway

        # The API without a port, and without a limit on the rate of its one client.
        limits, calibration = GatewayLimits(rate=1e5, burst=1e5), service.calibration
        gateway = Gateway(
            service.remote_model, limits=limits, calibration=calibration, model=DEFAULT_MODEL
        )
        app = create_app(gateway)
        transport = httpx.ASGITransport(app=app)
        victims, rows = SCENARIOS["third"].victims(service.coordinator.children.names), []
        async with AsyncSwarmClient("http://127.0.0.1", patience=0, transport=transport) as client:
            ask = asking(client, images, deadline_ms=self.deadline_ms, patient=False)

            async def phase(name: str, before: Mapping[int, Any] | None = None) -> None:
                print(f"{self.requests} requests: {name} ...", flush=True)
                replies = await sent(ask, self.requests, before=before)
                rows.append((name, *_cells(replies, service.calibration)))

            async def kill() -> None:
                for host in victims:
                    await service.faults.inject(host, "crash")

            await phase("all hosts up")
            await phase(f"{', '.join(victims)} killed meanwhile", {self.requests // 4: kill})
            await phase(f"{len(victims)} of {self.hosts} hosts dead")
            # The hosts stay dead: a pipeline needs every block, so all its requests fail.
            service.router.routing = "sequential"
            await phase("the same as a fixed-order pipeline")
            service.router.routing = "order-free"
            # Asked while hosts are dead, so that the answer shows which blocks were skipped.
            answer = await client.classify(images[0].image)
        print(f"\n{table(_HEADER, rows)}")
        guess = answer.top[0]
        route = " -> ".join(f"{hop.host} ({hop.block})" for hop in answer.route)
        print(
            f"\nOne answer: {guess.label} ({100 * guess.probability:.0f} %; it is "
            f"{images[0].label:02d}), "
            f"by {len(set(answer.blocks))} of {answer.depth} blocks: {route}"
        )
        for skipped in answer.skipped:
            print(f"  block {skipped.block} skipped: {skipped.why}")


def _cells(replies: Sequence[Reply], calibration: Calibration | None) -> tuple[str, ...]:
    """A row of the table, in the order of `_HEADER`, without its name."""
    from layershuffle.stats import mean, quantile
    from layershuffle.swarm.drill import judged, share

    answered = f"{100 - share(replies, 'failed'):.1f} %"
    kept = [reply.cell.kept for reply in replies if reply.cell is not None]
    verdict = judged(replies, calibration)
    if verdict is None:
        return (answered, "", "", "", "")
    median = quantile([reply.ms for reply in replies], 0.5)
    return (
        *(answered, f"{mean(kept):.1f}", f"{median:.0f}"),
        *(f"{verdict.top1:.1f} %", verdict.text),
    )
