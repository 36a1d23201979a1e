"""`simulate`: a plan under load and failures, in discrete events (simpy)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
import simpy

from layershuffle.errors import UsageError
from layershuffle.swarm import state
from layershuffle.swarm.chaos import Fault, check_faults
from layershuffle.swarm.drill import Ended
from layershuffle.swarm.limits import Limits
from layershuffle.swarm.messages import WHOLE
from layershuffle.swarm.plan import SwarmPlan
from layershuffle.swarm.policy import Progress, Routing
from layershuffle.swarm.simulation.gateway import Gateway, Walk
from layershuffle.swarm.simulation.machines import Machine
from layershuffle.swarm.simulation.outcome import Outcome, counted
from layershuffle.swarm.simulation.scenario import Arrivals, Churn, Profile, depth_of, lives
from layershuffle.swarm.state import HostView, Swarm

_MILLI = 1000.0
_CANARY_STREAM = 2
_REQUESTS = 1 << 32  # more than there are, so that seeds of requests are all different
Steps = Generator[simpy.Event, Any, None]


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
    accuracy: Mapping[int, float] | None = None,
) -> Outcome:
    """The end of all requests; the same for the same arguments.

    `routing`: instead of the plan's. `faults` happen before requests by number, as in a drill;
    `churn` goes on by itself; both depend on the seed and not on the routing. `accuracy`: percent
    by the number of blocks. Times are those of the swarm alone, without stem and head. Raises
    `UsageError` for plans that miss blocks, faults of hosts that are not there, or no requests.
    """
    if requests < 1:
        raise UsageError(f"{requests} requests are none", hint="take 1 or more")
    world = _World(
        plan,
        profile=profile,
        routing=routing or plan.routing,
        faults=check_faults(faults, list(plan.hosts)),
        min_blocks=min_blocks,
        seed=seed,
    )
    if churn is not None:
        world.churn(churn)
    ended = world.run(requests, arrivals or Arrivals())
    events = 0
    while not ended.triggered:
        world.env.step()
        events += 1
    return _outcome(world, accuracy, events=events)


@dataclass
class _Reply:
    ended: Ended
    blocks: int
    ms: float
    hops: int
    false: bool


@dataclass
class _World:
    """Machines, the gateway that knows them, and the requests' ends so far."""

    plan: SwarmPlan
    profile: Profile
    routing: Routing
    faults: tuple[Fault, ...]
    min_blocks: int
    seed: int
    env: simpy.Environment = field(default_factory=simpy.Environment)
    replies: list[_Reply] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.depth = depth_of(self.plan)
        self.pending = list(self.faults)
        self.blocks = {name: frozenset(host.blocks) for name, host in self.plan.hosts.items()}
        self.machines = {
            name: Machine(self.env, self.profile.times(name), self.profile, self.limits)
            for name in self.plan.hosts
        }
        self.gateway = Gateway(
            self.env,
            self.machines,
            swarm=Swarm(self._new(name) for name in self.blocks),
            depth=self.depth,
            limits=self.limits,
            routing=self.routing,
        )
        first = np.random.default_rng((self.seed, _CANARY_STREAM)).random(len(self.machines))
        for name, share in zip(self.machines, first.tolist(), strict=True):
            self.gateway.watch(name, share * self.limits.canary_every_ms / _MILLI)

    @property
    def limits(self) -> Limits:
        """Those of the plan."""
        return self.plan.limits

    def _new(self, name: str) -> HostView:
        return HostView(name, self.blocks[name], share=self.plan.hosts[name].share)

    # --- requests ---------------------------------------------------------------------------------

    def run(self, requests: int, arrivals: Arrivals) -> simpy.Event:
        """Begin sending; the event fires when all have ended."""
        numbers = iter(range(requests))
        if arrivals.rate is None:
            senders = [self._client(numbers, arrivals.think_ms) for _ in range(arrivals.clients)]
        else:
            times = arrivals.times(requests, seed=self.seed)
            senders = [self._stream(zip(numbers, times, strict=True))]
        return simpy.AllOf(self.env, [self.env.process(sender) for sender in senders])

    def _client(self, numbers: Iterator[int], think_ms: float) -> Steps:
        for number in numbers:
            yield from self._request(number)
            yield self.env.timeout(think_ms / _MILLI)

    def _stream(self, arrivals: Iterator[tuple[int, float]]) -> Steps:
        walks = []
        for number, time in arrivals:
            yield self.env.timeout(time - self.env.now)
            walks.append(self.env.process(self._request(number)))
        yield self.env.all_of(walks)

    def _request(self, number: int) -> Steps:
        while self.pending and self.pending[0].at <= number:
            self.happen(self.pending.pop(0))
        now, seconds = self.env.now, self.limits.deadline_ms / _MILLI
        progress = Progress(
            self.depth,
            now + seconds,
            self.min_blocks,
            seed=self.seed * _REQUESTS + number,
            most=self.plan.most_blocks,
        )
        walk = Walk(progress, now)
        yield from self.gateway.walk(walk)
        self.replies.append(self._reply(walk))

    def _reply(self, walk: Walk) -> _Reply:
        blocks = len(walk.progress.done)
        ended: Ended = "answered" if walk.ending in WHOLE else "degraded"
        if walk.ms > self.limits.deadline_ms:
            ended = "late"
        if walk.ending == "lost" or blocks < self.min_blocks:
            ended = "failed"
        return _Reply(ended, blocks, walk.ms, len(walk.hops), walk.false)

    # --- failures ---------------------------------------------------------------------------------

    def happen(self, fault: Fault) -> None:
        """Make the fault happen; see `faults.Fault`."""
        machine = self.machines[fault.host]
        if fault.kind == "crash":
            machine.die()
        elif fault.kind in ("freeze", "cut"):
            machine.hush()
        elif fault.kind == "slow":
            machine.slow()
        elif fault.kind == "wrong":
            machine.false = True
        elif fault.kind == "leave":
            machine.draining = True
            self.gateway.update(fault.host, state.draining)
        else:
            self.rejoin(fault.host)

    def rejoin(self, name: str) -> None:
        """A dead, shut-out or leaving host starts anew; for others, what is wrong ends."""
        machine, view = self.machines[name], self.gateway.swarm[name]
        if machine.alive and view.condition in ("healthy", "suspect"):
            machine.mend()
            return
        machine.start()
        self.gateway.know(view, replace(self._new(name), served=view.served))
        self.gateway.watch(name, self.env.now + self.limits.canary_every_ms / _MILLI)

    def churn(self, churn: Churn) -> None:
        """From now on hosts die and come back."""
        up, stays = lives(churn, len(self.machines), seed=self.seed)
        for name, there, times in zip(self.machines, up, stays, strict=True):
            if not there:
                self.machines[name].die()
                absent = partial(replace, condition="gone", why="it has not come yet")
                self.gateway.update(name, absent)
            self._stay(name, times)

    def _stay(self, name: str, times: Iterator[float]) -> None:
        timer = self.env.timeout(next(times))
        assert timer.callbacks is not None
        timer.callbacks.append(lambda _: self._turned(name, times))

    def _turned(self, name: str, times: Iterator[float]) -> None:
        machine = self.machines[name]
        if machine.alive:
            machine.die()
        else:
            self.rejoin(name)
        self._stay(name, times)


def _outcome(world: _World, accuracy: Mapping[int, float] | None, *, events: int) -> Outcome:
    replies = world.replies
    answers = [one for one in replies if one.ended != "failed"]
    right = None
    if accuracy:
        known = sorted(accuracy)
        table = np.interp(range(world.depth + 1), known, [accuracy[one] for one in known])
        right = float(sum(0.0 if one.false else table[one.blocks] for one in answers))
    return Outcome(
        routing=world.routing,
        requests=len(replies),
        ended=counted([one.ended for one in replies]),
        blocks=dict(sorted(Counter(one.blocks for one in answers).items())),
        ms=tuple(sorted(one.ms for one in replies)),
        accuracy=None if right is None or not answers else right / len(answers),
        right=None if right is None else right / len(replies),
        false=sum(one.false for one in answers),
        hops=sum(one.hops for one in replies) / len(replies),
        served={name: host.served for name, host in world.gateway.swarm.items()},
        seconds=world.env.now,
        events=events,
    )
