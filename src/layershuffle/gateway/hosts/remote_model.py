"""The model at the gateway: its stem and head run here, its blocks on the hosts.

A request is three steps: stem, walk through the swarm, head. A request that ends when it is sure
has run its head after every block.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from layershuffle.gateway.brain.policy import Route
from layershuffle.gateway.brain.state import State
from layershuffle.gateway.brain.sureness import probabilities
from layershuffle.gateway.calibration.calibration import Calibration, rounds_of, useful_blocks
from layershuffle.gateway.calibration.served import ServedModel
from layershuffle.gateway.hosts.places import HeldPlace
from layershuffle.gateway.hosts.router import Router
from layershuffle.ground.errors import LayerShuffleError

_MILLI = 1000.0
_WORKERS = 8  # most stems and heads that compute at a time; a walk needs no thread
_WEIGHT = 0.2  # of the newest measurement in an average time
# Up to here stems and heads run in the event loop: changing threads takes as long, and costs more.
_INLINE_SECONDS = 0.001


class NotAnswered(LayerShuffleError):
    """The swarm could not answer a request."""


@asynccontextmanager
async def time_limit(
    deadline: float, event: str, *, clock: Callable[[], float]
) -> AsyncIterator[None]:
    """Raise `NotAnswered` within at `deadline`, in seconds of `clock`: it passed before `event`."""
    try:
        async with asyncio.timeout(max(0.0, deadline - clock())):
            yield
    except TimeoutError as error:
        raise NotAnswered(
            f"The deadline passed before {event}",
            hint="try again later, allow a later deadline, or send a smaller image",
        ) from error


@dataclass(frozen=True)
class Classified:
    """Logits `[1, classes]`, float32, the route, and times in milliseconds.

    `temperature`: what makes their probabilities the chance of being right, `None` if unknown.
    """

    logits: NDArray[np.float32]
    temperature: float | None
    route: Route
    stem_ms: float
    swarm_ms: float
    head_ms: float


class _Timed:
    """A part of the model that runs here: in the event loop if it is short, else in a thread of
    `pool`. `seconds`: its average time, 0 before the first."""

    def __init__(self, pool: ThreadPoolExecutor) -> None:
        self._pool, self.seconds = pool, 0.0

    def run(self, part: Callable[[State], State], values: State) -> State:
        """What the part computes."""
        begun = time.perf_counter()
        out = part(values)
        self.seconds += _WEIGHT * (time.perf_counter() - begun - self.seconds)
        return out

    async def result(self, part: Callable[[State], State], values: State) -> State:
        """The same, without holding up the loop; cancelled before its turn, it never runs."""
        if 0 < self.seconds <= _INLINE_SECONDS:
            return self.run(part, values)
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._pool, self.run, part, values)


class RemoteModel:
    """A model whose blocks run in the swarm.

    `calibration`: the model's, `None` if it has none; `temperatures`: by the number of blocks, as
    it measured them (`sureness`). Use it from the router's event loop.
    """

    def __init__(
        self, model: ServedModel, router: Router, *, calibration: Calibration | None = None
    ) -> None:
        self.model = model
        self.router = router
        self.calibration = calibration
        self.temperatures = () if calibration is None else calibration.temperatures
        self.router.rounds = rounds_of(calibration)
        self._useful = useful_blocks(calibration)
        self._pool = ThreadPoolExecutor(_WORKERS, thread_name_prefix="remote-model")
        self._stem = _Timed(self._pool)
        self._head = _Timed(self._pool)

    async def classify(
        self,
        image: NDArray[np.float32],
        *,
        deadline: float,
        min_blocks: int | None = None,
        confidence: float | None = None,
        place: HeldPlace | None = None,
    ) -> Classified:
        """Classify an `image` `[1, channels, height, width]`, prepared for the model's view.

        `deadline`: in seconds of the router's clock; `place`: what it leaves while it waits for
        hosts. With too few blocks for half of the accuracy
        it waits for hosts that may come back, but still answers in time. It ends with fewer blocks
        once the chance of being right reaches `confidence`, which needs temperatures. Raises
        `NotAnswered` for fewer than `min_blocks` blocks, which it then waits for instead, and
        for a stem that could not run in time. Cancellation ends the walk as well.
        """
        router, model = self.router, self.model
        answered: tuple[State, NDArray[np.float32]] | None = None
        # The router reserves `reserve_ms` for the head; if heads take longer, it must finish
        # earlier. It has half of the time in any case: after one stall of ten seconds no request of
        # two would get to its head, which brings the average down.
        head = min(self._head.seconds, (deadline - router.clock()) / 2)
        late_by = max(0.0, head - router.limits.reserve_ms / _MILLI)
        begun = time.perf_counter()
        async with time_limit(deadline, "the model's stem had run", clock=router.clock):
            start = await self._stem.result(model.stem, image)
        entered = time.perf_counter()

        def chance(state: State, blocks: int) -> float:
            nonlocal answered
            answered = state, self._head.run(model.head, state)
            return float(probabilities(answered[1], self.temperatures[blocks - 1]).max())

        state, route = await router.walk(
            start,
            deadline=deadline - late_by,
            min_blocks=min_blocks or self._useful,
            confidence=confidence,
            chance=chance,
            place=place,
        )
        try:
            check_enough(route, min_blocks=min_blocks or 1)
        except NotAnswered:
            # No head ran that would bring the average down: where half of the time is too little,
            # all later requests would be refused, too.
            if late_by:
                self._head.seconds *= 1 - _WEIGHT
            raise
        left = time.perf_counter()
        if answered is None or answered[0] is not state:
            answered = state, await self._head.result(model.head, state)
        logits = answered[1]
        # Every hop was finite, but a head may overflow.
        if not np.isfinite(logits).all():
            raise NotAnswered(
                "The model's head gave numbers that are not finite",
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

    def close(self) -> None:
        """End the worker threads after their current computations."""
        self._pool.shutdown(wait=True, cancel_futures=True)


def check_enough(route: Route, *, min_blocks: int) -> None:
    """Raises `NotAnswered` if too few blocks ran."""
    if route.kept < min_blocks:
        why = sorted(set(route.skipped.values()))
        raise NotAnswered(
            f"{route.kept} of {route.depth - sum(route.fixed)} blocks could be run, {min_blocks} "
            "are needed "
            f"({'; '.join(why[:3]) or 'no reason known'})",
            hint="try again later, allow a later deadline, or ask for fewer blocks (min_blocks; on "
            "a command line --min-blocks)",
        )
