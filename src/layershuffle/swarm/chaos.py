"""Injected faults: which host fails when, and the wrappers that inject them.

A list of `Fault` is pure data and a function of a seed. Its times are counted in requests, so the
same list affects a real swarm, one in this process and a simulated one at the same places.

`ChaosTransport` wraps the transport of a router (as torchft's failure injector does), so hosts
contain no code for drills. `FaultInjector` installs it, and sends signals to processes.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

import numpy as np

from layershuffle.core.draws import Stream
from layershuffle.errors import UsageError
from layershuffle.swarm.messages import Answer, State, Transport, Visit, Wire, WorkExpired
from layershuffle.text import counted

if TYPE_CHECKING:
    from layershuffle.swarm.coordinator import Coordinator

FaultKind = Literal[
    "crash", "freeze", "slow", "wrong", "cut", "leave", "rejoin",
    "kill", "wrong-rarely", "wrong-but-canaries",
]  # fmt: skip
# The last three are only for scenarios; lists of faults contain kinds that can be undone.
KINDS: tuple[FaultKind, ...] = ("crash", "freeze", "slow", "wrong", "cut", "leave", "rejoin")
SLOW_FACTOR = 10.0
_NOISE_FACTOR, _NOISE_SEED = 10.0, 20407
_RARELY = 0.01  # of the answers


@dataclass(frozen=True, slots=True)
class Fault:
    """Just before request number `at` is sent, `kind` happens to `host`.

    crash    its process is killed
    freeze   its process stops silently
    slow     its compute takes ten times as long
    wrong    its answers are finite and false
    cut      its network fails silently
    leave    it is drained, then ended
    rejoin   a crashed, left or shut-out host is restarted; the faults of any other one end

    And for `scenarios`:

    kill                its process is killed, and started again
    wrong-rarely        one answer of a hundred is false, but none to a canary
    wrong-but-canaries  all its answers are false, except those to canaries
    """

    at: int
    host: str
    kind: FaultKind


def check_faults(faults: Sequence[Fault], hosts: Sequence[str]) -> tuple[Fault, ...]:
    """`faults`, sorted by time. Raises `UsageError` for unknown hosts."""
    for fault in faults:
        if fault.host not in hosts:
            raise UsageError(
                f"There is no host {fault.host!r} to {fault.kind}",
                hint=f"hosts: {', '.join(hosts)}",
            )
    return tuple(sorted(faults, key=lambda fault: fault.at))


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
    return check_faults(
        [Fault(first + stream.below(max(1, last - first)), host, "crash") for host in chosen], hosts
    )


def crashes_text(faults: Sequence[Fault], *, share: float, hosts: int) -> str:
    """A sentence with the number of hosts that die, which `share` does not make obvious."""
    die = "dies" if len(faults) == 1 else "die"
    return f"{len(faults)} of {counted(hosts, 'host')} {die} (--kill {share:g}, rounded down)"


def one_of_each_fault(
    hosts: Sequence[str], *, requests: int, seed: int, kinds: Sequence[FaultKind] = KINDS
) -> tuple[Fault, ...]:
    """Every kind of fault once, one after the other, each on a host drawn at random.

    The requests are split into as many parts as there are kinds. A fault begins after a quarter of
    its part and is undone (rejoin) after three quarters, so its costs can be separated. Raises
    `UsageError` for too few requests.
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
        # The quarters without a fault keep late effects of one fault out of the next part.
        start = number * part + part // 4
        faults.append(Fault(start, host, kind))
        if "rejoin" in kinds:
            faults.append(Fault(start + part // 2, host, "rejoin"))
    return check_faults(faults, hosts)


class ChaosTransport:
    """A transport with injected faults (`messages.Transport`); without any, it adds nothing.

    cut    neither visits nor answers are delivered, until `heal`
    slow   a visit computes `factor` times as long, and others wait for it
    wrong  an answer gets noise of ten times its own spread, the same for equal states;
           "wrong-rarely" and "wrong-but-canaries" change only answers to requests
    """

    def __init__(self, transport: Transport) -> None:
        self.inner = transport
        self._slow: dict[str, tuple[float, asyncio.Lock]] = {}
        self._wrong: dict[str, FaultKind] = {}
        self._chance = np.random.default_rng(_NOISE_SEED)
        self._open: dict[str, asyncio.Event] = {}

    def break_host(self, host: str, kind: FaultKind, *, factor: float = SLOW_FACTOR) -> None:
        """Inject a fault into `host`: cut, slow (by `factor`), or a kind of wrong."""
        if kind == "slow":
            self._slow[host] = (factor, asyncio.Lock())
        elif kind.startswith("wrong"):
            self._wrong[host] = kind
        else:
            self._open.setdefault(host, asyncio.Event())

    def heal(self, host: str) -> None:
        """End the faults of `host`."""
        self._slow.pop(host, None)
        self._wrong.pop(host, None)
        if way := self._open.pop(host, None):
            way.set()

    async def _way_to(self, host: str) -> None:
        # A loop, because the host may be cut off again before this task runs.
        while host in self._open:
            await self._open[host].wait()

    async def visit(self, visit: Visit, state: State, *, form: Wire = "fp32") -> Answer:
        """The host's answer; see `messages.Transport`."""
        await self._way_to(visit.host)
        if visit.host in self._slow:
            answer = await self._slowly(visit, state, form=form)
        else:
            answer = await self.inner.visit(visit, state, form=form)
        # On the way back too: a host that is cut off computes, but its answer does not arrive.
        await self._way_to(visit.host)
        if self._lies(visit):
            after = answer.state
            noise = np.random.default_rng(_NOISE_SEED).standard_normal(after.shape, np.float32)
            # A state of zeros has no spread, but must become wrong too.
            after = after + noise * np.float32(_NOISE_FACTOR * (after.std() or 1.0))
            answer = replace(answer, state=after)
        return answer

    def _lies(self, visit: Visit) -> bool:
        kind = self._wrong.get(visit.host)
        if kind is None or kind == "wrong":
            return kind is not None
        # Canaries have no budget, by which a careful liar recognises them.
        return visit.budget is not None and (
            kind == "wrong-but-canaries" or bool(self._chance.random() < _RARELY)
        )

    async def _slowly(self, visit: Visit, state: State, *, form: Wire) -> Answer:
        """Run one visit after the other, because a host computes in one thread; without batches."""
        factor, turn = self._slow[visit.host]
        clock = asyncio.get_running_loop().time
        arrived = clock()
        async with turn:
            waited = clock() - arrived
            # As real hosts do, it drops work whose budget has run out before its turn.
            if 1000 * waited > visit.budget_ms:
                raise WorkExpired(f"Host {visit.host} had no time for it in its budget")
            answer = await self.inner.visit(visit, state, form=form)
            await asyncio.sleep((factor - 1) * answer.compute_ms / 1000)
        return replace(
            answer,
            compute_ms=factor * answer.compute_ms,
            queue_ms=answer.queue_ms + 1000 * waited,
        )


class FaultInjector:
    """Injects faults into the hosts of a running swarm (`drill.Engine`).

    It wraps the transport of `coordinator`. Processes really die and stop; only the gateway's own
    can (`children.Children`). The other faults are made on the way to any host.
    """

    def __init__(self, coordinator: Coordinator) -> None:
        self.coordinator, self.transport = coordinator, ChaosTransport(coordinator.members)
        coordinator.router.transport = self.transport

    async def inject(self, fault: Fault) -> None:
        """Inject the fault. A crashed host stays dead until its rejoin.

        Raises `LayerShuffleError` for a host that is already dead, `UsageError` for one that is
        unknown, or no process of this gateway where the fault is one of processes.
        """
        name, kind, coordinator = fault.host, fault.kind, self.coordinator
        children = coordinator.children
        if kind in ("crash", "kill"):
            children.signal(name, signal.SIGKILL)
            if kind == "crash":
                children.hold(name)
        elif kind == "freeze":
            children.signal(name, signal.SIGSTOP)
        elif kind == "leave":
            await coordinator.leave(name)
        elif kind != "rejoin":
            coordinator.check_known(name)
            self.transport.break_host(name, kind)
        else:
            self.transport.heal(name)
            if name in children.pids:
                children.signal(name, signal.SIGCONT)
            view = coordinator.router.swarm.get(name)
            # A host that is only suspect is back with its next probe.
            if view is None or view.condition in ("shut-out", "draining", "gone"):
                coordinator.readmit(name)
