"""Injected faults: what may happen to a host of a running swarm, and the wrapper that does it.

`ChaosTransport` wraps the transport of a router (as torchft's failure injector does), so hosts
contain no code for drills. `FaultInjector` installs it, and sends signals to processes.
"""

from __future__ import annotations

import asyncio
import signal
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Literal

import numpy as np

from layershuffle.errors import LayerShuffleError
from layershuffle.swarm.messages import Answer, State, Transport, Visit, Wire, WorkExpired

if TYPE_CHECKING:
    from layershuffle.swarm.coordinator import Coordinator

FaultKind = Literal[
    "crash", "kill", "freeze", "slow", "wrong", "wrong-rarely", "wrong-but-canaries", "cut",
    "lossy", "restless", "leave", "rejoin",
]  # fmt: skip
"""What may happen to a host.

crash               its process is killed, and started again by its rejoin alone
kill                its process is killed, and started again
freeze              its process stops silently
slow                its compute takes ten times as long
wrong               its answers are finite and false
wrong-rarely        one answer of a hundred is false, but none to a canary
wrong-but-canaries  all its answers are false, except those to canaries
cut                 its network fails silently
lossy               each message takes 200 ms, and of five one is lost and sent again
restless            its connection ends every second, and it dials in again
leave               it is drained, then ended
rejoin              a crashed, left or shut-out host comes back; the faults of any other one end
"""
SLOW_FACTOR = 10.0
_DELAY, _LOST = 0.2, 0.2  # seconds of a message; share of messages
_RESTLESS = 1.0  # seconds between the ends of its connections
_NOISE_FACTOR, _NOISE_SEED = 10.0, 20407
_RARELY = 0.01  # of the answers


class ChaosTransport:
    """A transport with injected faults (`messages.Transport`); without any, it adds nothing.

    cut    neither visits nor answers are delivered, until `heal`
    lossy  both are delivered late, and some of them twice as late or later
    slow   a visit computes ten times as long, and others wait for it
    wrong  an answer gets noise of ten times its own spread, the same for equal states;
           "wrong-rarely" and "wrong-but-canaries" change only answers to requests
    """

    def __init__(self, transport: Transport) -> None:
        self.inner = transport
        self._slow: dict[str, asyncio.Lock] = {}
        self._wrong: dict[str, FaultKind] = {}
        self._chance = np.random.default_rng(_NOISE_SEED)
        self._open: dict[str, asyncio.Event] = {}
        self._lossy = set[str]()

    def break_host(self, host: str, kind: FaultKind) -> None:
        """Inject a fault into `host`: cut, lossy, slow, or a kind of wrong."""
        if kind == "slow":
            self._slow[host] = asyncio.Lock()
        elif kind.startswith("wrong"):
            self._wrong[host] = kind
        elif kind == "lossy":
            self._lossy.add(host)
        else:
            self._open.setdefault(host, asyncio.Event())

    def heal(self, host: str) -> None:
        """End the faults of `host`."""
        self._slow.pop(host, None)
        self._wrong.pop(host, None)
        self._lossy.discard(host)
        if way := self._open.pop(host, None):
            way.set()

    async def _way_to(self, host: str) -> None:
        # A loop, because the host may be cut off again before this task runs.
        while host in self._open:
            await self._open[host].wait()
        if host in self._lossy:
            # What was lost is sent again after the time in which its receipt would be there.
            await asyncio.sleep(_DELAY * (2 * self._chance.geometric(1 - _LOST) - 1))

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
        turn = self._slow[visit.host]
        clock = asyncio.get_running_loop().time
        arrived = clock()
        async with turn:
            waited = clock() - arrived
            # As real hosts do, it drops work whose budget has run out before its turn.
            if 1000 * waited > visit.budget_ms:
                raise WorkExpired(f"Host {visit.host} had no time for it in its budget")
            answer = await self.inner.visit(visit, state, form=form)
            await asyncio.sleep((SLOW_FACTOR - 1) * answer.compute_ms / 1000)
        return replace(
            answer,
            compute_ms=SLOW_FACTOR * answer.compute_ms,
            queue_ms=answer.queue_ms + 1000 * waited,
        )


class FaultInjector:
    """Injects faults into the hosts of a running swarm.

    It wraps the transport of `coordinator`. Processes really die and stop; only the gateway's own
    can (`children.Children`). The other faults are made on the way to any host.
    """

    def __init__(self, coordinator: Coordinator) -> None:
        self.coordinator, self.transport = coordinator, ChaosTransport(coordinator.members)
        coordinator.router.transport = self.transport
        self._restless: dict[str, asyncio.Task[None]] = {}

    async def inject(self, name: str, kind: FaultKind) -> None:
        """Let this happen to the host `name`.

        Raises `LayerShuffleError` for a host that is already dead, `UsageError` for one that is
        unknown, or no process of this gateway where the fault is one of processes.
        """
        coordinator, children = self.coordinator, self.coordinator.children
        if kind in ("restless", "rejoin") and (task := self._restless.pop(name, None)) is not None:
            task.cancel()
        if kind in ("crash", "kill"):
            children.signal(name, signal.SIGKILL)
            if kind == "crash":
                children.hold(name)
        elif kind == "freeze":
            children.signal(name, signal.SIGSTOP)
        elif kind == "leave":
            await coordinator.leave(name)
        elif kind == "restless":
            coordinator.check_known(name)
            self._restless[name] = asyncio.create_task(self._come_and_go(name))
        elif kind != "rejoin":
            coordinator.check_known(name)
            self.transport.break_host(name, kind)
        else:
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
            self.coordinator.members.cut(name)
            await asyncio.sleep(_RESTLESS)
