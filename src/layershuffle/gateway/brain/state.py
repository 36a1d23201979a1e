"""What the router knows of the hosts, and pure functions for what happens to one.

Visits are what is sent to hosts: a state through one block. A state travels as float32, as float16,
or as int8 with a scale per token: that of one image in a ViT-B/16 (197 x 768) takes 591, 296 or
148 KiB.

A `HostState` is a value: the functions take one and return the next. Time is an argument, seconds
of any one monotonic clock. Conditions:

    healthy   it receives visits
    suspect   it failed a visit; it receives none until a probe after `retry_at` succeeds
    shut-out  it gave a wrong answer; it stays out until its operator restarts it
    draining  it takes no new visits, because it is about to leave
    gone      its process is dead

`Swarm` holds the states of all hosts. Decisions read it, and never change it.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, ValuesView
from dataclasses import dataclass, field
from itertools import chain
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from layershuffle.gateway.brain.limits import Limits
from layershuffle.ground.errors import LayerShuffleError

State = NDArray[np.float32]
Outcome = Literal["answered", "late", "lost", "unavailable", "wrong", "failed"]
Condition = Literal["healthy", "suspect", "shut-out", "draining", "gone"]


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

    `outcome` decides what becomes of the host (`failed`). "lost": its process is dead, and
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


# A tuple, because two of them are made a visit, and one of a dataclass takes ten times as long.
class HostState(NamedTuple):
    """One host as the router sees it.

    `compute` and `link` are averages in seconds: per block and image, and per visit beyond compute
    and queue; they are `None` until measured. `lag`: the longest recent time, in seconds, that a
    visit took beyond the expected one; it decays from visit to visit. `batch`: the average number
    of images that it computes together. `waiting` counts the visits sent and not answered yet.
    `strikes` counts failures since the last answer. `retry_at`: the time from which a suspect may
    be probed, or until which requests wait for a host whose process died. `why` explains every
    condition but "healthy", and that no block fits or could be loaded. `loading`: blocks that it
    will serve soon.
    """

    name: str
    blocks: frozenset[int]
    condition: Condition = "healthy"
    why: str = ""
    retry_at: float = 0.0
    strikes: int = 0
    compute: float | None = None
    link: float | None = None
    lag: float | None = None
    batch: float = 1.0
    waiting: int = 0
    loading: frozenset[int] = frozenset()

    @property
    def usable(self) -> bool:
        """Whether the host may receive visits."""
        return self.condition == "healthy"


class Pace(NamedTuple):
    """Expected times of an unmeasured host: seconds per block, per visit, and of lag."""

    compute: float
    link: float
    lag: float = 0.0


class Swarm(Mapping[str, HostState]):
    """All hosts by name, in the order of their names; `put` and `remove` change it."""

    def __init__(self, hosts: Iterable[HostState] = ()) -> None:
        by_name: dict[str, HostState] = {}
        for host in hosts:
            by_name[host.name] = host
        self._hosts = dict(sorted(by_name.items()))

    def __getitem__(self, name: str) -> HostState:
        return self._hosts[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._hosts)

    def __len__(self) -> int:
        return len(self._hosts)

    # Those of `Mapping` look up every name, which takes five times as long.
    def values(self) -> ValuesView[HostState]:
        """All hosts."""
        return self._hosts.values()

    def put(self, host: HostState) -> None:
        """Add a host, or replace the one of its name."""
        is_new = host.name not in self._hosts
        self._hosts[host.name] = host
        if is_new:
            self._hosts = dict(sorted(self._hosts.items()))

    def remove(self, name: str) -> None:
        """Forget a host."""
        del self._hosts[name]

    def held(self, block: int) -> list[HostState]:
        """All hosts that hold or load `block`."""
        return [
            host for host in self._hosts.values() if block in host.blocks or block in host.loading
        ]

    def copies(self) -> Counter[int]:
        """The number of usable hosts of each block."""
        blocks = (host.blocks for host in self._hosts.values() if host.usable)
        return Counter(chain.from_iterable(blocks))

    def lacking(self, blocks: Iterable[int]) -> list[int]:
        """Which of these blocks no usable host holds."""
        copies = self.copies()
        return [block for block in blocks if not copies[block]]

    @property
    def usable_hosts(self) -> int:
        """The number of usable hosts."""
        return sum(host.usable for host in self._hosts.values())

    def pace(self, limits: Limits) -> Pace:
        """Medians over the usable hosts that were measured; the priors without such hosts."""
        compute: list[float | None] = []
        link: list[float | None] = []
        lag: list[float | None] = []
        for host in self._hosts.values():
            if host.usable:
                compute.append(host.compute)
                link.append(host.link)
                lag.append(host.lag)
        return Pace(
            _median(compute, otherwise=limits.prior_compute_ms / 1000),
            _median(link, otherwise=limits.prior_link_ms / 1000),
            _median(lag, otherwise=0.0),
        )


def _median(times: Iterable[float | None], *, otherwise: float) -> float:
    """Median of the times that are measured; `otherwise` if there are none."""
    measured = sorted(time for time in times if time is not None)
    half = len(measured) // 2
    if not measured:
        return otherwise
    return measured[half] if len(measured) % 2 else (measured[half - 1] + measured[half]) / 2


def expected(host: HostState, *, pace: Pace) -> float:
    """Seconds until `host` would answer a visit: link, queue and compute.

    Its block is assumed to run in a batch of the host's usual size. Waiting work takes its share of
    such batches.
    """
    compute = pace.compute if host.compute is None else host.compute
    link = pace.link if host.link is None else host.link
    # `waiting` is this router's own count: asking the host would cost a visit, and the answer would
    # be outdated.
    return link + compute * (host.waiting + host.batch)


def lag_of(host: HostState, pace: Pace) -> float:
    """Seconds that a visit to `host` may plausibly take beyond what is expected.

    It is at least the swarm's median, so no host is blamed for load that slows all of them. A
    single slow host does not raise the limits of the others.
    """
    return max(host.lag or 0.0, pace.lag)


def sent(host: HostState, visits: int = 1) -> HostState:
    """So many visits were sent; if they are negative, they are over without an answer."""
    # A restarted host begins with 0, while visits to its old process are still ending.
    return host._replace(waiting=max(0, host.waiting + visits))


def answered(host: HostState, hop: Visited, *, limits: Limits) -> HostState:
    """A request's visit was answered, and is over: its times update the averages."""
    compute, link, batch = _times_with(host, hop, limits=limits)
    return host._replace(
        compute=compute,
        link=link,
        lag=_lag_after(host, hop, fade=limits.lag_fade),
        batch=batch,
        waiting=max(0, host.waiting - 1),
        # Also of a suspect: it is late, not gone. But only a probe brings it back.
        strikes=0,
    )


def _lag_after(host: HostState, hop: Visited, *, fade: float) -> float | None:
    """The longest recent lag of the host in seconds, including this hop's."""
    if hop.lag_ms is None:
        return host.lag
    return max(hop.lag_ms / 1000, (1 - fade) * (host.lag or 0.0))


def _times_with(host: HostState, hop: Visited, *, limits: Limits) -> tuple[float, float, float]:
    """The averages `compute`, `link` and `batch` with the hop's times."""
    weight = limits.average_weight
    beyond = max(0.0, hop.ms - hop.compute_ms - hop.queue_ms) / 1000
    link = averaged(host.link, beyond, weight=weight)
    compute = averaged(host.compute, hop.compute_ms / 1000 / hop.batch, weight=weight)
    return compute, link, averaged(host.batch, hop.batch, weight=weight)


def failed(host: HostState, hop: Visited, *, now: float, limits: Limits) -> HostState:
    """A visit or probe failed: the host gets no visits for a while, or permanently.

    A dead host is gone, and a wrong answer shuts a host out. Any other failure makes it a suspect,
    for longer after every failure since its last success.
    """
    # A host that lied stays out, because it may well answer a probe correctly. What was sent to a
    # suspect before it became one says nothing new; only its probes do.
    stale = host.condition == "suspect" and hop.lag_ms is not None
    if host.condition == "shut-out" or (stale and hop.outcome not in ("lost", "wrong")):
        return host
    # One that leaves with a lie must not come back.
    if host.condition == "gone" and hop.outcome != "wrong":
        return host
    if hop.outcome == "lost":
        until = now + limits.return_ms / 1000
        return host._replace(condition="gone", why=hop.why, retry_at=until)
    if hop.outcome == "wrong":
        return host._replace(condition="shut-out", why=hop.why)
    pause = min(limits.suspect_ms * 2**host.strikes, limits.suspect_max_ms) / 1000
    return host._replace(
        # As a suspect, a draining host would return with its next probe.
        condition="draining" if host.condition == "draining" else "suspect",
        why=hop.why,
        # Bounded, or 2**strikes would eventually overflow a float.
        strikes=min(host.strikes + 1, 32),
        retry_at=now + pause,
        # If it comes back, it was only late, so its next visit gets more time.
        lag=_lag_after(host, hop, fade=0.0) if hop.outcome == "late" else host.lag,
    )


def probe_due(host: HostState, *, now: float) -> bool:
    """Whether a suspect host has waited long enough to be probed."""
    return host.condition == "suspect" and now >= host.retry_at


def may_return(host: HostState, *, now: float, left: float) -> bool:
    """Whether a suspect is probed within `left` seconds, the process died only recently, or the
    host is loading a block."""
    if host.usable:
        return bool(host.loading)
    if host.condition == "suspect":
        return host.retry_at < now + left
    return host.condition == "gone" and now < host.retry_at


def first_probe_end(host: HostState, limits: Limits) -> float:
    """The end of the first probe of a host: requests with enough blocks wait for it until then.

    A host that failed once since its last answer may be slow or gone: its next probe shows which.
    0 for all others.
    """
    once = host.condition == "suspect" and host.strikes <= 1
    return host.retry_at + limits.probe_ms / 1000 if once else 0.0


def retry_after(swarm: Swarm, *, now: float) -> int:
    """Whole seconds, at least 1, until a suspect host is asked again and a request may fare better.

    It is what Retry-After says to a client that got no answer.
    """
    waits = [host.retry_at - now for host in swarm.values() if host.condition == "suspect"]
    # Without suspects nothing says when it will be better; a second is a guess.
    return max(1, math.ceil(min(waits, default=1.0)))


def probed(host: HostState, hop: Visited, *, limits: Limits) -> HostState:
    """A probe was answered correctly and in time: a suspect host is healthy again.

    Its averages restart with the probe, because measurements from before the failure mean little.
    Only an answered visit clears its strikes, because some hosts answer nothing but probes.
    """
    if host.condition == "suspect":
        host = host._replace(condition="healthy", why="", compute=None, link=None, batch=1.0)
    compute, link, batch = _times_with(host, hop, limits=limits)
    return host._replace(compute=compute, link=link, batch=batch)


def draining(host: HostState) -> HostState:
    """The host is about to leave and takes no new visits."""
    if host.condition not in ("healthy", "suspect"):
        return host
    return host._replace(condition="draining", why="it is leaving")


def averaged(before: float | None, new: float, *, weight: float) -> float:
    """An average with a `new` value, which counts with `weight`; the first one counts whole."""
    return new if before is None else (1 - weight) * before + weight * new
