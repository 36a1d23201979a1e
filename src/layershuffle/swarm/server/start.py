"""Serve a swarm: the gateway, and hosts of this machine, until the end. Nothing imports torch."""

from __future__ import annotations

import asyncio
import gc
import logging
import secrets
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

from starlette.applications import Starlette

from layershuffle.errors import UsageError
from layershuffle.files import write_bytes
from layershuffle.swarm.children import Children
from layershuffle.swarm.served import ServedModel
from layershuffle.swarm.server.admin import add_operator
from layershuffle.swarm.server.admission import GatewayLimits
from layershuffle.swarm.server.app import create_app
from layershuffle.swarm.server.doors import Https, Keys, check_address, check_secret
from layershuffle.swarm.server.gateway import Gateway
from layershuffle.swarm.server.operating import Operated, Upkeep
from layershuffle.swarm.server.page import join_routes, runtime
from layershuffle.swarm.server.run import GatewaySocket, listening
from layershuffle.swarm.service import Service, SwarmSettings, running_service

_PATIENCE = 60.0  # seconds after which the start is told without the hosts that are not up
_MEMORY = 200_000_000
"""Bytes of weights that a host of this machine takes."""
_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Serving:
    """How a swarm is served. `operated`: the operator's file.

    `hosts`: hosts of this machine, `ray`: the address of a Ray cluster for a host on each of its
    nodes; `memory`: bytes of weights of each; `token_file`: what all hosts have to know. `host`,
    `port`: where to listen, `keys`: the clients' API keys; `public`: no key is needed, also where
    other machines reach it. `page`: whether to serve the page. `trusted_proxies`: addresses of
    reverse proxies, whose word on the client is taken; `min_accuracy`: top-1 in percent that
    /readyz asks for.

    Raises `UsageError` for an address that other machines reach, without a key.
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
    page: bool = True
    trusted_proxies: tuple[str, ...] = ()
    min_accuracy: float | None = None

    def __post_init__(self) -> None:
        check_address(self.host, keyed=bool(self.keys), public=self.public)

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
    token, operated, https = token_in(serving.token_file), serving.operated, serving.https
    upkeep = Upkeep(operated.state, token_file=serving.token_file, https=https)
    async with (
        running_service(settings, model, token=token) as service,
        local_hosts(service, serving.hosts, memory=serving.memory),
    ):
        if serving.hosts:
            await service.coordinator.ready(serving.hosts, within=_PATIENCE, say=say)
        gateway = Gateway(
            service.remote_model,
            calibration=service.calibration,
            keys=serving.keys,
            model=settings.model,
            coordinator=service.coordinator,
            upkeep=upkeep,
            min_accuracy=serving.min_accuracy,
        )
        app = create_app(gateway, page=serving.page)
        app.router.routes += [*service.members.routes(), *join_routes(runtime())]
        add_operator(app, service, key=operated.key)
        # What is loaded stays, so the collector need not look at it.
        gc.collect()
        gc.freeze()
        tasks = [asyncio.create_task(upkeep.run())]
        try:
            async with listening(
                app,
                host=serving.host,
                port=serving.port,
                tls=None if https is None else https.context,
                trusted=serving.trusted_proxies,
                members=service.members,
            ) as (listener, served):
                certificate = None if https is None else https.certificate
                operated.publish(listener.url, certificate=certificate)
                if serving.ray is not None:
                    # Not before: the nodes dial to this address.
                    from layershuffle.swarm.on_ray import hosts_on_ray

                    url, memory = listener.url, serving.memory
                    work = hosts_on_ray(serving.ray, url=url, token=token, memory=memory)
                    tasks.append(asyncio.create_task(work))
                ready(service, listener.url, operated.key)
                await served
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
        write_bytes(path, secrets.token_hex(32).encode("ascii"), private=True)
    check_secret(path, what="token", hint="name another --token-file, or remove it")
    return path.read_text(encoding="utf-8").strip()
