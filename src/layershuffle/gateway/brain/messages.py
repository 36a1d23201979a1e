"""The messages between router, transports and hosts: states, visits, answers and failures.

A state travels as float32, as float16, or as int8 with a scale per token: that of one image in a
ViT-B/16 (197 x 768) takes 591, 296 or 148 KiB. Nothing here imports torch.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from layershuffle.gateway.brain.settings import Wire
from layershuffle.ground.errors import LayerShuffleError

State = NDArray[np.float32]
Outcome = Literal["answered", "late", "lost", "unavailable", "wrong", "failed"]


@dataclass(slots=True)
class Visit:
    """One call to one host: run `block`; the request waits for it `limit` seconds.

    `budget` (default: `limit`): remaining seconds of the whole request. The host gets this number,
    because a visit that was late and repeated elsewhere may still answer first. `fair`: the limit
    was long enough for lateness to count against the host. `expected`: expected seconds.
    """

    host: str
    block: int
    limit: float
    budget: float | None = field(default=None, compare=False)
    fair: bool = field(default=True, compare=False)
    expected: float = field(default=0.0, compare=False)

    @property
    def budget_ms(self) -> float:
        """The host's budget in milliseconds."""
        return 1000 * (self.limit if self.budget is None else self.budget)


@dataclass(eq=False, slots=True)
class Answer:
    """The state after a visit, float32 `[images, tokens, width]`, and where the time went (ms).

    `compute_ms`: of the batch that the visit was part of; `queue_ms`: the rest of its time at the
    host; `batch`: images of that batch, those of other visits included.
    """

    state: State
    compute_ms: float
    queue_ms: float
    batch: float = 1.0


class VisitError(LayerShuffleError):
    """A visit without an answer. Transports raise it; clients never see it directly.

    `outcome` decides what becomes of the host (`state.failed`). "lost": its process is dead, and
    only a new one can take its name; "unavailable": it cannot be reached now or takes no more work;
    "late": the budget ran out before its turn; "failed": it raised; "wrong": it answered what no
    honest host answers.
    """

    def __init__(self, cause: str, *, outcome: Outcome) -> None:
        super().__init__(cause)
        self.outcome = outcome


class Visited(NamedTuple):
    """One hop of a route: times in milliseconds, `why` unless the outcome is "answered".

    `batch`: as in `Answer`; `lag_ms`: time beyond the expected one, `None` for canaries;
    `begun_ms`: its begin, since that of its walk.
    """

    host: str
    block: int
    outcome: Outcome
    ms: float
    compute_ms: float = 0.0
    queue_ms: float = 0.0
    why: str = ""
    batch: float = 1.0
    lag_ms: float | None = None
    begun_ms: float = 0.0


Ending = Literal["complete", "sure", "deadline", "unreachable"]
WHOLE: tuple[Ending, ...] = ("complete", "sure")
"""Endings of requests that ran all the blocks that they should run."""


@dataclass(frozen=True)
class Route:
    """The way of a request through the swarm.

    `order`: the blocks that ran, in execution order; `versions`: the version of the state that each
    of them read (`core.orders`); `skipped`: the other blocks with the reasons. `ending`: complete,
    sure (the answer was as sure as asked for), deadline (the time was up) or unreachable (no
    healthy host held a missing block). `ms`: total milliseconds. `fixed`: how many first and last
    blocks of the model keep their place; stem and head run them, and no route has them.
    """

    depth: int
    order: tuple[int, ...]
    versions: tuple[int, ...]
    skipped: dict[int, str]
    hops: tuple[Visited, ...]
    ending: Ending
    ms: float
    fixed: tuple[int, int] = (0, 0)

    @property
    def steps(self) -> tuple[tuple[int, int], ...]:
        """(block, version that it read) of every step."""
        return tuple(zip(self.order, self.versions, strict=True))

    @property
    def kept(self) -> int:
        """The number of different blocks that ran."""
        return len(set(self.order))

    @property
    def degraded(self) -> bool:
        """Whether the answer lacks blocks that it should have."""
        return self.ending not in WHOLE


class Transport(Protocol):
    """Carries visits to hosts."""

    def visit(self, visit: Visit, state: State, *, form: Wire = "fp32") -> Awaitable[Answer]:
        """The host's answer to `state`, float32 `[images, tokens, width]`, which travels as `form`.

        On a narrow wire the answer is what the block added, which is smaller and has smaller
        rounding errors; it is added to `state`, which was never rounded. The host gets
        `visit.budget_ms`, never a time of day, because clocks differ. Raises `VisitError`;
        cancellation drops the visit.
        """


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
