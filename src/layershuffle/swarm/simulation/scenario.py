"""The scenario of a simulation: speed and churn of hosts, arrivals of requests. Plain data."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated

import numpy as np
from pydantic import Field

from layershuffle.errors import UsageError
from layershuffle.settings import Above, NotBelow, Positive, Settings
from layershuffle.swarm.plan import HostPlan, SwarmPlan

_COPY = "~"
# Arrivals, churn and canaries draw from separate streams: a change of one leaves the others.
_CHURN_STREAM = 1
_DELAY_STREAM = 3


class HostTimes(Settings):
    """Times of one host."""

    block_ms: Above = 5.0
    """Compute time of one block for one image."""
    link_ms: NotBelow = 5.0
    """Time of a visit beyond compute and queue, both ways together."""


class Profile(Settings):
    """Times of all hosts, and the delay until a death is noticed."""

    every: HostTimes = HostTimes()
    """Times of hosts that `hosts` does not name."""
    hosts: dict[str, HostTimes] = Field(default_factory=dict)
    """Times by host; they hold for the copies that `scaled` makes of a host, too."""
    batch_share: Annotated[float, Field(ge=0, le=1)] = 1.0
    """Time of every further image of a batch, as a share of the first one's."""
    # Among 25,500 requests on a machine with a load of 10, some visits took ten times the usual
    # time: a lognormal delay is as uneven.
    delay_ms: NotBelow = 0.0
    """Median of the random delay of a visit on a busy machine ..."""
    delay_spread: NotBelow = 0.8
    """... and the standard deviation of its logarithm."""
    notice_ms: NotBelow = 70.0
    """Time from the death of a process until its callers are told (Ray, SIGKILL: 62 to 85 ms)."""

    def delays(self, seed: int) -> Iterator[float]:
        """The delays of successive visits in seconds, without end."""
        draw = np.random.default_rng((seed, _DELAY_STREAM))
        while True:
            # Nothing is drawn for a quiet machine, which saves time.
            yield (
                self.delay_ms / 1000 * draw.lognormal(0, self.delay_spread)
                if self.delay_ms
                else 0.0
            )

    def times(self, name: str) -> HostTimes:
        """Times of the host `name`."""
        return self.hosts.get(name) or self.hosts.get(name.partition(_COPY)[0]) or self.every


class Churn(Settings):
    """Hosts die and return independently, with exponential times, starting in the steady state."""

    up_s: Above
    """Mean time between a host's return and its next death."""
    down_s: Above
    """Mean time until a dead host is back, with its blocks loaded."""

    @property
    def availability(self) -> float:
        """Share of the time that a host is up."""
        return self.up_s / (self.up_s + self.down_s)


class Arrivals(Settings):
    """How requests arrive."""

    rate: Above | None = None
    """Requests per second that arrive at random (Poisson); replaces `clients`."""
    clients: Positive = 4
    """Number of clients, each of which sends its next request when the last one has ended; after a
    failed one it waits as long as Retry-After says."""

    def times(self, requests: int, *, seed: int) -> tuple[float, ...]:
        """Arrival times of the requests in seconds, ascending, drawn at `rate`."""
        assert self.rate is not None
        gaps = np.random.default_rng((seed, 0)).exponential(1 / self.rate, size=requests)
        return tuple(np.cumsum(gaps).tolist())


def scaled(plan: SwarmPlan, hosts: int) -> SwarmPlan:
    """A plan for `hosts` hosts: copies of those of `plan`, in turn (NAME~2 ...).

    Raises `UsageError` for fewer hosts than the plan has.
    """
    names = list(plan.hosts)
    if hosts < len(names):
        raise UsageError(
            f"The number of hosts must be at least that of the plan ({len(names)}), got {hosts}",
            hint="with fewer hosts blocks would be missing; simulate more hosts or another plan",
        )
    copies = {
        names[i % len(names)] + (f"{_COPY}{i // len(names) + 1}" if i >= len(names) else ""): i
        for i in range(hosts)
    }
    grown = {
        name: HostPlan(blocks=plan.hosts[names[i % len(names)]].blocks)
        for name, i in copies.items()
    }
    return plan.model_copy(update={"hosts": grown})


def lives(
    churn: Churn, hosts: int, *, seed: int
) -> tuple[tuple[bool, ...], tuple[Iterator[float], ...]]:
    """Whether each host is up at first, and the lengths of its stays up and down, in seconds.

    The times of a host depend on the seed and its number alone, not on what else is simulated.
    """
    draw = np.random.default_rng((seed, _CHURN_STREAM))
    # In the steady state: if all hosts were up at first, the first seconds would look too good.
    up = draw.random(hosts) < churn.availability
    # Exponential times have no memory: the remainder of a stay is distributed like a whole one.
    stays = draw.exponential(np.where(up, churn.up_s, churn.down_s)).tolist()
    return tuple(up.tolist()), tuple(
        _stays(churn, there, stay, (seed, _CHURN_STREAM, number))
        for number, (there, stay) in enumerate(zip(up.tolist(), stays, strict=True))
    )


def _stays(churn: Churn, up: bool, first: float, seed: tuple[int, ...]) -> Iterator[float]:
    yield first
    # Created late, because few hosts of a short run change their state twice.
    draw = np.random.default_rng(seed)
    while True:
        up = not up
        yield float(draw.exponential(churn.up_s if up else churn.down_s))


def depth_of(plan: SwarmPlan) -> int:
    """Number of blocks that the plan's hosts hold. Raises `UsageError` if one is missing."""
    # Gaps below the last block can be seen; a plan that ends too early looks complete.
    depth = 1 + max(block for host in plan.hosts.values() for block in host.blocks)
    plan.check(depth)
    return depth
