"""The router's view of the hosts, and pure functions that update it on every event.

A `HostView` is a value; every function here takes one and returns the next. Time is an argument, in
seconds of any one monotonic clock. Conditions:

    healthy   it receives visits
    suspect   it failed a visit; it receives none until a probe after `retry_at` succeeds
    shut-out  it gave a wrong answer; it stays out until its operator restarts it
    draining  it takes no new visits, because it is about to leave
    gone      its process is dead

`Swarm` holds the views of all hosts with indexes over them, so a change costs the same with 10,000
hosts as with ten.
"""

from __future__ import annotations

import math
from array import array
from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple

from layershuffle.swarm.limits import Limits
from layershuffle.swarm.messages import Visited

Condition = Literal["healthy", "suspect", "shut-out", "draining", "gone"]
_HostNames = dict[int, tuple[str, ...]]  # names of hosts, by block
_ROW = 64  # about the square root of a large swarm


# A tuple, because three of them are made a visit, and one of a dataclass takes ten times as long.
class HostView(NamedTuple):
    """One host as the router sees it.

    `compute` and `link` are averages in seconds: per block and image, and per visit of one image
    beyond compute and queue; they are `None` until measured. `lag`: the longest recent time, in
    seconds, that a visit took beyond the expected one; it decays from visit to visit. `batch`: the
    average number of images that it computes together. `waiting` counts the images of visits
    sent and not answered yet. `strikes` counts failures since the last answer. `retry_at`: the time
    from which a suspect may be probed, or until which requests wait for a host whose process died.
    `why` explains every condition but "healthy". `loading`: blocks that it will serve soon.
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


@dataclass(frozen=True, slots=True)
class Pace:
    """Expected times of an unmeasured host: seconds per block, per visit, and of lag."""

    compute: float
    link: float
    lag: float = 0.0


class Swarm(Mapping[str, HostView]):
    """All hosts by name, as an immutable value; `with_host` returns the next one.

    `suspects`: the names of the suspect hosts, sorted; `usable_hosts`: the number of usable ones.
    A change of a host copies one row of hosts and the affected parts of the indexes: with 10,000
    hosts this takes some microseconds, and the old value stays intact.
    """

    def __init__(self, hosts: Iterable[HostView] = ()) -> None:
        by_name = {host.name: host for host in sorted(hosts, key=lambda host: host.name)}
        views = list(by_name.values())
        # Places change only when a host joins or leaves, so other changes copy one row.
        self._place = {name: place for place, name in enumerate(by_name)}
        self._rows = [tuple(views[i : i + _ROW]) for i in range(0, len(views), _ROW)]
        self._held = _by_block((view.name, view.blocks | view.loading) for view in views)
        self._usable = _by_block((view.name, view.blocks) for view in views if view.usable)
        self.suspects = tuple(view.name for view in views if view.condition == "suspect")
        self.usable_hosts = sum(view.usable for view in views)
        # Sorted, so a decision only looks up the medians.
        self._compute = _sorted_times(_times(view)[0] for view in views)
        self._link = _sorted_times(_times(view)[1] for view in views)
        self._lag = _sorted_times(_times(view)[2] for view in views)

    def __getitem__(self, name: str) -> HostView:
        row, column = divmod(self._place[name], _ROW)
        return self._rows[row][column]

    def __iter__(self) -> Iterator[str]:
        return iter(self._place)

    def __len__(self) -> int:
        return len(self._place)

    def with_host(self, host: HostView) -> Swarm:
        """This swarm with `host` added, or replacing the host of the same name."""
        if host.name not in self._place:
            # Hosts join rarely, so everything may be rebuilt then.
            return Swarm([*self.values(), host])
        # A shallow copy that bypasses `__init__`: unchanged rows and indexes are shared.
        after = object.__new__(Swarm)
        after.__dict__.update(self.__dict__)
        row, column = divmod(self._place[host.name], _ROW)
        after._rows = self._rows.copy()
        after._rows[row] = (*self._rows[row][:column], host, *self._rows[row][column + 1 :])
        after._index(self[host.name], host)
        return after

    def without(self, name: str) -> Swarm:
        """This swarm without the host `name`."""
        return Swarm(host for host in self.values() if host.name != name)

    def held(self, block: int) -> tuple[str, ...]:
        """Names of all hosts that hold or load `block`, sorted."""
        return self._held.get(block, ())

    def usable(self, block: int) -> tuple[str, ...]:
        """Names of the usable hosts that hold `block`, sorted."""
        return self._usable.get(block, ())

    def pace(self, limits: Limits) -> Pace:
        """Medians over the usable hosts that were measured; the priors without such hosts."""
        return Pace(
            compute=_middle(self._compute, otherwise=limits.prior_compute_ms / 1000),
            link=_middle(self._link, otherwise=limits.prior_link_ms / 1000),
            lag=_middle(self._lag, otherwise=0.0),
        )

    def _index(self, before: HostView, after: HostView) -> None:
        """Update the indexes from one view of a host to the next; the old value keeps its own."""
        if _indexed(before) == _indexed(after):
            return
        name, out = after.name, frozenset[int]()
        was, now = (view.blocks | view.loading for view in (before, after))
        self._held = _moved(self._held, name, was=was, now=now)
        was, now = (view.blocks if view.usable else out for view in (before, after))
        self._usable = _moved(self._usable, name, was=was, now=now)
        if (before.condition == "suspect") != (after.condition == "suspect"):
            self.suspects = _toggled(self.suspects, name)
        self.usable_hosts += after.usable - before.usable
        old, new = (_times(view) for view in (before, after))
        self._compute = _retimed(self._compute, old[0], after=new[0])
        self._link = _retimed(self._link, old[1], after=new[1])
        self._lag = _retimed(self._lag, old[2], after=new[2])


def _indexed(host: HostView) -> tuple[object, ...]:
    """The fields that the indexes depend on; visits sent and settled change none of them."""
    return host.condition, host.compute, host.link, host.lag, host.blocks, host.loading


def _times(host: HostView) -> tuple[float | None, float | None, float | None]:
    """Compute time, link time and lag for the medians; `None` if the host is not usable."""
    return (host.compute, host.link, host.lag) if host.usable else (None, None, None)


def _by_block(hosts: Iterable[tuple[str, frozenset[int]]]) -> _HostNames:
    """Names by block, in the order of `hosts`, which are pairs of a name and its blocks."""
    names: dict[int, list[str]] = {}
    for name, blocks in hosts:
        for block in blocks:
            names.setdefault(block, []).append(name)
    return {block: tuple(holders) for block, holders in names.items()}


def _moved(names: _HostNames, name: str, *, was: frozenset[int], now: frozenset[int]) -> _HostNames:
    """`names` with `name` moved from the blocks `was` to the blocks `now`."""
    if was == now:
        return names
    return names | {block: _toggled(names.get(block, ()), name) for block in was ^ now}


def _toggled(names: tuple[str, ...], name: str) -> tuple[str, ...]:
    """Sorted `names` without `name` if it contains it, otherwise with it."""
    place = bisect_left(names, name)
    if names[place : place + 1] == (name,):
        return names[:place] + names[place + 1 :]
    return (*names[:place], name, *names[place:])


def _sorted_times(times: Iterable[float | None]) -> array[float]:
    """The times that are not `None`, ascending."""
    return array("d", sorted(time for time in times if time is not None))


def _retimed(times: array[float], before: float | None, *, after: float | None) -> array[float]:
    """Sorted `times` with `before` replaced by `after`; `None` means no time."""
    if before == after:
        return times
    changed = times[:]
    if before is not None:
        del changed[bisect_left(changed, before)]
    if after is not None:
        insort(changed, after)
    return changed


def _middle(times: array[float], *, otherwise: float) -> float:
    """Median of sorted `times`; `otherwise` if there are none."""
    half = len(times) // 2
    if not times:
        return otherwise
    return times[half] if len(times) % 2 else (times[half - 1] + times[half]) / 2


def expected(host: HostView, *, pace: Pace, images: int = 1) -> float:
    """Seconds until `host` would answer a visit: link, queue and compute.

    Its block is assumed to run in a batch of the host's usual size, or with its own images if they
    are more. Waiting work takes its share of such batches.
    """
    compute = pace.compute if host.compute is None else host.compute
    link = pace.link if host.link is None else host.link
    # `waiting` is this router's own count: asking the host would cost a visit, and the answer would
    # be outdated.
    return link * images + compute * (host.waiting + max(images, host.batch))


def lag_of(host: HostView, pace: Pace) -> float:
    """Seconds that a visit to `host` may plausibly take beyond what is expected.

    It is at least the swarm's median, so no host is blamed for load that slows all of them. A
    single slow host does not raise the limits of the others.
    """
    return max(host.lag or 0.0, pace.lag)


def sent(host: HostView, work: int) -> HostView:
    """A visit of `work` images was sent."""
    return host._replace(waiting=host.waiting + work)


def settled(host: HostView, work: int) -> HostView:
    """A visit of `work` images is over, however it ended."""
    # A restarted host begins with 0, while visits to its old process are still ending.
    return host._replace(waiting=max(0, host.waiting - work))


def answered(host: HostView, hop: Visited, *, limits: Limits) -> HostView:
    """A request's visit was answered: its times update the averages."""
    # Also of a suspect: it is late, not gone. But only a probe brings it back.
    lag = _lag_after(host, hop, fade=limits.lag_fade)
    compute, link, batch = _times_with(host, hop, limits=limits)
    return host._replace(compute=compute, link=link, batch=batch, strikes=0, lag=lag)


def _lag_after(host: HostView, hop: Visited, *, fade: float) -> float | None:
    """The longest recent lag of the host in seconds, including this hop's."""
    if hop.lag_ms is None:
        return host.lag
    return max(hop.lag_ms / 1000, (1 - fade) * (host.lag or 0.0))


def _times_with(
    host: HostView, hop: Visited, *, limits: Limits
) -> tuple[float, float | None, float]:
    """The averages `compute`, `link` and `batch` with the hop's times.

    Only visits of one image measure the link; canaries are such visits.
    """
    link, weight = host.link, limits.average_weight
    if hop.images == 1:
        beyond = max(0.0, hop.ms - hop.compute_ms - hop.queue_ms) / 1000
        link = _averaged(host.link, beyond, weight=weight)
    compute = _averaged(host.compute, hop.compute_ms / 1000 / hop.batch, weight=weight)
    return compute, link, _averaged(host.batch, hop.batch, weight=weight)


def failed(host: HostView, hop: Visited, *, now: float, limits: Limits) -> HostView:
    """A visit or probe failed: the host gets no visits for a while, or permanently.

    A dead host is gone, and a wrong answer shuts a host out. Any other failure makes it a suspect,
    for longer after every failure since its last success.
    """
    # A host that lied stays out, because it may well answer a probe correctly. What was sent to a
    # suspect before it became one says nothing new; only its probes do.
    stale = host.condition == "suspect" and hop.lag_ms is not None
    if host.condition in ("gone", "shut-out") or (stale and hop.outcome not in ("lost", "wrong")):
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


def probe_due(host: HostView, *, now: float) -> bool:
    """Whether a suspect host has waited long enough to be probed."""
    return host.condition == "suspect" and now >= host.retry_at


def may_return(host: HostView, *, now: float, left: float) -> bool:
    """Whether a suspect is probed within `left` seconds, the process died only recently, or the
    host is loading a block."""
    if host.usable:
        return bool(host.loading)
    if host.condition == "suspect":
        return host.retry_at < now + left
    return host.condition == "gone" and now < host.retry_at


def hoped_until(host: HostView, limits: Limits) -> float:
    """The time until which requests wait for a host although they have enough blocks.

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


def probed(host: HostView, hop: Visited, *, limits: Limits) -> HostView:
    """A probe was answered correctly and in time: a suspect host is healthy again.

    Its averages restart with the probe, because measurements from before the failure mean little.
    Only an answered visit clears its strikes, because some hosts answer nothing but probes.
    """
    if host.condition == "suspect":
        host = host._replace(condition="healthy", why="", compute=None, link=None, batch=1.0)
    compute, link, batch = _times_with(host, hop, limits=limits)
    return host._replace(compute=compute, link=link, batch=batch)


def draining(host: HostView) -> HostView:
    """The host is about to leave and takes no new visits."""
    if host.condition not in ("healthy", "suspect"):
        return host
    return host._replace(condition="draining", why="it is leaving")


def _averaged(before: float | None, new: float, *, weight: float) -> float:
    return new if before is None else (1 - weight) * before + weight * new
