"""The operator of a gateway: drain a host, readmit it, kill one that the gateway started itself.

The commands come over HTTP, on the port of the API, with the operator's key. A key and not a socket
of its own: the page needs it to kill hosts, also behind a proxy, and a second server in the process
would need a second set of limits. The key is made anew at every start and lies, with the address,
in a directory that no other user may enter (`state_directory`), where the command line finds both.
"""

from __future__ import annotations

import json
import os
import secrets
import ssl
from http import HTTPStatus
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast, get_args

import httpx
from filelock import FileLock, Timeout
from pydantic import BaseModel, ConfigDict, ValidationError
from starlette.requests import Request

from layershuffle.gateway.http.admission import Keys
from layershuffle.gateway.http.answers import ErrorAnswer
from layershuffle.gateway.http.errors import HTTPError
from layershuffle.gateway.http.secrets import client_context, is_loopback, pinned, read_secret
from layershuffle.ground.errors import LayerShuffleError, UsageError
from layershuffle.ground.files import explained, user_path, write_bytes
from layershuffle.ground.text import one_line

if TYPE_CHECKING:
    from fastapi import FastAPI

    from layershuffle.gateway.http.requests import Gateway

CommandName = Literal["drain", "readmit", "kill"]
_HINT = 'send {"host": NAME} to /operator/drain, /operator/readmit or /operator/kill'
_FILE = "operator.json"
_KEY_BYTES = 24
_TIMEOUT = 60.0  # seconds; a drain answers once no visit is open, after 30 s at most


# --- at the gateway -------------------------------------------------------------------------------


class Fields(BaseModel):
    """The fields of a command. Unknown ones are refused."""

    model_config = ConfigDict(extra="forbid")

    host: str


def add_operator(app: FastAPI, *, key: str) -> None:
    """Add POST /operator/NAME to the gateway's app, for requests with `key`.

    `drain`: let `host` finish its visits and take no more; the answer says in `empty` whether it
    has finished. `readmit`: start a host again that was shut out, was drained or died. `kill`: kill
    the process of a host that this gateway started.
    """
    gateway: Gateway = app.state.gateway
    keys = Keys([key])

    async def command(name: str, request: Request) -> dict[str, Any]:
        keys.check(
            request,
            cause="The operator's key is missing or wrong",
            hint="`layershuffle swarm up` prints the address of the page with the key in it",
        )
        if name not in get_args(CommandName):
            raise UsageError(f"There is no command {name!r}", hint=_HINT)
        try:  # not as an argument: FastAPI would read the body of anybody, of any size
            host = Fields.model_validate_json(await request.body()).host
        except ValidationError as error:
            raise UsageError(f"The body is no command ({one_line(error)})", hint=_HINT) from error
        try:
            return await _execute(gateway, host, name=cast(CommandName, name))
        except UsageError:
            raise
        except LayerShuffleError as error:
            hint = error.hint or ""
            raise HTTPError(
                HTTPStatus.CONFLICT, error.cause, place=error.place, hint=hint
            ) from error

    app.add_api_route("/operator/{name}", command, methods=["POST"], include_in_schema=False)


async def _execute(gateway: Gateway, host: str, *, name: CommandName) -> dict[str, Any]:
    """Carry out a command, and return its answer."""
    coordinator = gateway.coordinator
    if name == "drain":
        return {"empty": await coordinator.drain(host)}
    if name == "kill":
        coordinator.kill(host)
        return {}
    # The router knows a spare only once it is up.
    if host in gateway.router.swarm and gateway.router.swarm[host].usable:
        raise UsageError(
            f"Host {host} is healthy, so it was not restarted",
            hint=f"layershuffle swarm drain {host} takes it out of service",
        )
    coordinator.readmit(host)
    return {}


class Operated:
    """The operator's file of one gateway, in the directory `state`; it is locked until `close`.

    Raises `UsageError` if a swarm is using the directory.
    """

    def __init__(self, state: Path) -> None:
        self.key = secrets.token_urlsafe(_KEY_BYTES)
        self.state = state
        self._path = state / _FILE
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
        """Write where the gateway is, its process, the key and, for https, its certificate."""
        facts = {"url": url, "key": self.key, "process": os.getpid()}
        if certificate is not None:
            facts["certificate"] = str(certificate.absolute())
        write_bytes(self._path, json.dumps(facts).encode(), private=True)

    def close(self) -> None:
        """Remove the file and let another swarm use the directory."""
        self._path.unlink(missing_ok=True)
        self._lock.release()


def state_directory(path: str | None = None) -> Path:
    """The directory where a swarm of this user keeps its address, key and token.

    It is created if needed. Default: $XDG_STATE_HOME/layershuffle/swarm, or ~/.local/state/... .
    Raises `UsageError` if other users may enter it.
    """
    base = os.environ.get("XDG_STATE_HOME") or "~/.local/state"
    hint = "name a directory of this user with --state, or set HOME"
    directory = user_path(path or f"{base}/layershuffle/swarm", hint=hint).absolute()
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


# --- at the operator ------------------------------------------------------------------------------


class Operator:
    """Gives commands to a gateway.

    >>> Operator(url, key=key).command("drain", host="pi-1")  # doctest: +SKIP
    {'empty': True}

    `url`: its address; `key`: the operator's; `tls`: what to trust (default: the well-known
    authorities). Raises `UsageError` for what is no address.
    """

    def __init__(self, url: str, *, key: str, tls: ssl.SSLContext | None = None) -> None:
        self.url = url
        try:
            self._http = httpx.Client(
                base_url=url,
                headers={"Authorization": f"Bearer {key}"},
                timeout=_TIMEOUT,
                trust_env=False,  # a proxy cannot reach this machine's loopback
                verify=True if tls is None else tls,
            )
        except httpx.InvalidURL as error:
            raise _no_address(url) from error
        if self._http.base_url.scheme not in ("http", "https") or not self._http.base_url.host:
            raise _no_address(url)

    def close(self) -> None:
        """Close the connection."""
        self._http.close()

    def command(self, name: CommandName, *, host: str) -> dict[str, Any]:
        """The gateway's answer to a command (`add_operator`).

        Raises `UsageError` for one that it refuses, and `LayerShuffleError` if it cannot be carried
        out or nobody answers.
        """
        try:
            response = self._http.post(f"/operator/{name}", json={"host": host})
        except httpx.HTTPError as error:
            raise LayerShuffleError(
                f"The swarm does not answer its operator ({type(error).__name__})",
                place=self.url,
                hint="it may have been killed; start it again",
            ) from error
        try:
            if response.is_success:
                answer: dict[str, Any] = response.json()
                return answer
            problem = ErrorAnswer.model_validate_json(response.content).error
        except ValueError as error:  # of a proxy, in HTML
            raise LayerShuffleError(
                f"The answer (HTTP {response.status_code}) is not one of a LayerShuffle gateway",
                place=self.url,
                hint="check the address, and whether the gateway behind it runs",
            ) from error
        kind = UsageError if response.status_code == 422 else LayerShuffleError
        raise kind(problem.cause, hint=problem.hint or None)


def find_operator(
    state: str | None = None,
    *,
    address: str | None = None,
    key_file: Path | None = None,
    authority: Path | None = None,
) -> Operator:
    """The operator of the gateway of this user on this machine, or of the one at `address`.

    `state`: the directory of the gateway on this machine; `key_file`: the file of the operator's
    key (default: the key in `state`). Raises `UsageError` if the directory is needed and no swarm
    uses it, for a key file that others may read, and without one for another gateway than that of
    `state`: the key of this machine goes to nobody else.
    """
    tls = None if authority is None else client_context(authority)
    if address is not None and key_file is not None:
        key = read_secret(key_file, what="operator key", hint="put the key into it").strip()
        return Operator(address, key=key, tls=tls)
    facts = published(state)
    if address is not None and not _is_own(address, facts["url"]):
        raise UsageError(
            f"The operator's key of {address} is not known here: the gateway of this machine is "
            f"{facts['url']}",
            place="--address",
            hint="give its key with --operator-key-file FILE, or leave the address out",
        )
    if tls is None and "certificate" in facts:
        tls = pinned(Path(facts["certificate"]))
    return Operator(facts["url"], key=facts["key"], tls=tls)


def _no_address(url: str) -> UsageError:
    return UsageError(
        f"{url!r} is not the address of a gateway",
        place="--address",
        hint="write for example https://10.0.0.1:8000",
    )


def _is_own(address: str, own: str) -> bool:
    """Whether `address` leads to the gateway of this machine, which published `own`: it may name
    the machine in another way."""
    try:
        asked = httpx.URL(address)
    except httpx.InvalidURL as error:
        raise _no_address(address) from error
    known = httpx.URL(own)
    same_machine = asked.host == known.host or is_loopback(asked.host)
    return same_machine and asked.port == known.port


def published(state: str | None = None) -> dict[str, Any]:
    """The facts that the gateway of the directory `state` wrote (`Operated.publish`).

    Raises `UsageError` if no swarm uses the directory.
    """
    place = state_directory(state) / _FILE
    try:
        facts: dict[str, Any] = json.loads(place.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise UsageError(
            "No swarm of this user runs on this machine",
            place=place,
            hint="start one with `layershuffle swarm up`, name its --state directory, or give "
            "--address and --operator-key-file for one of another machine",
        ) from error
    return facts
