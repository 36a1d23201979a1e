"""`simulate`: devices under load and failures, with the real router, in virtual time.

`Router`, `HealthMonitor` and the policy are those of the gateway; the hosts behind them are
simulated, and the event loop's clock jumps (`clock`).
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from heapq import heapify, heapreplace

import numpy as np

from layershuffle.gateway.brain import state
from layershuffle.gateway.brain.assignment import BlockFile, HostCapacity, assign
from layershuffle.gateway.brain.limits import Limits
from layershuffle.gateway.brain.policy import QUEUE, Cell, Rounds
from layershuffle.gateway.brain.state import HostState, State, Swarm, retry_after
from layershuffle.gateway.brain.sureness import Stop
from layershuffle.gateway.hosts.health import HealthMonitor, Reference
from layershuffle.gateway.hosts.router import Router
from simulation.chaos import RESTLESS, ChaosTransport
from simulation.clock import VirtualTimeLoop
from simulation.faults import Fault
from simulation.hosts import SimulatedDevice, SimulatedHosts
from simulation.outcome import (
    Ended,
    SimulatedReply,
    SimulationOutcome,
    outcome_of,
)
from simulation.pipeline import Pipeline

Churn = tuple[float, float]
"""Mean seconds for which a host is up, and is down. Hosts die and return independently, with
exponential times, starting in the steady state."""
_MILLI = 1000.0
_CANARY_STREAM, _SURE_STREAM = 2, 4
_GRACE = 0.3  # seconds in which a host may come back before others take its blocks
_LOAD = 0.5  # seconds until a block is loaded and tested
_STATE = np.ones((1, 1, 1), dtype=np.float32)  # of one image; honest blocks leave it as it is


async def _unchanged(state: State) -> State:
    """An honest block of a simulation, which returns the state unchanged."""
    return state


def simulate(
    devices: Mapping[str, SimulatedDevice],
    *,
    requests: int,
    limits: Limits | None = None,
    seed: int = 0,
    pipeline: bool = False,
    take_over: bool = False,
    clients: int = 4,
    rate: float | None = None,
    churn: Churn | None = None,
    faults: Sequence[Fault] = (),
    min_blocks: int = 1,
    top1: Mapping[Cell, float] | None = None,
    rounds: Rounds = QUEUE,
    stop: Stop | None = None,
    max_batch: int = 16,
    delay_ms: float = 0.0,
) -> SimulationOutcome:
    """The outcome of all requests; the same for the same arguments.

    Each of `clients` sends its next request when the last one has ended; after a failed one it
    waits as long as Retry-After says. With a `rate` so many requests a second arrive at random
    instead. `faults` happen before requests by number; `churn` goes on by itself; both depend on
    the seed alone. `pipeline`: the baseline answers (`pipeline.Pipeline`), not the router.
    `take_over`: as at a gateway, the blocks of a host that has been away for 0.3 s go to those that
    are up, which load them in half a second. `top1`: percent by how the blocks ran; as one after
    the other for what is not named there. `rounds`: what the router runs side by side and again.
    `stop`: requests end when they are sure, after so many blocks on average (`ends_after`).
    `max_batch`: most images that a host runs together. `delay_ms`: median of the random delay of a
    visit on a busy machine. Times are those of the swarm alone, without stem and head.
    """
    depth = 1 + max(block for device in devices.values() for block in device.blocks)

    async def play() -> SimulationOutcome:
        # Inside the loop, because router and hosts take their clock from it.
        clock = asyncio.get_running_loop().time
        hosts = SimulatedHosts(devices, max_batch=max_batch, delay_ms=delay_ms, seed=seed)
        chaos = ChaosTransport(hosts)
        router = Router(
            chaos if faults else hosts,
            depth=depth,
            limits=limits or Limits(),
            rounds=rounds,
            clock=clock,
        )
        enough = () if stop is None else ends_after(stop, requests, seed=seed)
        simulation = _Simulation(
            devices, hosts, chaos, router=router, faults=faults, enough=enough, seed=seed
        )
        simulation.pipeline = Pipeline(router) if pipeline else None
        simulation.take_over = take_over
        await simulation.run(
            requests, clients=clients, rate=rate, churn=churn, min_blocks=min_blocks
        )
        return outcome_of(simulation.replies, top1=top1 or {}, sure=stop, visits=hosts.visits)

    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        return runner.run(play())


class _Simulation:
    """Simulated hosts, their router and health check, and the replies so far."""

    def __init__(
        self,
        devices: Mapping[str, SimulatedDevice],
        hosts: SimulatedHosts,
        chaos: ChaosTransport,
        *,
        router: Router,
        faults: Sequence[Fault],
        enough: Sequence[int],
        seed: int,
    ) -> None:
        self.devices = devices
        self.hosts = hosts
        self.chaos = chaos
        self.router = router
        self.enough = enough
        self.seed = seed
        self.pipeline: Pipeline | None = None
        self.take_over = False
        self.blocks = {name: device.blocks for name, device in devices.items()}
        self.pending = sorted(faults, key=lambda fault: fault.at)
        self.replies: list[SimulatedReply] = []
        self.restless = set[str]()
        self.loop = asyncio.get_running_loop()
        router.swarm = Swarm(self._view(name) for name in devices)
        self.health = HealthMonitor(router, seed=seed)

    def _view(self, name: str) -> HostState:
        return HostState(name, self.blocks[name])

    async def _expect_all(self) -> None:
        """Begin the health checks of all hosts, spread over the time between two canaries.

        Real hosts join one by one, too. If all began at once, they would always answer their
        canaries at the same moments.
        """
        shares = np.random.default_rng((self.seed, _CANARY_STREAM)).random(len(self.devices))
        times = shares * self.router.limits.canary_every_ms / _MILLI
        for time, name in sorted(zip(times.tolist(), self.devices, strict=True)):
            await asyncio.sleep(time - self.loop.time())
            self._expect(name)

    def _expect(self, name: str) -> None:
        """Begin the health checks of the host."""
        self.health.expect(
            name,
            {
                # The number replaces the digest of the weights.
                block: Reference(_STATE, _unchanged, str(block))
                for block in self.blocks[name]
            },
        )

    # --- requests ---------------------------------------------------------------------------------

    async def run(
        self,
        requests: int,
        *,
        clients: int,
        rate: float | None,
        churn: Churn | None,
        min_blocks: int,
    ) -> None:
        """Send all requests, and wait until they have ended."""
        async with asyncio.TaskGroup() as background:
            endless = [
                background.create_task(self.health.run()),
                background.create_task(self._expect_all()),
            ]
            if churn is not None:
                changes = self._begin_churn(churn)
                endless.append(background.create_task(self._churn(changes)))
            async with asyncio.TaskGroup() as senders:
                numbers = iter(range(requests))
                if rate is None:
                    for _ in range(clients):
                        senders.create_task(self._client(numbers, min_blocks))
                else:
                    times = arrivals(requests, rate, seed=self.seed)
                    for number, time in zip(numbers, times, strict=True):
                        await asyncio.sleep(time - self.loop.time())
                        senders.create_task(self._request(number, min_blocks))
            await self.health.close()
            # They never end by themselves, and the group waits for all of its tasks.
            for task in endless:
                task.cancel()

    async def _client(self, numbers: Iterator[int], min_blocks: int) -> None:
        for number in numbers:
            reply = await self._request(number, min_blocks)
            # Otherwise one outage, in which a failure takes no time, would use up all requests.
            if reply.ended == "failed":
                await asyncio.sleep(retry_after(self.router.swarm, now=self.loop.time()))

    async def _request(self, number: int, min_blocks: int, /) -> SimulatedReply:
        while self.pending and self.pending[0].at <= number:
            self.inject(self.pending.pop(0))

        async def chance(_: State, blocks: int) -> float:
            return float(blocks >= self.enough[number])

        deadline_ms = self.router.limits.deadline_ms
        deadline = self.loop.time() + deadline_ms / _MILLI
        if self.pipeline is not None:
            after, route = await self.pipeline.walk(_STATE, deadline=deadline)
            least = self.router.depth
        else:
            after, route = await self.router.walk(
                _STATE,
                deadline=deadline,
                min_blocks=min_blocks,
                confidence=1.0 if self.enough else None,
                chance=chance,
            )
            least = min_blocks
        ended: Ended = "degraded" if route.degraded else "answered"
        if route.kept < least:
            ended = "failed"
        elif route.ms > deadline_ms:
            ended = "late"
        false = bool((after != _STATE).any())
        reply = SimulatedReply(route, ended, self.loop.time(), false)
        self.replies.append(reply)
        return reply

    # --- failures ---------------------------------------------------------------------------------

    def inject(self, fault: Fault) -> None:
        """Make the fault happen."""
        if fault.kind in ("crash", "kill"):
            self._stop(fault.host)
            if fault.kind == "kill":
                pause = self.router.limits.restart_ms / _MILLI
                self.loop.call_later(pause, self.rejoin, fault.host)
        elif fault.kind == "leave":
            self.router.update(fault.host, state.draining)
        elif fault.kind == "rejoin":
            self.rejoin(fault.host)
        elif fault.kind == "restless":
            self.restless.add(fault.host)
            self._come_and_go(fault.host)
        else:
            # A process that does not run looks from here like one behind a cut cable.
            kind = "cut" if fault.kind == "freeze" else fault.kind
            self.chaos.break_host(fault.host, kind)

    def _come_and_go(self, name: str) -> None:
        if name in self.restless:
            self.hosts[name].die()
            self._start(name)
            self.loop.call_later(RESTLESS, self._come_and_go, name)

    def rejoin(self, name: str) -> None:
        """End the faults of a host; start one that is dead, shut out or leaving."""
        self.chaos.heal(name)
        self.restless.discard(name)
        host, view = self.hosts[name], self.router.swarm[name]
        if host.alive and view.condition in ("healthy", "suspect"):
            return
        self._start(name)

    def _stop(self, name: str) -> None:
        self.hosts[name].die()
        if self.take_over:
            self.loop.call_later(_GRACE, self._assign)

    def _start(self, name: str) -> None:
        self.hosts[name].start()
        self.router.update(name, lambda _: self._view(name))
        self.health.drop(name)
        self._expect(name)
        if self.take_over:
            self._assign()

    def _assign(self) -> None:
        """Give the blocks to the hosts that are up, as a gateway does."""
        swarm = self.router.swarm
        present = [name for name, host in self.hosts.items() if host.alive]
        holders = [
            HostCapacity(
                name,
                memory=len(self.devices[name].blocks),
                blocks=self.blocks[name],
                ready=swarm[name].blocks,
            )
            for name in present
        ]
        files = [BlockFile(str(block), 1) for block in range(self.router.depth)]
        for name, blocks in assign(holders, files).items():
            before = self.blocks[name]
            if blocks == before:
                continue
            self.blocks[name] = blocks
            ready = swarm[name].blocks & blocks
            change = partial(HostState._replace, blocks=ready, loading=blocks - ready)
            self.router.update(name, change)
            self.health.forget(name, before - blocks)
            self.loop.call_later(_LOAD, self._load, name)

    def _load(self, name: str) -> None:
        """What a host was given has been loaded and tested, if it is still up."""
        if self.hosts[name].alive:
            change = partial(HostState._replace, blocks=self.blocks[name], loading=frozenset())
            self.router.update(name, change)
            self._expect(name)

    def _begin_churn(self, churn: Churn) -> list[tuple[float, str, Iterator[float]]]:
        """Stop the hosts that are down at first. Returns a heap of (next change, name, stays).

        One heap of tuples, and not a timer for each host: with 10,000 timers the event loop spends
        more time on comparing them than on anything else.
        """
        changes = []
        for number, name in enumerate(self.devices):
            up, stays = life(churn, number, seed=self.seed)
            changes.append((next(stays), name, stays))
            if not up:
                self.hosts[name].die()
                absent = self._view(name)._replace(condition="gone", why="it has not come yet")
                self.router.put(absent)
        heapify(changes)
        return changes

    async def _churn(self, changes: list[tuple[float, str, Iterator[float]]]) -> None:
        """Stop and restart hosts at the times in the heap, until cancelled."""
        while True:
            time, name, times = changes[0]
            await asyncio.sleep(time - self.loop.time())
            host = self.hosts[name]
            if host.alive:
                self._stop(name)
            else:
                self.rejoin(name)
            # Counted from the planned time, so a host's times depend only on its own draws.
            heapreplace(changes, (time + next(times), name, times))


def arrivals(requests: int, rate: float, *, seed: int) -> tuple[float, ...]:
    """Arrival times of the requests in seconds, ascending, `rate` a second (Poisson)."""
    gaps = np.random.default_rng((seed, 0)).exponential(1 / rate, size=requests)
    return tuple(np.cumsum(gaps).tolist())


def ends_after(stop: Stop, requests: int, *, seed: int) -> tuple[int, ...]:
    """The blocks after which each request is sure: `stop.blocks`, up or down to a whole number by a
    draw that keeps the mean. The calibration does not say how far single requests are from it."""
    draws = np.random.default_rng((seed, _SURE_STREAM)).random(requests)
    return tuple(np.floor(stop.blocks + draws).astype(int).tolist())


def life(churn: Churn, number: int, *, seed: int) -> tuple[bool, Iterator[float]]:
    """Whether host `number` is up at first, and the lengths of its stays up and down, in seconds.

    They depend on the seed and the number alone, not on what else is simulated.
    """
    # Cheaper to make than one of numpy: there is one for each of 10,000 hosts.
    draw = random.Random(seed << 32 | number)
    up_s, down_s = churn
    # In the steady state: if all hosts were up at first, the first seconds would look too good.
    up = draw.random() < up_s / (up_s + down_s)

    def stays(there: bool) -> Iterator[float]:
        # Exponential times have no memory: the rest of a stay is distributed like a whole one.
        while True:
            yield draw.expovariate(1 / (up_s if there else down_s))
            there = not there

    return up, stays(up)
