"""Carry out a classification, from the first byte of its body to the answer, under all limits.

The limits hold for each client (rate, requests under way, share of the decoders) and for all of
them together.
"""

from __future__ import annotations

import asyncio
import threading
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import ExitStack, asynccontextmanager, contextmanager, suppress
from functools import partial
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect, Request
from torch import Tensor

from layershuffle.models import file_view
from layershuffle.swarm.calibration import Calibration
from layershuffle.swarm.expectations import (
    NEVER,
    Expected,
    expected_at,
    useful_blocks,
)
from layershuffle.swarm.messages import Route
from layershuffle.swarm.policy import side_by_side
from layershuffle.swarm.remote_model import Classified, NotAnswered, RemoteModel
from layershuffle.swarm.rounds import Cell, cell_of
from layershuffle.swarm.server.errors import busy
from layershuffle.swarm.server.limits import GatewayLimits, client_of
from layershuffle.swarm.server.requests import Bounds, Decoder, Query, read_query
from layershuffle.swarm.server.schemas import Classification, classification

_MILLI = 1000.0
_T = TypeVar("_T")


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
        """Whether this client has no running work, not even threads whose results are useless."""
        return not self.requests and not self.decodes

    def wait(self, now: float) -> float:
        """Count a request; return the seconds that it has to wait, 0 if it is admitted at `now`.

        This is the generic cell rate algorithm, a token bucket in one number: every request pays
        for 1 / rate seconds, and a client may be `burst` payments ahead of the clock. A request
        that has to wait pays nothing.
        """
        begin = max(self._paid_until, now)
        wait = begin - now - (self._limits.burst - 1) / self._limits.rate
        # Sums of many payments are rounded: without this margin a request would wait for 1e-16 s.
        if wait > 1e-9:
            return wait
        self._paid_until = begin + 1 / self._limits.rate
        return 0.0

    async def decode(self, pool: Executor, work: Callable[[], _T]) -> _T:
        """Run `work` in a thread of `pool` once this client has a place there; return its result.

        Cancellation ends the wait, but not a thread that has begun, which keeps its place until it
        ends: clients that give up early and ask again get no more decoders than others.
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
        wait = self.at(address).wait(now)
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


class RequestScheduler:
    """Carries out classifications, as many at a time as the limits allow.

    `labels`: the class names, in the order of the model's logits. `decoder_threads`: the
    executor that decodes images (default: as many threads as the limits allow).
    """

    def __init__(
        self,
        remote_model: RemoteModel,
        *,
        limits: GatewayLimits,
        labels: Sequence[str],
        calibration: Calibration | None,
        decoder_threads: Executor | None = None,
    ) -> None:
        self.remote_model, self.limits, self.labels = remote_model, limits, labels
        self.calibration, self.clients = calibration, Clients(limits)
        self._clock = remote_model.router.clock
        self._bounds = Bounds(
            remote_model.depth,
            useful=useful_blocks(calibration),
            gateway=limits,
            swarm=remote_model.router.limits,
        )
        model = remote_model.model
        self._decoder = Decoder(file_view(model), limits)
        self._decoder_threads = decoder_threads or ThreadPoolExecutor(
            limits.decoders, thread_name_prefix="decoder"
        )
        self._walks = asyncio.Semaphore(limits.running)
        self._open = 0
        self._free_bytes = limits.held_bytes

    async def classify(self, request: Request) -> Classification:
        """The answer to `request`. Raises `HTTPError`, `NotAnswered`, `UsageError`, `DataError`.

        The deadline counts from the end of the body, and covers the waits for a decoder and for a
        walk, decoding, and the walk. If the client disconnects, the work is cancelled and
        `ClientDisconnect` is raised.
        """
        with ExitStack() as places:
            address = request.client.host if request.client else ""
            client = places.enter_context(self.clients.request_of(address))
            self._check_room()  # before a body is received in vain
            memory = places.enter_context(ExitStack())
            take = memory.enter_context(self._body_memory())
            query, files = await read_query(request, bounds=self._bounds, take=take)
            begun = self._clock()
            deadline = begun + query.deadline_ms / _MILLI
            # Not before: a body that arrives slowly takes only the places of its own client.
            places.enter_context(self._counted_as_open())

            async def answered() -> Classified:
                images = await self._decode(files, client=client, deadline=deadline)
                # Otherwise they would stay in memory, uncounted, while the request walks.
                files.clear()
                memory.close()
                return await self._walk(images, query, deadline=deadline)

            # One watch for both steps, because each takes two tasks.
            classified = await _unless_gone(request, answered())
        return classification(
            classified,
            labels=self.labels,
            top_k=query.top_k,
            expected=self._expected(classified.route),
            total_ms=(self._clock() - begun) * _MILLI,
        )

    def close(self) -> None:
        """End the decoder threads when their work is done, and close the remote model."""
        self._decoder_threads.shutdown(wait=True, cancel_futures=True)
        self.remote_model.close()

    async def _decode(self, files: Sequence[bytes], *, client: Client, deadline: float) -> Tensor:
        """The batch of the images in `files`, decoded in a thread when it is `client`'s turn."""
        over = threading.Event()

        def check() -> None:
            if over.is_set() or self._clock() >= deadline:
                raise _too_late("the images were decoded")

        decoding = partial(self._decoder.batch, files, check=check)
        try:
            async with self._before(deadline, "the images were decoded"):
                return await client.decode(self._decoder_threads, decoding)
        finally:
            over.set()  # a thread that still decodes may stop: its result is not needed

    async def _walk(self, images: Tensor, query: Query, *, deadline: float) -> Classified:
        async with self._before(deadline, "it was the request's turn"):
            await self._walks.acquire()
        try:
            # No time-out here: the router ends a walk in time, to answer with the blocks that ran.
            return await self.remote_model.classify(
                images,
                deadline=deadline,
                min_blocks=query.min_blocks,
                useful_blocks=query.useful_blocks,
            )
        finally:
            self._walks.release()

    @asynccontextmanager
    async def _before(self, deadline: float, event: str) -> AsyncIterator[None]:
        """Cancel the body at `deadline`, in seconds of the router's clock. Raises `NotAnswered`."""
        try:
            async with asyncio.timeout(max(0.0, deadline - self._clock())):
                yield
        except TimeoutError as error:
            raise _too_late(event) from error

    def expected_now(self) -> tuple[Expected | None, str]:
        """The accuracy to expect if all reachable blocks run, or `None` and the reason."""
        router = self.remote_model.router
        usable = [host for host in router.swarm.values() if host.usable]
        reachable = {block for host in usable for block in host.blocks}
        enough = router.most_blocks or router.depth
        most, passes, parallel = min(len(reachable), enough), 1, 1
        if router.routing == "order-free":
            rounds = router.rounds
            passes = rounds.way(len(reachable), enough=enough).passes
            # Busy hosts run one visit at a time, whatever the calibration allows.
            parallel = side_by_side(
                sorted(reachable),
                router.swarm,
                rounds=rounds,
                enough=enough,
                walks=router.walks + 1,
            )
        cell = Cell(most, passes, parallel) if most else None
        return self._expected_at(cell)

    def _expected(self, route: Route) -> tuple[Expected | None, str]:
        """The accuracy to expect of the answer of `route`, or `None` and the reason."""
        return self._expected_at(cell_of(route.steps) if route.order else None)

    def _expected_at(self, cell: Cell | None) -> tuple[Expected | None, str]:
        """The accuracy to expect of answers in `cell`; `None` and the reason if it is unknown."""
        if self.calibration is None:
            return None, NEVER
        if cell is None:
            return None, "no block can be run"
        expected = expected_at(self.calibration, cell)
        why = f"{cell.kept} blocks were not measured with answers as late as these"
        return expected, "" if expected else why

    def _check_room(self) -> None:
        """Raises `HTTPError` (429) if too many requests are open."""
        if self._open >= self.limits.running + self.limits.waiting:
            raise busy("Too many requests are open")

    @contextmanager
    def _counted_as_open(self) -> Iterator[None]:
        """Count a request whose body is in. Raises `HTTPError` (429) if there are too many."""
        self._check_room()
        self._open += 1
        try:
            yield
        finally:
            self._open -= 1

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


def _too_late(event: str) -> NotAnswered:
    return NotAnswered(
        f"The deadline passed before {event}",
        hint="try again later, allow a later deadline, or send fewer or smaller images",
    )


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
