"""One request on its way through the swarm: its state, its visits, and who makes them.

`OverlapWalk` has several visits under way at once and carries out what `overlap` decides;
`OrderedWalk` is of a request that names its steps, and carries out what `ordered` decides.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Protocol

from layershuffle.orders import ExecutionOrder
from layershuffle.swarm.limits import Limits
from layershuffle.swarm.messages import Answer, Ending, Outcome, Route, State, Visit, Visited
from layershuffle.swarm.ordered import Ask, PassOver, Steps, decide_step
from layershuffle.swarm.overlap import MOST_BESIDE, counts, decide_overlap
from layershuffle.swarm.policy import Finish, RequestProgress, UnderWay, Wait
from layershuffle.swarm.rounds import Rounds
from layershuffle.swarm.state import Swarm


@dataclass
class PendingVisit:
    """A visit under way with the state `before`, of that version.

    `ends`: when it is late, in seconds of the router's clock. `reported`: its lateness has already
    counted against its host.
    """

    visit: Visit
    task: asyncio.Task[Answer]
    started: float
    before: State
    version: int
    ends: float
    reported: bool = False

    @property
    def waited(self) -> bool:
        """Whether its request waits for it."""
        return self.visit.waited and not self.reported


@dataclass
class Walk:
    """One request under way: its state, its progress, the visits so far, and a late visit."""

    state: State
    progress: RequestProgress
    started: float
    hops: list[Visited] = field(default_factory=list)
    late: PendingVisit | None = None


class Caller(Protocol):
    """What makes the visits of requests and knows the hosts: the router.

    `walks`: requests under way.
    """

    limits: Limits
    clock: Callable[[], float]
    walks: int

    @property
    def swarm(self) -> Swarm:
        """The present state of the hosts."""

    def call(
        self, walk: Walk, visit: Visit, *, before: State, version: int, now: float
    ) -> PendingVisit:
        """Send the state `before` of a request, of that version, to a host, as decided at `now`."""

    def answer_to(self, walk: Walk, call: PendingVisit) -> State | None:
        """The state that the ended call brought; `None`, and its host is blamed, without one."""

    def fail(self, walk: Walk, call: PendingVisit, *, outcome: Outcome, why: str) -> None:
        """Note a failed visit: one hop and at most one strike, however often it fails."""

    async def wait(
        self, tasks: Iterable[asyncio.Task[Answer]], *, until: float, changes: bool
    ) -> None:
        """Wait until one of `tasks` ends, that time comes or, with `changes`, the swarm changes."""


class Watcher(Protocol):
    """Who sees requests while they walk. Its methods must be quick: the request waits for them."""

    def begun(self, walk: Walk) -> None:
        """A request begins."""

    def sent(self, walk: Walk, call: PendingVisit) -> None:
        """A visit of it begins."""

    def noted(self, call: PendingVisit, hop: Visited) -> None:
        """A visit has an outcome; one that was late may have another one later."""

    def over(self, walk: Walk, route: Route | None) -> None:
        """A request ends, without a route if it was cancelled."""


class OverlapWalk:
    """The visits of one request. Its states and its progress are those of `walk`."""

    def __init__(self, router: Caller, walk: Walk, *, rounds: Rounds) -> None:
        self._router, self._walk, self._rounds = router, walk, rounds
        self._calls: list[PendingVisit] = []

    async def run(self) -> Ending:
        """Make visits until the request is over."""
        router, walk = self._router, self._walk
        try:
            while True:
                # Read once: else the deadline might pass in between, and nothing would be late.
                now = router.clock()
                self._take_ended(now)
                action = decide_overlap(
                    replace(walk.progress, under_way=tuple(map(_under_way, self._calls))),
                    router.swarm,
                    now=now,
                    limits=router.limits,
                    rounds=self._rounds,
                    walks=router.walks,
                )
                if isinstance(action, Finish):
                    return action.ending
                if isinstance(action, Visit):
                    version = len(walk.progress.done)
                    call = router.call(walk, action, before=walk.state, version=version, now=now)
                    self._calls.append(call)
                else:
                    await self._wait(action)
        finally:
            for call in self._calls:
                call.task.cancel()

    @property
    def _joinable(self) -> list[PendingVisit]:
        """Visits whose answers may join the state now.

        Not while several blocks run one after the other on the newest one: theirs comes first, and
        fits no other.
        """
        several = [call for call in self._calls if call.waited and len(call.visit.blocks) > 1]
        return several or self._calls

    def _take_ended(self, now: float) -> None:
        """Give up what is late, add up what has come, and drop what can no longer count."""
        # First, because answers that came wait for a visit of several blocks until it is late.
        _give_up_late(self._router, self._walk, self._calls, now=now)
        while ended := [call for call in self._joinable if call.task.done()]:
            call = ended[0]
            self._calls.remove(call)
            after = self._router.answer_to(self._walk, call)
            if after is not None:
                _add(self._walk, call, after)
            self._drop_stale()
        self._drop_stale()

    def _drop_stale(self) -> None:
        age, beside = self._rounds.max_age, [call for call in self._calls if not call.waited]
        for call in self._calls[:]:
            old = call in beside[:-MOST_BESIDE]
            if old or not counts(self._walk.progress, _under_way(call), max_age=age):
                call.task.cancel()
                self._calls.remove(call)

    async def _wait(self, action: Wait) -> None:
        """Until a visit ends or is late, the time comes or, if it matters, the swarm changes."""
        router = self._router
        limits = [call.ends for call in self._calls if call.waited]
        tasks = {call.task for call in self._joinable}
        await router.wait(tasks, until=min([action.until, *limits]), changes=action.for_hosts)


class OrderedWalk:
    """The visits of one request. Its state and its progress are those of `walk`.

    Answers come in any order, and are added up in that of the steps: so `layershuffle.running` does
    it, and float sums depend on it.
    """

    def __init__(self, router: Caller, walk: Walk, *, order: ExecutionOrder) -> None:
        self._router, self._walk = router, walk
        self._steps = Steps(order)
        self._calls: list[tuple[int, PendingVisit]] = []
        self._answers: dict[int, tuple[PendingVisit, State]] = {}
        # The versions that later steps read, no longer than they do.
        self._last = order.last_readers()
        self._states = {0: walk.state} if 0 in self._last else {}

    async def run(self) -> Ending:
        """Make visits until the request is over."""
        router, walk = self._router, self._walk
        try:
            while True:
                # Read once: else the deadline might pass in between, and nothing would be late.
                now = router.clock()
                self._take_ended(now)
                action = decide_step(
                    walk.progress,
                    self._now(),
                    swarm=router.swarm,
                    now=now,
                    limits=router.limits,
                )
                if isinstance(action, Finish):
                    self._end()
                    return action.ending
                if isinstance(action, Ask):
                    self._ask(action, now=now)
                elif isinstance(action, PassOver):
                    self._pass_over()
                else:
                    await self._wait(action)
        finally:
            for _, call in self._calls:
                call.task.cancel()

    def _now(self) -> Steps:
        """The steps as they stand."""
        return replace(
            self._steps,
            # A visit of several blocks begins with the first step that is not over, so that its
            # answer joins at once and none of its later positions stands here.
            answered=frozenset(self._answers),
            under_way=tuple((position, _under_way(call)) for position, call in self._calls),
        )

    def _ask(self, action: Ask, *, now: float) -> None:
        steps, position = self._steps, action.position
        version = steps.order.steps[position][1]
        before = self._walk.state if version == steps.over else self._states[version]
        call = self._router.call(
            self._walk, action.visit, before=before, version=steps.version_of(position), now=now
        )
        self._calls.append((position, call))

    def _take_ended(self, now: float) -> None:
        """Keep the answers that have come, add up those in turn, and give up what is late."""
        for position, call in self._calls[:]:
            # Another holder may have answered for this step a moment ago.
            if not call.task.done() or (position, call) not in self._calls:
                continue
            self._calls.remove((position, call))
            after = self._router.answer_to(self._walk, call)
            if after is not None:
                self._answers[position] = call, after
                self._drop(position)
        _give_up_late(self._router, self._walk, [call for _, call in self._calls], now=now)
        self._join()

    def _join(self) -> None:
        """Add up the answers, as far as no step before them is still open."""
        walk = self._walk
        while answer := self._answers.pop(self._steps.over, None):
            call, after = answer
            _add(walk, call, after)
            self._over(len(call.visit.blocks), ran=True)

    def _over(self, count: int, *, ran: bool) -> None:
        """The next `count` steps are over: the state is that of another version."""
        self._steps = self._steps.after(count, ran=ran)
        version = self._steps.over
        if version in self._last:
            self._states[version] = self._walk.state
        for old in [old for old in self._states if self._last[old] < version]:
            del self._states[old]

    def _pass_over(self) -> None:
        """Go on without the first step that is not over; its late visits count no more."""
        self._drop(self._steps.over)
        self._over(1, ran=False)
        self._join()

    def _end(self) -> None:
        """Add up what is there, without the steps that are not."""
        while self._steps.over < len(self._steps.order):
            self._pass_over()

    def _drop(self, position: int) -> None:
        """Cancel the visits for the step at `position`."""
        for at, call in self._calls[:]:
            if at == position:
                call.task.cancel()
                self._calls.remove((at, call))

    async def _wait(self, action: Wait) -> None:
        """Until a visit ends or is late, the swarm changes, or the time comes."""
        tasks = [call.task for _, call in self._calls]
        limits = [call.ends for _, call in self._calls if call.waited]
        await self._router.wait(tasks, until=min([action.until, *limits]), changes=True)


def _under_way(call: PendingVisit) -> UnderWay:
    return UnderWay(call.visit.host, call.visit.blocks, call.version, call.waited)


def _give_up_late(router: Caller, walk: Walk, calls: Iterable[PendingVisit], *, now: float) -> None:
    """Count the visits that the request waits for, and that are late, as failed."""
    for call in calls:
        if call.waited and now >= call.ends and not call.task.done():
            router.fail(walk, call, outcome="late", why="no answer in time")


def _add(walk: Walk, call: PendingVisit, after: State) -> None:
    """Join the answer of a visit to the state of its request."""
    # Exactly the host's answer where it read the newest state; else what it added to its own.
    newest = call.version == len(walk.progress.done)
    walk.state = after if newest else walk.state + (after - call.before)
    walk.progress = walk.progress.after(call.visit.blocks, version=call.version)
