"""Serve a swarm: the gateway, and hosts of this machine, until the end. Nothing imports torch."""

from __future__ import annotations

import asyncio
import gc
import logging
import secrets
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from starlette.applications import Starlette

from layershuffle.errors import UsageError
from layershuffle.files import write_bytes
from layershuffle.swarm.children import Children
from layershuffle.swarm.served import ServedModel
from layershuffle.swarm.server.admin import Operated, add_operator
from layershuffle.swarm.server.app import create_app
from layershuffle.swarm.server.join import join_routes, runtime
from layershuffle.swarm.server.keys import Keys
from layershuffle.swarm.server.limits import GatewayLimits
from layershuffle.swarm.server.run import GatewaySocket, listening, serve
from layershuffle.swarm.server.tls import Https, check_secret
from layershuffle.swarm.server.upkeep import Upkeep
from layershuffle.swarm.service import Service, SwarmSettings, running_service

_MEMORY = 200_000_000
"""Bytes of weights that a host of this machine takes."""
_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Serving:
    """How a swarm is served. `operated`: the operator's file.

    `hosts`: hosts of this machine, `ray`: the address of a Ray cluster for a host on each of its
    nodes; `memory`: bytes of weights of each; `token_file`: what all hosts have to know. `host`,
    `port` and `public` are those of `run.serve`, `keys` the clients' API keys. `wait`: seconds
    after which the start is told without the hosts that are not up. `page`: whether to serve the
    page. `trusted_proxies`: addresses of reverse proxies, whose word on the client is taken;
    `min_accuracy`: top-1 in percent that /readyz asks for.
    """

    operated: Operated
    token_file: Path
    hosts: int = 0
    ray: str | None = None
    memory: int = _MEMORY
    host: str = "127.0.0.1"
    port: int = 8000
    public: bool = False
    https: Https | None = None
    keys: Keys = field(default_factory=Keys)
    wait: float = 60.0
    page: bool = True
    trusted_proxies: tuple[str, ...] = ()
    min_accuracy: float | None = None

    def reload(self) -> None:
        """Read API keys and certificate again. What cannot be read stays as it was."""
        for what, part in (("API keys", self.keys), ("certificate", self.https)):
            if not part:
                continue
            try:
                part.load()
            except UsageError as error:
                _log.error("Of %s those of before stay in use. %s", what, error)
            else:
                _log.warning("Read again: %s", what)


async def serve_swarm(
    settings: SwarmSettings,
    model: ServedModel,
    *,
    serving: Serving,
    say: Callable[[str], None],
    ready: Callable[[Service, str, str], None],
) -> None:
    """Serve clients, hosts and the operator, until SIGINT or SIGTERM.

    `say` gets the steps of the start; `ready` the service, its address and the operator's key, once
    it is open and its own hosts are up. Raises `LayerShuffleError` for an address that cannot be
    listened on.
    """
    # A port that is in use is found before hosts are started.
    GatewaySocket(serving.host, port=serving.port, limits=GatewayLimits()).close()
    token = token_in(serving.token_file)
    async with (
        running_service(settings, model, token=token) as service,
        local_hosts(service, serving.hosts, memory=serving.memory),
    ):
        if serving.hosts:
            await service.coordinator.ready(serving.hosts, within=serving.wait, say=say)
        # What is loaded stays, so the collector need not look at it.
        gc.collect()
        gc.freeze()
        await serve_service(service, serving, ready=partial(ready, service))


async def serve_service(
    service: Service, serving: Serving, *, ready: Callable[[str, str], None]
) -> None:
    """Serve clients and the operator, until SIGINT or SIGTERM; `ready` is called with the address
    and the operator's key."""
    operated, https = serving.operated, serving.https
    upkeep = Upkeep(operated.state, token_file=serving.token_file, https=https)
    app = create_app(
        service.remote_model,
        calibration=service.calibration,
        keys=serving.keys,
        model=service.settings.model,
        coordinator=service.coordinator,
        upkeep=upkeep,
        page=serving.page,
        min_accuracy=serving.min_accuracy,
        operate=partial(add_operator, service=service, key=operated.key),
        hosts=[*service.members.routes(), *join_routes(runtime())],
    )

    tasks = [asyncio.create_task(upkeep.run())]

    def open_at(url: str) -> None:
        operated.publish(url, certificate=None if https is None else https.certificate)
        if serving.ray is not None:
            # Not above: the nodes dial to this address.
            from layershuffle.swarm.on_ray import hosts_on_ray

            token = service.members.token
            work = hosts_on_ray(serving.ray, url=url, token=token, memory=serving.memory)
            tasks.append(asyncio.create_task(work))
        ready(url, operated.key)

    try:
        await serve(
            app,
            host=serving.host,
            port=serving.port,
            public=serving.public,
            tls=None if https is None else https.context,
            trusted_proxies=serving.trusted_proxies,
            members=service.members,
            ready=open_at,
        )
    finally:
        operated.close()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


@asynccontextmanager
async def local_hosts(
    service: Service, hosts: int, *, memory: int = _MEMORY
) -> AsyncIterator[Children]:
    """`hosts` child processes host-1, host-2 ... that hold blocks of `service`, ended after.

    They dial in at a port of their own on the loopback network, which is open while they run: no
    certificate is made for it, and nobody outside can crowd it.
    """
    app = Starlette(routes=service.members.routes())
    ways = GatewayLimits(connections=4096, client_connections=4096)
    async with listening(app, limits=ways, members=service.members) as (listener, _):
        service.coordinator.children = children = Children(
            tuple(f"host-{number + 1}" for number in range(hosts)),
            url=f"ws://127.0.0.1:{listener.port}",
            token=service.members.token,
            memory=memory,
            limits=service.router.limits,
        )
        running = asyncio.create_task(children.run())
        try:
            yield children
        finally:
            service.members.watcher = None  # that they leave now is no news
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)


def token_in(path: Path) -> str:
    """The token in a file, which is made if it is not there.

    Raises `UsageError` for a file that others may read.
    """
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        write_bytes(path, secrets.token_hex(32).encode("ascii"), private=True)
    check_secret(path, what="token", hint="name another --token-file, or remove it")
    return path.read_text(encoding="utf-8").strip()
