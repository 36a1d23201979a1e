"""One classification from the first byte of its body to the answer, under all limits."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, asynccontextmanager, contextmanager
from functools import partial
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect, Request
from torch import Tensor

from layershuffle.models import image_view
from layershuffle.swarm.calibration import NEVER, Calibration, expected_at
from layershuffle.swarm.messages import Route
from layershuffle.swarm.remote_model import Classified, NotAnswered, RemoteModel, resize_of
from layershuffle.swarm.server.bodies import Budget, read_body
from layershuffle.swarm.server.clients import Client, Clients
from layershuffle.swarm.server.errors import busy
from layershuffle.swarm.server.images import Decoder
from layershuffle.swarm.server.limits import GatewayLimits
from layershuffle.swarm.server.requests import Bounds, Query, kind_of, query_of
from layershuffle.swarm.server.schemas import Classification, Expected, classification

Strangers = frozenset[tuple[str, int]]
"""Blocks of another model than the swarm's, each with the host that holds it so."""
_MILLI = 1000.0
_READERS = 2  # threads that take bodies apart, some ms for a large one
_T = TypeVar("_T")


class RequestScheduler:
    """Carries out classifications, as many at a time as the limits allow.

    The class names in `labels` stand in the order of the model's logits. `strangers` says which
    blocks of which hosts are of another model than the one that `calibration` was measured on.
    """

    def __init__(
        self,
        front: RemoteModel,
        *,
        limits: GatewayLimits,
        labels: Sequence[str],
        calibration: Calibration | None,
        strangers: Callable[[], Strangers],
    ) -> None:
        self.front, self.limits, self.labels = front, limits, labels
        self.calibration, self._strangers = calibration, strangers
        self._bounds = Bounds(front.depth, limits, front.router.limits)
        self._decoder = Decoder(image_view(front.model), resize_of(front.model), limits)
        # Apart, so that what a request asks for is known however many images wait to be decoded.
        self._readers = ThreadPoolExecutor(_READERS, thread_name_prefix="reader")
        self._decoders = ThreadPoolExecutor(limits.decoders, thread_name_prefix="decoder")
        self._clients = Clients(limits)
        self._turns = asyncio.Semaphore(limits.running)
        self._open = 0
        self._held = Budget(limits.held_bytes)

    async def classify(self, request: Request) -> Classification:
        """The answer to `request`. Raises `Refused`, `NotAnswered`, `UsageError`, `DataError`.

        The deadline counts from when the body is in, and covers all that follows: the waits for a
        decoder and for a turn, decoding, the walk. A client that goes away ends the work with
        `ClientDisconnect`.
        """
        kind_of(request.headers)  # before anything is read
        with ExitStack() as places:
            address = request.client.host if request.client else ""
            client = places.enter_context(self._clients.request_of(address))
            self._check_room()  # before a body comes in for nothing
            strange = self._strangers()
            with self._held.share() as share:
                body = await read_body(request, limits=self.limits, share=share)
                begun = self.front.router.clock()
                places.enter_context(self._opened())
                work = self._prepared(client, body, request.headers, begun)
                query, images, deadline = await _unless_gone(request, work)
            found = await _unless_gone(request, self._walked(query, images, deadline))
        return classification(
            found,
            labels=self.labels,
            top_k=query.top_k,
            order=query.order,
            expected=self._expected(found.route, strange | self._strangers()),
            total_ms=(self.front.router.clock() - begun) * _MILLI,
        )

    def close(self) -> None:
        """End the threads, once what they do is done."""
        self._readers.shutdown(wait=True, cancel_futures=True)
        self._decoders.shutdown(wait=True, cancel_futures=True)
        self.front.close()

    async def _prepared(
        self, client: Client, body: bytes, headers: Mapping[str, str], begun: float
    ) -> tuple[Query, Tensor, float]:
        """What is asked, its images decoded, and the deadline. `begun`: when the body was in."""
        longest = begun + self.front.router.limits.max_deadline_ms / _MILLI  # not known before
        reading = partial(query_of, body, headers, bounds=self._bounds)
        loop = asyncio.get_running_loop()
        async with self._before(longest, "the request was read"):
            query, files = await loop.run_in_executor(self._readers, reading)
        deadline = begun + query.deadline_ms / _MILLI
        over = threading.Event()

        def check() -> None:
            if over.is_set() or self.front.router.clock() >= deadline:
                raise _too_late("the images were decoded")

        decoding = partial(self._decoder.batch, files, check=check)
        try:
            async with self._before(deadline, "the images were decoded"):
                images = await client.decode(self._decoders, decoding)
        finally:
            over.set()  # a thread that still decodes may stop: nobody waits for it
        return query, images, deadline

    async def _walked(self, query: Query, images: Tensor, deadline: float) -> Classified:
        async with self._before(deadline, "it was the request's turn"):
            await self._turns.acquire()
        try:
            return await self.front.classify(
                images, deadline=deadline, min_blocks=query.min_blocks, order=query.order
            )
        finally:
            self._turns.release()

    @asynccontextmanager
    async def _before(self, deadline: float, what: str) -> AsyncIterator[None]:
        """Ends what is awaited inside at `deadline`, in seconds of the router's clock."""
        try:
            async with asyncio.timeout(max(0.0, deadline - self.front.router.clock())):
                yield
        except TimeoutError as error:
            raise _too_late(what) from error

    def _expected(self, route: Route, strange: Strangers) -> tuple[Expected | None, str]:
        """The accuracy to expect, or why it is not known."""
        if self.calibration is None:
            return None, NEVER
        if why := not_calibrated(route, strange):
            return None, why
        return expected_at(self.calibration, len(route.order)), ""

    def _check_room(self) -> None:
        """Raises `Refused` (429) if as many requests are open as may be."""
        if self._open >= self.limits.running + self.limits.waiting:
            raise busy("Too many requests are open")

    @contextmanager
    def _opened(self) -> Iterator[None]:
        """Count an open request, whose body is in; raises `Refused` (429) if there are too many."""
        self._check_room()
        self._open += 1
        try:
            yield
        finally:
            self._open -= 1


def not_calibrated(route: Route, strange: Strangers) -> str:
    """Why the calibration says nothing of this route, "" if it does: blocks of other weights."""
    used: dict[str, set[int]] = {}
    for hop in route.hops:
        for block in hop.blocks:
            if hop.outcome == "answered" and (hop.host, block) in strange:
                used.setdefault(hop.host, set()).add(block)
    if not used:
        return ""
    told = "; ".join(f"{host}: {', '.join(map(str, sorted(used[host])))}" for host in sorted(used))
    return f"blocks of another model than the calibrated one took part ({told})"


def _too_late(what: str) -> NotAnswered:
    return NotAnswered(
        f"The deadline passed before {what}",
        hint="try again later, allow a later deadline, or send fewer or smaller images",
    )


async def _unless_gone(request: Request, work: Coroutine[Any, Any, _T]) -> _T:
    """The result of `work`, which is cancelled if the client goes away (`ClientDisconnect`)."""
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_disconnected(request))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientDisconnect
    finally:
        task.cancel()
        gone.cancel()


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
