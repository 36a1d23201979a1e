"""Who may ask, and what a request may take: the one place where keys and places are given out.

A request passes in one direction: `admit` (its key, or where it comes from), `received` (its body),
`compute` (a thread that decodes), `walking` (a place among those that run). What there is of each
is shared between addresses (`places`), so that none of them shuts out the others.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import ipaddress
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import Executor
from contextlib import asynccontextmanager, suppress
from functools import lru_cache
from http import HTTPStatus
from pathlib import Path
from typing import Annotated, TypeVar
from urllib.parse import urlsplit

from pydantic import Field
from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect, Request

from layershuffle.gateway.brain.limits import Milliseconds
from layershuffle.gateway.hosts.places import HeldPlace, Places, Shares
from layershuffle.gateway.hosts.served_model import time_limit
from layershuffle.gateway.http.errors import HTTPError, busy
from layershuffle.gateway.http.secrets import is_loopback, read_keys
from layershuffle.ground.errors import UsageError
from layershuffle.ground.settings import Positive, Settings

BODY_HINT = "send one image as the body, neither as a form nor compressed: curl --data-binary @FILE"
ENDING_SECONDS = 3.0
"""Seconds that running requests get when the gateway is told to end. The server drops all that are
left two seconds later."""
RETURN_SECONDS = 5.0
"""Seconds after which a gateway that a service manager starts again has its hosts back."""
SHORTEST_KEY = 16
"""Signs of a key or a token: shorter ones can be guessed."""
_MAX_DIGITS = 18  # of a Content-Length that are read
_IPV6_PREFIX = 64  # one client may use every address below such a prefix
_T = TypeVar("_T")


class GatewayLimits(Settings):
    """Bounds on what clients send, and how much at a time. `Limits` bounds how long it takes.

    Bodies in memory, decoders, and places for requests that run or wait are shared: no address can
    have more of them than are free after its own (`places`).
    """

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
    """Most images that are decoded at one time."""

    min_deadline_ms: Milliseconds = 50.0
    """Shortest deadline that a request may ask for; the longest is the swarm's own limit."""

    running: Positive = 32
    """Most requests that have a visit in the swarm at one time. Those that wait for a host to come
    back take no place."""
    waiting: Annotated[int, Field(ge=0)] = 64
    """Most further requests, complete with their bodies, that may wait for their turn; clients of
    others are told to try later."""
    connections: Positive = 512
    """Most open connections; a further one takes the place of one that is silent, of the client
    that has the most."""
    head_ms: Milliseconds = 10_000.0
    """Longest time from the opening of a connection, and from every answer, to the next request's
    complete head; also the longest time of a TLS handshake, and the longest pause in a body."""

    client_connections: Positive = 128
    """Most open connections of one client address."""
    client_requests: Positive = 48
    """Most open requests of one client address, counted from their heads on: as many as may run
    (16) and wait (32) if nobody else asks."""


@lru_cache(10_000)
def client_name(address: str) -> str:
    """The name of a client: its IPv4 address, its IPv6 /64 network, else the text itself."""
    try:
        parsed = ipaddress.ip_address(address)
    except ValueError:
        return address
    mapped = parsed.ipv4_mapped if isinstance(parsed, ipaddress.IPv6Address) else parsed
    return str(mapped or ipaddress.ip_network((int(parsed), _IPV6_PREFIX), strict=False))


class Keys:
    """The API keys that open the gateway; without any it is open to everybody.

    Every one of the `lines`, or of the lines of a `file`, is a key. Raises `UsageError` for keys
    that are short enough to be guessed, and for those that no header carries.
    """

    def __init__(self, lines: Sequence[str] = (), *, file: Path | None = None) -> None:
        self._file = file
        self._digests = list(map(_checked, lines))
        self.load()

    def load(self) -> None:
        """Read the file again.

        Raises the errors of `read_keys`, and `UsageError` for a line that is no key; then the old
        keys stay.
        """
        if self._file is not None:
            lines = read_keys(self._file)
            self._digests = [_checked(line, place=self._file) for line in lines]

    def __bool__(self) -> bool:
        return bool(self._digests)

    def check(self, request: Request, *, cause: str, hint: str) -> None:
        """Raises `HTTPError` (401) with `cause` unless a request has one of the keys.

        The request sends it as `Authorization: Bearer KEY`. A wrong key takes as long as a right
        one.
        """
        scheme, _, key = request.headers.get("authorization", "").partition(" ")
        sent = key.strip().encode("latin-1", "replace") if scheme.lower() == "bearer" else b""
        # Digests have equal length, and all are compared: the time does not depend on the length of
        # a key, its first letters, or its place in the list.
        digest = hashlib.sha256(sent).digest()
        matches = [hmac.compare_digest(digest, valid) for valid in self._digests]
        if not any(matches):
            raise HTTPError(HTTPStatus.UNAUTHORIZED, cause, hint=hint)


def announced_length(headers: Headers) -> int:
    """The length that a request says its body has, in bytes; 0 if it says none."""
    text = headers.get("content-length", "")
    return int(text[:_MAX_DIGITS]) if text.isdecimal() else 0


def _checked(key: str, *, place: Path | None = None) -> bytes:
    """The digest of a key. Raises `UsageError` for a line of `place` that is no key."""
    if len(key) < SHORTEST_KEY or not (key.isascii() and key.isprintable()) or " " in key:
        raise UsageError(
            f"An API key is one word of at least {SHORTEST_KEY} ASCII letters, digits and signs",
            place=place,
            hint='make one: python -c "import secrets; print(secrets.token_urlsafe(24))"',
        )
    return hashlib.sha256(key.encode()).digest()


class Received:
    """The body of a request, of a client. Its bytes count, in `shares`, until it is dropped."""

    def __init__(self, client: str, shares: Shares) -> None:
        self.client = client
        self.body = b""
        self._shares = shares
        self._counted = 0

    def count(self, size: int) -> None:
        """Count `size` more bytes that came. Raises `HTTPError` (429) if the memory is full."""
        if size and not self._shares.fits(self.client, size):
            raise busy("The bodies of other requests fill the memory")
        self._shares.take(self.client, size)
        self._counted += size

    def drop(self) -> None:
        """Drop the body from memory: its image is decoded, or the request has ended."""
        self.body = b""
        self._shares.give_back(self.client, self._counted)
        self._counted = 0


class Admission:
    """Lets requests in, as many at a time as the limits allow. For one event loop.

    `clock` is the clock of all deadlines. `keys` are the API keys; a gateway that is open to all
    has none. A `local` gateway is for this machine alone, so it is called by an address or as
    localhost. `open` counts the requests whose bodies are in and that have no answer yet.
    """

    def __init__(
        self,
        limits: GatewayLimits,
        *,
        clock: Callable[[], float],
        keys: Keys | None = None,
        local: bool = False,
    ) -> None:
        self.limits = limits
        self.clock = clock
        self.keys = keys or Keys()
        self.open = 0
        self._local = local
        self._ends: set[asyncio.Timeout] = set()
        self._is_ending = False
        self._requests: Counter[str] = Counter()
        self._bytes = Shares(limits.held_bytes)
        self._decoders = Places(limits.decoders)
        self._walks = Places(limits.running, waiting=limits.waiting)

    async def admit(self, request: Request) -> None:
        """Check the key of a request or, where there are none, which page sent it.

        Raises `HTTPError`: 401, or 403 for a page of another site and for another name of a local
        gateway, by which such a page would reach it (DNS rebinding).
        """
        if self.keys:
            self.keys.check(
                request,
                cause="The API key is missing or wrong",
                hint="send it as Authorization: Bearer KEY, or in the form of a camera as api_key",
            )
            return
        host = _host_name(f"//{request.headers.get('host', '')}")
        # Without a name, as of HTTP/1.0, it is no browser that was led here by one.
        if self._local and host and not (_is_address(host) or is_loopback(host)):
            raise HTTPError(
                HTTPStatus.FORBIDDEN,
                "This gateway is for its own machine, and was called by another name",
                hint="call it as 127.0.0.1 or localhost; one that others reach has --keys or "
                "--public, and one behind a proxy --trusted-proxy",
            )
        origin = request.headers.get("origin")
        elsewhere = request.headers.get("sec-fetch-site", "") in ("cross-site", "same-site")
        if elsewhere or (origin is not None and _host_name(origin) != host):
            raise HTTPError(
                HTTPStatus.FORBIDDEN,
                "Another site's page sent this request",
                hint="open the page of this gateway, or give the gateway --keys",
            )

    @asynccontextmanager
    async def received(self, request: Request) -> AsyncIterator[Received]:
        """The body of `request`, which counts in the context.

        Raises `HTTPError` (408, 413, 415, 429). If the client disconnects, the context is
        cancelled, and `ClientDisconnect` is raised.
        """
        client = client_name(request.client.host if request.client else "")
        if self._requests[client] >= self.limits.client_requests:
            raise busy("Too many requests from your address are under way")
        self._requests[client] += 1
        received = Received(client, self._bytes)
        try:
            self._check_room(client)  # before a body is received in vain
            async with self._ended_late():
                await self._read(request, received)
                # Not before: a body that arrives slowly takes no place.
                self._check_room(client)
                self.open += 1
                try:
                    async with _unless_gone(request):
                        yield received
                finally:
                    self.open -= 1
        finally:
            received.drop()
            self._requests[client] -= 1
            if not self._requests[client]:
                del self._requests[client]

    async def compute(
        self,
        client: str,
        work: Callable[[], _T],
        *,
        pool: Executor,
        deadline: float,
        event: str,
    ) -> _T:
        """The result of `work()` in a thread of `pool`, once it is the turn of `client`.

        Raises `NotAnswered` at `deadline`, in seconds of the clock, if it passed before `event`.
        That ends the wait, but not a thread that has begun, which keeps its place until it ends:
        clients that give up early and ask again get no more threads than others.
        """
        loop = asyncio.get_running_loop()
        async with time_limit(deadline, event, clock=self.clock):
            place = await self._decoders.take(client)

            def end(_: object) -> None:
                with suppress(RuntimeError):  # the loop has ended, and with it all places
                    loop.call_soon_threadsafe(place.leave)

            future = pool.submit(work)
            future.add_done_callback(end)
            return await asyncio.wrap_future(future)

    @asynccontextmanager
    async def walking(self, client: str, *, deadline: float) -> AsyncIterator[HeldPlace]:
        """A place of `client` among the requests that run.

        Raises `NotAnswered` at `deadline`, and `HTTPError` (429) if no more requests may wait.
        """
        async with time_limit(deadline, "it was the request's turn", clock=self.clock):
            self._check_room(client)  # again: others were quicker to decode
            place = await self._walks.take(client)
        try:
            yield place
        finally:
            place.leave()

    def end(self) -> None:
        """Tell the requests that have no answer in a few seconds that the gateway ends."""
        self._is_ending = True
        for end in self._ends:
            end.reschedule(asyncio.get_running_loop().time() + ENDING_SECONDS)

    @asynccontextmanager
    async def _ended_late(self) -> AsyncIterator[None]:
        """A context that raises `HTTPError` (503) seconds after the gateway was told to end."""
        when = asyncio.get_running_loop().time() + ENDING_SECONDS if self._is_ending else None
        try:
            async with asyncio.timeout_at(when) as end:
                self._ends.add(end)
                try:
                    yield
                finally:
                    self._ends.discard(end)
        except TimeoutError as error:
            if not end.expired():
                raise
            raise HTTPError(
                HTTPStatus.SERVICE_UNAVAILABLE,
                "The gateway ends",
                hint="ask another gateway, or this one again once it is back",
                retry_after=RETURN_SECONDS,
            ) from error

    def _check_room(self, client: str) -> None:
        """Raises `HTTPError` (429) if a request of a client could neither run nor wait."""
        if not self._walks.has_room(client):
            raise busy("Too many requests are open")

    async def _read(self, request: Request, received: Received) -> None:
        """Read the body of `request`. Raises `HTTPError` and `ClientDisconnect`."""
        encoding = request.headers.get("content-encoding", "identity").strip().lower()
        # Other kinds are not checked: curl calls every body a form of fields.
        is_form = request.headers.get("content-type", "").lower().startswith("multipart/")
        if encoding != "identity" or is_form:
            raise HTTPError(
                HTTPStatus.UNSUPPORTED_MEDIA_TYPE, "The body is not an image alone", hint=BODY_HINT
            )
        self._check_size(announced_length(request.headers))
        seconds = self.limits.body_ms / 1000
        body = bytearray()
        try:
            async with asyncio.timeout(seconds):
                async for chunk in request.stream():  # counted: what is announced may be wrong
                    self._check_size(len(body) + len(chunk))
                    received.count(len(chunk))
                    body += chunk
        except TimeoutError as error:
            raise HTTPError(
                HTTPStatus.REQUEST_TIMEOUT,
                f"The body did not arrive within {seconds:g} s",
                hint="send a smaller image",
            ) from error
        received.body = bytes(body)

    def _check_size(self, size: int) -> None:
        if size > self.limits.max_body_bytes:
            raise HTTPError(
                HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
                f"The body is larger than {self.limits.max_body_bytes} bytes",
                hint="send a smaller image",
            )


def _host_name(address: str) -> str:
    """The host's name or address in the address of a page; empty if there is none."""
    try:
        return urlsplit(address).hostname or ""
    except ValueError:  # brackets that do not close
        return ""


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


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
