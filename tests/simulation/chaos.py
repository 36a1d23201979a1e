"""Inject faults: `ChaosTransport` into the hosts of any transport, a real one or a simulated one,
`FaultInjector` also into the processes of a running swarm.

The transport of a router is wrapped (as torchft's failure injector does), so neither hosts nor
gateway contain code for faults.
"""

from __future__ import annotations

import asyncio
import signal
from collections import defaultdict
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from layershuffle.gateway.brain.settings import Wire
from layershuffle.gateway.brain.state import Answer, State, Visit
from layershuffle.gateway.hosts.router import Transport
from layershuffle.ground.errors import LayerShuffleError
from simulation.faults import FaultKind

if TYPE_CHECKING:
    from layershuffle.gateway.hosts.coordinator import Coordinator

RESTLESS = 1.0
"""Seconds between the ends of a restless host's connections."""
_SLOW_FACTOR = 10.0
_DELAY, _LOST = 0.2, 0.2  # seconds of a message; share of messages
_NOISE_FACTOR, _NOISE_SEED = 10.0, 20407
_RARELY = 0.01  # of the answers


class ChaosTransport:
    """A transport with injected faults (`messages.Transport`); without any, it adds nothing."""

    def __init__(self, transport: Transport) -> None:
        self.inner = transport
        self._faults: defaultdict[str, set[FaultKind]] = defaultdict(set)
        self._turns: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)
        self._healed: defaultdict[str, asyncio.Event] = defaultdict(asyncio.Event)
        self._chance = np.random.default_rng(_NOISE_SEED)

    def break_host(self, host: str, kind: FaultKind) -> None:
        """Inject a fault into `host`: cut, lossy, slow, or a kind of wrong."""
        self._faults[host].add(kind)

    def heal(self, host: str) -> None:
        """End the faults of `host`."""
        self._faults.pop(host, None)
        self._healed.pop(host, asyncio.Event()).set()

    async def visit(self, visit: Visit, state: State, *, form: Wire = "fp32") -> Answer:
        """The host's answer; see `messages.Transport`."""
        await self._way_to(visit.host)
        if "slow" in self._faults.get(visit.host, ()):
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

    async def _way_to(self, host: str) -> None:
        # A loop, because the host may be cut off again before this task runs.
        while "cut" in self._faults.get(host, ()):
            await self._healed[host].wait()
        if "lossy" in self._faults.get(host, ()):
            # What was lost is sent again after the time in which its receipt would be there.
            await asyncio.sleep(_DELAY * (2 * self._chance.geometric(1 - _LOST) - 1))

    def _lies(self, visit: Visit) -> bool:
        faults = self._faults.get(visit.host, ())
        if "wrong" in faults:
            return True
        # Canaries have no budget, by which a careful liar recognises them.
        if visit.budget is None:
            return False
        if "wrong-but-canaries" in faults:
            return True
        return "wrong-rarely" in faults and bool(self._chance.random() < _RARELY)

    async def _slowly(self, visit: Visit, state: State, *, form: Wire) -> Answer:
        """Run one visit after the other, because a host computes in one thread; without batches."""
        clock = asyncio.get_running_loop().time
        arrived = clock()
        async with self._turns[visit.host]:
            waited = clock() - arrived
            answer = await self.inner.visit(visit, state, form=form)
            await asyncio.sleep((_SLOW_FACTOR - 1) * answer.compute_ms / 1000)
        return replace(
            answer,
            compute_ms=_SLOW_FACTOR * answer.compute_ms,
            queue_ms=answer.queue_ms + 1000 * waited,
        )


class FaultInjector:
    """Injects faults into the hosts of a running swarm.

    It wraps the transport of `coordinator`. Processes really die and stop; only the gateway's own
    can (`children.Children`). The other faults are made on the way to any host.
    """

    def __init__(self, coordinator: Coordinator) -> None:
        self.coordinator, self.transport = coordinator, ChaosTransport(coordinator.connected)
        coordinator.router.transport = self.transport
        self._restless: dict[str, asyncio.Task[None]] = {}

    async def inject(self, name: str, kind: FaultKind) -> None:
        """Let this happen to the host `name`.

        Raises `LayerShuffleError` for a host that is already dead, or no process of this gateway
        where the fault is one of processes; `UsageError` for one that is unknown.
        """
        coordinator, children = self.coordinator, self.coordinator.children
        if kind in ("crash", "kill"):
            if kind == "crash":
                coordinator.kill(name)
            else:
                children.signal(name, signal.SIGKILL)
        elif kind == "freeze":
            children.signal(name, signal.SIGSTOP)
        elif kind == "leave":
            coordinator.check_known(name)
            children.hold(name)
            children.signal(name, signal.SIGTERM)
        elif kind == "rejoin":
            self._rejoin(name)
        else:
            coordinator.check_known(name)
            if kind != "restless":
                self.transport.break_host(name, kind)
            elif name not in self._restless:
                self._restless[name] = asyncio.create_task(self._come_and_go(name))

    def _rejoin(self, name: str) -> None:
        coordinator, children = self.coordinator, self.coordinator.children
        if (task := self._restless.pop(name, None)) is not None:
            task.cancel()
        self.transport.heal(name)
        if name in children.names:
            # Also where nobody has noticed yet that it died.
            children.release(name)
            with suppress(LayerShuffleError):
                children.signal(name, signal.SIGCONT)
        view = coordinator.router.swarm.get(name)
        # A host that is only suspect is back with its next probe.
        if view is None or view.condition in ("shut-out", "draining", "gone"):
            coordinator.readmit(name)

    async def _come_and_go(self, name: str) -> None:
        while True:
            self.coordinator.connected.cut(name)
            await asyncio.sleep(RESTLESS)
