"""What is simulated: hosts and their times, their churn and faults, arrivals of requests."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np

from layershuffle.core.draws import Stream
from layershuffle.errors import UsageError
from layershuffle.settings import Above, Positive, Settings

# Apart from that of arrivals: a change of one leaves the other.
_DELAY_STREAM = 3
SimulatedFault = Literal["crash", "freeze", "slow", "wrong", "cut", "leave", "rejoin"]
FAULTS: tuple[SimulatedFault, ...] = get_args(SimulatedFault)


@dataclass(frozen=True, slots=True)
class SimulatedDevice:
    """A host: its blocks, milliseconds of one block for one image, and of a visit beyond compute
    and queue, both ways together."""

    blocks: frozenset[int]
    block_ms: float = 5.0
    link_ms: float = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Machines:
    """What all hosts have in common. `notice_ms`: from the death of a process until its callers
    are told; `batch_share`: time of every further image of a batch, as a share of the first one's;
    `max_batch`: most images that a host runs together, `max_queue`: visits that wait there at most.

    `delay_ms` is the median of the random delay of a visit on a busy machine, and `delay_spread`
    the standard deviation of its logarithm.
    """

    notice_ms: float = 10.0  # SIGKILL of a process of this machine: 5 to 11 ms
    batch_share: float = 1.0
    max_batch: int = 16
    max_queue: int = 256
    # Among 25,500 requests on a machine with a load of 10, some visits took ten times the usual
    # time: a lognormal delay is as uneven.
    delay_ms: float = 0.0
    delay_spread: float = 0.8

    def delays(self, seed: int) -> Iterator[float]:
        """The delays of successive visits in seconds, without end."""
        draw, seconds = np.random.default_rng((seed, _DELAY_STREAM)), self.delay_ms / 1000
        while True:
            # Nothing is drawn for a quiet machine, which saves time.
            yield seconds * draw.lognormal(0, self.delay_spread) if seconds else 0.0


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
    """Just before request number `at` is sent, `kind` happens to `host` (`chaos.FaultKind`)."""

    at: int
    host: str
    kind: SimulatedFault


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
