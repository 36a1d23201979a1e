"""What is simulated: hosts and their times, their churn and faults, arrivals of requests."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from layershuffle.core.draws import Stream
from layershuffle.errors import UsageError
from layershuffle.settings import Above, Positive, Settings
from layershuffle.swarm.faults import FaultKind


@dataclass(frozen=True, slots=True)
class SimulatedDevice:
    """A host: its blocks, milliseconds of one block for one image, and of a visit beyond compute
    and queue, both ways together."""

    blocks: frozenset[int]
    block_ms: float = 5.0
    link_ms: float = 5.0


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


@dataclass(frozen=True, slots=True)
class Fault:
    """Just before request number `at` is sent, `kind` happens to `host`: any but `restless`, which
    needs connections."""

    at: int
    host: str
    kind: FaultKind


def crashes(hosts: Sequence[str], *, share: float, requests: int, seed: int) -> tuple[Fault, ...]:
    """A share of the hosts (rounded down, at least one) dies, each at a request drawn at random.

    No host dies before the first tenth of the requests or in the last one. Raises `UsageError` for
    a share that is not above 0 and at most 1.
    """
    if not 0 < share <= 1:
        raise UsageError(
            f"The share of hosts to kill must be in (0, 1], got {share:g}",
            hint="0.34 is about a third of them",
        )
    stream = Stream(seed, 0)
    count = max(1, int(len(hosts) * share))
    chosen = [hosts[i] for i in stream.shuffled(range(len(hosts)))[:count]]
    # No crashes at both ends, so the times before and after can be compared.
    first, last = requests // 10, requests - requests // 10
    return tuple(Fault(first + stream.below(max(1, last - first)), h, "crash") for h in chosen)


def in_turn(devices: Mapping[str, SimulatedDevice], hosts: int) -> dict[str, SimulatedDevice]:
    """`hosts` hosts: copies of `devices`, in turn (NAME~2 ...).

    Raises `UsageError` for fewer than there are devices.
    """
    names = list(devices)
    if hosts < len(names):
        raise UsageError(
            f"The number of hosts must be at least that of the devices ({len(names)}), got {hosts}",
            hint="with fewer hosts blocks would be missing; simulate more hosts or other devices",
        )
    rounds = [divmod(number, len(names)) for number in range(hosts)]
    return {
        names[place] + (f"~{turn + 1}" if turn else ""): devices[names[place]]
        for turn, place in rounds
    }


def life(churn: Churn, number: int, *, seed: int) -> tuple[bool, Iterator[float]]:
    """Whether host `number` is up at first, and the lengths of its stays up and down, in seconds.

    They depend on the seed and the number alone, not on what else is simulated.
    """
    # Cheaper to make than one of numpy: there is one for each of 10,000 hosts.
    draw = random.Random(seed << 32 | number)
    # In the steady state: if all hosts were up at first, the first seconds would look too good.
    up = draw.random() < churn.availability

    def stays(there: bool) -> Iterator[float]:
        # Exponential times have no memory: the rest of a stay is distributed like a whole one.
        while True:
            yield draw.expovariate(1 / (churn.up_s if there else churn.down_s))
            there = not there

    return up, stays(up)
