"""The model at the gateway: its stem and head run here, its blocks on the hosts.

A request is three steps: stem, walk through the swarm, head. A request that ends when it is sure
has run its head after every block.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from layershuffle.swarm.messages import NotAnswered, Route, State
from layershuffle.swarm.router import Router
from layershuffle.swarm.served import ServedModel
from layershuffle.swarm.sureness import probabilities

_MILLI = 1000.0
_WORKERS = 8  # most stems and heads that compute at a time; a walk needs no thread
_HEAD_WEIGHT = 0.2  # weight of the newest measurement in the average time of the head
# Up to here stems and heads run in the event loop: changing threads takes as long, and costs more.
_INLINE_SECONDS = 0.001


@dataclass(frozen=True)
class Classified:
    """Logits `[images, classes]`, float32, the route, and times in milliseconds.

    `temperature`: what makes their probabilities the chance of being right, `None` if unknown.
    """

    logits: NDArray[np.float32]
    temperature: float | None
    route: Route
    stem_ms: float
    swarm_ms: float
    head_ms: float


class RemoteModel:
    """A model whose blocks run in the swarm.

    `temperatures`: by the number of blocks (`sureness`). `stem_seconds`: time of the last stem,
    `head_seconds`: average time of a head. Use it from the router's event loop.
    """

    def __init__(
        self,
        model: ServedModel,
        router: Router,
        *,
        temperatures: Sequence[float] = (),
    ) -> None:
        self.model, self.router, self.depth = model, router, model.depth
        self.temperatures = temperatures
        self.stem_seconds, self.head_seconds = math.inf, 0.0
        self._pool = ThreadPoolExecutor(_WORKERS, thread_name_prefix="remote-model")

    async def classify(
        self,
        images: NDArray[np.float32],
        *,
        deadline: float,
        min_blocks: int = 1,
        useful_blocks: int = 1,
        confidence: float | None = None,
    ) -> Classified:
        """Classify `images` `[n, channels, height, width]`, prepared for the model's view.

        `deadline`: in seconds of the router's clock. With fewer than `useful_blocks` blocks it
        waits for hosts that may come back, but still answers in time. It ends with fewer blocks
        once the chance of being right reaches `confidence`, which needs temperatures. Raises
        `NotAnswered` for fewer than `min_blocks` blocks, for a stem that could not run in time, and
        for a pipeline that broke. Cancellation ends the walk as well.
        """
        loop, router = asyncio.get_running_loop(), self.router
        # The router reserves `reserve_ms` for the head; if heads take longer, it must finish
        # earlier.
        late_by = max(0.0, self.head_seconds - router.limits.reserve_ms / _MILLI)
        begun = time.perf_counter()
        try:
            # A cancelled stem that is still queued never runs.
            async with asyncio.timeout(max(0.0, deadline - router.clock())):
                if self.stem_seconds <= _INLINE_SECONDS:
                    start = self._stem(images)
                else:
                    start = await loop.run_in_executor(self._pool, self._stem, images)
        except TimeoutError as error:
            raise NotAnswered(
                "The deadline passed before the model's stem had run",
                hint="try again later, or allow a later deadline",
            ) from error
        entered = time.perf_counter()
        heads = _Heads(self.model, self.temperatures)
        state, route = await router.walk(
            start,
            deadline=deadline - late_by,
            min_blocks=max(min_blocks, useful_blocks),
            confidence=confidence,
            chance=heads.chance,
        )
        try:
            check_enough(route, min_blocks=min_blocks)
        except NotAnswered:
            # Without this, no head would run and update the average: after one stall of ten seconds
            # every request of two seconds would be refused forever.
            if late_by:
                self.head_seconds *= 1 - _HEAD_WEIGHT
            raise
        left = time.perf_counter()
        if heads.state is not state:
            if 0 < self.head_seconds <= _INLINE_SECONDS:
                heads.run(state)
            else:
                await loop.run_in_executor(self._pool, heads.run, state)
        self.head_seconds += _HEAD_WEIGHT * (heads.seconds / heads.runs - self.head_seconds)
        logits = heads.logits
        # Every hop was finite, but a head may overflow.
        if not np.isfinite(logits).all():
            raise NotAnswered(
                "The model's head gave numbers that are not finite",
                route=route,
                hint="the weights are broken: score the model by layershuffle eval",
            )
        return Classified(
            logits=logits,
            temperature=self.temperatures[route.kept - 1] if self.temperatures else None,
            route=route,
            stem_ms=(entered - begun) * _MILLI,
            swarm_ms=(left - entered) * _MILLI,
            head_ms=(time.perf_counter() - left) * _MILLI,
        )

    def take_over(self, model: ServedModel, temperatures: Sequence[float]) -> None:
        """Answer by another model from now on, while no request is under way."""
        self.model, self.temperatures, self.stem_seconds = model, temperatures, math.inf

    def _stem(self, images: NDArray[np.float32]) -> State:
        begun = time.perf_counter()
        start = self.model.stem(images)
        self.stem_seconds = time.perf_counter() - begun
        return start

    def close(self) -> None:
        """End the worker threads after their current computations."""
        self._pool.shutdown(wait=True, cancel_futures=True)


class _Heads:
    """The heads of one request: the newest `logits`, those of `state`, and `seconds` of all `runs`.

    `temperatures`: by the number of blocks.
    """

    logits: NDArray[np.float32]

    def __init__(self, model: ServedModel, temperatures: Sequence[float]) -> None:
        self._model, self._temperatures = model, temperatures
        self.state: State | None = None
        self.runs, self.seconds = 0, 0.0

    def run(self, state: State) -> None:
        """Compute the logits of `state`."""
        begun = time.perf_counter()
        self.state, self.logits = state, self._model.head(state)
        self.seconds += time.perf_counter() - begun
        self.runs += 1

    def chance(self, state: State, blocks: int) -> float:
        """That the least sure answer for `state`, after so many different blocks, is right."""
        self.run(state)
        return float(probabilities(self.logits, self._temperatures[blocks - 1]).max(axis=-1).min())


def check_enough(route: Route, *, min_blocks: int) -> None:
    """Raises `NotAnswered` if too few blocks ran, or the pipeline broke."""
    if route.ending == "lost":
        first = min(route.skipped, default=0)
        raise NotAnswered(
            f"The pipeline broke at block {first}: {route.skipped.get(first, 'no reason known')}",
            route=route,
            hint="order-free routing would go on without it",
        )
    if route.kept < min_blocks:
        why = sorted(set(route.skipped.values()))
        raise NotAnswered(
            f"{route.kept} of {route.depth} blocks could be run, {min_blocks} are needed "
            f"({'; '.join(why[:3]) or 'no reason known'})",
            route=route,
            hint="try again later, allow a later deadline, or ask for fewer blocks (min_blocks; on "
            "a command line --min-blocks)",
        )
