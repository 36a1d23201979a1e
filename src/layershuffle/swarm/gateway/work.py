"""One classification from the first byte of its body to the answer, under all limits."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect, Request
from torch import Tensor

from layershuffle.models import image_view
from layershuffle.swarm.calibration import NEVER, Calibration, expected_at
from layershuffle.swarm.front import Classified, Front, Unanswered, resize_of
from layershuffle.swarm.gateway.answers import Classification, Expected, classification
from layershuffle.swarm.gateway.images import Decoder
from layershuffle.swarm.gateway.intake import Bounds, Query, kind_of, query_of
from layershuffle.swarm.gateway.limits import GatewayLimits
from layershuffle.swarm.gateway.refusals import Refused

_MILLI = 1000.0
_SOON = 1.0  # seconds after which a busy gateway is worth another try
_MAX_DIGITS = 18  # of a Content-Length that is worth reading as a number
_T = TypeVar("_T")


class Desk:
    """Carries out classifications, as many at a time as the limits allow.

    The class names in `labels` stand in the order of the model's logits.
    """

    def __init__(
        self,
        front: Front,
        *,
        limits: GatewayLimits,
        labels: Sequence[str],
        calibration: Calibration | None,
    ) -> None:
        self.front, self.limits, self.labels = front, limits, labels
        self.calibration = calibration
        self._bounds = Bounds(front.depth, limits, front.router.limits)
        self._decoder = Decoder(image_view(front.model), resize_of(front.model), limits.max_pixels)
        self._decoders = ThreadPoolExecutor(limits.decoders, thread_name_prefix="decoder")
        self._turns = asyncio.Semaphore(limits.running)
        self._open = 0
        self._held = _Budget(limits.held_bytes)

    async def classify(self, request: Request) -> Classification:
        """The answer to `request`. Raises `Refused`, `Unanswered`, `UsageError`, `DataError`.

        The deadline counts from when the body is in. A client that goes away ends the work with
        `ClientDisconnect`.
        """
        kind_of(request.headers)  # before anything is read
        with self._opened():
            query, images, begun = await self._taken_in(request)
            deadline = begun + query.deadline_ms / _MILLI
            found = await _unless_gone(request, self._walked(query, images, deadline))
        return classification(
            found,
            labels=self.labels,
            top_k=query.top_k,
            order=query.order,
            expected=self._expected(len(found.route.order)),
            total_ms=(self.front.router.clock() - begun) * _MILLI,
        )

    def close(self) -> None:
        """End the threads, once what they do is done."""
        self._decoders.shutdown(wait=True, cancel_futures=True)
        self.front.close()

    async def _taken_in(self, request: Request) -> tuple[Query, Tensor, float]:
        """What is asked, its images decoded, and when the body was in; the body is let go."""
        with self._held.share() as share:
            body = await read_body(request, limits=self.limits, share=share)
            begun = self.front.router.clock()
            work = asyncio.get_running_loop().run_in_executor(
                self._decoders, self._read, body, request.headers
            )
            query, images = await _unless_gone(request, _awaited(work))
        return query, images, begun

    def _read(self, body: bytes, headers: Mapping[str, str]) -> tuple[Query, Tensor]:
        query, files = query_of(body, headers, bounds=self._bounds)
        return query, self._decoder.batch(files)

    async def _walked(self, query: Query, images: Tensor, deadline: float) -> Classified:
        try:
            async with asyncio.timeout(max(0.0, deadline - self.front.router.clock())):
                await self._turns.acquire()
        except TimeoutError as error:
            raise Unanswered(
                "The deadline passed before it was the request's turn",
                hint="try again later, or allow a later deadline",
            ) from error
        try:
            return await self.front.classify(
                images, deadline=deadline, min_blocks=query.min_blocks, order=query.order
            )
        finally:
            self._turns.release()

    def _expected(self, kept: int) -> tuple[Expected | None, str]:
        if self.calibration is None:
            return None, NEVER
        return expected_at(self.calibration, kept), ""

    @contextmanager
    def _opened(self) -> Iterator[None]:
        """Count an open request; raises `Refused` (429) if there are too many."""
        if self._open >= self.limits.running + self.limits.waiting:
            raise busy("Too many requests are open")
        self._open += 1
        try:
            yield
        finally:
            self._open -= 1


@dataclass
class _Budget:
    """Bytes that all bodies together may take."""

    free: int

    @contextmanager
    def share(self) -> Iterator[_Share]:
        """One body's part, given back at the end."""
        share = _Share(self)
        try:
            yield share
        finally:
            self.free += share.taken


@dataclass
class _Share:
    budget: _Budget
    taken: int = 0

    def take(self, count: int) -> None:
        """Take `count` bytes; raises `Refused` (429) if that many are not free."""
        if count > self.budget.free:
            raise busy("The bodies of other requests fill the memory")
        self.budget.free -= count
        self.taken += count


async def read_body(request: Request, *, limits: GatewayLimits, share: _Share) -> bytes:
    """The whole body. Raises `Refused`: 413 as soon as it is too large, 408 if it takes too long,
    429 if `share` has no room for it."""
    announced = request.headers.get("content-length", "")
    if announced.isdecimal() and int(announced[:_MAX_DIGITS]) > limits.max_body_bytes:
        raise _too_large(limits)
    chunks: list[bytes] = []
    size = 0
    try:
        async with asyncio.timeout(limits.body_ms / _MILLI):
            async for chunk in request.stream():
                size += len(chunk)
                if size > limits.max_body_bytes:
                    raise _too_large(limits)
                share.take(len(chunk))
                chunks.append(chunk)
    except TimeoutError as error:
        raise Refused(
            HTTPStatus.REQUEST_TIMEOUT,
            f"The body did not come in within {limits.body_ms / _MILLI:g} s",
            hint="send smaller images",
        ) from error
    return b"".join(chunks)


def busy(cause: str, *, wait: float = _SOON) -> Refused:
    """The answer to a client that is to come later, after `wait` seconds."""
    return Refused(
        HTTPStatus.TOO_MANY_REQUESTS,
        cause,
        hint="wait as long as Retry-After says, and send less at one time",
        retry_after=wait,
    )


def _too_large(limits: GatewayLimits) -> Refused:
    return Refused(
        HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
        f"The body is larger than {limits.max_body_bytes} bytes",
        hint="send fewer or smaller images",
    )


async def _awaited(work: asyncio.Future[_T]) -> _T:
    return await work


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
