"""What router, transports and hosts say to each other. Plain data and the failures of a visit."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, Protocol

from layershuffle.errors import LayerShuffleError

if TYPE_CHECKING:
    from layershuffle.swarm.wire import Packet

Outcome = Literal["answered", "late", "lost", "unavailable", "wrong", "failed"]


@dataclass(frozen=True, slots=True)
class Visit:
    """One call to one host: run `blocks`, in this order; given up after `limit` seconds.

    `budget`: seconds that are left to the whole request, which the host is told: while a visit that
    was given up is repeated elsewhere it may still answer first. By default `limit`. `fair`: the
    limit gave the host time enough for its lateness to count against it.
    """

    host: str
    blocks: tuple[int, ...]
    limit: float
    budget: float | None = field(default=None, compare=False)
    fair: bool = field(default=True, compare=False)

    @property
    def budget_ms(self) -> float:
        """What the host is told, in milliseconds."""
        return 1000 * (self.limit if self.budget is None else self.budget)


@dataclass(frozen=True, slots=True)
class Answer:
    """A host's answer to a visit: the state after its blocks, and where the time went (ms).

    `compute_ms` counts the whole time of the batches that it was part of, `queue_ms` the wait at
    the host beside that. `batch`: images of a batch, those of other visits too; a mean over its
    blocks such that `compute_ms / batch` is the time of one image.
    """

    packet: Packet
    compute_ms: float
    queue_ms: float
    batch: float = 1.0


class VisitError(LayerShuffleError):
    """A visit brought no answer. Raised by transports, never shown to clients as it is."""

    outcome: Outcome = "failed"


class HostGone(VisitError):
    """The host's process is dead and does not come back under this name's handle."""

    outcome: Outcome = "lost"


class HostUnavailable(VisitError):
    """The host cannot be reached now, or takes no more work; it may come back."""

    outcome: Outcome = "unavailable"


class WorkExpired(VisitError):
    """The host dropped the visit because its budget had run out before its turn."""

    outcome: Outcome = "late"


class HostFailed(VisitError):
    """The host raised while it ran the visit."""

    outcome: Outcome = "failed"


@dataclass(frozen=True, slots=True)
class Visited:
    """One hop of a route as it went: times in milliseconds, `why` for everything but "answered".

    `images`: of the request; `batch`: as in `Answer`.
    """

    host: str
    blocks: tuple[int, ...]
    outcome: Outcome
    ms: float
    compute_ms: float = 0.0
    queue_ms: float = 0.0
    why: str = ""
    images: int = 1
    batch: float = 1.0


Ending = Literal["complete", "enough", "deadline", "unreachable", "lost"]
WHOLE: tuple[Ending, ...] = ("complete", "enough")
"""Endings of requests that got all the blocks that they should have."""


@dataclass(frozen=True)
class Route:
    """How a request went through the swarm.

    `order` holds the blocks that ran, in execution order; `skipped` the others, each with the
    reason. `ending`: complete, enough (as many blocks as the plan wants), deadline (the time was
    up), unreachable (no healthy host held what was missing) or lost (fixed-order routing could not
    go on; such a request has failed).
    """

    depth: int
    order: tuple[int, ...]
    skipped: dict[int, str]
    hops: tuple[Visited, ...]
    ending: Ending
    ms: float

    @property
    def degraded(self) -> bool:
        """Whether the answer misses blocks that it should have."""
        return self.ending not in WHOLE


class Transport(Protocol):
    """How visits reach hosts. One contract suite runs over every engine (tests/swarm)."""

    async def visit(self, visit: Visit, packet: Packet) -> Answer:
        """The host's answer. Raises a `VisitError`; being cancelled drops the visit.

        The host is told `visit.budget_ms` as its remaining budget, never a time of day.
        """
