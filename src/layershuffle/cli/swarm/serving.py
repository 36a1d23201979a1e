"""What `up`, `demo` and `deploy` share: a service behind its two doors, until it is told to end."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from layershuffle.errors import Interrupted, UsageError

if TYPE_CHECKING:
    from layershuffle.swarm.service import Service


def require_extra() -> None:
    """Raises `UsageError` where the swarm's libraries are not installed."""
    from importlib.util import find_spec

    missing = [name for name in ("ray", "fastapi", "uvicorn", "httpx") if find_spec(name) is None]
    if missing:
        raise UsageError(
            f"The swarm needs {', '.join(missing)}, which is not installed",
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

    from layershuffle.swarm.operating import SOCKET, listens, operator_app

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
        server = Quiet(uvicorn.Config(operator_app(service), log_config=None, access_log=False))
        task = asyncio.create_task(server.serve(sockets=[listener]))
        try:
            yield
        finally:
            path.unlink(missing_ok=True)  # first: Ctrl-C cancels what is awaited here
            server.should_exit = True
            await asyncio.gather(task, return_exceptions=True)


async def serve_service(
    service: Service,
    *,
    state: Path,
    host: str,
    port: int,
    keys: tuple[str, ...],
    public: bool,
    ready: Callable[[str], None],
) -> None:
    """Gateway and operator's door, until SIGINT or SIGTERM."""
    from layershuffle.swarm.gateway.app import create_app
    from layershuffle.swarm.gateway.serving import serve

    app = create_app(
        service.front, calibration=service.calibration, keys=keys, model=service.plan.model
    )
    async with operator_door(service, state):
        await serve(app, host=host, port=port, public=public, ready=ready)


def told(service: Service, url: str, *, state: str | None) -> str:
    """What a user should know once a swarm answers, and what to type next."""
    plan = service.plan
    width = max(map(len, plan.hosts))
    lines = [f"  {name:<{width}}  blocks {', '.join(map(str, one.blocks))}"
             for name, one in plan.hosts.items()]  # fmt: skip
    option = f" --state {state}" if state else ""
    missing = f"Not up yet: {', '.join(service.missing)}. " if service.missing else ""
    return "\n".join(
        [
            f"{plan.model}, {plan.routing}, {plan.wire} on the wire:",
            *lines,
            f"{missing}It answers at {url} (API: {url}/docs). In another shell:",
            f"  layershuffle classify IMAGE --address {url}",
            f"  layershuffle swarm status --address {url}",
            f"  layershuffle swarm drill --address {url} --requests 300{option}",
            "Ctrl-C ends it, with all its hosts.",
        ]
    )
