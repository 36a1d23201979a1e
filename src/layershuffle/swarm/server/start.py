"""Serve a plan: start its hosts and the gateway, and run until the end.

The gateway answers clients, and the operator, who has a key. Nothing here
imports torch before the hosts are started, whose processes import it at the same time.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from layershuffle.machine import collector_paused

if TYPE_CHECKING:
    import ssl

    from layershuffle.swarm.plan import SwarmPlan
    from layershuffle.swarm.ray_session import RaySession
    from layershuffle.swarm.server.admin import Operated
    from layershuffle.swarm.service import Cargo, Service


@dataclass(frozen=True, kw_only=True)
class Serving:
    """How a plan is served. `operated`: the operator's file.

    `host`, `port`, `public` and `tls` are those of `run.serve`, `keys` the clients' API keys.
    `threads`: torch threads of each host (default: chosen on its machine); `wait`: seconds after
    which the server starts without the hosts that are not up. `page`: whether to serve the page.
    `certificate`: the file of that of `tls`; `trusted_proxies`: addresses of reverse proxies, whose
    word on the client is taken; `min_accuracy`: top-1 in percent that /readyz asks for.
    """

    operated: Operated
    host: str = "127.0.0.1"
    port: int = 8000
    public: bool = False
    tls: ssl.SSLContext | None = None
    keys: tuple[str, ...] = ()
    threads: int | None = None
    wait: float = 120.0
    page: bool = True
    certificate: Path | None = None
    trusted_proxies: tuple[str, ...] = ()
    min_accuracy: float | None = None


async def serve_plan(
    plan: SwarmPlan,
    session: AbstractContextManager[RaySession],
    *,
    serving: Serving,
    say: Callable[[str], None],
    ready: Callable[[Service, str, str], None],
) -> None:
    """Serve the plan with hosts of a Ray session, until SIGINT or SIGTERM.

    `say` gets the steps of the start, `ready` the service, its address and the
    operator's key once it is open. Raises
    `LayerShuffleError` for an address that cannot be listened on, before anything is started.
    """
    from layershuffle.swarm.placement import started_early
    from layershuffle.swarm.ray_hosts import RayHosts
    from layershuffle.swarm.server.limits import GatewayLimits
    from layershuffle.swarm.server.run import GatewaySocket

    # A port that is in use is found before the hosts are started, which takes seconds.
    GatewaySocket(serving.host, port=serving.port, limits=GatewayLimits()).close()
    say(f"Loading {plan.model}, and connecting to Ray ...")
    # In parallel: Ray mostly waits for its processes, and those of the hosts import torch while
    # this one does. So nothing above may import torch.
    with ThreadPoolExecutor(1) as loader:
        loading = loader.submit(_loaded, plan)
        with session as ray_session:
            backend = RayHosts(ray_session.ray, limits=plan.limits, threads=serving.threads)
            say(f"Starting {len(plan.hosts)} block hosts ...")
            async with started_early(backend, plan):
                cargo = await asyncio.wrap_future(loading)
                # It imports torch, which is loaded by now, so the event loop is not blocked.
                from layershuffle.swarm.service import running_service

                async with running_service(
                    plan, cargo, backend=backend, session=ray_session, within=serving.wait, say=say
                ) as service:
                    # With port 0 the address is known once the server listens.
                    await serve_service(service, serving, ready=partial(ready, service))


async def serve_service(
    service: Service, serving: Serving, *, ready: Callable[[str, str], None]
) -> None:
    """Serve clients and the operator, until SIGINT or SIGTERM; `ready` is called with the address
    and the operator's key."""
    from layershuffle.swarm.server.admin import add_operator
    from layershuffle.swarm.server.app import create_app
    from layershuffle.swarm.server.run import serve

    coordinator, health = service.coordinator, service.coordinator.health
    operated = serving.operated
    app = create_app(
        service.remote_model,
        calibration=service.calibration,
        keys=serving.keys,
        model=service.plan.model,
        # Functions, because these change while the server runs.
        foreign_blocks=lambda: coordinator.foreign_blocks,
        watching=lambda: coordinator.watching,
        audits=lambda: (health.audited, health.disagreed),
        carriers=coordinator.backend.carriers,
        trouble=lambda: service.trouble,
        page=serving.page,
        min_accuracy=serving.min_accuracy,
        operate=partial(add_operator, service=service, key=operated.key),
    )

    def open_at(url: str) -> None:
        operated.publish(url, certificate=serving.certificate)
        ready(url, operated.key)

    try:
        await serve(
            app,
            host=serving.host,
            port=serving.port,
            public=serving.public,
            tls=serving.tls,
            trusted_proxies=serving.trusted_proxies,
            ready=open_at,
        )
    finally:
        operated.close()


def _loaded(plan: SwarmPlan) -> Cargo:
    """`service.load_cargo(plan)`, in a thread, because it imports torch."""
    with collector_paused():
        from layershuffle.swarm.service import load_cargo

        return load_cargo(plan)
