"""The operator's endpoint: what only the owner of a running swarm may do, on a socket of its own.

A Unix socket in a directory that no other user may enter (`state_directory`), beside the public
gateway, so that no key can be guessed or lost: whoever may write there is the owner. `operator_app`
is the side of the swarm, `Operator` that of the command line.
"""

from __future__ import annotations

import asyncio
import os
import socket
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

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

SOCKET = "operator.sock"
# Seconds; a swap may have to load a whole model before it answers.
_TIMEOUT = 120.0
_SOCKET_PATH_BYTES = 100  # Linux allows 107, less what Python adds


class HostBody(BaseModel):
    """The body of a command to one host. Unknown keys are refused, here and below."""

    model_config = ConfigDict(extra="forbid")

    host: str


class SwapBody(HostBody):
    """Replace a block by that of another model."""

    block: int
    donor: str


class FaultBody(HostBody):
    """Let the host fail."""

    kind: FaultKind


class RoutingBody(BaseModel):
    """Route new requests this way."""

    model_config = ConfigDict(extra="forbid")

    routing: Routing


def operator_app(service: Service) -> FastAPI:
    """What the operator's socket answers to; errors are JSON with cause and hint."""
    app = FastAPI(title="LayerShuffle swarm: operator", openapi_url=None)
    coordinator, router = service.coordinator, service.router

    @app.post("/drain")
    async def drain(command: HostBody) -> dict[str, Any]:
        return {"empty": await coordinator.drain(command.host)}

    @app.post("/readmit")
    async def readmit(command: HostBody) -> dict[str, Any]:
        await coordinator.readmit(command.host)
        return {}

    @app.post("/swap")
    async def swap(command: SwapBody) -> dict[str, Any]:
        block, base = command.block, coordinator.base
        # In a thread: requests go on while files are read, or a model is loaded.
        from layershuffle.swarm.service import donor_bundle

        bundle = await asyncio.to_thread(donor_bundle, command.donor, base, blocks=[block])
        await coordinator.swap(command.host, block, donor=bundle)
        return {}

    @app.post("/routing")
    async def routing(command: RoutingBody) -> dict[str, Any]:
        # A drill puts the earlier routing back when it is over.
        before, router.routing = router.routing, command.routing
        return {"before": before}

    @app.post("/fault")
    async def fault(command: FaultBody) -> dict[str, Any]:
        await service.faults.inject(Fault(0, command.host, command.kind))
        return {}

    @app.get("/plan")
    async def plan() -> dict[str, Any]:
        return service.plan.model_dump(mode="json")

    @app.exception_handler(LayerShuffleError)
    async def answer_error(request: Request, error: LayerShuffleError) -> JSONResponse:
        del request
        # The operator's side turns the two back into these classes of errors.
        status = 400 if isinstance(error, UsageError) else 409
        return JSONResponse({"cause": error.cause, "hint": error.hint}, status)

    @app.exception_handler(RequestValidationError)
    async def refuse(request: Request, error: RequestValidationError) -> JSONResponse:
        del request
        # Places begin with "body", which says nothing here.
        problems = [(".".join(map(str, e["loc"][1:])), e["msg"]) for e in error.errors()]
        cause = "; ".join(f"{key}: {text}" if key else text for key, text in problems)
        hint = "run the same version of layershuffle as the swarm does"
        return JSONResponse({"cause": cause, "hint": hint}, 400)

    return app


@asynccontextmanager
async def operator_endpoint(service: Service, state: Path) -> AsyncIterator[None]:
    """The operator's socket in `state`, open inside. Raises `UsageError` if a swarm is using it."""
    import uvicorn  # commands of the operator need no server

    class Quiet(uvicorn.Server):
        def capture_signals(self) -> Any:  # the clients' server has them
            return nullcontext()

    path = free_socket(state)
    listener = socket.socket(socket.AF_UNIX)
    with listener:
        path.unlink(missing_ok=True)
        listener.bind(str(path))
        # Before it listens, so that no other user can connect in between.
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


class Operator:
    """The owner's side of the socket, for command lines. Every method raises `LayerShuffleError`.

    Raises `UsageError` if no swarm listens in `state`.
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
        """Let the host finish its visits and take no more. Returns whether it is empty."""
        return bool(self._ask("POST", "/drain", host=host)["empty"])

    def readmit(self, host: str) -> None:
        """Start a host again that was shut out, was drained, or died."""
        self._ask("POST", "/readmit", host=host)

    def swap(self, host: str, block: int, *, donor: str) -> None:
        """Replace a block of the host by that of the model `donor`."""
        self._ask("POST", "/swap", host=host, block=block, donor=donor)

    def routing(self, routing: Routing) -> Routing:
        """Route new requests this way. Returns how they were routed before."""
        before: Routing = self._ask("POST", "/routing", routing=routing)["before"]
        return before

    def fault(self, host: str, kind: FaultKind) -> None:
        """Let a host fail, for a drill."""
        self._ask("POST", "/fault", host=host, kind=kind)

    def plan(self) -> dict[str, Any]:
        """The plan that runs."""
        return self._ask("GET", "/plan")

    def close(self) -> None:
        """Close the connection."""
        self._http.close()

    def _ask(self, method: str, path: str, **fields: Any) -> dict[str, Any]:
        try:
            response = self._http.request(method, path, json=fields or None)
        except httpx.HTTPError as error:
            raise LayerShuffleError(
                f"The swarm does not answer its operator ({type(error).__name__})",
                place=self._socket,
                hint="see what swarm up or swarm deploy printed, or start it again",
            ) from error
        # A failure of the swarm's own is plain text.
        is_json = response.headers.get("content-type") == "application/json"
        answer: dict[str, Any] = response.json() if is_json else {}
        if response.is_success:
            return answer
        kind = UsageError if response.status_code == 400 else LayerShuffleError
        cause = answer.get("cause") or f"The swarm answered {response.status_code}"
        raise kind(str(cause), hint=answer.get("hint"))


@contextmanager
def operator_of(state: str | None) -> Iterator[Operator]:
    """The operator of the swarm in that directory (default: this user's)."""
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
    # The directory may have been there before, so that its mode and owner are looked at.
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
    """Where the operator's socket of a new swarm is to stand, in the directory `state`.

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
    """A short path for the logs and sockets of Ray, in a directory that is checked like the state.

    Ray makes the directory itself, the first time.
    """
    # A subdirectory, because Ray opens its own directory to every user, which at the next start
    # would look like another user's.
    return state_directory(f"{tempfile.gettempdir()}/ls-{os.getuid()}-{name}") / "ray"


def listens(path: Path) -> bool:
    """Whether a process answers at the Unix socket `path`."""
    with socket.socket(socket.AF_UNIX) as probe:
        try:
            probe.connect(str(path))
        except OSError:
            return False  # nothing there, or left over from a swarm that was killed
    return True
