"""What a client may take of the gateway, for the API and the page alike, and how it is refused.

The limits hold for each client (requests under way, share of the threads) and for all of them
together (bodies in memory, requests open).
"""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import math
import uuid
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Executor
from contextlib import asynccontextmanager, suppress
from functools import lru_cache
from http import HTTPStatus
from pathlib import Path
from typing import Annotated, Any, TypeVar

from pydantic import Field
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response

from layershuffle.errors import DataError, LayerShuffleError, UsageError
from layershuffle.settings import Positive, Settings
from layershuffle.swarm.limits import Milliseconds
from layershuffle.swarm.messages import NotAnswered, until
from layershuffle.swarm.server.schemas import ErrorAnswer, Problem

LOG = logging.getLogger("layershuffle")
BODY_HINT = "send one image as the body, neither as a form nor compressed: curl --data-binary @FILE"
_CLIENT_GONE = 499  # nginx's status; nobody reads it
_LONGEST = 500  # characters of a cause: some causes quote the client
_MAX_DIGITS = 18  # of a Content-Length that are read
_IPV6_PREFIX = 64  # one client may use every address below such a prefix
_SOON = 1.0  # seconds after which a client may try a busy gateway again
_T = TypeVar("_T")


class GatewayLimits(Settings):
    """Bounds on what clients send, and how much at a time. `Limits` bounds how long it takes."""

    max_body_bytes: Positive = 16 << 20
    """Largest body; counted while it arrives, because its announced length may be wrong."""
    body_ms: Milliseconds = 15_000.0
    """Longest time that a body may take to arrive."""
    held_bytes: Positive = 256 << 20
    """Most bytes of bodies in memory at one time, over all requests."""
    max_pixels: Positive = 25_000_000
    """Most pixels of an image, checked before it is decoded, and again for what it is resized to.
    25 million are 75 MB once decoded."""
    decoders: Positive = 2
    """Most images that are decoded at one time; at most half of them of one client."""

    min_deadline_ms: Milliseconds = 50.0
    """Shortest deadline that a request may ask for; the longest is the swarm's own limit."""

    running: Positive = 32
    """Most requests that walk the swarm at one time."""
    waiting: Annotated[int, Field(ge=0)] = 64
    """Most further requests, complete with their bodies, that may wait for their turn; clients of
    others are told to try later."""
    connections: Positive = 512
    """Most open connections; further ones are closed at once."""
    head_ms: Milliseconds = 10_000.0
    """Longest time from the opening of a connection, and from every answer, to the next request's
    complete head; also the longest time of a TLS handshake."""

    # A quarter of the connections, and half of the requests that may run or wait: no single address
    # can take every place.
    client_connections: Positive = 128
    """Open connections of one client address ..."""
    client_requests: Positive = 48
    """... and its requests under way, counted from their heads on."""

    max_clients: Positive = 10_000
    """Most client addresses that are remembered; the longest idle is forgotten first."""


@lru_cache(10_000)
def client_of(address: str) -> str:
    """The name of a client: its IPv4 address, its IPv6 /64 network, else the text itself."""
    try:
        parsed = ipaddress.ip_address(address)
    except ValueError:
        return address
    mapped = parsed.ipv4_mapped if isinstance(parsed, ipaddress.IPv6Address) else parsed
    return str(mapped or ipaddress.ip_network((int(parsed), _IPV6_PREFIX), strict=False))


def key_of(request: Request) -> bytes:
    """The key in `Authorization: Bearer KEY`; empty without one."""
    scheme, _, key = request.headers.get("authorization", "").partition(" ")
    return key.strip().encode("latin-1", "replace") if scheme.lower() == "bearer" else b""


class HTTPError(LayerShuffleError):
    """The refusal of a request; `retry_after` in seconds, where a later try may help."""

    def __init__(
        self,
        status: HTTPStatus,
        cause: str,
        *,
        hint: str,
        place: str | Path | None = None,
        retry_after: float | None = None,
    ) -> None:
        super().__init__(cause, place=place, hint=hint)
        self.status, self.retry_after = status, retry_after


def busy(cause: str, *, wait: float = _SOON) -> HTTPError:
    """The refusal (429) of a client that may try again after `wait` seconds."""
    return HTTPError(
        HTTPStatus.TOO_MANY_REQUESTS,
        cause,
        hint="wait as long as Retry-After says, and send less at a time",
        retry_after=wait,
    )


def answer_to(
    error: Exception, *, wait: float | None = None, reference: str | None = None
) -> Response:
    """The response to a request that was refused, cannot be answered, or failed unexpectedly.

    `wait`: seconds after which another try may help, where `error` does not say it; `reference`:
    the id of the request in the log.
    """
    if isinstance(error, ClientDisconnect):
        return Response(status_code=_CLIENT_GONE)
    if isinstance(error, HTTPException):  # a wrong path or method
        hint = "see /openapi.json for the paths and methods"
        body = _body(str(error.detail), hint)
        return JSONResponse(body, error.status_code, error.headers)
    status, headers = status_of(error), {}
    if status == HTTPStatus.INTERNAL_SERVER_ERROR or not isinstance(error, LayerShuffleError):
        # The cause of an internal failure may name files and hosts: the client gets only an id.
        reference = uuid.uuid4().hex
        LOG.error("Request %s failed", reference, exc_info=error, extra={"request": reference})
        hint = "give the operator this id: it is in the log"
        return JSONResponse(_body("The gateway failed", hint, reference=reference), status)
    if isinstance(error, HTTPError):
        wait = error.retry_after
    if wait is not None:
        headers["Retry-After"] = str(max(1, math.ceil(wait)))  # whole seconds
    if status == HTTPStatus.UNAUTHORIZED:
        headers["WWW-Authenticate"] = "Bearer"
    place = f" ({error.place})" if error.place else ""
    body = _body(error.cause + place, error.hint or "", reference=reference)
    return JSONResponse(body, status, headers)


async def answer_plainly(request: Request, error: Exception) -> Response:
    """`answer_to` as the handler of an app."""
    del request
    return answer_to(error)


def status_of(error: Exception) -> HTTPStatus:
    """The HTTP status for `error`: 422 for a request that can be read but not carried out, 500 for
    unexpected errors."""
    if isinstance(error, HTTPError):
        return error.status
    if isinstance(error, NotAnswered):
        return HTTPStatus.SERVICE_UNAVAILABLE
    if isinstance(error, UsageError | DataError):
        return HTTPStatus.UNPROCESSABLE_ENTITY
    return HTTPStatus.INTERNAL_SERVER_ERROR


def _body(cause: str, hint: str, *, reference: str | None = None) -> dict[str, Any]:
    problem = Problem(cause=cause[:_LONGEST], hint=hint, id=reference)
    return ErrorAnswer(error=problem).model_dump(mode="json")


class Client:
    """One client: its requests under way, and its places in a pool of threads (half as many as
    there are decoders, at least one)."""

    def __init__(self, limits: GatewayLimits) -> None:
        self.requests = 0
        self.places = asyncio.Semaphore(max(1, limits.decoders // 2))


class Admission:
    """Lets requests in, as many at a time as the limits allow. `clock`: that of all deadlines;
    `open`: requests whose bodies are in and that have no answer yet. For one event loop."""

    def __init__(self, limits: GatewayLimits, *, clock: Callable[[], float]) -> None:
        self.limits, self.clock = limits, clock
        self.open = self._held_bytes = 0
        # Bounded, because an attacker may come from ever new addresses. Who is forgotten has as
        # many places again; who can bring that about has as many addresses anyway.
        self._clients = lru_cache(limits.max_clients)(lambda _name: Client(limits))

    def client(self, request: Request) -> Client:
        """The client that a request comes from."""
        return self._clients(client_of(request.client.host if request.client else ""))

    @asynccontextmanager
    async def carried(self, request: Request) -> AsyncIterator[tuple[Client, bytes]]:
        """The client of `request` and its body, which count within. Raises `HTTPError` (408, 413,
        415, 429).

        If the client disconnects, what runs within is cancelled, and `ClientDisconnect` is raised.
        """
        client, body, content = self.client(request), bytearray(), b""
        if client.requests >= self.limits.client_requests:
            raise busy("Too many requests from your address are under way")
        client.requests += 1
        try:
            self._check_room()  # before a body is received in vain
            await self._read(request, body)
            # Not before: a body that arrives slowly takes only the places of its own client.
            self._check_room()
            content = bytes(body)
            body.clear()  # one of them is counted
            self.open += 1
            try:
                async with _unless_gone(request):
                    yield client, content
            finally:
                self.open -= 1
        finally:
            client.requests -= 1
            self._held_bytes -= len(body) + len(content)

    async def compute(
        self,
        client: Client,
        work: Callable[[], _T],
        *,
        pool: Executor,
        deadline: float,
        event: str,
    ) -> _T:
        """`work()` in a thread of `pool`, once `client` has a place there. Raises `NotAnswered` at
        `deadline`, in seconds of the clock: it passed before `event`.

        That ends the wait, but not a thread that has begun, which keeps its place until it ends:
        clients that give up early and ask again get no more threads than others.
        """
        loop = asyncio.get_running_loop()

        def ended(_: object) -> None:
            with suppress(RuntimeError):  # the loop has ended, and with it everything counted here
                loop.call_soon_threadsafe(client.places.release)

        async with until(deadline, event, clock=self.clock):
            await client.places.acquire()
            future = pool.submit(work)
            future.add_done_callback(ended)
            return await asyncio.wrap_future(future)

    def _check_room(self) -> None:
        """Raises `HTTPError` (429) if too many requests are open."""
        if self.open >= self.limits.running + self.limits.waiting:
            raise busy("Too many requests are open")

    async def _read(self, request: Request, body: bytearray) -> None:
        """Read the body of `request` into `body`. Raises `HTTPError` and `ClientDisconnect`."""
        encoding = request.headers.get("content-encoding", "identity").strip().lower()
        # Other kinds are not looked at: curl calls every body a form of fields.
        is_form = request.headers.get("content-type", "").lower().startswith("multipart/")
        if encoding != "identity" or is_form:
            raise HTTPError(
                HTTPStatus.UNSUPPORTED_MEDIA_TYPE, "The body is not an image alone", hint=BODY_HINT
            )
        announced = request.headers.get("content-length", "")
        self._check_size(int(announced[:_MAX_DIGITS]) if announced.isdecimal() else 0)
        seconds = self.limits.body_ms / 1000
        try:
            async with asyncio.timeout(seconds):
                async for chunk in request.stream():  # counted: what is announced may be wrong
                    self._check_size(len(body) + len(chunk))
                    if self._held_bytes + len(chunk) > self.limits.held_bytes:
                        raise busy("The bodies of other requests fill the memory")
                    self._held_bytes += len(chunk)
                    body += chunk
        except TimeoutError as error:
            raise HTTPError(
                HTTPStatus.REQUEST_TIMEOUT,
                f"The body did not arrive within {seconds:g} s",
                hint="send a smaller image",
            ) from error

    def _check_size(self, size: int) -> None:
        if size > self.limits.max_body_bytes:
            raise HTTPError(
                HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
                f"The body is larger than {self.limits.max_body_bytes} bytes",
                hint="send a smaller image",
            )


@asynccontextmanager
async def _unless_gone(request: Request) -> AsyncIterator[None]:
    """Cancel what runs within if the client disconnects, and raise `ClientDisconnect`."""

    # A handler is not cancelled when its client leaves; only `receive` reports that.
    async def watch() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass
        stay.reschedule(0)

    try:
        async with asyncio.timeout(None) as stay:
            watching = asyncio.create_task(watch())
            try:
                yield
            finally:
                watching.cancel()
    except TimeoutError as error:
        if stay.expired():
            raise ClientDisconnect from error
        raise
