"""`layershuffle swarm demo`: what a swarm does when a third of its hosts dies."""

from __future__ import annotations

import asyncio
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
    from layershuffle.swarm.drill import Drill
    from layershuffle.swarm.service import Service

_DATA = "digit-pairs"
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
    seed: int = 0
    """Seed that chooses the hosts to kill."""

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
        from layershuffle.swarm.load_client import labelled_images
        from layershuffle.swarm.plan import SwarmSettings
        from layershuffle.swarm.served import ServedModel, served_directory
        from layershuffle.swarm.server.start import local_hosts
        from layershuffle.swarm.service import running_service

        model = ServedModel(served_directory(DEFAULT_MODEL))
        images = labelled_images(load(DEFAULT_MODEL), _DATA, count=self.requests)
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

    async def _show(self, service: Service, images: Any) -> None:
        from layershuffle.swarm.chaos import crashes
        from layershuffle.swarm.drill import run_drill
        from layershuffle.swarm.load_client import client_inside, load_client

        # Drawn from the seed before any request, so that a demo can be repeated.
        names = service.coordinator.children.names
        faults = crashes(names, share=1 / 3, requests=self.requests, seed=self.seed)
        rows = []
        async with client_inside(service) as client:
            ask = load_client(client, images, deadline_ms=self.deadline_ms)

            async def phase(name: str, **drill_options: Any) -> None:
                print(f"{self.requests} requests: {name} ...", flush=True)
                drill = await run_drill(ask, self.requests, **drill_options)
                rows.append((name, *_cells(drill, service.calibration)))

            await phase("all hosts up")
            killed = ", ".join(fault.host for fault in faults)
            await phase(f"{killed} killed meanwhile", faults=faults, engine=service.faults)
            await phase(f"{len(faults)} of {self.hosts} hosts dead")
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


def _cells(drill: Drill, calibration: Calibration | None) -> tuple[str, ...]:
    """A row of the table, in the order of `_HEADER`, without its name."""
    from layershuffle.swarm.drill import judged

    replies = list(drill.replies.values())
    answered = [reply for reply in replies if reply.ended != "failed"]
    share = f"{100 * len(answered) / len(replies):.1f} %"
    if not answered:
        return (share, "", "", "", "")
    blocks = sum(reply.blocks for reply in answered) / len(answered)
    cells = (share, f"{blocks:.1f}", f"{drill.quantile(0.5):.0f}")
    verdict = None if calibration is None else judged(replies, calibration)
    # There may be nothing to compare the answers with.
    if verdict is None or not verdict.answers:
        return (*cells, "", "")
    bounds = f"{verdict.expected:.1f} ({verdict.low:.1f}-{verdict.high:.1f})"
    if not verdict.inside:
        bounds += ", outside"
    return (*cells, f"{verdict.top1:.1f} %", bounds)
