"""Which visits a host runs next, and which of them together. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

from torch import Tensor

from layershuffle.swarm.messages import Answer, Packet
from layershuffle.swarm.program import Block

MAX_SKIPS = 8
"""Turns after which the oldest visit goes first, however few others need its block."""


@dataclass(eq=False)
class QueuedVisit:
    """A visit at this host. `steps`: the blocks it is to run, as they were when it came.

    `compute`: seconds of the batches that it was in, `each`: their seconds per image.
    """

    # The blocks themselves and not their ids: a swap does not change a visit that is here.
    steps: tuple[Block, ...]
    packet: Packet
    arrived: float
    expires: float
    future: Future[Answer] = field(default_factory=Future)
    state: Tensor | None = None
    done: int = 0
    compute: float = 0.0
    each: float = 0.0
    passed: int = 0
    alone: bool = False

    @property
    def images(self) -> int:
        """Number of images in its state."""
        return self.packet.images

    @property
    def batch_key(self) -> object:
        """Visits of one key can go through their next block together."""
        # Blocks compare by identity, so that old and new weights of one id never share a batch.
        return self if self.alone else self.steps[self.done]


class Waiting(Protocol):
    """What the choice reads of a visit that waits; the simulation's visits have it too."""

    @property
    def images(self) -> int:
        """Number of images in its state."""

    @property
    def batch_key(self) -> object:
        """Visits of one key can go through their next block together."""

    passed: int
    """How often others went before it."""


_Waiting = TypeVar("_Waiting", bound=Waiting)


def next_batch(jobs: Sequence[_Waiting], *, images: int) -> list[_Waiting]:
    """The waiting `jobs` (oldest first) that go through one block together next.

    They need the block that most of the jobs need; if there are several such blocks, the one that
    the oldest job needs. The batch holds as many jobs as `images` allows, and at least one. An
    oldest job that was passed over `MAX_SKIPS` times goes first.
    """
    groups: dict[object, list[_Waiting]] = {}
    for job in jobs:
        groups.setdefault(job.batch_key, []).append(job)
    oldest = jobs[0]
    # The fullest block first lets visits meet, but alone it could leave one behind for as long as
    # others keep coming (decision 009).
    patient = oldest.passed < MAX_SKIPS
    # Groups stand in the order of their oldest jobs, and of equal ones `max` takes the first.
    group = max(groups.values(), key=len) if patient else groups[oldest.batch_key]
    chosen, total = group[:1], group[0].images
    # A job that is too large is passed over, and smaller ones behind it still go.
    for job in group[1:]:
        if total + job.images <= images:
            chosen.append(job)
            total += job.images
    return chosen
