"""What `up`, `demo` and `deploy` share: a service behind its two doors, until it is told to end."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from layershuffle.errors import Interrupted, UsageError

if TYPE_CHECKING:
    import ssl

    from layershuffle.swarm.service import Service


@dataclass
class Https:
    """Flags about the encryption between clients and the gateway."""

    https_certificate: Path | None = None
    """Serve https: the gateway's certificate (PEM), with the names by which clients call it."""
    https_key: Path | None = None
    """Key of that certificate, its owner's alone (mode 0600)."""


def context_of(options: Https) -> ssl.SSLContext | None:
    """What the flags make the gateway speak; `None` for plain http. Raises `UsageError` for one
    file without the other, and for files that cannot be used."""
    from layershuffle.swarm.server.tls import server_context

    certificate, key = options.https_certificate, options.https_key
    if certificate is None and key is None:
        return None
    if certificate is None or key is None:
        raise UsageError(
            "https needs a certificate and its key",
            hint="give --https-certificate and --https-key, or neither",
        )
    return server_context(certificate, key)


def read_keys(path: Path | None) -> tuple[str, ...]:
    """The lines of a file of API keys, none without a file.

    Raises `UsageError` if it cannot be read, holds none, or others may read it.
    """
    from layershuffle.swarm.ray_config import check_secret

    if path is None:
        return ()
    check_secret(path, what="API keys", hint="one key per line, mode 0600")
    try:
        return tuple(path.read_text(encoding="utf-8").split())
    except UnicodeDecodeError as error:
        raise UsageError(f"The API keys cannot be read ({error})", place=path) from error


def require_extra() -> None:
    """Raises `UsageError` where the swarm's libraries are not installed."""
    from importlib.util import find_spec

    needed = ("ray", "fastapi", "uvicorn", "httpx", "simpy")
    missing = [name for name in needed if find_spec(name) is None]
    if missing:
        raise UsageError(
            f"The swarm needs what is not installed: {', '.join(missing)}",
            hint="pip install 'layershuffle[swarm]'",
        )


@contextmanager
def ended_by_signals() -> Iterator[None]:
    """SIGTERM ends what is inside as Ctrl-C does: everything is cleaned up, exit code 143."""

    def stop(number: int, frame: Any) -> None:
        del number, frame
        raise Interrupted("The swarm was told to end; its hosts have ended with it")

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@asynccontextmanager
async def operator_door(service: Service, state: Path) -> AsyncIterator[None]:
    """The operator's socket in `state`, open inside. Raises `UsageError` if a swarm is using it."""
    import socket

    import uvicorn

    from layershuffle.swarm.server.admin import SOCKET, listens, operator_app

    class Quiet(uvicorn.Server):
        def capture_signals(self) -> Any:  # the gateway's server listens to them
            return nullcontext()

    path = state / SOCKET
    listener = socket.socket(socket.AF_UNIX)
    with listener:
        if listens(path):
            raise UsageError(
                "A swarm of this user runs already",
                place=path,
                hint="end it, or name another --state",
            )
        path.unlink(missing_ok=True)
        listener.bind(str(path))
        path.chmod(0o600)
        listener.listen()
        app = operator_app(service)
        server = Quiet(uvicorn.Config(app, lifespan="off", log_config=None, access_log=False))
        task = asyncio.create_task(server.serve(sockets=[listener]))
        try:
            yield
        finally:
            path.unlink(missing_ok=True)  # first: Ctrl-C cancels what is awaited here
            server.should_exit = True
            await asyncio.wait({task})  # which, unlike others, does not cancel it in turn


async def serve_service(
    service: Service,
    *,
    state: Path,
    host: str,
    port: int,
    keys: tuple[str, ...],
    public: bool,
    tls: ssl.SSLContext | None,
    ready: Callable[[str], None],
) -> None:
    """Gateway and operator's door, until SIGINT or SIGTERM."""
    from layershuffle.swarm.server.app import create_app
    from layershuffle.swarm.server.run import serve

    coordinator, health = service.coordinator, service.coordinator.health
    app = create_app(
        service.front,
        calibration=service.calibration,
        keys=keys,
        model=service.plan.model,
        strangers=lambda: coordinator.foreign_blocks,
        watching=lambda: coordinator.watching,
        audits=lambda: (health.audited, health.disagreed),
    )
    async with operator_door(service, state):
        await serve(app, host=host, port=port, public=public, tls=tls, ready=ready)


def told(service: Service, url: str, *, state: str | None, keyed: bool = False) -> str:
    """What a user should know once a swarm answers, and what to type next."""
    plan = service.plan
    width = max(map(len, plan.hosts))
    lines = [f"  {name:<{width}}  blocks {', '.join(map(str, one.blocks))}"
             for name, one in plan.hosts.items()]  # fmt: skip
    option = f" --state {state}" if state else ""
    asked = f" --address {url}"
    if url.startswith("https:"):
        asked += " --authority FILE"
    if keyed:
        asked += " --api-key-file FILE"
    missing = f"Not up yet: {', '.join(service.missing)}. " if service.missing else ""
    return "\n".join(
        [
            f"{plan.model}, {plan.routing}, {plan.wire} on the wire:",
            *lines,
            f"{missing}It answers at {url} (API: {url}/docs). In another shell:",
            f"  layershuffle classify IMAGE{asked}",
            f"  layershuffle swarm status{asked}",
            f"  layershuffle swarm drill{asked} --requests 300{option}",
            "Ctrl-C ends it, with all its hosts.",
        ]
    )
