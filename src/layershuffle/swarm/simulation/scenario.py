"""What is simulated: how fast hosts are, how they come and go, how requests arrive. Plain data."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Annotated

import numpy as np
from pydantic import Field

from layershuffle.errors import UsageError
from layershuffle.settings import Above, NotBelow, Positive, Settings
from layershuffle.swarm.plan import HostPlan, SwarmPlan

if TYPE_CHECKING:
    from layershuffle.swarm.planning.hosts import PlannedHost

_COPY = "~"
# Arrivals, churn and canaries draw from streams of their own: a change of one leaves the others.
_CHURN_STREAM = 1
_DELAY_STREAM = 3


class HostTimes(Settings):
    """How long one host takes."""

    block_ms: Above = 5.0
    """Compute of one block of one image."""
    link_ms: NotBelow = 5.0
    """A visit beyond compute and queue, both ways together."""


class Profile(Settings):
    """How long hosts take, and how soon a death is noticed."""

    every: HostTimes = HostTimes()
    """Hosts that are not named."""
    hosts: dict[str, HostTimes] = Field(default_factory=dict)
    """Hosts by name; copies of a host that `scaled` made are like it."""
    batch_share: Annotated[float, Field(ge=0, le=1)] = 1.0
    """Time of every further image of a batch, as a share of the first one's."""
    # Of 25,500 requests on a machine with a load of 10 some visits took ten times the usual time:
    # a lognormal delay is as uneven.
    delay_ms: NotBelow = 0.0
    """Median of what a busy machine delays a visit by, at random ..."""
    delay_spread: NotBelow = 0.8
    """... and the standard deviation of its logarithm."""
    notice_ms: NotBelow = 70.0
    """From the death of a process until its callers are told (Ray, SIGKILL: 62 to 85 ms)."""

    def delays(self, seed: int) -> Iterator[float]:
        """Seconds by which one visit after the other is delayed."""
        draw = np.random.default_rng((seed, _DELAY_STREAM))
        while True:
            # Nothing is drawn for a quiet machine, so that it costs no time to simulate.
            yield (
                self.delay_ms / 1000 * draw.lognormal(0, self.delay_spread)
                if self.delay_ms
                else 0.0
            )

    def times(self, name: str) -> HostTimes:
        """Times of the host `name`."""
        return self.hosts.get(name) or self.hosts.get(name.partition(_COPY)[0]) or self.every


class Churn(Settings):
    """Hosts die and come back, each on its own, with exponential times; from a steady state."""

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
    """Requests per second, at random (Poisson); instead of clients."""
    clients: Positive = 4
    """So many clients, each sending its next request when the last one has ended ..."""
    think_ms: NotBelow = 0.0
    """... and this time has passed; after a failed one at least as long as Retry-After says."""

    def times(self, requests: int, *, seed: int) -> tuple[float, ...]:
        """Seconds at which requests arrive at random."""
        assert self.rate is not None
        gaps = np.random.default_rng((seed, 0)).exponential(1 / self.rate, size=requests)
        return tuple(np.cumsum(gaps).tolist())


def profile_of(hosts: Iterable[PlannedHost]) -> Profile:
    """The profile of the hosts that a plan was made for."""
    return Profile(
        hosts={
            host.name: HostTimes(
                block_ms=1000 * host.block, link_ms=1000 * (host.link + host.transfer)
            )
            for host in hosts
        }
    )


def scaled(plan: SwarmPlan, hosts: int) -> SwarmPlan:
    """A plan for `hosts` hosts: those of `plan`, in turn, as often as needed (NAME~2 ...).

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
    # Blocks alone are copied: shares hold for exactly the hosts that they were planned for.
    grown = {
        name: HostPlan(blocks=plan.hosts[names[i % len(names)]].blocks)
        for name, i in copies.items()
    }
    return plan.model_copy(update={"hosts": grown})


def lives(
    churn: Churn, hosts: int, *, seed: int
) -> tuple[tuple[bool, ...], tuple[Iterator[float], ...]]:
    """Whether each host is up at first, and the times it then stays as it is, in turn.

    The times of a host depend on the seed and its number alone, not on what else is simulated.
    """
    draw = np.random.default_rng((seed, _CHURN_STREAM))
    # In the steady state: with all hosts up at first the first seconds would look too good.
    up = draw.random(hosts) < churn.availability
    # Exponential times have no memory: the rest of a stay is distributed as a whole one.
    stays = draw.exponential(np.where(up, churn.up_s, churn.down_s)).tolist()
    return tuple(up.tolist()), tuple(
        _stays(churn, there, stay, (seed, _CHURN_STREAM, number))
        for number, (there, stay) in enumerate(zip(up.tolist(), stays, strict=True))
    )


def _stays(churn: Churn, up: bool, first: float, seed: tuple[int, ...]) -> Iterator[float]:
    yield first
    # Not made before a host changes sides twice, which few hosts of a short run do.
    draw = np.random.default_rng(seed)
    while True:
        up = not up
        yield float(draw.exponential(churn.up_s if up else churn.down_s))


def depth_of(plan: SwarmPlan) -> int:
    """Number of blocks that the plan's hosts hold. Raises `UsageError` if one is missing."""
    # Gaps below the last block can be seen; a plan that ends too early looks whole.
    depth = 1 + max(block for host in plan.hosts.values() for block in host.blocks)
    plan.check(depth)
    return depth
