"""The messages between router, transports and hosts: states, visits, answers and failures.

A state is sent as float32, as float16, or as int8 with a scale per token: that of one image in a
ViT-B/16 (197 x 768) takes 591, 296 or 148 KiB. Plain data and numpy.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from layershuffle.errors import LayerShuffleError, UsageError

State = NDArray[np.float32]
Wire = Literal["fp32", "fp16", "int8"]
_LEVELS = 127
Outcome = Literal["answered", "late", "lost", "unavailable", "wrong", "failed"]


@dataclass(frozen=True, slots=True)
class Packet:
    """A state `[images, tokens, width]`: `values` in the wire's type, `scales` for int8 only."""

    wire: Wire
    values: NDArray[Any]
    scales: NDArray[np.float32] | None = None

    @property
    def images(self) -> int:
        """Number of images in the state."""
        return len(self.values)

    @property
    def nbytes(self) -> int:
        """Bytes on the wire, without the envelope."""
        return int(self.values.nbytes) + (0 if self.scales is None else int(self.scales.nbytes))


def pack(state: State, wire: Wire) -> Packet:
    """Encode `state`, float32 `[images, tokens, width]`. Raises `UsageError` for other types.

    fp32 is exact; fp16 rounds to 11 bits; int8 rounds each token to 1/127 of its largest value.
    """
    if state.dtype != np.float32:
        raise UsageError(f"A state travels from float32, not {state.dtype}")
    if wire == "fp32":
        return Packet(wire, np.ascontiguousarray(state))
    if wire == "fp16":
        # Values beyond the range of fp16 would become infinite, and an honest host would look
        # wrong.
        limits = np.finfo(np.float16)
        small = np.clip(state, limits.min, limits.max)
        # Non-finite values are kept, because the router must see them.
        return Packet(wire, np.where(np.isfinite(state), small, state).astype(np.float16))
    # A scale per token, so a token with large values does not coarsen the others.
    largest = np.abs(state).max(axis=-1, keepdims=True)
    # A token of zeros would divide by zero.
    scales = np.where(largest == 0, 1, largest / _LEVELS).astype(np.float32)
    broken = ~np.isfinite(scales)
    scales[broken] = np.nan  # so that its whole token is not finite
    levels = state / scales
    # In place, because states are large.
    np.rint(levels, out=levels)
    # int8 has no NaN, so only the scale shows that the token is broken.
    if broken.any():
        np.nan_to_num(levels, copy=False)
    return Packet(wire, levels.astype(np.int8), scales)


def unpack(packet: Packet) -> State:
    """The values of a packet, float32 `[images, tokens, width]`."""
    if packet.scales is None:
        return packet.values.astype(np.float32, copy=False)
    return packet.values.astype(np.float32) * packet.scales


def pack_answer(after: State, received: Packet) -> Packet:
    """The answer to a visit with the packet `received`, whose blocks returned `after`.

    On a narrow wire it holds only the residual of the blocks, which is smaller than the state and
    has smaller rounding errors. The router adds it to its own copy of the state, which was never
    rounded.
    """
    return pack(after if received.wire == "fp32" else after - unpack(received), received.wire)


def unpack_answer(packet: Packet, *, before: State) -> State:
    """The state after a visit with the state `before`, from the packet of its answer.

    Raises `ValueError` for an answer of another shape.
    """
    values = unpack(packet)
    # Numpy would broadcast some other shapes and add them anyway.
    if values.shape != before.shape:
        raise ValueError(f"it has the shape {values.shape}, not {before.shape}")
    return values if packet.wire == "fp32" else before + values


@dataclass(frozen=True, slots=True)
class Visit:
    """One call to one host: run `blocks`, in this order; cancelled after `limit` seconds.

    `budget` (default: `limit`): remaining seconds of the whole request. The host gets this number,
    because a visit that was late and repeated elsewhere may still answer first. `fair`: the limit
    was long enough for lateness to count against the host. `expected`: expected seconds. `waited`:
    the request waits for it until its limit; else its answer counts only if it arrives before the
    request ends.
    """

    host: str
    blocks: tuple[int, ...]
    limit: float
    budget: float | None = field(default=None, compare=False)
    fair: bool = field(default=True, compare=False)
    expected: float = field(default=0.0, compare=False)
    waited: bool = True

    @property
    def budget_ms(self) -> float:
        """The host's budget in milliseconds."""
        return 1000 * (self.limit if self.budget is None else self.budget)


@dataclass(frozen=True, slots=True)
class Answer:
    """A host's answer to a visit (`pack_answer`), and where the time went (ms).

    `compute_ms` is the whole time of the batches that the visit was part of, `queue_ms` the rest of
    its time at the host. `batch` is the number of images per batch, including those of other
    visits: a mean over the blocks such that `compute_ms / batch` is the time of one image.
    """

    packet: Packet
    compute_ms: float
    queue_ms: float
    batch: float = 1.0


class VisitError(LayerShuffleError):
    """A visit without an answer. Transports raise it; clients never see it directly."""

    outcome: Outcome = "failed"


# `state.failed` depends on which of these is raised: dead hosts are gone, others become suspects
# and are tried again later.
class HostGone(VisitError):
    """The host's process is dead; only a new process can take its name."""

    outcome: Outcome = "lost"


class HostUnavailable(VisitError):
    """The host cannot be reached now or takes no more work, but may do so again later."""

    outcome: Outcome = "unavailable"


class WorkExpired(VisitError):
    """The host dropped the visit because its budget had run out before its turn."""

    outcome: Outcome = "late"


class HostFailed(VisitError):
    """The host raised while it ran the visit."""

    outcome: Outcome = "failed"


@dataclass(frozen=True, slots=True)
class Visited:
    """One hop of a route: times in milliseconds, `why` unless the outcome is "answered".

    `images`: images of the request; `batch`: as in `Answer`; `lag_ms`: time beyond the expected
    one, `None` for canaries; `begun_ms`: its begin, since that of its walk.
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
    lag_ms: float | None = None
    begun_ms: float = 0.0


Ending = Literal["complete", "enough", "deadline", "unreachable", "lost"]
WHOLE: tuple[Ending, ...] = ("complete", "enough")
"""Endings of requests that ran all the blocks that they should run."""


@dataclass(frozen=True)
class Route:
    """The way of a request through the swarm.

    `order`: the blocks that ran, in execution order; `versions`: the version of the state that each
    of them read, `None` if always the newest (`core.orders`); `skipped`: the other blocks
    with the reasons. `ending`: complete, enough (as many blocks as the plan needs), deadline (the
    time was up), unreachable (no healthy host held a missing block) or lost (fixed-order routing
    could not continue; the request has failed). `ms`: total milliseconds.
    """

    depth: int
    order: tuple[int, ...]
    skipped: dict[int, str]
    hops: tuple[Visited, ...]
    ending: Ending
    ms: float
    versions: tuple[int, ...] | None = None

    @property
    def steps(self) -> tuple[tuple[int, int], ...]:
        """(block, version that it read) of every step."""
        versions = range(len(self.order)) if self.versions is None else self.versions
        return tuple(zip(self.order, versions, strict=True))

    @property
    def kept(self) -> int:
        """The number of different blocks that ran."""
        return len(set(self.order))

    @property
    def degraded(self) -> bool:
        """Whether the answer lacks blocks that it should have."""
        return self.ending not in WHOLE


class Transport(Protocol):
    """Carries visits to hosts. One contract suite runs over every engine (tests/swarm)."""

    async def visit(self, visit: Visit, packet: Packet) -> Answer:
        """The host's answer. Raises `VisitError`; cancellation drops the visit.

        The host gets `visit.budget_ms`, never a time of day, because clocks differ.
        """


class NotAnswered(LayerShuffleError):
    """The swarm could not answer a request; `route` is its route so far, if it began."""

    def __init__(self, cause: str, *, route: Route | None = None, hint: str | None = None) -> None:
        super().__init__(cause, hint=hint)
        self.route = route
