"""The operator's endpoint: commands that only the owner of a running swarm may give.

It is a Unix socket in a directory that no other user may enter (`state_directory`), so it needs no
key that could be guessed or lost. `operator_app` is the server, `Operator` the client of the
command line.
"""

from __future__ import annotations

import asyncio
import os
import socket
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import httpx
from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import BaseModel, ConfigDict
from starlette.requests import Request

from layershuffle.errors import LayerShuffleError, UsageError
from layershuffle.files import explained
from layershuffle.swarm.chaos import Fault, FaultKind
from layershuffle.swarm.policy import Routing

if TYPE_CHECKING:
    # It imports torch, which takes seconds, and commands look for a swarm that runs before that.
    from layershuffle.swarm.service import Service

CommandName = Literal["drain", "readmit", "routing", "fault", "plan"]
SOCKET = "operator.sock"
# Seconds.
_TIMEOUT = 120.0
_SOCKET_PATH_BYTES = 100  # Linux allows 107, less what Python adds


class HostBody(BaseModel):
    """The body of a command to one host. Unknown keys are refused, here and below."""

    model_config = ConfigDict(extra="forbid")

    host: str


class FaultBody(HostBody):
    """Inject a fault into the host."""

    kind: FaultKind


class RoutingBody(BaseModel):
    """Set the routing of new requests."""

    model_config = ConfigDict(extra="forbid")

    routing: Routing


def operator_app(service: Service) -> FastAPI:
    """The app behind the operator's socket; its errors are JSON with cause and hint."""
    app = FastAPI(title="LayerShuffle swarm: operator", openapi_url=None)
    coordinator, router = service.coordinator, service.router

    @app.post("/drain")
    async def drain(command: HostBody) -> dict[str, Any]:
        """Let the host finish its visits and take no more; `empty`: it has finished."""
        return {"empty": await coordinator.drain(command.host)}

    @app.post("/readmit")
    async def readmit(command: HostBody) -> dict[str, Any]:
        """Restart a host that was shut out, was drained, or died."""
        # The router knows a spare only once it is up.
        if command.host in router.swarm and router.swarm[command.host].usable:
            raise UsageError(
                f"Host {command.host} is healthy, so it was not restarted",
                hint=f"layershuffle swarm drain {command.host} takes it out of service",
            )
        await coordinator.readmit(command.host)
        return {}

    @app.post("/routing")
    async def routing(command: RoutingBody) -> dict[str, Any]:
        """Set the routing of new requests; `before`: the earlier one."""
        before, router.routing = router.routing, command.routing
        return {"before": before}

    @app.post("/fault")
    async def fault(command: FaultBody) -> dict[str, Any]:
        """Inject a fault into a host, for a drill."""
        await service.faults.inject(Fault(0, command.host, command.kind))
        return {}

    @app.post("/plan")
    async def plan() -> dict[str, Any]:
        """The running plan."""
        return service.plan.model_dump(mode="json")

    @app.exception_handler(LayerShuffleError)
    async def answer_error(request: Request, error: LayerShuffleError) -> JSONResponse:
        del request
        # `Operator` maps the status back to the class of the error.
        status = 400 if isinstance(error, UsageError) else 409
        return JSONResponse({"cause": error.cause, "hint": error.hint}, status)

    @app.exception_handler(RequestValidationError)
    async def refuse(request: Request, error: RequestValidationError) -> JSONResponse:
        del request
        # Every location begins with "body", which tells the operator nothing.
        problems = [(".".join(map(str, e["loc"][1:])), e["msg"]) for e in error.errors()]
        cause = "; ".join(f"{key}: {text}" if key else text for key, text in problems)
        hint = "run the same version of layershuffle as the swarm does"
        return JSONResponse({"cause": cause, "hint": hint}, 400)

    return app


@asynccontextmanager
async def operator_endpoint(service: Service, state: Path) -> AsyncIterator[None]:
    """Serve the operator's socket in `state` within. Raises `UsageError` if a swarm is using it."""
    import uvicorn  # commands of the operator need no server

    class Quiet(uvicorn.Server):
        def capture_signals(self) -> Any:  # the clients' server handles signals
            return nullcontext()

    path = free_socket(state)
    listener = socket.socket(socket.AF_UNIX)
    with listener:
        path.unlink(missing_ok=True)
        listener.bind(str(path))
        # Before listening: no other user can connect in between.
        path.chmod(0o600)
        listener.listen()
        app = operator_app(service)
        server = Quiet(uvicorn.Config(app, lifespan="off", log_config=None, access_log=False))
        task = asyncio.create_task(server.serve(sockets=[listener]))
        try:
            yield
        finally:
            path.unlink(missing_ok=True)  # first: Ctrl-C cancels the wait below
            server.should_exit = True
            await asyncio.wait({task})  # a cancelled `wait` does not cancel the task


class Operator:
    """The client of the operator's socket. Every command may raise `LayerShuffleError`.

    Raises `UsageError` if no swarm listens in the directory `state`.
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

    def close(self) -> None:
        """Close the connection."""
        self._http.close()

    def command(self, name: CommandName, **fields: Any) -> dict[str, Any]:
        """Give the swarm a command and return its answer; `operator_app` has the fields of each."""
        try:
            response = self._http.post(name, json=fields)
        except httpx.HTTPError as error:
            raise LayerShuffleError(
                f"The swarm does not answer its operator ({type(error).__name__})",
                place=self._socket,
                hint="see what swarm up or swarm deploy printed, or start it again",
            ) from error
        # An unexpected failure of the swarm is plain text.
        is_json = response.headers.get("content-type") == "application/json"
        answer: dict[str, Any] = response.json() if is_json else {}
        if response.is_success:
            return answer
        kind = UsageError if response.status_code == 400 else LayerShuffleError
        cause = answer.get("cause") or f"The swarm answered {response.status_code}"
        raise kind(str(cause), hint=answer.get("hint"))


@contextmanager
def operator_of(state: str | None) -> Iterator[Operator]:
    """The operator of the swarm in the directory `state` (default: this user's), closed after."""
    operator = Operator(state_directory(state))
    try:
        yield operator
    finally:
        operator.close()


def state_directory(path: str | None = None) -> Path:
    """The directory where a swarm of this user keeps its socket and token; it is created if needed.

    Default: $XDG_STATE_HOME/layershuffle/swarm, or ~/.local/state/... . Raises `UsageError` if
    other users may enter it, or its path is too long for a socket.
    """
    base = os.environ.get("XDG_STATE_HOME") or "~/.local/state"
    directory = Path(path or f"{base}/layershuffle/swarm").expanduser().absolute()
    with explained(directory, flag="--state"):
        directory.mkdir(parents=True, exist_ok=True, mode=0o700)
    # An existing directory keeps its mode and owner.
    status = directory.stat()
    if status.st_mode & 0o077 or status.st_uid != os.getuid():
        raise UsageError(
            "Other users may enter the swarm's directory and could control it",
            place=directory,
            hint=f"chmod 700 {directory}, or remove it if it is not yours",
        )
    if len(os.fsencode(directory / SOCKET)) > _SOCKET_PATH_BYTES:
        raise UsageError(
            "The path is too long for a socket", place=directory, hint="name a shorter --state"
        )
    return directory


def free_socket(state: Path) -> Path:
    """The path for the operator's socket of a new swarm, in the directory `state`.

    Raises `UsageError` if a swarm is using it.
    """
    path = state / SOCKET
    if listens(path):
        raise UsageError(
            "A swarm of this user runs already",
            place=path,
            hint="end it, or name another --state",
        )
    return path


def scratch_directory(name: str) -> Path:
    """A short path for the logs and sockets of Ray, below a directory checked like the state's.

    Ray creates it at its first start.
    """
    # A subdirectory, because Ray opens its own directory to every user, and `state_directory`
    # would refuse that at the next start.
    return state_directory(f"{tempfile.gettempdir()}/ls-{os.getuid()}-{name}") / "ray"


def listens(path: Path) -> bool:
    """Whether a process answers at the Unix socket `path`."""
    with socket.socket(socket.AF_UNIX) as probe:
        try:
            probe.connect(str(path))
        except OSError:
            return False  # no socket, or one left by a swarm that was killed
    return True
