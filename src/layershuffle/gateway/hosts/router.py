"""The router: a thin asyncio layer that carries out the policy's decisions over a transport.

Everything that it learns goes into its `Swarm` through the pure functions of `state`, and
`policy.decide` decides everything that it does. Use it from one event loop only.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

import numpy as np

from layershuffle.gateway.brain import policy, state
from layershuffle.gateway.brain.limits import Limits
from layershuffle.gateway.brain.policy import (
    QUEUE,
    Ending,
    RequestProgress,
    Rounds,
    Route,
    UnderWay,
    Wait,
    counts,
    decide,
)
from layershuffle.gateway.brain.settings import Wire
from layershuffle.gateway.brain.state import (
    Answer,
    HostState,
    Outcome,
    State,
    Swarm,
    Visit,
    Visited,
    VisitError,
)
from layershuffle.gateway.hosts.places import HeldPlace
from layershuffle.ground.errors import ModelFileError

_MILLI = 1000.0
_SLACK = 1.1
_SLACK_MS = 1.0
"""Allowed difference between the clocks of a host and of the router over one visit."""
_GROWTH = 1e4
"""Growth of the largest value above which an answer is wrong: blocks add to their state."""


class Transport(Protocol):
    """Carries visits to hosts."""

    def visit(self, visit: Visit, state: State, *, form: Wire = "fp32") -> Awaitable[Answer]:
        """The host's answer to `state`, float32 `[images, tokens, width]`, which travels as `form`.

        On a narrow wire the answer is what the block added, which is smaller and has smaller
        rounding errors; it is added to `state`, which was never rounded. The host gets
        `visit.budget_ms`, never a time of day, because clocks differ. Raises `VisitError`;
        cancellation drops the visit.
        """


@dataclass(eq=False, slots=True, kw_only=True)
class PendingVisit(UnderWay):
    """A visit in flight that carries the state `before`.

    `ends`: the time from which the visit is late, in seconds of the router's clock; then its
    lateness counts against its host, once. `hop`: of an answer that has come and counts once it has
    been computed again, for which `answer` waits then.
    """

    visit: Visit
    answer: asyncio.Future[Answer]
    started: float
    before: State
    ends: float
    hop: Visited | None = None


@dataclass(eq=False, slots=True, kw_only=True)
class Walk(RequestProgress):
    """A running request: its state, its progress, its visits so far and those in flight.

    `judge`: the chance that the answer for a state after so many blocks is right; `place`: what it
    leaves while nothing of it is under way; `judged`: after how many steps it was judged last.
    While it waits, `woken` is not done.
    """

    state: State
    started: float
    rounds: Rounds
    judge: Callable[[State, int], Awaitable[float]] | None
    place: HeldPlace | None
    hops: list[Visited] = field(default_factory=list)
    under_way: list[PendingVisit] = field(default_factory=list)
    judged: int = 0
    woken: asyncio.Future[None] | None = None

    def wake(self) -> None:
        """Go on, if it waits."""
        if self.woken is not None and not self.woken.done():
            self.woken.set_result(None)

    def over(self, answer: asyncio.Future[Answer]) -> None:
        """Go on, because an answer or a failure has come."""
        if not answer.cancelled():
            answer.exception()  # otherwise asyncio reports those of dropped visits as lost
        self.wake()


class Router:
    """Sends states through the swarm. `swarm` is its knowledge about the hosts.

    `depth`: the number of blocks of the model; `fixed`: how many first and last ones keep their
    place in stem and head. Hosts serve the others, `hosted`.
    `rounds` (how many blocks run side by side, and how often) may be changed at any time; a running
    request keeps what it began with. Each of `observers` is called with every hop and the states
    around it (metrics and audits use this). `second_opinion` is called with the same for every
    answer: where it returns a future, the answer counts once that says so.
    """

    def __init__(
        self,
        transport: Transport,
        *,
        depth: int,
        fixed: tuple[int, int] = (0, 0),
        limits: Limits,
        wire: Wire = "fp32",
        rounds: Rounds = QUEUE,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.transport = transport
        self.depth = depth
        self.fixed = fixed
        self.hosted = range(fixed[0], depth - fixed[1])
        self.limits = limits
        self.wire: Wire = wire
        self.clock = clock
        self.rounds = rounds
        self.swarm = Swarm()
        self._moving: set[Walk] = set()
        self.observers: list[Callable[[Visited, State, State | None], None]] = []
        self.second_opinion: Callable[[Visited, State, State], asyncio.Future[bool] | None] = (
            lambda *_: None
        )
        # Not a set, whose order is another one in every process: they are woken in turn.
        self._watching: dict[Walk, None] = {}

    @property
    def walks(self) -> int:
        """The number of requests of which something is under way."""
        return len(self._moving)

    def put(self, host: HostState) -> None:
        """Take this for what is known of a host from now on."""
        before = self.swarm.get(host.name)
        self.swarm.put(host)
        # Times change with every visit, and a request that waits for hosts needs none of them.
        same = before is not None and _presence(before) == _presence(host)
        for walk in self._watching:
            if walk in self._moving or not same:
                walk.wake()

    def update(self, name: str, change: Callable[[HostState], HostState]) -> None:
        """Apply a pure change to one host, if it is still known."""
        if (host := self.swarm.get(name)) is not None:
            self.put(change(host))

    async def walk(
        self,
        start: State,
        *,
        deadline: float,
        min_blocks: int = 1,
        confidence: float | None = None,
        chance: Callable[[State, int], Awaitable[float]] | None = None,
        place: HeldPlace | None = None,
    ) -> tuple[State, Route]:
        """Run the blocks that can be reached; return the state after them, and the route.

        `start`: float32 `[1, tokens, width]`; `deadline`: the time to return, in seconds of
        the router's clock; `min_blocks`: with fewer blocks, the request waits for hosts that may
        come back. Failing hosts raise no exception: the route names the skipped blocks with the
        reasons. `chance(state, blocks)`: that the answer after so many blocks is right; the request
        ends when it reaches `confidence`. `place`: what the request leaves to others while nothing
        of it is under way.
        """
        walk = Walk(
            blocks=self.hosted,
            deadline=deadline,
            min_blocks=min_blocks,
            confidence=confidence,
            state=start,
            started=self.clock(),
            rounds=self.rounds,
            judge=chance if confidence is not None else None,
            place=place,
        )
        self._moving.add(walk)
        try:
            route = self._route(walk, await self._ending(walk))
        finally:
            for call in walk.under_way:
                self._drop(call)
            self._moving.discard(walk)
        return walk.state, route

    async def _ending(self, walk: Walk) -> Ending:
        """Make the visits of a request until it ends."""
        while True:
            # Read once: the deadline might pass between two reads, and no visit would be late.
            now = self.clock()
            self._take_ended(walk, now)
            # With fewer blocks it does not end, however sure it is.
            kept = len(set(walk.done))
            if walk.judge is not None and walk.judged < len(walk.done) and kept >= walk.min_blocks:
                await self._judge(walk, walk.judge, kept=kept, now=now)
                continue
            action = decide(
                walk,
                self.swarm,
                now=now,
                limits=self.limits,
                rounds=walk.rounds,
                walks=self.walks,
            )
            if isinstance(action, Visit):
                walk.under_way.append(self._call(walk, action, now=now))
            elif isinstance(action, Wait):
                await self._wait(walk, action)
            else:
                return action

    async def _judge(
        self, walk: Walk, judge: Callable[[State, int], Awaitable[float]], *, kept: int, now: float
    ) -> None:
        """Note the chance that the newest state is right, unless that takes longer than is left."""
        walk.judged = len(walk.done)
        ends = walk.deadline - self.limits.reserve_ms / _MILLI
        with suppress(TimeoutError):
            async with asyncio.timeout(max(0.0, ends - now)):
                walk.chance = await judge(walk.state, kept)

    def _take_ended(self, walk: Walk, now: float) -> None:
        """Give up late visits, add answers that arrived, and drop visits that no longer count."""
        for call in walk.under_way:
            if not call.late and now >= call.ends and not call.answer.done():
                self._fail(walk, call, outcome="late", why="no answer in time")
        for call in [call for call in walk.under_way if call.answer.done()]:
            if self._counts(walk, call):  # since the answer before it
                walk.under_way.remove(call)
                self._take(walk, call)
        for call in [call for call in walk.under_way if not self._counts(walk, call)]:
            self._drop(call)
            walk.under_way.remove(call)

    def _counts(self, walk: Walk, call: PendingVisit) -> bool:
        return counts(walk, call, max_age=walk.rounds.max_age)

    def _drop(self, call: PendingVisit) -> None:
        """Nobody waits for a visit any more; without this its host would look busy forever."""
        call.answer.cancel()
        if call.hop is None:
            self.update(call.visit.host, lambda host: state.sent(host, -1))

    async def _wait(self, walk: Walk, action: Wait) -> None:
        """Wait until a visit ends or is late, time is up or, if it matters, the swarm changes.

        It follows a decision without any await in between, so that no change is missed.
        """
        until = min([action.until, *[call.ends for call in walk.under_way if not call.late]])
        loop = asyncio.get_running_loop()
        walk.woken = loop.create_future()
        alarm = loop.call_later(max(0.0, until - self.clock()), walk.wake)
        if action.for_hosts:
            self._watching[walk] = None
        # Visits that were given up may still answer, but nobody can say when.
        idle = action.for_hosts and all(call.late for call in walk.under_way)
        if idle:
            self._moving.discard(walk)
            if walk.place is not None:
                walk.place.leave()
        try:
            await walk.woken
        finally:
            alarm.cancel()
            self._watching.pop(walk, None)
        if idle:
            if walk.place is not None:
                ends = walk.deadline - self.limits.reserve_ms / _MILLI
                # Without a place there is time left to end it, and no more.
                await walk.place.come_back(seconds=ends - self.clock())
            self._moving.add(walk)

    def _route(self, walk: Walk, ending: Ending) -> Route:
        return Route(
            depth=self.depth,
            order=tuple(walk.done),
            versions=tuple(walk.versions),
            skipped=policy.skipped(walk, self.swarm, ending=ending),
            hops=tuple(walk.hops),
            ending=ending,
            ms=(self.clock() - walk.started) * _MILLI,
            fixed=self.fixed,
        )

    def _call(self, walk: Walk, visit: Visit, *, now: float) -> PendingVisit:
        """Send the newest state to a host, as decided at `now`."""
        # Read before the visit is sent: a host may have begun by the time that this goes on.
        before = walk.state
        started = self.clock()
        self.put(state.sent(self.swarm[visit.host]))
        answer = asyncio.ensure_future(self.transport.visit(visit, before, form=self.wire))
        answer.add_done_callback(walk.over)
        return PendingVisit(
            block=visit.block,
            version=len(walk.done),
            visit=visit,
            answer=answer,
            started=started,
            before=before,
            # From `now`: sending a large state takes time, and no limit may pass the deadline.
            ends=now + visit.limit,
        )

    def _take(self, walk: Walk, call: PendingVisit) -> None:
        """Add the answer of a visit that has ended, or count its failure."""
        elapsed = self.clock() - call.started
        try:
            answer = call.answer.result()
            refuse_odd(answer, before=call.before, ms=elapsed * _MILLI)
        except VisitError as error:
            self._fail(walk, call, outcome=error.outcome, why=error.cause)
            self._drop(call)
            return
        after = answer.state
        hop = call.hop
        if hop is None:
            hop = self._hop(walk, call, outcome="answered", seconds=elapsed)._replace(
                compute_ms=answer.compute_ms, queue_ms=answer.queue_ms, batch=answer.batch
            )
            self.update(hop.host, partial(state.answered, hop=hop, limits=self.limits))
            opinion = self.second_opinion(hop, call.before, after)
            if opinion is not None:
                call.hop = hop
                call.answer = asyncio.ensure_future(_agreed(answer, opinion))
                call.answer.add_done_callback(walk.over)
                # Its host has answered in time, and computing here may take longer.
                call.ends = math.inf
                walk.under_way.append(call)
                return
        self._note(walk, call, hop=hop, after=after)
        # The answer itself if it read the newest state; otherwise add its residual.
        newest = call.version == len(walk.done)
        walk.state = after if newest else walk.state + (after - call.before)
        walk.done.append(call.block)
        walk.versions.append(call.version)

    def _fail(self, walk: Walk, call: PendingVisit, *, outcome: Outcome, why: str) -> None:
        """Record a failed visit: one hop and at most one strike, even if it fails several times."""
        now = self.clock()
        hop = self._hop(walk, call, outcome=outcome, seconds=now - call.started)._replace(why=why)
        if not call.late:
            self._note(walk, call, hop=hop, after=None)
        if policy.strikes(call.visit, outcome, over=now >= call.ends, again=call.late):
            self.report(hop)
        call.late = True

    def report(self, hop: Visited) -> None:
        """Count a failed visit or probe against its host."""
        now = self.clock()
        self.update(hop.host, lambda host: state.failed(host, hop, now=now, limits=self.limits))

    def _hop(self, walk: Walk, call: PendingVisit, *, outcome: Outcome, seconds: float) -> Visited:
        visit = call.visit
        return Visited(
            visit.host,
            visit.block,
            outcome,
            ms=seconds * _MILLI,
            lag_ms=(seconds - visit.expected) * _MILLI,
            begun_ms=(call.started - walk.started) * _MILLI,
        )

    def _note(self, walk: Walk, call: PendingVisit, *, hop: Visited, after: State | None) -> None:
        walk.hops.append(hop)
        for observe in self.observers:
            observe(hop, call.before, after)


async def _agreed(answer: Answer, opinion: asyncio.Future[bool]) -> Answer:
    """`answer`, once the second opinion is the same. Raises `VisitError` if it is not."""
    try:
        # Shielded, because it says something of the host, whatever becomes of the request.
        same = await asyncio.shield(opinion)
    except ModelFileError as error:
        cause = f"its answer could not be computed again: {error.cause}"
        raise VisitError(cause, outcome="unavailable") from error
    if not same:
        raise VisitError("it answered wrongly", outcome="wrong")
    return answer


def _presence(host: HostState) -> tuple[object, ...]:
    """What a request that waits for hosts has to know of one: whether it is there, or may be."""
    return host.condition, host.blocks, host.loading, host.retry_at, host.strikes


def refuse_odd(answer: Answer, *, before: State, ms: float) -> None:
    """Raises `VisitError` for the answer to a visit with the state `before` that holds numbers so
    large that no block produced them, or says that it took longer than the `ms` milliseconds of
    the visit, which would make a distant host look near. Transports have checked shape and dtype.
    """
    if answer.compute_ms + answer.queue_ms > _SLACK * ms + _SLACK_MS:
        # The router's clock may have stopped, on a machine that was paused.
        raise VisitError("it answered that it took longer than its visit", outcome="failed")
    # No number is larger than the length of all, which takes a third of the time; NaN is not
    # smaller than anything.
    if np.vdot(answer.state, answer.state) <= _GROWTH**2:
        return
    largest = float(np.abs(answer.state).max(initial=0.0))
    # At least 1, because a state of zeros may grow by any factor.
    if not largest <= _GROWTH * max(1.0, float(np.abs(before).max(initial=0.0))):
        raise VisitError(f"it answered with numbers up to {largest:.1g}", outcome="wrong")
