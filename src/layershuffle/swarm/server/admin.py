"""The operator's commands, on the port of the API, for who has the operator's key.

A key and not a socket of its own: the page needs it to break hosts, also behind a proxy, and a
second server in the process would need a second set of limits. The key is made anew at every start
and lies, with the address, in a directory that no other user may enter (`state_directory`), where
the command line finds both.
"""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from http import HTTPStatus
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import httpx
from filelock import FileLock, Timeout
from pydantic import BaseModel, ConfigDict, Field

from layershuffle.errors import LayerShuffleError, UsageError
from layershuffle.files import explained
from layershuffle.swarm.faults import FaultKind
from layershuffle.swarm.server.join import join_address, qr_code
from layershuffle.swarm.server.tls import pinned

if TYPE_CHECKING:
    from fastapi import FastAPI
    from starlette.requests import Request

    from layershuffle.swarm.server.app import Gateway
    from layershuffle.swarm.service import Service

CommandName = Literal["drain", "readmit", "fault", "facts", "join", "roll"]
KEY_HEADER = "X-Operator-Key"
_FILE = "operator.json"
_KEY_BYTES = 24
# Seconds; a roll answers when hosts have loaded another model (`rolling.LOAD_SECONDS`).
_TIMEOUT = 330.0


class Fields(BaseModel):
    """The fields of a command. Unknown ones are refused."""

    model_config = ConfigDict(extra="forbid")

    host: str = ""
    kind: FaultKind | None = None
    address: str = Field("", max_length=500)
    model: str = ""


def add_operator(
    app: FastAPI, admit: Callable[[Request], Awaitable[None]], *, service: Service, key: str
) -> None:
    """Add POST /operator/NAME to the gateway's app, for requests with `key`.

    `drain`: let `host` finish its visits and take no more (`empty`: it has finished); `readmit`:
    start a host again that was shut out, was drained or died; `fault`: let a host of this swarm
    fail, by `kind`; `facts`: the model, and the gateway's own hosts; `join`: the address, with the
    token, at which a tab becomes a host of the gateway that it reaches at `address`, and its QR
    code as SVG; `roll`: serve the export in the directory `model` instead of the one in `before`.
    """
    from starlette.requests import Request

    from layershuffle.swarm.server.errors import HTTPError
    from layershuffle.swarm.server.keys import Keys
    from layershuffle.swarm.server.rolling import roll

    keys = Keys([key])

    async def command(name: CommandName, fields: Fields, request: Request) -> dict[str, Any]:
        await admit(request)  # before the key, so that guessing is slow
        if not keys.accept(request.headers.get(KEY_HEADER, "").encode("latin-1", "replace")):
            raise HTTPError(
                HTTPStatus.UNAUTHORIZED,
                "The operator's key is missing or wrong",
                hint="`layershuffle swarm up` prints the address of the page with the key in it",
            )
        try:
            if name != "roll":
                return await carry_out(service, name, fields=fields)
            gateway: Gateway = app.state.gateway
            before = service.coordinator.model.directory
            await roll(service, gateway.scheduler, directory=Path(fields.model))
            gateway.model = gateway.metrics.model = fields.model
            return {"before": str(before)}
        except UsageError:
            raise
        except LayerShuffleError as error:
            raise HTTPError(HTTPStatus.CONFLICT, error.cause, hint=error.hint or "") from error

    command.__annotations__["request"] = Request
    app.add_api_route("/operator/{name}", command, methods=["POST"], include_in_schema=False)


async def carry_out(service: Service, name: CommandName, *, fields: Fields) -> dict[str, Any]:
    """Carry out a command, and return its answer."""
    coordinator, router, host = service.coordinator, service.router, fields.host
    if name == "drain":
        return {"empty": await coordinator.drain(host)}
    if name == "readmit":
        # The router knows a spare only once it is up.
        if host in router.swarm and router.swarm[host].usable:
            raise UsageError(
                f"Host {host} is healthy, so it was not restarted",
                hint=f"layershuffle swarm drain {host} takes it out of service",
            )
        coordinator.readmit(host)
    elif name == "fault" and fields.kind is not None:
        # Hosts that joined from elsewhere may be processes of others.
        if host not in coordinator.children.names:
            raise UsageError(f"This swarm did not start a host {host!r}")
        await service.faults.inject(host, fields.kind)
    elif name == "facts":
        return {"model": service.settings.model, "hosts": list(coordinator.children.names)}
    elif name == "join":
        return qr_code(join_address(fields.address, token=service.members.token))
    else:
        raise UsageError(f"The command {name} lacks a field")
    return {}


class Operated:
    """The operator's file of one gateway, in the directory `state`; it is locked until `close`.

    Raises `UsageError` if a swarm is using the directory.
    """

    def __init__(self, state: Path) -> None:
        self.key = secrets.token_urlsafe(_KEY_BYTES)
        self.state, self._path = state, state / _FILE
        self._lock = FileLock(state / "lock", mode=0o600)
        try:
            self._lock.acquire(blocking=False)
        except Timeout as error:
            raise UsageError(
                "A swarm of this user runs already",
                place=state,
                hint="end it, or name another --state",
            ) from error

    def publish(self, url: str, *, certificate: Path | None) -> None:
        """Write where the gateway is, with the key and, for https, its certificate."""
        facts = {"url": url, "key": self.key, "process": os.getpid()}
        if certificate is not None:
            facts["certificate"] = str(certificate.absolute())
        # The directory is closed to others, and a reader must never see half of it.
        fresh = self._path.with_suffix(".new")
        fresh.touch(mode=0o600)
        fresh.write_text(json.dumps(facts), encoding="utf-8")
        fresh.replace(self._path)

    def close(self) -> None:
        """Remove the file and let another swarm use the directory."""
        self._path.unlink(missing_ok=True)
        self._lock.release()


class Operator:
    """Gives commands to the swarm of the directory `state`. Each may raise `LayerShuffleError`.

    `process`: that of the gateway. Raises `UsageError` if no swarm uses the directory.
    """

    def __init__(self, state: Path) -> None:
        self._place = state / _FILE
        try:
            facts = json.loads(self._place.read_text(encoding="utf-8"))
        except FileNotFoundError as error:
            raise UsageError(
                "No swarm of this user runs on this machine",
                place=self._place,
                hint="start one with `layershuffle swarm up`, or name its --state directory",
            ) from error
        self.process: int = facts["process"]
        self._http = httpx.Client(
            base_url=facts["url"],
            headers={KEY_HEADER: facts["key"]},
            timeout=_TIMEOUT,
            trust_env=False,  # a proxy cannot reach this machine's loopback
            verify=pinned(facts["certificate"]) if "certificate" in facts else True,
        )

    def close(self) -> None:
        """Close the connection."""
        self._http.close()

    def command(self, name: CommandName, **fields: Any) -> dict[str, Any]:
        """Give the swarm a command and return its answer; `add_operator` has the fields of each."""
        try:
            response = self._http.post(f"/operator/{name}", json=fields)
        except httpx.HTTPError as error:
            raise LayerShuffleError(
                f"The swarm does not answer its operator ({type(error).__name__})",
                place=self._place,
                hint="it may have been killed; start it again",
            ) from error
        answer: dict[str, Any] = response.json()
        if response.is_success:
            return answer
        kind = UsageError if response.status_code == 422 else LayerShuffleError
        raise kind(answer["error"]["cause"], hint=answer["error"]["hint"] or None)


@contextmanager
def operator_of(state: str | None) -> Iterator[Operator]:
    """The operator of the swarm in the directory `state` (default: this user's), closed after."""
    operator = Operator(state_directory(state))
    try:
        yield operator
    finally:
        operator.close()


def state_directory(path: str | None = None) -> Path:
    """The directory where a swarm of this user keeps its address, key and token; it is created if
    needed.

    Default: $XDG_STATE_HOME/layershuffle/swarm, or ~/.local/state/... . Raises `UsageError` if
    other users may enter it.
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
    return directory
