"""The router: a thin asyncio layer that carries out the policy's decisions over a transport.

Everything that it learns goes into `Swarm` values through the pure functions of `state`, and
`policy.decide` decides everything that it does. Use it from one event loop only.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count

import numpy as np

from layershuffle.swarm import policy, state
from layershuffle.swarm.limits import Limits
from layershuffle.swarm.messages import (
    Answer,
    Ending,
    Outcome,
    Route,
    State,
    Transport,
    Visit,
    Visited,
    VisitError,
    Wire,
)
from layershuffle.swarm.policy import (
    Finish,
    RequestProgress,
    Routing,
    UnderWay,
    Wait,
    counts,
    decide,
)
from layershuffle.swarm.rounds import QUEUE, Rounds
from layershuffle.swarm.state import HostView, Swarm

TOO_LONG = "it answered that it took longer than its visit"
_MILLI = 1000.0
_SLACK, _SLACK_MS = 1.1, 1.0
"""Allowed difference between the clocks of a host and of the router over one visit."""
_GROWTH = 1e4
"""Growth of the largest value above which an answer is wrong: blocks add to their state."""


@dataclass(eq=False, slots=True)
class PendingVisit:
    """A visit in flight that carries the state `before`, which has this `version`.

    `ends`: the time from which the visit is late, in seconds of the router's clock. `late`: its
    lateness has already counted against its host.
    """

    visit: Visit
    task: asyncio.Future[Answer]
    started: float
    before: State
    version: int
    ends: float
    late: bool = False

    @property
    def under_way(self) -> UnderWay:
        """What decisions know of it."""
        return UnderWay(self.visit.host, self.visit.block, self.version, self.late)


@dataclass(eq=False, slots=True)
class Walk:
    """A running request: its state, its progress, its visits so far and those in flight.

    While it waits, `woken` is not done; `until`: when it goes on at the latest, in seconds of the
    router's clock, by the `alarm`, which may go off earlier and is then set again.
    """

    state: State
    progress: RequestProgress
    started: float
    rounds: Rounds
    chance: Callable[[State, int], float] | None = None
    hops: list[Visited] = field(default_factory=list)
    calls: list[PendingVisit] = field(default_factory=list)
    woken: asyncio.Future[None] | None = None
    until: float = 0.0
    alarm: asyncio.TimerHandle | None = None
    alarm_at: float = 0.0

    def wake(self) -> None:
        """Go on, if it waits."""
        if self.woken is not None and not self.woken.done():
            self.woken.set_result(None)


class Router:
    """Sends states through the swarm. `swarm` is its knowledge about the hosts, as a value.

    `routing` and `rounds` (how many blocks run side by side, and how often, in free order) may be
    changed at any time; a running request keeps them. Each of `observers` is called with every hop
    and the states around it (metrics and audits use this). `walks`: the number of running requests.
    """

    def __init__(
        self,
        transport: Transport,
        *,
        depth: int,
        limits: Limits,
        routing: Routing = "order-free",
        wire: Wire = "fp32",
        rounds: Rounds = QUEUE,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.transport, self.depth, self.limits = transport, depth, limits
        self.routing, self.wire, self.clock = routing, wire, clock
        self.rounds, self.walks = rounds, 0
        self.observers: list[Callable[[Visited, State, State | None], None]] = []
        self._swarm = Swarm()
        self._watching = set[Walk]()
        self._numbers = count()

    @property
    def swarm(self) -> Swarm:
        """The current state of the hosts, as far as the router knows it."""
        return self._swarm

    @swarm.setter
    def swarm(self, swarm: Swarm) -> None:
        self._swarm = swarm
        for walk in self._watching:
            walk.wake()

    def update(self, name: str, change: Callable[[HostView], HostView]) -> None:
        """Apply a pure change to one host, if it is still known."""
        if name in self._swarm:
            self.swarm = self._swarm.with_host(change(self._swarm[name]))

    async def walk(
        self,
        start: State,
        *,
        deadline: float,
        min_blocks: int = 1,
        confidence: float | None = None,
        chance: Callable[[State, int], float] | None = None,
    ) -> tuple[State, Route]:
        """Run the blocks that can be reached; return the state after them, and the route.

        `start`: float32 `[images, tokens, width]`; `deadline`: the time to return, in seconds of
        the router's clock; `min_blocks`: with fewer blocks, the request waits for hosts that may
        come back. Failing hosts raise no exception: the route names the skipped blocks with the
        reasons. `chance(state, blocks)`: that the answer after so many blocks is right; the request
        ends when it reaches `confidence`.
        """
        free = self.routing == "order-free"
        progress = RequestProgress(
            self.depth,
            deadline,
            min_blocks,
            self.routing,
            seed=next(self._numbers),
            images=len(start),
            confidence=confidence,
        )
        rounds = self.rounds if free else QUEUE
        sure = chance if free and confidence is not None else None
        walk = Walk(start, progress, self.clock(), rounds, sure)
        self.walks += 1
        try:
            route = self._route(walk, await self._ending(walk))
        finally:
            for call in walk.calls:
                self._drop(call)
            if walk.alarm is not None:
                walk.alarm.cancel()
            self.walks -= 1
        return walk.state, route

    async def _ending(self, walk: Walk) -> Ending:
        """Make the visits of a request until it ends."""
        while True:
            # Read once: the deadline might pass between two reads, and no visit would be late.
            now = self.clock()
            self._take_ended(walk, now)
            action = decide(
                walk.progress._replace(under_way=tuple([call.under_way for call in walk.calls])),
                self._swarm,
                now=now,
                limits=self.limits,
                rounds=walk.rounds,
                walks=self.walks,
            )
            if isinstance(action, Finish):
                return action.ending
            if isinstance(action, Visit):
                walk.calls.append(self._call(walk, action, now=now))
            else:
                await self._wait(walk, action)

    def _take_ended(self, walk: Walk, now: float) -> None:
        """Give up late visits, add answers that arrived, and drop visits that no longer count."""
        for call in walk.calls:
            if not call.late and now >= call.ends and not call.task.done():
                self._fail(walk, call, outcome="late", why="no answer in time")
        for call in [call for call in walk.calls if call.task.done()]:
            if not self._counts(walk, call):  # since the answer before it
                continue
            after = self._answer_to(walk, call)
            walk.calls.remove(call)
            if after is None:
                self._drop(call)
            else:
                # The answer itself if it read the newest state; otherwise add its residual.
                newest = call.version == len(walk.progress.done)
                walk.state = after if newest else walk.state + (after - call.before)
                walk.progress = walk.progress.after(call.visit.block, version=call.version)
                kept = len(set(walk.progress.done))
                # With fewer blocks it does not end, however sure it is.
                if walk.chance is not None and kept >= walk.progress.min_blocks:
                    # Here and not in a thread: a head takes less time than a hop.
                    chance = walk.chance(walk.state, kept)
                    walk.progress = walk.progress._replace(chance=chance)
        for call in [call for call in walk.calls if not self._counts(walk, call)]:
            self._drop(call)
            walk.calls.remove(call)

    def _drop(self, call: PendingVisit) -> None:
        """Nobody waits for a visit any more; without this its host would look busy forever."""
        call.task.cancel()
        work = len(call.before)
        self.update(call.visit.host, lambda host: state.settled(host, work))

    def _counts(self, walk: Walk, call: PendingVisit) -> bool:
        return counts(walk.progress, call.under_way, max_age=walk.rounds.max_age)

    async def _wait(self, walk: Walk, action: Wait) -> None:
        """Wait until a visit ends or is late, time is up or, if it matters, the swarm changes.

        It follows a decision without any await in between, so that no change is missed.
        """
        walk.until = min([action.until, *(call.ends for call in walk.calls if not call.late)])
        walk.woken = asyncio.get_running_loop().create_future()
        # One alarm for many waits: nearly all of them end long before it.
        if walk.alarm is None or walk.until < walk.alarm_at:
            self._set_alarm(walk)
        if action.for_hosts:
            self._watching.add(walk)
        try:
            await walk.woken
        finally:
            self._watching.discard(walk)

    def _set_alarm(self, walk: Walk) -> None:
        if walk.alarm is not None:
            walk.alarm.cancel()
        left = max(0.0, walk.until - self.clock())
        walk.alarm_at = walk.until
        walk.alarm = asyncio.get_running_loop().call_later(left, self._rung, walk)

    def _rung(self, walk: Walk) -> None:
        walk.alarm = None
        if walk.alarm_at < walk.until:
            self._set_alarm(walk)
        else:
            walk.wake()

    def _route(self, walk: Walk, ending: Ending) -> Route:
        done, versions = walk.progress.done, walk.progress.versions
        return Route(
            depth=self.depth,
            order=done,
            versions=None if versions == tuple(range(len(done))) else versions,
            skipped=policy.skipped(walk.progress, self._swarm, ending=ending),
            hops=tuple(walk.hops),
            ending=ending,
            ms=(self.clock() - walk.started) * _MILLI,
        )

    def _call(self, walk: Walk, visit: Visit, *, now: float) -> PendingVisit:
        """Send the newest state to a host, as decided at `now`."""
        before, work = walk.state, len(walk.state)
        self.update(visit.host, lambda host: state.sent(host, work))
        task = asyncio.ensure_future(self.transport.visit(visit, before, form=self.wire))

        def over(task: asyncio.Future[Answer]) -> None:
            if not task.cancelled():
                task.exception()  # otherwise asyncio reports exceptions of dropped calls as lost
            walk.wake()

        task.add_done_callback(over)
        # From `now`: sending a large state takes time, and the limit must not pass the deadline.
        ends = now + visit.limit
        version = len(walk.progress.done)
        return PendingVisit(visit, task, self.clock(), before, version, ends)

    def _answer_to(self, walk: Walk, call: PendingVisit) -> State | None:
        """The state from the ended call; `None`, and a strike for its host, if it failed."""
        try:
            answer = call.task.result()
        except VisitError as error:
            self._fail(walk, call, outcome=error.outcome, why=error.cause)
            return None
        elapsed_ms = (self.clock() - call.started) * _MILLI
        after = answer.state
        if fault := fault_of(answer, before=call.before, ms=elapsed_ms):
            # The router's clock may have stopped, on a machine that was paused.
            outcome: Outcome = "failed" if fault == TOO_LONG else "wrong"
            self._fail(walk, call, outcome=outcome, why=fault)
            return None
        hop = Visited(
            call.visit.host, call.visit.block, "answered", elapsed_ms,
            answer.compute_ms, answer.queue_ms, images=len(after), batch=answer.batch,
            lag_ms=elapsed_ms - call.visit.expected * _MILLI,
            begun_ms=(call.started - walk.started) * _MILLI,
        )  # fmt: skip
        self._note(walk, call, hop=hop, after=after)
        self.update(
            hop.host,
            lambda host: state.answered(
                state.settled(host, len(call.before)), hop, limits=self.limits
            ),
        )
        return after

    def _fail(self, walk: Walk, call: PendingVisit, *, outcome: Outcome, why: str) -> None:
        """Record a failed visit: one hop and at most one strike, even if it fails several times."""
        now = self.clock()
        elapsed = now - call.started
        hop = Visited(
            call.visit.host, call.visit.block, outcome, elapsed * _MILLI, why=why,
            images=len(call.before), lag_ms=(elapsed - call.visit.expected) * _MILLI,
            begun_ms=(call.started - walk.started) * _MILLI,
        )  # fmt: skip
        if not call.late:
            self._note(walk, call, hop=hop, after=None)
        if policy.strikes(call.visit, outcome, over=now >= call.ends, again=call.late):
            self.report(hop)
        call.late = True

    def report(self, hop: Visited) -> None:
        """Count a failed visit or probe against its host."""
        now = self.clock()
        self.update(hop.host, lambda host: state.failed(host, hop, now=now, limits=self.limits))

    def _note(self, walk: Walk, call: PendingVisit, *, hop: Visited, after: State | None) -> None:
        walk.hops.append(hop)
        for observe in self.observers:
            observe(hop, call.before, after)


def fault_of(answer: Answer, *, before: State, ms: float) -> str:
    """What is wrong with the answer to a visit with the state `before`, "" if nothing is.

    It holds numbers so large that no block produced them, or says that it took longer than the `ms`
    milliseconds of the visit (`TOO_LONG`), which would make a distant host look near. Transports
    have checked shape and dtype.
    """
    if answer.compute_ms + answer.queue_ms > _SLACK * ms + _SLACK_MS:
        return TOO_LONG
    largest = float(np.abs(answer.state).max(initial=0.0))
    # At least 1, because a state of zeros may grow by any factor; `not <=`, because of NaN.
    if not largest <= _GROWTH and not largest <= _GROWTH * float(np.abs(before).max(initial=0.0)):
        return f"it answered with numbers up to {largest:.1g}"
    return ""
