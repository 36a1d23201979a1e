"""The routing policy: the rules that all decisions about the next action of a request share.

There are four routings, so that they can be compared under the same failures:

    order-free             the next host is the one that is expected to answer first, among the
                           usable hosts with a block that has not run; several visits at once and
                           second passes as far as the calibration allows
    order-free-serial      the same, one visit after the other, no block twice
    sequential             a classical pipeline: block i after block i - 1, each on a single host
    replicated-sequential  the same, on whichever usable replica has the least work

`free` decides for requests in free order, `ordered` for pipelines and for requests that name their
steps.

If the missing blocks have more than `Limits.compared` holders, some holders of every block are
drawn at every step, from the request's own seed, and only these are compared: a few choices are
nearly as good as all (Mitzenmacher 2001, "The power of two choices in randomized load balancing"),
and a step costs the same in any swarm.

All decisions are pure functions. The real router and the simulation run the same code.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal, get_args

from layershuffle.core.draws import Stream
from layershuffle.swarm.limits import Limits
from layershuffle.swarm.messages import Ending, Outcome, Visit
from layershuffle.swarm.state import (
    HostView,
    Swarm,
    expected,
    is_slow,
    lag_of,
    may_return,
    slow_above,
)

Routing = Literal["order-free", "order-free-serial", "sequential", "replicated-sequential"]
ROUTINGS: tuple[Routing, ...] = get_args(Routing)
FREE: tuple[Routing, ...] = ("order-free", "order-free-serial")
"""Routings that answer even if blocks are missing."""

_FEWEST = 2
"""Least number of holders of every block that are compared."""
_FAIR = 2.0
"""A limit is fair to the host if it is at least this many times the expected time."""


@dataclass(frozen=True, slots=True)
class UnderWay:
    """A visit in flight, and the version of the state that it carries.

    `waited`: the request waits for it; else it is late, or with a slow host, and its answer counts
    only if it arrives before the end. `late`: its limit has passed.
    """

    host: str
    blocks: tuple[int, ...]
    version: int
    waited: bool = True
    late: bool = False


@dataclass(frozen=True, slots=True)
class RequestProgress:
    """The progress of a request.

    `done`: blocks that ran, in order, and `versions`: the version of the state that each of them
    read. `deadline`: when the answer must be ready, in seconds of the router's clock. `order`: the
    blocks to run, in this order, if the client named one. `min_blocks`: with fewer blocks the
    request waits, as long as it has time, for hosts that may come back. `seed`: for draws among
    many holders; it has no effect on `Limits.compared` holders or fewer. `images`: the number of
    images in its state. `most`: the number of blocks that is enough in free order, if not all are
    needed. `under_way`: all visits in flight.
    """

    depth: int
    deadline: float
    min_blocks: int = 1
    order: tuple[int, ...] | None = None
    done: tuple[int, ...] = ()
    seed: int = 0
    images: int = 1
    most: int | None = None
    versions: tuple[int, ...] = ()
    under_way: tuple[UnderWay, ...] = ()

    def after(self, blocks: Sequence[int], *, version: int | None = None) -> RequestProgress:
        """This request after `blocks` ran one after the other, from `version` (default: newest)."""
        first = len(self.done) if version is None else version
        versions = (*self.versions, *range(first, first + len(blocks)))
        return replace(self, done=(*self.done, *blocks), versions=versions)


@dataclass(frozen=True, slots=True)
class Finish:
    """The request ends with the blocks in `done`."""

    ending: Ending


@dataclass(frozen=True, slots=True)
class Wait:
    """No visit can start now, but one may be possible before `until`.

    Decide again when a visit in flight has ended and, if `for_hosts`, when the swarm has changed.
    """

    until: float
    for_hosts: bool = True


Action = Visit | Finish | Wait
Offer = tuple[HostView, tuple[int, ...]]
"""A host, and the blocks that it could run in one visit."""


class Moment:
    """A request at the time `now`.

    `ends`: the time at which its last visit must end; `left`: the seconds until then.
    """

    def __init__(
        self, progress: RequestProgress, swarm: Swarm, *, now: float, limits: Limits
    ) -> None:
        self.progress, self.swarm, self.limits, self.now = progress, swarm, limits, now
        # Head and answer must still fit in after the last visit.
        self.ends = progress.deadline - limits.reserve_ms / 1000
        self.left = self.ends - now
        self.pace = swarm.pace(limits)
        self._bound = slow_above(self.pace, limits)

    def compared(self, blocks: Sequence[int]) -> list[HostView]:
        """Usable hosts to choose from, by name (`compared`)."""
        return compared(self.progress, self.swarm, blocks=blocks, limits=self.limits)

    def is_slow(self, host: HostView) -> bool:
        """Whether `host` is a last resort (`state.is_slow`)."""
        return is_slow(host, bound=self._bound)

    def expected(self, host: HostView, count: int) -> float:
        """Seconds until `host` would answer a visit of `count` blocks."""
        return expected(host, count, pace=self.pace, images=self.progress.images)

    def first(self, offers: Iterable[Offer]) -> Offer | None:
        """The next offer: by rank (`_turn`), then by the expected time of its answer."""
        return min(offers, key=self._rank, default=None)

    def _rank(self, offer: Offer) -> tuple[float, float, str]:
        host, count = offer[0], len(offer[1])
        # The name breaks ties, so the result is the same in every run.
        turn = _turn(host, count * self.progress.images)
        return turn, self.expected(host, count), host.name

    def cut_to_fit(self, host: HostView, blocks: tuple[int, ...]) -> tuple[int, ...]:
        """The first of `blocks` that `host` can run in the time left, and at least one."""
        # One block stays; the caller ends the request if even that takes too long.
        while len(blocks) > 1 and self.expected(host, len(blocks)) > self.left:
            blocks = blocks[:-1]
        return blocks

    def visit(self, host: HostView, blocks: tuple[int, ...]) -> Visit:
        """The visit to `host` with as many of `blocks` as fit, and its limit."""
        blocks, left = self.cut_to_fit(host, blocks), self.left
        seconds = self.expected(host, len(blocks))
        limit = hop_limit(seconds, lag=lag_of(host, self.pace), left=left, limits=self.limits)
        # If the deadline cut the limit short, lateness is not the host's fault (decision 010).
        fair = limit < left or limit >= _FAIR * seconds
        return Visit(host.name, blocks, limit, budget=left, fair=fair, expected=seconds)


def hop_limit(seconds: float, *, lag: float, left: float, limits: Limits) -> float:
    """Seconds after which a visit expected to take `seconds` is late; never beyond `left`.

    `lag`: what visits may take beyond that, judged by recent ones (`state.lag_of`). The cap is for
    hosts that stopped answering; visits that are known to take longer (many images) get more time.
    """
    patience = max(limits.hop_factor * (seconds + lag), limits.hop_floor_ms / 1000)
    return min(patience, max(limits.hop_cap_ms / 1000, _FAIR * seconds), left)


def compared(
    progress: RequestProgress, swarm: Swarm, *, blocks: Sequence[int], limits: Limits
) -> list[HostView]:
    """Usable hosts to choose from: the holders of `blocks`, by name.

    If there are more than `limits.compared` of them, an equal number is drawn for each block, with
    repeats.
    """
    holders = [swarm.usable(block) for block in blocks]
    if sum(map(len, holders)) > limits.compared:
        # By request and step, so a request draws the same hosts again after waiting, and visits in
        # flight at once draw different ones.
        stream = Stream(progress.seed, len(progress.done) + len(progress.under_way))
        each = max(_FEWEST, limits.compared // len(blocks))
        # The same numbers for all blocks, so blocks with the same holders draw the same hosts,
        # which keeps the list short.
        draws = [stream.below(1 << 64) for _ in range(each)]
        holders = [
            tuple([names[draw % len(names)] for draw in draws if names]) for names in holders
        ]
    # Sorted, because the order of a set of names differs between processes.
    return [swarm[name] for name in sorted(set().union(*holders))]


def _turn(host: HostView, work: int) -> float:
    """The work of a host relative to its share, with `work` included: a rank for scheduling.

    The host with the lowest rank is next (weighted fair queueing); hosts without a share rank 0.
    """
    if host.share is None:
        return 0.0
    # Work in flight counts too, or all requests of one moment would choose the same host.
    done = host.served + host.waiting + work
    return done / host.share if host.share > 0 else math.inf


def nowhere(moment: Moment, blocks: Iterable[int], *, free: bool) -> Finish | Wait:
    """The action of a request if no usable host holds one of the missing `blocks`.

    A request with too few blocks waits if a holder may come back or a late visit may still be
    answered; otherwise it ends. `free`: it may be answered without some of its blocks.
    """
    progress, swarm = moment.progress, moment.swarm
    if free and len(set(progress.done)) >= progress.min_blocks:
        return Finish("unreachable")
    holders = (swarm[name] for block in blocks for name in swarm.held(block))
    if progress.under_way or any(
        # A pipeline fails with a process and does not wait for the next one.
        may_return(host, now=moment.now, left=moment.left) and (free or host.condition == "suspect")
        for host in holders
    ):
        return Wait(moment.ends)
    return Finish("unreachable" if free else "lost")


def strikes(visit: Visit, outcome: Outcome, *, over: bool, again: bool) -> bool:
    """Whether a failed visit counts against its host.

    `over`: the visit's limit has passed. `again`: the visit has been counted already, so only the
    death of the host still counts. A visit that was late because of the deadline does not count.
    """
    if outcome == "lost":
        return True
    excused = outcome == "late" and not visit.fair and over
    return not again and not excused


def skipped(
    progress: RequestProgress, swarm: Swarm, *, ending: Ending, limits: Limits
) -> dict[int, str]:
    """Every block that did not run, with a reason for the user."""
    missing = [block for block in range(progress.depth) if block not in progress.done]
    return {
        block: _reason(block, progress, swarm, ending=ending, limits=limits) for block in missing
    }


def _reason(
    block: int, progress: RequestProgress, swarm: Swarm, *, ending: Ending, limits: Limits
) -> str:
    if progress.order is not None and block not in progress.order:
        return "the requested order leaves it out"
    if ending == "enough":
        return f"the plan needs only {len(progress.done)} blocks per request"
    holders = [swarm[name] for name in swarm.held(block)]
    bound = slow_above(swarm.pace(limits), limits)
    usable = [host for host in holders if host.usable]
    if not holders:
        return "no host holds it"
    if not usable:
        return "; ".join(f"host {host.name} is {host.condition}: {host.why}" for host in holders)
    if ending == "unreachable" and all(is_slow(host, bound=bound) for host in usable):
        return "; ".join(f"host {host.name} is slow" for host in usable)
    free = progress.order is None
    passed = "its host did not answer in time" if free else "its turn had passed"
    return "the deadline was near" if ending in ("deadline", "lost") else passed
