"""Failures as data: what happens to which host, and when. Pure, and a function of a seed.

When is counted in requests, so that the same plan hits a real swarm, one in this process and a
simulated one at the same places.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from layershuffle.draws import Stream
from layershuffle.errors import UsageError

Kind = Literal["crash", "freeze", "slow", "wrong", "cut", "leave", "rejoin"]
KINDS: tuple[Kind, ...] = ("crash", "freeze", "slow", "wrong", "cut", "leave", "rejoin")
SLOW_FACTOR = 10.0


@dataclass(frozen=True, slots=True)
class Fault:
    """Just before request number `at` is sent, `kind` happens to `host`.

    crash    its process is killed
    freeze   its process stops, without a word
    slow     its compute takes ten times as long
    wrong    its answers are finite and false
    cut      its network is gone, without a word
    leave    it is drained, then ended in good order
    rejoin   a crashed or left one starts anew; else what was wrong with it ends
    """

    at: int
    host: str
    kind: Kind


def check_faults(faults: Sequence[Fault], hosts: Sequence[str]) -> tuple[Fault, ...]:
    """`faults` by time. Raises `UsageError` for hosts that are not there."""
    for fault in faults:
        if fault.host not in hosts:
            raise UsageError(
                f"There is no host {fault.host!r} to {fault.kind}",
                hint=f"hosts: {', '.join(hosts)}",
            )
    return tuple(sorted(faults, key=lambda fault: fault.at))


def crashes(hosts: Sequence[str], *, share: float, requests: int, seed: int) -> tuple[Fault, ...]:
    """A share of the hosts (rounded down, at least one) dies, each at a request drawn at random.

    No host dies before the first tenth of the requests or in the last one.
    """
    stream = Stream(seed, 0)
    count = max(1, int(len(hosts) * share))
    chosen = [hosts[i] for i in stream.shuffled(range(len(hosts)))[:count]]
    first, last = requests // 10, requests - requests // 10
    return check_faults(
        [Fault(first + stream.below(max(1, last - first)), host, "crash") for host in chosen], hosts
    )


def rehearsal(
    hosts: Sequence[str], *, requests: int, seed: int, kinds: Sequence[Kind] = KINDS
) -> tuple[Fault, ...]:
    """Every kind of failure once, one after the other, each on a host drawn at random.

    The requests are cut into as many parts as there are kinds; a failure comes at the beginning of
    its part and is undone (rejoin) at half of it, so that what it costs can be told apart.
    """
    stream = Stream(seed, 1)
    troubles = [kind for kind in kinds if kind != "rejoin"]
    part = requests // max(1, len(troubles))
    if part < 4:
        raise UsageError(
            f"{requests} requests are too few for {len(troubles)} kinds of failures",
            hint=f"take {4 * len(troubles)} or more",
        )
    faults: list[Fault] = []
    for number, kind in enumerate(troubles):
        host = hosts[stream.below(len(hosts))]
        start = number * part + part // 4
        faults.append(Fault(start, host, kind))
        if "rejoin" in kinds:
            faults.append(Fault(start + part // 2, host, "rejoin"))
    return check_faults(faults, hosts)
