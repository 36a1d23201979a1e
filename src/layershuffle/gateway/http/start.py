"""Serve a swarm: the gateway, and hosts of this machine, until the end. Nothing imports torch."""

from __future__ import annotations

import asyncio
import gc
import logging
import secrets
import ssl
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from pathlib import Path

from starlette.applications import Starlette

from layershuffle.gateway.brain.settings import SwarmSettings
from layershuffle.gateway.hosts.children import Children
from layershuffle.gateway.hosts.connections import ConnectedHosts
from layershuffle.gateway.hosts.coordinator import Coordinator
from layershuffle.gateway.hosts.on_ray import hosts_on_ray
from layershuffle.gateway.hosts.served_model import ServedModel
from layershuffle.gateway.hosts.service import background, running_service
from layershuffle.gateway.hosts.shut_out import ShutOut
from layershuffle.gateway.http.admission import SHORTEST_KEY, GatewayLimits, Keys
from layershuffle.gateway.http.app import create_app
from layershuffle.gateway.http.files import join_routes, runtime
from layershuffle.gateway.http.listening import GatewaySocket, listening
from layershuffle.gateway.http.operator import Operated, add_operator, state_directory
from layershuffle.gateway.http.requests import Gateway
from layershuffle.gateway.http.secrets import (
    certificate_expiry,
    is_loopback,
    read_secret,
    server_context,
)
from layershuffle.gateway.http.upkeep import Upkeep
from layershuffle.ground.errors import UsageError
from layershuffle.ground.files import write_bytes
from layershuffle.models.manifest import MANIFEST
from layershuffle_host.wire import MAX_TEXT

_ANY_ADDRESS = ("0.0.0.0", "::")
_PATIENCE = 60.0  # seconds after which the start is told without the hosts that are not up
HOSTS = GatewayLimits(connections=4096, client_connections=4096)
"""Bounds of a port on which hosts dial in, and nobody else has anything to ask."""
_MOST_TOKENS = 2
_log = logging.getLogger(__name__)


class Serving:
    """What the settings of a swarm name, opened: its keys, its certificate, its files.

    Once the gateway is open, `hosts_url` is the address at which hosts of other machines dial in,
    and `connected` are the hosts that do.

    Raises `UsageError` for a certificate without its key, for an address that other machines reach
    without a key of the API, and for an address that nodes of Ray do not reach. It is also raised
    if a swarm uses the state directory.
    """

    def __init__(self, settings: SwarmSettings) -> None:
        certificate = settings.https_certificate
        key = settings.https_key
        if (certificate is None) != (key is None):
            raise UsageError(
                "https needs a certificate and its key",
                hint="give --https-certificate and --https-key, or neither",
            )
        if settings.ray is not None and settings.listen.strip("[]") in _ANY_ADDRESS:
            raise UsageError(
                f"The nodes of a Ray cluster cannot dial to {settings.listen}",
                place="--listen",
                hint="name the address by which they reach this machine",
            )
        state = state_directory(settings.state)
        self.settings = settings
        self.hosts_url = ""
        self.connected: ConnectedHosts | None = None
        self.tls: ssl.SSLContext | None = None
        if certificate is not None and key is not None:
            self.tls = server_context(certificate, key)
            warn_of_expiry(certificate)
        self.operated = Operated(state)
        self.token_file = settings.token_file or state / "host-token"
        self.keys = Keys(file=settings.keys)
        open_to_others = settings.public or settings.trusted_proxy
        self.local = is_loopback(settings.listen) and not open_to_others
        if is_loopback(settings.listen) and not settings.trusted_proxy:
            return
        if not (self.keys or settings.public):
            way = "through the proxy" if settings.trusted_proxy else "where other machines reach it"
            raise UsageError(
                f"The gateway would listen on {settings.listen}, {way}, without an API key",
                hint="--keys FILE for clients with a key, --listen 127.0.0.1, or --public for all",
            )
        if self.keys and self.tls is None and not is_loopback(settings.listen):
            _log.warning(
                "API keys, images and answers are sent to and from %s unencrypted: anyone who can "
                "listen on the way can read them and use the keys. Give the gateway a certificate "
                "(--https-certificate, --https-key), or use a network on which no one else can "
                "listen",
                settings.listen,
            )

    def reload(self) -> None:
        """Read the API keys and the tokens of hosts again; those that cannot be read stay."""
        if self.keys:
            self._load("API keys", self.keys.load)
        if self.connected is not None:
            self._load("host tokens", self._load_tokens)

    def _load(self, what: str, load: Callable[[], None]) -> None:
        try:
            load()
        except UsageError as error:
            _log.error("Of %s those of before stay in use. %s", what, error)
        else:
            _log.warning("Read again: %s", what)

    def _load_tokens(self) -> None:
        assert self.connected is not None
        own = self.connected.tokens[-1]
        self.connected.tokens = (*read_tokens(self.token_file), own)


def warn_of_expiry(certificate: Path) -> None:
    """Say in the log that a certificate has expired, if it has."""
    expires = certificate_expiry(certificate)
    if expires is not None and expires <= datetime.now(UTC):
        _log.warning(
            "The certificate %s expired on %s: clients and hosts do not connect. Renew it, and "
            "start the gateway again",
            certificate,
            f"{expires:%Y-%m-%d}",
        )


def try_ports(settings: SwarmSettings) -> None:
    """Raises `LayerShuffleError` for a port that is in use, before hosts are started."""
    for port in (settings.port, settings.hosts_port):
        if port is not None:
            GatewaySocket(settings.listen, port=port, limits=GatewayLimits()).close()


async def serve_swarm(
    serving: Serving,
    model: ServedModel,
    *,
    say: Callable[[str], None],
    ready: Callable[[Coordinator, str, str], None],
) -> None:
    """Serve clients, hosts and the operator, until SIGINT or SIGTERM.

    `say` gets the steps of the start; `ready` the coordinator, the address and the operator's key,
    once it is open and its own hosts are up. Raises `LayerShuffleError` for an address that cannot
    be listened on, and `UsageError` for a Ray cluster that does not answer.
    """
    settings = serving.settings
    operated = serving.operated
    try_ports(settings)
    tokens = read_tokens(serving.token_file)
    memory = int(1e6 * settings.memory_mb)
    swarm = running_service(
        model,
        token=tokens[0],
        copies=settings.copies,
        wire=settings.wire,
        shut_out=ShutOut(operated.state / "shut-out.json"),
    )
    async with (
        swarm as (coordinator, remote_model),
        local_hosts(coordinator, settings.hosts, memory=memory),
    ):
        upkeep = Upkeep(
            operated.state,
            token_file=serving.token_file,
            model=model.directory / MANIFEST,
        )
        connected = coordinator.connected
        connected.tokens = (*tokens, connected.tokens[-1])
        if settings.hosts:
            lacking = await coordinator.ready(settings.hosts, within=_PATIENCE, say=say)
            if lacking:
                blocks = ", ".join(map(str, lacking))
                why = "answers lack them until other hosts dial in, or these get more --memory-mb"
                _log.warning("No host of this machine holds the blocks %s: %s", blocks, why)
        gateway = Gateway(
            remote_model,
            coordinator,
            keys=serving.keys,
            local=serving.local,
            model=settings.model,
            upkeep=upkeep,
            min_accuracy=settings.min_accuracy,
        )
        app = create_app(gateway, page=settings.page)
        app.router.routes += [*connected.routes(), *join_routes(runtime())]
        add_operator(app, key=operated.key)
        # What is loaded stays, so the collector need not look at it.
        gc.collect()
        gc.freeze()
        try:
            async with (
                background(upkeep.run()),
                port_of_hosts(coordinator, serving) as hosts_url,
                listening(
                    app,
                    host=settings.listen,
                    port=settings.port,
                    tls=serving.tls,
                    trusted=settings.trusted_proxy,
                    connected=connected,
                    on_end=gateway.admission.end,
                ) as (listener, served),
            ):
                url = listener.url
                dial = hosts_url or url
                serving.hosts_url = dial
                serving.connected = connected
                others = []
                operated.publish(url, certificate=settings.https_certificate)
                if settings.ray is not None:
                    # Not before: the nodes dial to this address. The token of this process, so
                    # that a rotation of those in the file shuts none of them out.
                    token = connected.tokens[-1]
                    others = [hosts_on_ray(settings.ray, url=dial, token=token, memory=memory)]
                async with background(*others):
                    ready(coordinator, url, operated.key)
                    # Shielded, because the block above ends it without a word of cancelled tasks.
                    await asyncio.shield(served)
        finally:
            operated.close()


@asynccontextmanager
async def port_of_hosts(coordinator: Coordinator, serving: Serving) -> AsyncIterator[str | None]:
    """The address of the port for hosts alone, which is open within; `None` without --hosts-port.

    Many hosts may share an address, behind a router of theirs. Who does not know their token is
    silent until it is refused, and makes room for them.
    """
    settings = serving.settings
    if settings.hosts_port is None:
        yield None
        return
    async with listening(
        Starlette(routes=coordinator.connected.routes()),
        host=settings.listen,
        port=settings.hosts_port,
        limits=HOSTS,
        tls=serving.tls,
        connected=coordinator.connected,
    ) as (listener, _):
        yield listener.url


@asynccontextmanager
async def local_hosts(
    coordinator: Coordinator, hosts: int, *, memory: int = 200_000_000
) -> AsyncIterator[Children]:
    """A context with `hosts` child processes host-1, host-2, ..., which `coordinator` gives blocks.

    Each takes at most `memory` bytes of weights, and all are ended after the context. They dial in
    at a port of their own on the loopback network, which is open while they run: no certificate is
    made for it, and nobody outside can crowd it.
    """
    connected = coordinator.connected
    # A token of their own, so that they come back whatever becomes of the one in the file.
    own = secrets.token_hex(32)
    connected.tokens = (*connected.tokens, own)
    app = Starlette(routes=connected.routes())
    names = [f"host-{number + 1}" for number in range(hosts)]
    async with listening(app, limits=HOSTS, connected=connected) as (listener, _):
        children = Children(
            tuple(names),
            url=f"ws://127.0.0.1:{listener.port}",
            token=own,
            memory=memory,
            limits=coordinator.router.limits,
        )
        coordinator.children = children
        async with background(children.run()):
            try:
                yield children
            finally:
                coordinator.connected.watcher = None  # that they leave now is no news


def read_tokens(path: Path) -> tuple[str, ...]:
    """The tokens in a file, one a line; the file is made if it is not there.

    While tokens rotate there are two: hosts may know either, and new ones are given the first.
    Raises `UsageError` for a file that others may read, for a token that the protocol cannot carry
    or that is short enough to be guessed, and for a file with more tokens.
    """
    if not path.exists():
        write_bytes(path, secrets.token_hex(32).encode("ascii"), private=True)
    text = read_secret(path, what="token", hint="name another --token-file, or remove it")
    tokens: list[str] = []
    for line in text.splitlines():
        token = line.strip()
        if not token:
            continue
        if not token.isprintable() or not SHORTEST_KEY <= len(token) <= MAX_TEXT:
            raise UsageError(
                f"This is no token of hosts: it has {len(token)} signs, or some do not print",
                place=path,
                hint=f"a token has {SHORTEST_KEY} to {MAX_TEXT} signs; remove the file for a new "
                "one",
            )
        tokens.append(token)
    if len(tokens) > _MOST_TOKENS:
        raise UsageError(
            f"The file holds {len(tokens)} tokens",
            place=path,
            hint="keep the new one, and below it the one of before while hosts still have it",
        )
    return tuple(tokens)
