"""`layershuffle swarm drill`: rehearse failures on a running swarm, and judge its answers."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import tyro

from layershuffle.cli.parsing import parse
from layershuffle.cli.swarm.serving import require_extra
from layershuffle.cli.swarm.status import Gateway, client_options
from layershuffle.errors import LayerShuffleError, UsageError
from layershuffle.swarm.chaos import KINDS, Fault, Kind, crashes, one_of_each_fault
from layershuffle.swarm.policy import Routing

if TYPE_CHECKING:
    from layershuffle.swarm.client import AsyncSwarmClient
    from layershuffle.swarm.plan import SwarmPlan
    from layershuffle.swarm.server.admin import Operator

_ABOUT = (
    "Send labelled images to a running swarm while failures from a seeded plan happen to its "
    "hosts; then mend it, and print what happened beside what was to be expected. Run on the "
    "machine of the gateway."
)


_BACK_SECONDS, _POLL_SECONDS = 60.0, 0.1


@dataclass(kw_only=True)
class Options(Gateway):
    """Flags of `swarm drill`."""

    plan: tyro.conf.Positional[Path | None] = None
    """Plan that the swarm is expected to run; refused if it runs another."""
    requests: int = 300
    """Requests, per routing."""
    kinds: tuple[Kind, ...] = KINDS
    """Failures to rehearse, one after the other; rejoin mends each after a while."""
    kill: float | None = None
    """Instead: kill this share of the hosts at random moments, and none comes back."""
    routings: tuple[Routing, ...] = field(default=("order-free",))
    """Routings to compare, under the same requests and failures."""
    data: str = "digit-pairs"
    """Labelled images: the test split of this data."""
    deadline_ms: float = 2000.0
    """Deadline of every request."""
    concurrency: int = 4
    """Requests at a time."""
    seed: int = 0
    """Seed of the failures."""
    state: str | None = None
    """Directory of the operator's socket (default: ~/.local/state/layershuffle/swarm)."""


def run(argv: Sequence[str]) -> int:
    """Drill; exit code 1 if a request was lost or late in free order."""
    options = parse(Options, argv, command="swarm drill [PLAN]", about=_ABOUT)
    require_extra()

    from layershuffle.swarm.plan import SwarmPlan, read_plan
    from layershuffle.swarm.server.admin import operator_of

    with operator_of(options.state) as operator:
        plan = SwarmPlan(**operator.plan())
        if options.plan is not None and read_plan(options.plan) != plan:
            raise UsageError("The swarm runs another plan", place=options.plan)
        return asyncio.run(_drill(plan, operator, options))


def faults_of(hosts: Sequence[str], options: Options) -> tuple[Fault, ...]:
    """The failures that the flags ask for."""
    if options.kill is not None:
        return crashes(hosts, share=options.kill, requests=options.requests, seed=options.seed)
    return one_of_each_fault(
        hosts, requests=options.requests, seed=options.seed, kinds=options.kinds
    )


async def _drill(plan: SwarmPlan, operator: Operator, options: Options) -> int:
    from layershuffle.models import load
    from layershuffle.swarm.asking import asker, labelled_images
    from layershuffle.swarm.client import AsyncSwarmClient
    from layershuffle.swarm.drill import drill_report, foreseen, judged, run_drill
    from layershuffle.swarm.remote_model import served_host
    from layershuffle.swarm.service import calibration_of

    host = served_host(load(plan.model))
    calibration = calibration_of(plan.model, host)
    if any(one.donors for one in plan.hosts.values()):
        print("Blocks of other models take part: the accuracy is not judged.")
        calibration = None
    images = labelled_images(host, options.data, count=min(options.requests, 1000))
    faults = faults_of(list(plan.hosts), options)
    print("\n".join(f"before request {one.at}: {one.kind} {one.host}" for one in faults))
    lost = 0.0
    before = operator.routing(options.routings[0])
    async with AsyncSwarmClient(options.address, **client_options(options)) as client:
        ask = asker(client, images, deadline_ms=options.deadline_ms)
        engine = _Remote(operator, client)
        try:
            for routing in options.routings:
                operator.routing(routing)
                try:
                    drill = await run_drill(
                        ask,
                        options.requests,
                        faults=faults,
                        engine=engine,
                        concurrency=options.concurrency,
                    )
                    seen = foreseen(plan, faults, requests=options.requests, routing=routing)
                    replies = list(drill.replies.values())
                    verdict = judged(replies, calibration) if calibration else None
                    report = drill_report(drill, seen, judgement=verdict, routing=routing)
                    print(f"\n{report}", flush=True)
                    if verdict and any(one.kind == "wrong" for one in faults):
                        print("A host lied for a while; until it was found out its answers count.")
                    if routing == "order-free":
                        lost = drill.share("failed", "late")
                finally:
                    await engine.mend()
        finally:
            operator.routing(before)
    return 1 if lost else 0


class _Remote:
    """A running swarm's hosts, through the operator's door (`drill.Engine`)."""

    def __init__(self, operator: Operator, client: AsyncSwarmClient) -> None:
        self._operator, self._client = operator, client
        self._hit: set[str] = set()
        self._order: asyncio.Future[None] | None = None

    async def inject(self, fault: Fault) -> None:
        """Make the fault happen; a rejoin is over when the host is healthy."""
        self._hit.add(fault.host)
        self._order = asyncio.ensure_future(self._ordered(fault.host, fault.kind))
        await asyncio.shield(self._order)  # its thread goes on: `mend` comes after it
        if fault.kind == "rejoin":
            await self.healthy({fault.host})

    async def healthy(self, hosts: set[str]) -> None:
        """Wait until these hosts are healthy. Raises `LayerShuffleError` if they stay away."""
        away = hosts
        try:
            async with asyncio.timeout(_BACK_SECONDS):
                while away:
                    swarm = await self._client.swarm()
                    away = hosts - {one.name for one in swarm.hosts if one.condition == "healthy"}
                    await asyncio.sleep(_POLL_SECONDS)
        except TimeoutError as error:
            raise _left(away) from error

    async def mend(self) -> None:
        """Bring every host back that a fault hit. Raises `LayerShuffleError` for those that stay
        away, after all others were seen to.
        """
        if self._order is not None:
            await asyncio.wait({self._order}, timeout=_BACK_SECONDS)
        hit, self._hit = sorted(self._hit), set()
        if hit:
            print(f"Bringing back {', '.join(hit)}.", flush=True)
        orders = [asyncio.ensure_future(self._ordered(name, "rejoin")) for name in hit]
        if orders:
            await asyncio.wait(orders, timeout=_BACK_SECONDS)
        if late := {name for name, order in zip(hit, orders, strict=True) if not order.done()}:
            raise _left(late)
        if errors := [error for order in orders if (error := order.exception())]:
            raise errors[0]
        await self.healthy(set(hit))

    async def _ordered(self, host: str, kind: Kind) -> None:
        await asyncio.to_thread(self._operator.fault, host, kind)


def _left(hosts: set[str]) -> LayerShuffleError:
    return LayerShuffleError(
        f"{', '.join(sorted(hosts))} did not come back within {_BACK_SECONDS:g} s",
        hint="layershuffle swarm status says why, layershuffle swarm readmit starts a host anew",
    )
