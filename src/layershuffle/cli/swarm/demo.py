"""`layershuffle swarm demo`: what a swarm does when a third of its hosts dies, in two minutes."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from layershuffle.cli.parsing import parse
from layershuffle.cli.swarm.serving import ended_by_signals, require_extra
from layershuffle.swarm.plan import DEFAULT_MODEL, even_plan

if TYPE_CHECKING:
    from layershuffle.swarm.calibration import Calibration
    from layershuffle.swarm.drill import Drill
    from layershuffle.swarm.service import Service

_ABOUT = (
    "Start a swarm of processes on this machine, send it handwritten digits, kill a third of its "
    "hosts, send on; then the same as a classical pipeline. Prints a table."
)
_DATA = "digit-pairs"


@dataclass
class Options:
    """Flags of `swarm demo`."""

    hosts: int = 6
    """Number of block hosts, each a process of its own."""
    requests: int = 200
    """Requests in each of the phases."""
    deadline_ms: float = 2000.0
    """Deadline of every request."""
    seed: int = 0
    """Seed of who dies."""


def run(argv: Sequence[str]) -> int:
    """Show it."""
    options = parse(Options, argv, command="swarm demo", about=_ABOUT)
    require_extra()
    with ended_by_signals(), suppress(KeyboardInterrupt):
        asyncio.run(_demo(options))
    return 0


async def _demo(options: Options) -> None:
    from layershuffle.models import load
    from layershuffle.stack import depth_of
    from layershuffle.swarm.asking import labelled_images
    from layershuffle.swarm.ray_session import local_ray
    from layershuffle.swarm.service import swarm_on

    plan = even_plan(depth_of(model := load(DEFAULT_MODEL)), options.hosts)
    images = labelled_images(model, _DATA, count=options.requests)
    print(
        f"Starting {options.hosts} block hosts, each a process with its own blocks ...", flush=True
    )
    with local_ray(list(plan.hosts)) as ray:
        async with swarm_on(ray, plan) as service:
            await _show(service, images, options)
    print("The swarm has ended. To keep one running: layershuffle swarm up")


async def _show(service: Service, images: Any, options: Options) -> None:
    """The phases, each a line of the table."""
    from layershuffle.swarm.asking import asker, client_inside
    from layershuffle.swarm.chaos import crashes
    from layershuffle.swarm.drill import run_drill

    faults = crashes(
        list(service.plan.hosts), share=1 / 3, requests=options.requests, seed=options.seed
    )
    async with client_inside(service) as client:
        ask = asker(client, images, deadline_ms=options.deadline_ms)

        async def phase(name: str, **options_: Any) -> None:
            drill = await run_drill(ask, options.requests, **options_)
            print(_line(name, drill, service.calibration), flush=True)

        print(_HEAD)
        await phase("all hosts up")
        dead = ", ".join(fault.host for fault in faults)
        await phase(f"{dead} killed meanwhile", faults=faults, engine=service.coordinator)
        await phase(f"{len(faults)} of {options.hosts} hosts dead")
        service.router.routing = "sequential"
        await phase("the same as a fixed-order pipeline")
        service.router.routing = "order-free"
        answer = await client.classify(images[0].image)
    _explain(answer, images[0].label)


_HEAD = f"\n{'':<38}{'answered':>9}{'blocks':>8}{'median ms':>11}{'right':>8}{'expected':>20}"


def _line(name: str, drill: Drill, calibration: Calibration | None) -> str:
    from layershuffle.swarm.drill import judged

    replies = list(drill.replies.values())
    answered = [one for one in replies if one.ended != "failed"]
    share = f"{100 * len(answered) / len(replies):.1f} %"
    if not answered:
        return f"{name:<38}{share:>9}"
    blocks = sum(one.blocks for one in answered) / len(answered)
    start = f"{name:<38}{share:>9}{blocks:>8.1f}{drill.quantile(0.5):>11.0f}"
    if calibration is None:
        return start
    found = judged(replies, calibration)
    bounds = f"{found.expected:.1f} ({found.low:.1f}-{found.high:.1f})"
    return f"{start}{f'{found.top1:.1f} %':>8}{bounds:>20}"


def _explain(answer: Any, label: int) -> None:
    top = answer.images[0].top[0]
    route = " -> ".join(f"{hop.host} ({', '.join(map(str, hop.blocks))})" for hop in answer.route)
    print(
        f"\nOne answer: {top.label} ({100 * top.probability:.0f} %; it is {label:02d}), by "
        f"{len(answer.blocks)} of {answer.depth} blocks: {route}"
    )
    for one in answer.skipped:
        print(f"  block {one.block} skipped: {one.why}")
