"""Injected faults: which host fails when, and the wrappers that inject them.

A list of `Fault` is pure data and a function of a seed. Its times are counted in requests, so the
same list affects a real swarm, one in this process and a simulated one at the same places.

`ChaosBackend` and `ChaosTransport` wrap the backend of a coordinator and the transport of a router
(as torchft's failure injector does), so hosts and engines contain no code for drills.
`FaultInjector` installs them.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from layershuffle.core.draws import Stream
from layershuffle.errors import UsageError
from layershuffle.swarm.messages import (
    Answer,
    HostGone,
    HostUnavailable,
    Packet,
    Transport,
    Visit,
    VisitError,
    WorkExpired,
    pack,
    unpack,
)
from layershuffle.text import counted

if TYPE_CHECKING:
    from layershuffle.swarm.coordinator import Coordinator
    from layershuffle.swarm.host import HostInfo
    from layershuffle.swarm.placement import Carrier, HostBackend, HostCall, HostRecord, Node

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

    kill                its process is killed, and the coordinator may restart it
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

    cut, freeze  neither visits nor answers are delivered, until `heal`
    slow         a visit computes `factor` times as long, and others wait for it
    wrong        an answer gets noise of ten times its own spread, the same for equal states;
                 "wrong-rarely" and "wrong-but-canaries" change only answers to requests
    """

    def __init__(self, transport: Transport) -> None:
        self.inner = transport
        self.dead: set[str] = set()
        self._slow: dict[str, tuple[float, asyncio.Lock]] = {}
        self._wrong: dict[str, FaultKind] = {}
        self._chance = np.random.default_rng(_NOISE_SEED)
        self._open: dict[str, asyncio.Event] = {}

    def break_host(self, host: str, kind: FaultKind, *, factor: float = SLOW_FACTOR) -> None:
        """Inject a fault into `host`: cut, freeze, slow (by `factor`), or a kind of wrong."""
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
        self.dead.discard(host)
        if way := self._open.pop(host, None):
            way.set()

    async def way_to(self, host: str) -> None:
        """Wait until messages to and from `host` are delivered."""
        # A loop, because the host may be cut off again before this task runs.
        while host in self._open:
            await self._open[host].wait()

    async def visit(self, visit: Visit, packet: Packet) -> Answer:
        """The host's answer; see `messages.Transport`."""
        await self.way_to(visit.host)
        if visit.host in self._slow:
            answer = await self._slowly(visit, packet)
        else:
            answer = await self._passed(visit, packet)
        # On the way back too: a host that is cut off computes, but its answer does not arrive.
        await self.way_to(visit.host)
        if self._lies(visit):
            state = unpack(answer.packet)
            noise = np.random.default_rng(_NOISE_SEED).standard_normal(state.shape, np.float32)
            # A state of zeros has no spread, but must become wrong too.
            state = state + noise * np.float32(_NOISE_FACTOR * (state.std() or 1.0))
            answer = replace(answer, packet=pack(state, answer.packet.wire))
        return answer

    def _lies(self, visit: Visit) -> bool:
        kind = self._wrong.get(visit.host)
        if kind is None or kind == "wrong":
            return kind is not None
        # Canaries have no budget, by which a careful liar recognises them.
        return visit.budget is not None and (
            kind == "wrong-but-canaries" or bool(self._chance.random() < _RARELY)
        )

    async def _passed(self, visit: Visit, packet: Packet) -> Answer:
        try:
            return await self.inner.visit(visit, packet)
        except VisitError as error:
            # A killed host in this process is only closed; callers must get the error of a dead
            # process.
            if visit.host in self.dead:
                raise HostGone(f"The process of host {visit.host} is dead") from error
            raise

    async def _slowly(self, visit: Visit, packet: Packet) -> Answer:
        """Run one visit after the other, because a host computes in one thread; without batches."""
        factor, turn = self._slow[visit.host]
        clock = asyncio.get_running_loop().time
        arrived = clock()
        async with turn:
            waited = clock() - arrived
            # As real hosts do, it drops work whose budget has run out before its turn.
            if 1000 * waited > visit.budget_ms:
                raise WorkExpired(f"Host {visit.host} had no time for it in its budget")
            answer = await self._passed(visit, packet)
            await asyncio.sleep((factor - 1) * answer.compute_ms / 1000)
        return replace(
            answer,
            compute_ms=factor * answer.compute_ms,
            queue_ms=answer.queue_ms + 1000 * waited,
        )


class ChaosBackend:
    """A backend with injected faults (`placement.HostBackend`); without any, it adds nothing.

    `transport` wraps that of `backend`, and replaces it in the router.
    """

    def __init__(self, backend: HostBackend) -> None:
        self.inner, self.transport = backend, ChaosTransport(backend.transport)

    async def nodes(self) -> Sequence[Node]:
        """The living machines."""
        return await self.inner.nodes()

    async def start(self, name: str, *, node: str) -> HostInfo:
        """Start a process for `name` on that machine."""
        await self.transport.way_to(name)
        return await self.inner.start(name, node=node)

    async def end(self, name: str) -> None:
        """End the host, and its injected faults."""
        await self.inner.end(name)
        self.transport.heal(name)

    async def call(self, name: str, method: HostCall, *args: Any) -> Any:
        """The result of this method of the host."""
        await self.transport.way_to(name)
        result = await self.inner.call(name, method, *args)
        await self.transport.way_to(name)
        return result

    def carriers(self) -> Mapping[str, Carrier]:
        """How visits reach each host."""
        return self.inner.carriers()

    def forget(self) -> None:
        """Drop everything about the processes; injected faults last until the host's `end`."""
        self.inner.forget()


def signal_process(ray: Any, pid: int, *, number: signal.Signals, node: str) -> None:
    """Signal a process on a member of the cluster. Raises `HostUnavailable` if it is dead."""
    if node == ray.get_runtime_context().get_node_id():
        # A task would have to wait until a worker process has started there.
        try:
            os.kill(pid, number)
        except ProcessLookupError as error:
            raise HostUnavailable(f"The process {pid} of a host is dead") from error
        return
    there = ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(node, soft=False)
    # Without retries: the pid may belong to another process by then.
    send = ray.remote(_send_signal).options(num_cpus=0, max_retries=0, scheduling_strategy=there)
    send.remote(pid, int(number))


def _send_signal(pid: int, number: int) -> None:
    os.kill(pid, number)


class FaultInjector:
    """Injects faults into the hosts of a running swarm (`drill.Engine`).

    It wraps the backend and the transport of `coordinator`. `ray`: the connected module if Ray runs
    the hosts, whose processes then really die and stop; otherwise they only appear to.
    """

    def __init__(self, coordinator: Coordinator, *, ray: Any | None = None) -> None:
        self.coordinator, self._ray = coordinator, ray
        self.backend = ChaosBackend(coordinator.backend)
        coordinator.backend, coordinator.router.transport = self.backend, self.backend.transport

    async def inject(self, fault: Fault) -> None:
        """Inject the fault. A crashed host stays dead until its rejoin.

        Raises `LayerShuffleError` for a host that is unknown or already dead.
        """
        name, coordinator = fault.host, self.coordinator
        coordinator.record_of(name)
        if fault.kind == "crash":
            await self.kill(name)
            # Otherwise the coordinator would restart it at once.
            coordinator.hold(name, "it crashed")
        elif fault.kind == "kill":
            await self.kill(name)
        elif fault.kind == "leave":
            await coordinator.leave(name)
        elif fault.kind == "freeze":
            self.freeze(name)
        elif fault.kind != "rejoin":
            self.backend.transport.break_host(name, fault.kind)
        elif coordinator.is_up(name) and coordinator.router.swarm[name].condition not in (
            "shut-out",
            "gone",
        ):
            self.heal(name)
        else:
            await coordinator.readmit(name)

    async def kill(self, name: str) -> None:
        """Kill the host's process at once. Raises `HostUnavailable` if there is none."""
        host = self._running(name)
        if self._ray is not None:
            signal_process(self._ray, host.pid, number=signal.SIGKILL, node=host.node)
        else:
            self.backend.transport.heal(name)  # callers that wait for it must learn of its death
            self.backend.transport.dead.add(name)
            await self.backend.inner.end(name)
        self.coordinator.has_process(name, 0)  # its pid may be reused

    def freeze(self, name: str) -> None:
        """Stop the host's process; a host in this process stops answering."""
        if self._ray is None:
            return self.backend.transport.break_host(name, "freeze")
        host = self._running(name)
        signal_process(self._ray, host.pid, number=signal.SIGSTOP, node=host.node)

    def heal(self, name: str) -> None:
        """End the host's faults, unless it is dead."""
        if self._ray is not None:
            host = self._running(name)
            signal_process(self._ray, host.pid, number=signal.SIGCONT, node=host.node)
        self.backend.transport.heal(name)

    def _running(self, name: str) -> HostRecord:
        host = self.coordinator.record_of(name)
        if not host.pid:
            raise HostUnavailable(f"Host {name} has no process now: it is starting, or dead")
        return host
