"""The router of the simulation: `router.Router` and `health.Health` on simulated time.

Every decision and every change of what is known of the hosts is made by the same pure functions, in
the same sequence: `policy.decide`, then `state.sent`, `settled`, `answered`, `failed`, `probed`. A
visit that is late keeps running beside the one that repeats it; the first answer counts. Canaries
are asked as `health` does. Not simulated: audits of answered visits by replicas.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import simpy

from layershuffle.swarm import policy, state
from layershuffle.swarm.health import patience
from layershuffle.swarm.limits import Limits
from layershuffle.swarm.messages import Ending, Outcome, Visit, Visited
from layershuffle.swarm.policy import Finish, Progress, Routing, Wait
from layershuffle.swarm.simulation.machines import Job, Machine, Result
from layershuffle.swarm.simulation.scenario import tick
from layershuffle.swarm.state import HostView, Swarm

_MILLI = 1000.0
_TICK = 0.05  # seconds between looks at whose canary is due, as in `health`
_INSTANT = 1e-9
Steps = Generator[simpy.Event, Any, None]


@dataclass(slots=True)
class Call:
    """A visit under way. `reported`: its lateness was held against its host already."""

    job: Job
    started: float
    reported: bool = False

    @property
    def visit(self) -> Visit:
        """What is under way."""
        return self.job.visit


@dataclass(slots=True)
class Walk:
    """One request: where it stands, how it ended, and whether a host lied to it."""

    progress: Progress
    started: float
    late: Call | None = None
    hops: list[Visited] = field(default_factory=list)
    false: bool = False
    ending: Ending | None = None
    ms: float = 0.0


class Gateway:
    """Sends requests over simulated machines. `swarm` is what it knows of them, as a value."""

    def __init__(
        self,
        env: simpy.Environment,
        machines: Mapping[str, Machine],
        *,
        swarm: Swarm,
        depth: int,
        limits: Limits,
        routing: Routing,
    ) -> None:
        self.env, self.machines, self.swarm = env, machines, swarm
        self.depth, self.limits, self.routing = depth, limits, routing
        self._waiting: list[simpy.Event] = []
        self._asked: dict[str, int] = dict.fromkeys(machines, 0)
        self._alarm: dict[str, int] = dict.fromkeys(machines, 0)
        self._busy: set[str] = set()

    # --- what is known of the hosts ---------------------------------------------------------------

    def update(self, name: str, change: Callable[[HostView], HostView]) -> None:
        """Apply a pure change to one host."""
        before = self.swarm[name]
        self.know(before, change(before))

    def know(self, before: HostView, after: HostView) -> None:
        """`after` is now known of a host.

        Waiting requests ask again. Only a condition, or when a suspect may be probed, can change
        what they are told, so that nothing else wakes them.
        """
        self.swarm = self.swarm.with_host(after)
        if (before.condition, before.retry_at) == (after.condition, after.retry_at):
            return
        waiting, self._waiting = self._waiting, []
        for event in waiting:
            if not event.triggered:
                event.succeed()
        if after.condition == "suspect" and after.name not in self._busy:
            self.watch(after.name, after.retry_at)

    def report(self, hop: Visited) -> None:
        """Hold a failed visit or probe against its host."""
        now = self.env.now
        self.update(hop.host, lambda host: state.failed(host, hop, now=now, limits=self.limits))

    # --- requests ---------------------------------------------------------------------------------

    def walk(self, walk: Walk) -> Steps:
        """Run one request to its end."""
        while True:
            action = policy.decide(
                replace(walk.progress, pending=walk.late is not None),
                self.swarm,
                now=self.env.now,
                limits=self.limits,
                routing=self.routing,
            )
            if isinstance(action, Finish):
                break
            if isinstance(action, Wait):
                yield from self._wait(walk, action.until)
            else:
                yield from self._step(walk, action)
        self._drop(walk.late)
        walk.ending, walk.ms = action.ending, (self.env.now - walk.started) * _MILLI

    def _wait(self, walk: Walk, until: float) -> Steps:
        """Wait until the swarm changes, the late visit ends (then take it), or that time comes."""
        changed, late = self.env.event(), walk.late
        self._waiting.append(changed)
        # Simulated time stands still by itself: a rest lost to rounding would never pass.
        timer = self.env.timeout(max(_INSTANT, until - self.env.now))
        yield self.env.any_of([changed, timer, *([] if late is None else [late.job.ended])])
        if late is not None and late.job.ended.triggered:
            walk.late = None
            self._take(walk, late)

    def _step(self, walk: Walk, visit: Visit) -> Steps:
        """Make one visit; a late one that it repeats keeps running beside it, first answer wins."""
        if walk.late is not None and not policy.hedges(walk.late.visit, visit):
            self._drop(walk.late)
            walk.late = None
        call = self._call(visit)
        racing = [call] if walk.late is None else [walk.late, call]
        timer = self.env.timeout(visit.limit)
        while call in racing:
            done = [one for one in racing if one.job.ended.triggered]
            if not done and timer.processed:
                self._fail(walk, call, outcome="late", why="no answer in time")
                self._drop(walk.late)
                walk.late = call
                return
            if not done:
                yield self.env.any_of([*(one.job.ended for one in racing), timer])
                continue
            for ended in done:
                racing.remove(ended)
                if self._take(walk, ended):
                    for other in racing:
                        self._drop(other)
                    walk.late = None
                    return
        walk.late = racing[0] if racing else None

    def _call(self, visit: Visit) -> Call:
        count = len(visit.blocks)
        self.update(visit.host, lambda host: state.sent(host, count))
        job = self.machines[visit.host].send(visit, lambda: self._settle(visit))
        return Call(job, self.env.now)

    def _settle(self, visit: Visit) -> None:
        self.update(visit.host, lambda host: state.settled(host, len(visit.blocks)))

    def _drop(self, call: Call | None) -> None:
        if call is not None and not call.job.ended.triggered and not call.job.dropped:
            self.machines[call.visit.host].drop(call.job)
            self._settle(call.visit)

    def _take(self, walk: Walk, call: Call) -> bool:
        """Whether the ended call brought an answer, which is then the walk's state."""
        result = call.job.result
        if result.outcome != "answered":
            self._fail(walk, call, outcome=result.outcome, why=result.outcome)
            return False
        hop = self._hop(call, result)
        walk.hops.append(hop)
        walk.false = walk.false or result.false
        self.update(hop.host, lambda host: state.answered(host, hop, limits=self.limits))
        walk.progress = walk.progress.after(hop.blocks)
        return True

    def _fail(self, walk: Walk, call: Call, *, outcome: Outcome, why: str) -> None:
        elapsed = self.env.now - call.started
        hop = Visited(call.visit.host, call.visit.blocks, outcome, elapsed * _MILLI, why=why)
        if not call.reported:
            walk.hops.append(hop)
        if policy.strikes(call.visit, outcome, elapsed=elapsed, again=call.reported):
            self.report(hop)
        call.reported = True

    def _hop(self, call: Call, result: Result) -> Visited:
        elapsed = (self.env.now - call.started) * _MILLI
        return Visited(
            call.visit.host, call.visit.blocks, result.outcome, elapsed, result.compute_ms,
            result.queue_ms, batch=result.batch,
        )  # fmt: skip

    # --- canaries and probes ----------------------------------------------------------------------

    def watch(self, name: str, at: float) -> None:
        """Ask a canary of the host at that time, or at the next look after it."""
        self._alarm[name] += 1
        number = self._alarm[name]
        timer = self.env.timeout(max(0.0, tick(at, _TICK) - self.env.now))
        assert timer.callbacks is not None
        timer.callbacks.append(lambda _: self._due(name, number))

    def _due(self, name: str, number: int) -> None:
        host = self.swarm[name]
        if number != self._alarm[name] or host.condition in ("gone", "shut-out"):
            return  # a later look is planned, or none is needed before it comes back
        if host.condition == "suspect" and not state.probe_due(host, now=self.env.now):
            self.watch(name, max(host.retry_at, self.env.now + _TICK / 2))  # a look too soon
            return
        self._ask(host)

    def _ask(self, host: HostView) -> None:
        blocks = sorted(host.blocks)
        block = blocks[self._asked[host.name] % len(blocks)]
        limit = patience(host, self.swarm, limits=self.limits)
        self._asked[host.name] += 1
        self._busy.add(host.name)
        call = Call(self.machines[host.name].send(Visit(host.name, (block,), limit)), self.env.now)
        timer = self.env.timeout(limit)
        both = call.job.ended | timer
        assert both.callbacks is not None
        both.callbacks.append(lambda _: self._told(call))

    def _told(self, call: Call) -> None:
        """A canary was answered, or not in time."""
        name = call.visit.host
        self._busy.discard(name)
        if call.job.ended.triggered:
            hop = self._hop(call, call.job.result)
            if call.job.result.false:
                hop = replace(hop, outcome="wrong", why="it failed its canary")
        else:
            self.machines[name].drop(call.job)
            hop = self._hop(call, Result("late"))
        if hop.outcome == "answered":
            self.update(name, lambda host: state.probed(host, hop, limits=self.limits))
        else:
            self.report(replace(hop, why=hop.why or hop.outcome))
        host = self.swarm[name]
        later = self.env.now + self.limits.canary_every_ms / _MILLI
        self.watch(name, host.retry_at if host.condition == "suspect" else later)
