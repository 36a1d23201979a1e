"""`layershuffle swarm up`: a whole swarm on this machine, in one command."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from layershuffle.cli.parsing import parse
from layershuffle.cli.swarm.serving import (
    Https,
    context_of,
    ended_by_signals,
    require_extra,
    serve_service,
    told,
)
from layershuffle.swarm.messages import Wire
from layershuffle.swarm.plan import DEFAULT_MODEL, SwarmPlan, even_plan, read_plan
from layershuffle.swarm.policy import Routing

if TYPE_CHECKING:
    import ssl

    from layershuffle.swarm.service import Cargo

_ABOUT = (
    "Start a swarm on this machine, on the loopback network alone: Ray, a process per block host, "
    "router and gateway. Prints the address and what to type next."
)


@dataclass
class Options(Https):
    """Flags of `swarm up`."""

    model: str = DEFAULT_MODEL
    """Model to serve, best one refined by layershuffle-depth."""
    plan: Path | None = None
    """A plan to start instead of an even one (then --model, --hosts and --replicas say nothing)."""
    hosts: int = 4
    """Number of block hosts."""
    replicas: int = 1
    """Hosts that hold each block."""
    routing: Routing = "order-free"
    """order-free, sequential (a classical pipeline) or replicated-sequential."""
    wire: Wire = "fp32"
    """Type of states on the wire: fp32, fp16 or int8."""
    port: int = 8000
    """Port of the gateway; 0 takes a free one."""
    threads: int = 1
    """Threads of torch in each host."""
    state: str | None = None
    """Directory of the operator's socket (default: ~/.local/state/layershuffle/swarm)."""


def run(argv: Sequence[str]) -> int:
    """Start it, say so, and wait for Ctrl-C."""
    options = parse(Options, argv, command="swarm up", about=_ABOUT)
    require_extra()

    from layershuffle.swarm.service import load_cargo

    tls = context_of(options)
    plan = plan_of(options)
    cargo = load_cargo(plan)
    with ended_by_signals(), suppress(KeyboardInterrupt):
        asyncio.run(_up(plan, cargo, options, tls=tls))
    print("The swarm has ended, with all its hosts.")
    return 0


def plan_of(options: Options) -> SwarmPlan:
    """The plan that the flags ask for."""
    if options.plan is not None:
        return read_plan(options.plan)

    from layershuffle.models import load
    from layershuffle.stack import depth_of

    depth = depth_of(load(options.model))
    plan = even_plan(depth, options.hosts, model=options.model, replicas=options.replicas)
    return SwarmPlan(
        **{**dict(plan), "routing": options.routing, "wire": options.wire},
    )


async def _up(
    plan: SwarmPlan, cargo: Cargo, options: Options, *, tls: ssl.SSLContext | None
) -> None:
    from layershuffle.swarm.ray_hosts import RayHosts
    from layershuffle.swarm.ray_session import local_ray
    from layershuffle.swarm.server.admin import state_directory
    from layershuffle.swarm.service import running_service

    state = state_directory(options.state)
    print(f"Starting {len(plan.hosts)} block hosts ...", flush=True)
    with local_ray(list(plan.hosts), threads=options.threads) as ray:
        backend = RayHosts(ray, limits=plan.limits, threads=options.threads)
        async with running_service(plan, cargo, backend=backend, ray=ray) as service:
            await serve_service(
                service,
                state=state,
                host="127.0.0.1",
                port=options.port,
                keys=(),
                public=False,
                tls=tls,
                ready=lambda url: print(told(service, url, state=options.state), flush=True),
            )
