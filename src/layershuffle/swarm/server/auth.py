"""Who may ask, how fast, and how much of the server each client may occupy."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import ipaddress
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from typing import TypeVar

from layershuffle.errors import UsageError
from layershuffle.swarm.server.errors import busy
from layershuffle.swarm.server.limits import GatewayLimits

_SHORTEST_KEY = 16
_IPV6_PREFIX = 64  # one client commands as many addresses as it likes below such a prefix
_Result = TypeVar("_Result")


class Keys:
    """The API keys that open the gateway; without any it is open to everybody.

    Raises `UsageError` for keys that are short enough to be guessed.
    """

    def __init__(self, keys: Sequence[str]) -> None:
        if any(len(key) < _SHORTEST_KEY for key in keys):
            raise UsageError(
                f"An API key has at least {_SHORTEST_KEY} characters",
                hint='make one: python -c "import secrets; print(secrets.token_urlsafe(24))"',
            )
        self._digests = tuple(_digest(key.encode()) for key in keys)

    def __bool__(self) -> bool:
        return bool(self._digests)

    def accept(self, key: bytes | None) -> bool:
        """Whether `key` is one of the keys; a wrong key takes as long as a right one."""
        if not self._digests:
            return True
        if key is None:
            return False
        # Digests have one length, and the loop never ends early: neither the length of a key, nor
        # its first letters, nor its place in the list change the time of the comparison.
        digest, matches = _digest(key), False
        for valid in self._digests:
            matches |= hmac.compare_digest(digest, valid)
        return matches


def key_in(authorization: str | None, x_api_key: str | None) -> bytes | None:
    """The key in `Authorization: Bearer KEY`, else in `X-API-Key: KEY`, else `None`."""
    scheme, _, token = (authorization or "").partition(" ")
    if scheme.lower() == "bearer" and token.strip():
        return token.strip().encode("latin-1", "replace")
    return None if x_api_key is None else x_api_key.strip().encode("latin-1", "replace")


def client_of(address: str) -> str:
    """What stands for a client: its IPv4 address, its IPv6 /64 network, else the text itself."""
    try:
        parsed = ipaddress.ip_address(address)
    except ValueError:
        return address
    mapped = parsed.ipv4_mapped if isinstance(parsed, ipaddress.IPv6Address) else parsed
    return str(mapped or ipaddress.ip_network((int(parsed), _IPV6_PREFIX), strict=False))


class Client:
    """One client: its rate, its requests under way, and its share of the decoders (half of them,
    at least one)."""

    def __init__(self, limits: GatewayLimits) -> None:
        self._limits = limits
        self._paid_until = 0.0
        self._decoder_places = asyncio.Semaphore(max(1, limits.decoders // 2))
        self.requests = self.decodes = 0

    @property
    def idle(self) -> bool:
        """Whether nothing of this client is under way, threads that nobody waits for included."""
        return not self.requests and not self.decodes

    def wait(self, now: float) -> float:
        """Count a request; the seconds that it has to wait, 0 if it may be made at `now`.

        This is the generic cell rate algorithm, a token bucket in one number: every request pays
        for 1 / rate seconds, and a client may be `burst` payments ahead of the clock. A request
        that has to wait pays nothing.
        """
        begin = max(self._paid_until, now)
        wait = begin - now - (self._limits.burst - 1) / self._limits.rate
        # Sums of many payments round: without the margin a request at its time would wait 1e-16 s.
        if wait > 1e-9:
            return wait
        self._paid_until = begin + 1 / self._limits.rate
        return 0.0

    async def decode(self, pool: ThreadPoolExecutor, work: Callable[[], _Result]) -> _Result:
        """What `work` returns, done in a thread of `pool` once this client has a place there.

        Being cancelled gives up the wait. A thread that has begun goes on, and keeps its place
        until it ends: clients that give up early and ask again get no more decoders than others.
        """
        await self._decoder_places.acquire()
        self.decodes += 1
        loop = asyncio.get_running_loop()

        def leave() -> None:
            self.decodes -= 1
            self._decoder_places.release()

        def thread_ended(_: object) -> None:
            with suppress(RuntimeError):  # the loop has ended, and with it everything counted here
                loop.call_soon_threadsafe(leave)

        future = pool.submit(work)
        future.add_done_callback(thread_ended)
        return await asyncio.wrap_future(future)


class Clients:
    """The clients that were heard of last, by address. Takes bounded memory; one event loop."""

    def __init__(self, limits: GatewayLimits) -> None:
        self._limits = limits
        self._clients: OrderedDict[str, Client] = OrderedDict()

    def __len__(self) -> int:
        return len(self._clients)

    def at(self, address: str) -> Client:
        """The client with this address."""
        name = client_of(address)
        client = self._clients.setdefault(name, Client(self._limits))
        self._clients.move_to_end(name)
        if len(self._clients) > self._limits.max_clients:
            # The rate of a forgotten client starts anew, so the one that was silent for longest
            # goes. Those with requests under way stay: the limit on connections bounds them.
            idle = (name for name, client in self._clients.items() if client.idle)
            self._clients.pop(next(idle, name))
        return client

    @contextmanager
    def request_of(self, address: str) -> Iterator[Client]:
        """Count a request of `address`. Raises `HTTPError` (429) if its client has too many."""
        client = self.at(address)
        if client.requests >= self._limits.client_requests:
            raise busy("Too many requests from your address are under way")
        client.requests += 1
        try:
            yield client
        finally:
            client.requests -= 1


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()
