"""What router, transports and hosts say to each other. Plain data and the failures of a visit."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol

from layershuffle.errors import LayerShuffleError

if TYPE_CHECKING:
    from layershuffle.swarm.wire import Packet

Outcome = Literal["answered", "late", "lost", "unavailable", "wrong", "failed"]


@dataclass(frozen=True, slots=True)
class Visit:
    """One call to one host: run `blocks`, in this order; given up after `limit` seconds."""

    host: str
    blocks: tuple[int, ...]
    limit: float


@dataclass(frozen=True, slots=True)
class Answer:
    """A host's answer to a visit: the state after its blocks, and where the time went (ms).

    `queue_ms` is the wait at the host before its compute, `batch` the number of images that ran
    through the first block together with this visit's.
    """

    packet: Packet
    compute_ms: float
    queue_ms: float
    batch: int = 1


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
    """One hop of a route as it went: times in milliseconds, `why` for everything but "answered"."""

    host: str
    blocks: tuple[int, ...]
    outcome: Outcome
    ms: float
    compute_ms: float = 0.0
    queue_ms: float = 0.0
    why: str = ""


Ending = Literal["complete", "deadline", "unreachable", "lost"]


@dataclass(frozen=True)
class Route:
    """How a request went through the swarm.

    `order` holds the blocks that ran, in execution order; `skipped` the others, each with the
    reason. `ending`: complete, deadline (the time was up), unreachable (no healthy host held what
    was missing) or lost (fixed-order routing could not go on; such a request has failed).
    """

    depth: int
    order: tuple[int, ...]
    skipped: dict[int, str]
    hops: tuple[Visited, ...]
    ending: Ending
    ms: float

    @property
    def degraded(self) -> bool:
        """Whether the answer misses blocks."""
        return self.ending != "complete"


class Transport(Protocol):
    """How visits reach hosts. One contract suite runs over every engine (tests/swarm)."""

    async def visit(self, visit: Visit, packet: Packet) -> Answer:
        """The host's answer. Raises a `VisitError`; being cancelled drops the visit.

        The host is told `visit.limit` as its remaining budget, never a time of day.
        """
