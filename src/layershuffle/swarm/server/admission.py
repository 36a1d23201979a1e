"""What a client may take of the gateway, for the API and the page alike.

The limits hold for each client (rate, requests under way, share of the threads) and for all of them
together (bodies in memory, requests open).
"""

from __future__ import annotations

import asyncio
import threading
from collections import OrderedDict
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import Executor
from contextlib import contextmanager, suppress
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect, Request

from layershuffle.swarm.messages import NotAnswered
from layershuffle.swarm.server.errors import busy
from layershuffle.swarm.server.keys import Rate
from layershuffle.swarm.server.limits import GatewayLimits, client_of
from layershuffle.swarm.server.requests import read_body

_T = TypeVar("_T")


class Client:
    """One client: its rate, its requests under way, and its share of the threads of a pool (half as
    many as there are decoders, at least one)."""

    def __init__(self, limits: GatewayLimits) -> None:
        self.rate = Rate(limits.rate, limits.burst)
        self._places = asyncio.Semaphore(max(1, limits.decoders // 2))
        self.requests = self.threads = 0

    @property
    def idle(self) -> bool:
        """Whether this client has no running work, not even threads whose results are useless."""
        return not self.requests and not self.threads

    async def compute(self, pool: Executor, work: Callable[[], _T]) -> _T:
        """Run `work` in a thread of `pool` once this client has a place there; return its result.

        Cancellation ends the wait, but not a thread that has begun, which keeps its place until it
        ends: clients that give up early and ask again get no more threads than others.
        """
        await self._places.acquire()
        self.threads += 1
        loop = asyncio.get_running_loop()

        def leave() -> None:
            self.threads -= 1
            self._places.release()

        def thread_ended(_: object) -> None:
            with suppress(RuntimeError):  # the loop has ended, and with it everything counted here
                loop.call_soon_threadsafe(leave)

        future = pool.submit(work)
        future.add_done_callback(thread_ended)
        return await asyncio.wrap_future(future)


class Clients:
    """The most recent clients, by address, in bounded memory. For one event loop."""

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
            # The rate of a forgotten client is reset, so the longest idle is forgotten. Those with
            # requests under way stay: the limit on connections bounds them.
            idle = (name for name, client in self._clients.items() if client.idle)
            self._clients.pop(next(idle, name))
        return client

    def admit(self, address: str, *, now: float) -> None:
        """Count a request at the time `now`, in seconds. Raises `HTTPError` (429) for too many."""
        wait = self.at(address).rate.wait(now)
        if wait:
            raise busy("Too many requests from your address", wait=wait)

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


class Admission:
    """Lets requests in, as many at a time as the limits allow. `clock`: that of all deadlines;
    `open`: requests whose bodies are in and that have no answer yet."""

    def __init__(self, limits: GatewayLimits, *, clock: Callable[[], float]) -> None:
        self.limits, self.clock, self.clients = limits, clock, Clients(limits)
        self.open = 0
        self._free_bytes = limits.held_bytes

    def admit(self, request: Request) -> None:
        """Count a request against the rate of its client. Raises `HTTPError` (429)."""
        self.clients.admit(_address(request), now=self.clock())

    async def carry(
        self, request: Request, work: Callable[[Client, bytes], Coroutine[Any, Any, _T]]
    ) -> _T:
        """The result of `work(client, body)`. Raises `HTTPError` (408, 413, 415, 429).

        If the client disconnects, the work is cancelled and `ClientDisconnect` is raised.
        """
        with self.clients.request_of(_address(request)) as client, self._body_memory() as take:
            self._check_room()  # before a body is received in vain
            body = await read_body(request, limits=self.limits, take=take)
            # Not before: a body that arrives slowly takes only the places of its own client.
            self._check_room()
            self.open += 1
            try:
                return await _unless_gone(request, work(client, body))
            finally:
                self.open -= 1

    async def compute(
        self,
        client: Client,
        work: Callable[[Callable[[], None]], _T],
        *,
        pool: Executor,
        deadline: float,
        event: str,
    ) -> _T:
        """`work(check)` in a thread of `pool`, when it is the turn of `client`.

        Raises `NotAnswered` at `deadline`, in seconds of the clock: it passed before `event`. Then,
        and if the work is cancelled, `check` raises in the thread: its result is not needed.
        """
        over = threading.Event()

        def check() -> None:
            if over.is_set() or self.clock() >= deadline:
                raise too_late(event)

        try:
            async with asyncio.timeout(max(0.0, deadline - self.clock())):
                return await client.compute(pool, lambda: work(check))
        except TimeoutError as error:
            raise too_late(event) from error
        finally:
            over.set()

    def _check_room(self) -> None:
        """Raises `HTTPError` (429) if too many requests are open."""
        if self.open >= self.limits.running + self.limits.waiting:
            raise busy("Too many requests are open")

    @contextmanager
    def _body_memory(self) -> Iterator[Callable[[int], None]]:
        """A function that reserves bytes of the memory for all bodies, released at the end; it
        raises `HTTPError` (429) if too few are free."""
        total = 0

        def take(count: int) -> None:
            nonlocal total
            if count > self._free_bytes:
                raise busy("The bodies of other requests fill the memory")
            self._free_bytes -= count
            total += count

        try:
            yield take
        finally:
            self._free_bytes += total


def too_late(event: str) -> NotAnswered:
    """The refusal of a request whose deadline passed before `event`."""
    return NotAnswered(
        f"The deadline passed before {event}",
        hint="try again later, allow a later deadline, or send a smaller image",
    )


def _address(request: Request) -> str:
    return request.client.host if request.client else ""


async def _unless_gone(request: Request, work: Coroutine[Any, Any, _T]) -> _T:
    """The result of `work`. If the client disconnects, cancels it and raises `ClientDisconnect`."""

    async def disconnect() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    # A handler is not cancelled when its client leaves; only `receive` reports that.
    task, gone = asyncio.ensure_future(work), asyncio.ensure_future(disconnect())
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientDisconnect
    finally:
        task.cancel()
        gone.cancel()
