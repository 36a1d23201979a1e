"""`layershuffle swarm deploy PLAN`: serve a plan from the machines of a head."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import tyro

from layershuffle.cli.parsing import parse
from layershuffle.cli.swarm.head import Security, tls_of
from layershuffle.cli.swarm.serving import (
    ended_by_signals,
    require_extra,
    serve_service,
    told,
)
from layershuffle.errors import UsageError

if TYPE_CHECKING:
    from layershuffle.swarm.plan import SwarmPlan
    from layershuffle.swarm.service import Cargo

_ABOUT = (
    "Serve a plan from the machines that joined a head; run it on the head. Hosts come and go at "
    "any time: those that come are given their blocks, those that go are done without."
)


@dataclass(kw_only=True)
class Options(Security):
    """Flags of `swarm deploy`."""

    plan: tyro.conf.Positional[Path]
    """The plan: YAML with model, hosts and their blocks."""
    address: str
    """Address of the head, as it printed it."""
    bind: str = "127.0.0.1"
    """Address on which the gateway listens; others than this machine's own need --keys."""
    port: int = 8000
    """Port of the gateway; 0 takes a free one."""
    keys: Path | None = None
    """File with the API keys that clients may use, one per line."""
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
    from layershuffle.swarm.service import load_cargo

    plan = read_plan(options.plan)
    keys = read_keys(options.keys)
    cargo = load_cargo(plan)
    with ended_by_signals(), suppress(KeyboardInterrupt):
        asyncio.run(_serve(plan, cargo, options, keys=keys))
    print("The gateway has ended, with the block hosts; the machines stay members of the head.")
    return 0


def read_keys(path: Path | None) -> tuple[str, ...]:
    """The lines of a key file. Raises `UsageError` if it cannot be read or holds none."""
    if path is None:
        return ()
    try:
        lines = path.read_text(encoding="utf-8").split()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"The API keys cannot be read ({error})", place=path) from error
    if not lines:
        raise UsageError("The file holds no API key", place=path, hint="one key per line")
    return tuple(lines)


async def _serve(plan: SwarmPlan, cargo: Cargo, options: Options, *, keys: tuple[str, ...]) -> None:
    from layershuffle.swarm.operating import state_directory
    from layershuffle.swarm.ray_engine import RayHosts
    from layershuffle.swarm.ray_session import joined_ray
    from layershuffle.swarm.ray_settings import default_token
    from layershuffle.swarm.service import running_service

    state = state_directory(options.state)
    token = options.token or default_token()
    with joined_ray(options.address, token=token, tls=tls_of(options)) as ray:
        places = RayHosts(ray, limits=plan.limits, threads=options.threads)
        print(f"Waiting for {len(plan.hosts)} hosts ...", flush=True)
        async with running_service(
            plan, cargo, places=places, transport=places.transport, within=options.wait
        ) as service:
            await serve_service(
                service,
                state=state,
                host=options.bind,
                port=options.port,
                keys=keys,
                public=options.public,
                ready=lambda url: print(told(service, url, state=options.state), flush=True),
            )
