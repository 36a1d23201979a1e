"""Carry out a classification, from the first byte of its body to the answer."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress
from functools import partial

import numpy as np
from numpy.typing import NDArray
from starlette.requests import Request

from layershuffle.swarm.calibration import Calibration
from layershuffle.swarm.expectations import NEVER, Expected, expected_at, useful_blocks
from layershuffle.swarm.policy import side_by_side
from layershuffle.swarm.remote_model import Classified, RemoteModel
from layershuffle.swarm.rounds import Cell, cell_of
from layershuffle.swarm.server.admission import Admission, Client, too_late
from layershuffle.swarm.server.errors import unprocessable
from layershuffle.swarm.server.images import Decoder
from layershuffle.swarm.server.limits import GatewayLimits
from layershuffle.swarm.server.requests import Options, image_in
from layershuffle.swarm.server.schemas import Classification, classification

_MILLI = 1000.0


class RequestScheduler:
    """Carries out classifications, as many at a time as the limits allow.

    `labels`: the class names, in the order of the model's logits. `decoder_threads`: the executor
    that decodes images (default: as many threads as the limits allow).
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
        self.take_over(calibration)
        self._clock = remote_model.router.clock
        self.admission = Admission(limits, clock=self._clock)
        self._decoder = Decoder(remote_model.model.manifest.file_view, limits)
        self._decoder_threads = decoder_threads or ThreadPoolExecutor(
            limits.decoders, thread_name_prefix="decoder"
        )
        self._walks = asyncio.Semaphore(limits.running)

    def take_over(self, calibration: Calibration | None) -> None:
        """Expect of answers what another `calibration` says."""
        self.calibration, self._useful = calibration, useful_blocks(calibration)

    @asynccontextmanager
    async def paused(self, seconds: float) -> AsyncIterator[bool]:
        """Let no request walk within; false if those that do so now take longer than `seconds`.

        New ones wait for their turn.
        """
        turns = 0
        try:
            with suppress(TimeoutError):
                async with asyncio.timeout(seconds):
                    while turns < self.limits.running:
                        await self._walks.acquire()
                        turns += 1
            yield turns == self.limits.running
        finally:
            for _ in range(turns):
                self._walks.release()

    async def classify(self, request: Request, options: Options) -> Classification:
        """The answer to `request`. Raises `HTTPError`, `NotAnswered`, `DataError`.

        The deadline counts from the end of the body, and covers the waits for a decoder and for a
        walk, decoding, and the walk.
        """
        self._check(options)

        async def answered(client: Client, body: bytes) -> tuple[Classified, float]:
            begun = self._clock()
            swarm = self.remote_model.router.limits
            deadline = begun + (options.deadline_ms or swarm.deadline_ms) / _MILLI
            image = await self.admission.compute(
                client,
                partial(self._decoder.batch, image_in(body)),
                pool=self._decoder_threads,
                deadline=deadline,
                event="the image was decoded",
            )
            return await self._walk(image, options, deadline=deadline), begun

        classified, begun = await self.admission.carry(request, answered)
        route = classified.route
        return classification(
            classified,
            labels=self.labels,
            top=options.top,
            expected=self._expected_with(cell_of(route.steps) if route.order else None),
            total_ms=(self._clock() - begun) * _MILLI,
        )

    def close(self) -> None:
        """End the decoder threads when their work is done, and close the remote model."""
        self._decoder_threads.shutdown(wait=True, cancel_futures=True)
        self.remote_model.close()

    def _check(self, options: Options) -> None:
        """Raises `HTTPError` (422) for more blocks than there are, and an impossible deadline."""
        most = self.remote_model.depth
        if options.min_blocks is not None and options.min_blocks > most:
            raise unprocessable(
                f"min_blocks is {options.min_blocks}, but at most {most} blocks can run",
                hint=f"ask for at most {most} (min_blocks; on a command line --min-blocks)",
            )
        if isinstance(options.confidence, float) and not self.remote_model.temperatures:
            raise unprocessable(
                "How sure its answers are was never measured on this model",
                hint="run layershuffle swarm calibrate, or leave confidence out",
            )
        low, high = self.limits.min_deadline_ms, self.remote_model.router.limits.max_deadline_ms
        if options.deadline_ms is not None and not low <= options.deadline_ms <= high:
            raise unprocessable(
                f"deadline_ms is {options.deadline_ms:g}", hint=f"ask for {low:g} to {high:g} ms"
            )

    async def _walk(
        self, image: NDArray[np.float32], options: Options, *, deadline: float
    ) -> Classified:
        try:
            async with asyncio.timeout(max(0.0, deadline - self._clock())):
                await self._walks.acquire()
        except TimeoutError as error:
            raise too_late("it was the request's turn") from error
        try:
            # No time-out here: the router ends a walk in time, to answer with the blocks that ran.
            return await self.remote_model.classify(
                image,
                deadline=deadline,
                min_blocks=options.min_blocks or 1,
                useful_blocks=options.min_blocks or self._useful,
                confidence=self._confidence(options),
            )
        finally:
            self._walks.release()

    def _confidence(self, options: Options) -> float | None:
        """The chance of being right at which a request may end; `None` if it runs all blocks."""
        if options.confidence == "off" or not self.remote_model.temperatures:
            return None
        if options.confidence is not None or self.calibration is None:
            return options.confidence
        sureness = self.calibration.sureness
        return None if sureness is None else sureness.confidence

    def expected_now(self) -> tuple[Expected | None, str]:
        """The accuracy to expect if all reachable blocks run, or `None` and the reason."""
        router = self.remote_model.router
        reachable = {b for host in router.swarm.values() if host.usable for b in host.blocks}
        passes, parallel = 1, 1
        if router.routing == "order-free":
            rounds, walks = router.rounds, router.walks + 1
            passes = rounds.way(len(reachable)).passes
            # Busy or fast hosts run one visit at a time, whatever the calibration allows.
            parallel = side_by_side(len(reachable), router.swarm, rounds=rounds, walks=walks)
        return self._expected_with(Cell(len(reachable), passes, parallel) if reachable else None)

    def _expected_with(self, cell: Cell | None) -> tuple[Expected | None, str]:
        """The accuracy to expect of answers in `cell`, or `None` and the reason."""
        if self.calibration is None:
            return None, NEVER
        if cell is None:
            return None, "no block can be run"
        expected = expected_at(self.calibration, cell)
        why = f"{cell.kept} blocks were not measured with answers as late as these"
        return expected, "" if expected else why
