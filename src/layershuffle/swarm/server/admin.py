"""The operator's door: what only the owner of a running swarm may do, on a socket of its own.

A Unix socket in a directory that no other user may enter (`STATE`), beside the public gateway, so
that no key can be guessed or lost: whoever may write there is the owner. Drain, readmit, swap,
change of routing, and the faults of drills.
"""

from __future__ import annotations

import asyncio
import os
import socket
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
from fastapi import FastAPI
from fastapi.responses import JSONResponse
from pydantic import BaseModel, ConfigDict
from starlette.requests import Request

from layershuffle.errors import LayerShuffleError, UsageError
from layershuffle.swarm.chaos import Fault, Kind
from layershuffle.swarm.policy import Routing
from layershuffle.swarm.service import Service, donor_bundle

SOCKET = "operator.sock"
_TIMEOUT = 120.0
_SOCKET_PATH_BYTES = 100  # Linux allows 107, less what Python adds


class _Order(BaseModel):
    model_config = ConfigDict(extra="forbid")


class HostOrder(_Order):
    """Something that happens to one host."""

    host: str


class SwapOrder(_Order):
    """A block of a host comes from another model from now on."""

    host: str
    block: int
    donor: str


class RoutingOrder(_Order):
    """New requests are routed this way."""

    routing: Routing


class FaultOrder(_Order):
    """A failure for a drill."""

    host: str
    kind: Kind


def operator_app(service: Service) -> FastAPI:
    """What the operator's socket answers to; errors are JSON with cause and hint."""
    app = FastAPI(title="LayerShuffle swarm: operator", openapi_url=None)
    coordinator, router = service.coordinator, service.router

    @app.post("/drain")
    async def drain(order: HostOrder) -> dict[str, Any]:
        return {"empty": await coordinator.drain(order.host)}

    @app.post("/readmit")
    async def readmit(order: HostOrder) -> dict[str, Any]:
        await coordinator.readmit(order.host)
        return {}

    @app.post("/swap")
    async def swap(order: SwapOrder) -> dict[str, Any]:
        # In a thread: requests go on while files are read, or a model is loaded.
        donor = await asyncio.to_thread(
            donor_bundle, order.donor, coordinator.base, blocks=[order.block]
        )
        await coordinator.swap(order.host, order.block, donor=donor)
        return {}

    @app.post("/routing")
    async def routing(order: RoutingOrder) -> dict[str, Any]:
        before, router.routing = router.routing, order.routing
        return {"before": before}

    @app.post("/fault")
    async def fault(order: FaultOrder) -> dict[str, Any]:
        await service.faults.inject(Fault(0, order.host, order.kind))
        return {}

    @app.get("/plan")
    async def plan() -> dict[str, Any]:
        return service.plan.model_dump(mode="json")

    app.add_exception_handler(LayerShuffleError, _told)
    return app


async def _told(request: Request, error: Exception) -> JSONResponse:
    del request
    assert isinstance(error, LayerShuffleError)
    status = 400 if isinstance(error, UsageError) else 409
    return JSONResponse({"cause": error.cause, "hint": error.hint}, status)


def state_directory(given: str | None = None) -> Path:
    """Where a swarm of this user keeps its socket and token; made, for its owner alone.

    Default: $XDG_STATE_HOME/layershuffle/swarm, or ~/.local/state/... . Raises `UsageError` if
    other users may enter it, or its path is too long for a socket.
    """
    base = os.environ.get("XDG_STATE_HOME") or "~/.local/state"
    place = Path(given or f"{base}/layershuffle/swarm").expanduser().absolute()
    place.mkdir(parents=True, exist_ok=True, mode=0o700)
    found = place.stat()
    if found.st_mode & 0o077 or found.st_uid != os.getuid():
        raise UsageError(
            "Other users may enter the swarm's directory, and could command it",
            place=place,
            hint=f"chmod 700 {place}, or remove it if it is not yours",
        )
    if len(os.fsencode(place / SOCKET)) > _SOCKET_PATH_BYTES:
        raise UsageError(
            "The path is too long for a socket", place=place, hint="name a shorter --state"
        )
    return place


def listens(path: Path) -> bool:
    """Whether a process answers at the Unix socket `path`."""
    with socket.socket(socket.AF_UNIX) as probe:
        try:
            probe.connect(str(path))
        except OSError:
            return False  # nothing there, or left over from a swarm that was killed
    return True


def scratch_directory(name: str) -> Path:
    """A short place for the logs and sockets of Ray's part `name`; checked as `state_directory`."""
    return state_directory(f"{tempfile.gettempdir()}/ls-{os.getuid()}-{name}")


class Operator:
    """The owner's side of the door, for command lines. Every method raises `LayerShuffleError`.

    Raises `UsageError` if nobody listens in `state`.
    """

    def __init__(self, state: Path) -> None:
        self._socket = state / SOCKET
        if not listens(self._socket):
            raise UsageError(
                "No swarm of this user runs on this machine",
                place=self._socket,
                hint="start one with `layershuffle swarm up`, or name its --state directory",
            )
        self._http = httpx.Client(
            transport=httpx.HTTPTransport(uds=str(self._socket)),
            base_url="http://operator",
            timeout=_TIMEOUT,
        )

    def drain(self, host: str) -> bool:
        """The host takes no new visits; whether it is empty."""
        return bool(self._ask("/drain", host=host)["empty"])

    def readmit(self, host: str) -> None:
        """A shut-out, drained or dead host starts anew."""
        self._ask("/readmit", host=host)

    def swap(self, host: str, block: int, *, donor: str) -> None:
        """A block of the host comes from the model `donor` from now on."""
        self._ask("/swap", host=host, block=block, donor=donor)

    def routing(self, routing: Routing) -> Routing:
        """New requests are routed this way; how they were before."""
        before: Routing = self._ask("/routing", routing=routing)["before"]
        return before

    def fault(self, host: str, kind: Kind) -> None:
        """A failure, for a drill."""
        self._ask("/fault", host=host, kind=kind)

    def plan(self) -> dict[str, Any]:
        """The plan that runs."""
        return self._read(lambda: self._http.get("/plan"))

    def close(self) -> None:
        """Close the connection."""
        self._http.close()

    def _ask(self, path: str, **words: Any) -> dict[str, Any]:
        return self._read(lambda: self._http.post(path, json=words))

    def _read(self, ask: Callable[[], httpx.Response]) -> dict[str, Any]:
        try:
            response = ask()
        except httpx.HTTPError as error:
            raise LayerShuffleError(
                f"The swarm does not answer its operator ({type(error).__name__})",
                place=self._socket,
            ) from error
        if response.is_success:
            found: dict[str, Any] = response.json()
            return found
        raise _error_of(response)


def _error_of(response: httpx.Response) -> LayerShuffleError:
    try:
        told = response.json()
    except ValueError:
        told = {}
    kind = UsageError if response.status_code == 400 else LayerShuffleError
    return kind(
        str(told.get("cause") or f"The swarm answered {response.status_code}"),
        hint=told.get("hint"),
    )


@contextmanager
def operator_of(state: str | None) -> Iterator[Operator]:
    """The operator of the swarm in that directory (default: this user's)."""
    operator = Operator(state_directory(state))
    try:
        yield operator
    finally:
        operator.close()
