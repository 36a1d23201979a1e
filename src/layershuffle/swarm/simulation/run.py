"""`simulate`: run a plan under load and failures, with the real router, in virtual time.

`Router`, `HealthMonitor` and the policy are those of the gateway, unchanged; the hosts behind them
are simulated, and the event loop's clock jumps (`clock`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from heapq import heapify, heapreplace

import numpy as np

from layershuffle.errors import UsageError
from layershuffle.swarm import state
from layershuffle.swarm.chaos import Fault, check_faults
from layershuffle.swarm.health import HealthMonitor, Reference
from layershuffle.swarm.messages import State
from layershuffle.swarm.plan import SwarmPlan
from layershuffle.swarm.policy import Routing
from layershuffle.swarm.rounds import QUEUE, Cell, Rounds
from layershuffle.swarm.router import Router
from layershuffle.swarm.simulation.clock import VirtualTimeLoop
from layershuffle.swarm.simulation.hosts import SimulatedHosts
from layershuffle.swarm.simulation.outcome import SimulatedReply, SimulationOutcome, outcome_of
from layershuffle.swarm.simulation.scenario import Arrivals, Churn, Profile, depth_of, lives
from layershuffle.swarm.state import HostView, Swarm, retry_after

_MILLI = 1000.0
_CANARY_STREAM = 2
_STATE = np.ones((1, 1, 1), dtype=np.float32)  # of one image; honest blocks leave it as it is


async def _unchanged(state: State) -> State:
    """An honest block of a simulation, which returns the state unchanged."""
    return state


def simulate(
    plan: SwarmPlan,
    *,
    profile: Profile,
    requests: int,
    seed: int = 0,
    routing: Routing | None = None,
    arrivals: Arrivals | None = None,
    churn: Churn | None = None,
    faults: Sequence[Fault] = (),
    min_blocks: int = 1,
    accuracy: Mapping[Cell, float] | None = None,
    rounds: Rounds = QUEUE,
) -> SimulationOutcome:
    """The outcome of all requests; the same for the same arguments.

    `routing`: instead of the plan's. `faults` happen before requests by number, as in a drill;
    `churn` goes on by itself; both depend on the seed and not on the routing. `accuracy`: percent
    by how the blocks ran; as one after the other for what is not named there. `rounds`: what the
    router is to run side by side and again. Times are those of the swarm alone, without stem and
    head. Raises `UsageError` for plans that miss blocks, faults of unknown hosts, no
    requests, or more `min_blocks` than there are.
    """
    if requests < 1:
        raise UsageError(f"At least one request is needed, got {requests}", hint="--requests 1000")
    if min_blocks > (depth := depth_of(plan)):
        raise UsageError(
            f"An answer is to have {min_blocks} blocks or more, and the plan has {depth}",
            hint=f"ask for at most {depth} (--min-blocks)",
        )
    pending = check_faults(faults, list(plan.hosts))
    arrivals = arrivals or Arrivals()

    async def play() -> SimulationOutcome:
        # Inside the loop, because router and hosts take their clock from it.
        simulation = _Simulation(plan, profile=profile, routing=routing, faults=pending, seed=seed)
        simulation.router.rounds = rounds
        await simulation.run(requests, arrivals=arrivals, churn=churn, min_blocks=min_blocks)
        return outcome_of(
            simulation.replies,
            routing=simulation.router.routing,
            accuracy=accuracy,
            depth=simulation.router.depth,
            visits=simulation.transport.visits,
        )

    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        return runner.run(play())


class _Simulation:
    """Simulated hosts, their router and health check, and the replies so far."""

    def __init__(
        self,
        plan: SwarmPlan,
        *,
        profile: Profile,
        routing: Routing | None,
        faults: Sequence[Fault],
        seed: int,
    ) -> None:
        self.plan, self.seed, self.pending = plan, seed, list(faults)
        self.replies: list[SimulatedReply] = []
        self.loop = asyncio.get_running_loop()
        self.transport = SimulatedHosts(plan.hosts, profile=profile, limits=plan.limits, seed=seed)
        self.router = Router(
            self.transport,
            depth=depth_of(plan),
            limits=plan.limits,
            routing=routing or plan.routing,
            most_blocks=plan.most_blocks,
            clock=self.loop.time,
        )
        self.router.swarm = Swarm(self._view(name) for name in plan.hosts)
        self.health = HealthMonitor(self.router, seed=seed)

    def _view(self, name: str) -> HostView:
        return HostView(name, frozenset(self.plan.hosts[name].blocks))

    async def _expect_all(self) -> None:
        """Begin the health checks of all hosts, spread over the time between two canaries.

        Real hosts join one by one, too. If all began at once, they would always answer their
        canaries at the same moments.
        """
        shares = np.random.default_rng((self.seed, _CANARY_STREAM)).random(len(self.plan.hosts))
        times = shares * self.plan.limits.canary_every_ms / _MILLI
        for time, name in sorted(zip(times.tolist(), self.plan.hosts, strict=True)):
            await asyncio.sleep(time - self.loop.time())
            self._expect(name)

    def _expect(self, name: str) -> None:
        """Begin the health checks of the host."""
        self.health.expect(
            name,
            {
                # The number replaces the digest of the weights.
                block: Reference(_STATE, _unchanged, str(block))
                for block in self.plan.hosts[name].blocks
            },
        )

    # --- requests ---------------------------------------------------------------------------------

    async def run(
        self, requests: int, *, arrivals: Arrivals, churn: Churn | None, min_blocks: int
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
                if arrivals.rate is None:
                    for _ in range(arrivals.clients):
                        senders.create_task(self._client(numbers, min_blocks))
                else:
                    times = arrivals.times(requests, seed=self.seed)
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
        deadline_ms = self.plan.limits.deadline_ms
        after, route = await self.router.walk(
            _STATE, deadline=self.loop.time() + deadline_ms / _MILLI, min_blocks=min_blocks
        )
        reply = SimulatedReply(
            route=route,
            ended_at=self.loop.time(),
            false=bool((after != _STATE).any()),
            late=route.ms > deadline_ms,
            enough=route.kept >= min_blocks,
        )
        self.replies.append(reply)
        return reply

    # --- failures ---------------------------------------------------------------------------------

    def inject(self, fault: Fault) -> None:
        """Make the fault happen; see `chaos.Fault`."""
        host = self.transport.hosts[fault.host]
        if fault.kind == "crash":
            host.die()
        elif fault.kind in ("freeze", "cut"):
            host.hush()
        elif fault.kind == "slow":
            host.slow()
        elif fault.kind == "wrong":
            host.lying = True
        elif fault.kind == "leave":
            self.router.update(fault.host, state.draining)
        elif fault.kind == "rejoin":
            self.rejoin(fault.host)
        else:
            raise UsageError(f"A host cannot {fault.kind} in a simulation")

    def rejoin(self, name: str) -> None:
        """Restart a dead, shut-out or leaving host; end the faults of any other."""
        host, view = self.transport.hosts[name], self.router.swarm[name]
        if host.alive and view.condition in ("healthy", "suspect"):
            host.mend()
            return
        host.start()
        self.router.update(name, lambda _: self._view(name))
        self.health.drop(name)
        self._expect(name)

    def _begin_churn(self, churn: Churn) -> list[tuple[float, str, Iterator[float]]]:
        """Stop the hosts that are down at first. Returns a heap of (next change, name, stays).

        One heap of tuples, and not a timer for each host: with 10,000 timers the event loop spends
        more time on comparing them than on anything else.
        """
        up, stays = lives(churn, len(self.plan.hosts), seed=self.seed)
        for name, there in zip(self.plan.hosts, up, strict=True):
            if not there:
                self.transport.hosts[name].die()
                absent = self._view(name)._replace(condition="gone", why="it has not come yet")
                self.router.swarm = self.router.swarm.with_host(absent)
        firsts = zip(self.plan.hosts, stays, strict=True)
        changes = [(next(times), name, times) for name, times in firsts]
        heapify(changes)
        return changes

    async def _churn(self, changes: list[tuple[float, str, Iterator[float]]]) -> None:
        """Stop and restart hosts at the times in the heap, until cancelled."""
        while True:
            time, name, times = changes[0]
            await asyncio.sleep(time - self.loop.time())
            host = self.transport.hosts[name]
            if host.alive:
                host.die()
            else:
                self.rejoin(name)
            # Counted from the planned time, so a host's times depend only on its own draws.
            heapreplace(changes, (time + next(times), name, times))
