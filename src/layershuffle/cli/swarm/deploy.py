"""`layershuffle swarm deploy PLAN`: serve a plan from the machines of a head."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import tyro

from layershuffle.cli.parsing import parse
from layershuffle.cli.swarm.head import Security, tls_of
from layershuffle.cli.swarm.serving import (
    Https,
    context_of,
    ended_by_signals,
    read_keys,
    require_extra,
    serve_service,
    told,
)

if TYPE_CHECKING:
    import ssl

    from layershuffle.swarm.plan import SwarmPlan
    from layershuffle.swarm.service import Cargo

_ABOUT = (
    "Serve a plan from the machines that joined a head; run it on the head. Hosts come and go at "
    "any time: those that come are given their blocks, those that go are done without."
)


@dataclass(kw_only=True)
class Options(Security, Https):
    """Flags of `swarm deploy`."""

    plan: tyro.conf.Positional[Path]
    """The plan: YAML with model, hosts and their blocks."""
    address: str
    """Address of the head, as it printed it."""
    bind: str = "127.0.0.1"
    """Address on which the gateway listens; others than this machine's own need --keys. Nothing is
    encrypted on the way there without --https-certificate."""
    port: int = 8000
    """Port of the gateway; 0 takes a free one."""
    keys: Path | None = None
    """File with the API keys that clients may use, one per line; its owner's alone (mode 0600)."""
    public: bool = False
    """Let everybody ask who reaches --bind, without a key."""
    wait: float = 120.0
    """Seconds to wait for the plan's hosts before the gateway opens with those that are there."""
    threads: int = 1
    """Threads of torch in each host."""
    state: str | None = None
    """Directory of the operator's socket (default: ~/.local/state/layershuffle/swarm)."""


def run(argv: Sequence[str]) -> int:
    """Serve until told to end."""
    options = parse(Options, argv, command="swarm deploy PLAN", about=_ABOUT)
    require_extra()

    from layershuffle.swarm.plan import read_plan
    from layershuffle.swarm.server.auth import check_address, in_clear
    from layershuffle.swarm.service import load_cargo

    plan = read_plan(options.plan)
    keys, tls = read_keys(options.keys), context_of(options)
    check_address(options.bind, keyed=bool(keys), public=options.public)
    if warning := in_clear(options.bind, keyed=bool(keys), encrypted=tls is not None):
        print(f"warning: {warning}", file=sys.stderr, flush=True)
    cargo = load_cargo(plan)
    with ended_by_signals(), suppress(KeyboardInterrupt):
        asyncio.run(_serve(plan, cargo, options, keys=keys, tls=tls))
    print("The gateway has ended, with the block hosts; the machines stay members of the head.")
    return 0


async def _serve(
    plan: SwarmPlan,
    cargo: Cargo,
    options: Options,
    *,
    keys: tuple[str, ...],
    tls: ssl.SSLContext | None,
) -> None:
    from layershuffle.swarm.ray_config import default_token
    from layershuffle.swarm.ray_hosts import RayHosts
    from layershuffle.swarm.ray_session import joined_ray
    from layershuffle.swarm.server.admin import state_directory
    from layershuffle.swarm.service import running_service

    state = state_directory(options.state)
    token = options.token or default_token()
    with joined_ray(options.address, token=token, tls=tls_of(options)) as ray:
        backend = RayHosts(ray, limits=plan.limits, threads=options.threads)
        print(f"Waiting for {len(plan.hosts)} hosts ...", flush=True)
        async with running_service(
            plan, cargo, backend=backend, ray=ray, within=options.wait
        ) as service:
            await serve_service(
                service,
                state=state,
                host=options.bind,
                port=options.port,
                keys=keys,
                public=options.public,
                tls=tls,
                ready=lambda url: print(
                    told(service, url, state=options.state, keyed=bool(keys)), flush=True
                ),
            )
