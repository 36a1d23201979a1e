"""`layershuffle swarm demo`: a swarm of processes, of which a third is killed under load."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from layershuffle.cli.asking import describe_answer
from layershuffle.cli.command import Command
from layershuffle.gateway.brain.settings import DEFAULT_MODEL
from layershuffle.ground.extras import require
from layershuffle.ground.text import table

if TYPE_CHECKING:
    from layershuffle.gateway.client.judging import Labelled
    from layershuffle.gateway.hosts.coordinator import Coordinator
    from layershuffle.gateway.hosts.served_model import RemoteModel

PIPELINE = (
    "While six hosts are away for 30 s every 60 s (simulated, two copies of each block), a swarm "
    "has 96.6 % of all requests right, a pipeline 57.3 %, or 79.1 % if others take over the blocks."
)
"""Measured by benchmarks/swarm_simulation.py; docs/swarm-measured.md has the table."""
_HOSTS = 6
_KILLED = _HOSTS // 3
_REQUESTS = 200  # in each phase


@dataclass(frozen=True, kw_only=True)
class DemoCommand(Command):
    """Show what a swarm does when a third of its hosts dies.

    Starts processes on this machine, sends them handwritten digits, kills a third of the hosts,
    sends more, and prints a table.
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

        from layershuffle.gateway.client.labelled import labelled_images
        from layershuffle.gateway.hosts.served_model import ServedModel, served_directory
        from layershuffle.gateway.hosts.service import running_service
        from layershuffle.gateway.http.start import local_hosts
        from layershuffle.models import load

        model = ServedModel(served_directory(DEFAULT_MODEL))
        images = labelled_images(load(DEFAULT_MODEL), "digit-pairs", count=_REQUESTS)
        # Room for each block once, so that a dead host's blocks are lost.
        memory = math.ceil(len(model.hosted) / _HOSTS) * model.weights[0].size
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

        from layershuffle.gateway.client.client import AsyncSwarmClient
        from layershuffle.gateway.client.judging import COLUMNS, asking, cells, judged, sent
        from layershuffle.gateway.http.app import create_app
        from layershuffle.gateway.http.requests import Gateway

        # The API without a port.
        gateway = Gateway(remote, coordinator, model=DEFAULT_MODEL)
        transport = httpx.ASGITransport(app=create_app(gateway))
        victims = coordinator.children.names[-_KILLED:]
        rows = []
        async with AsyncSwarmClient("http://127.0.0.1", patience=0, transport=transport) as client:
            ask = asking(client, images, deadline_ms=2000, patient=False)

            async def phase(name: str, events: Mapping[int, Any] | None = None) -> None:
                print(f"{_REQUESTS} requests: {name} ...", flush=True)
                replies = await sent(ask, _REQUESTS, events=events)
                rows.append((name, *cells(replies, judged(replies))))

            async def kill() -> None:
                for host in victims:
                    coordinator.kill(host)

            await phase("all hosts up")
            await phase(f"{', '.join(victims)} killed meanwhile", {_REQUESTS // 4: kill})
            await phase(f"{len(victims)} of {_HOSTS} hosts dead")
            # Asked while hosts are dead, so that the answer shows which blocks were skipped.
            answer = await client.classify(images[0].image, confidence="off", top=1)
        print(f"\n{table(('shares in %', *COLUMNS), rows)}\n")
        print(f"{PIPELINE}\n")
        print(describe_answer(answer, f"One answer, to {images[0].label:02d}"))
