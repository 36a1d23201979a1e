"""A request on its way through the swarm: its state, its visits, and the object that makes them.

`FreeWalk` carries out the decisions of `free`, and `OrderedWalk` those of `ordered`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from layershuffle.core.orders import ExecutionOrder
from layershuffle.swarm.free import MOST_BESIDE, counts, decide_free
from layershuffle.swarm.limits import Limits
from layershuffle.swarm.messages import Answer, Ending, Outcome, State, Visit, Visited
from layershuffle.swarm.ordered import Ask, PassOver, Steps, decide_step
from layershuffle.swarm.policy import Finish, RequestProgress, Routing, UnderWay, Wait
from layershuffle.swarm.rounds import Rounds
from layershuffle.swarm.state import Swarm


@dataclass
class PendingVisit:
    """A visit in flight that carries the state `before`, which has this `version`.

    `ends`: the time from which the visit is late, in seconds of the router's clock. `reported`: its
    lateness has already counted against its host.
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
        """Whether its request waits for this visit."""
        return self.visit.waited and not self.reported


@dataclass
class Walk:
    """A running request: its state, its progress, and its visits so far."""

    state: State
    progress: RequestProgress
    started: float
    hops: list[Visited] = field(default_factory=list)


class Caller(Protocol):
    """The interface of the router: it makes the visits of requests and tracks the hosts.

    `walks`: the number of running requests.
    """

    limits: Limits
    clock: Callable[[], float]
    walks: int

    @property
    def swarm(self) -> Swarm:
        """The current state of the hosts."""

    def call(self, visit: Visit, *, before: State, version: int, now: float) -> PendingVisit:
        """Send the state `before`, which has this `version`, to a host, as decided at `now`."""

    def answer_to(self, walk: Walk, call: PendingVisit) -> State | None:
        """The state from the ended call; `None`, and a strike for its host, if it failed."""

    def fail(self, walk: Walk, call: PendingVisit, *, outcome: Outcome, why: str) -> None:
        """Record a failed visit: one hop and at most one strike, even if it fails several times."""

    async def wait(
        self, tasks: Iterable[asyncio.Task[Answer]], *, until: float, changes: bool
    ) -> None:
        """Wait until one of `tasks` ends, the time `until` or, with `changes`, a swarm change."""


class FreeWalk:
    """Makes the visits of one request; `walk` holds its state and progress."""

    def __init__(self, router: Caller, walk: Walk, *, rounds: Rounds) -> None:
        self._router, self._walk, self._rounds = router, walk, rounds
        self._calls: list[PendingVisit] = []

    async def run(self) -> Ending:
        """Make visits until the request ends."""
        router, walk = self._router, self._walk
        try:
            while True:
                # Read once: the deadline might pass between two reads, and no visit would be late.
                now = router.clock()
                self._take_ended(now)
                action = decide_free(
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
                    call = router.call(action, before=walk.state, version=version, now=now)
                    self._calls.append(call)
                else:
                    await _wait(router, action, self._joinable)
        finally:
            for call in self._calls:
                call.task.cancel()

    @property
    def _joinable(self) -> list[PendingVisit]:
        """Visits whose answers may be added to the state now.

        While a visit of several blocks runs on the newest state, only that visit and late ones that
        it repeats on the same state, because its answer fits no other state.
        """
        several = [call for call in self._calls if call.waited and len(call.visit.blocks) > 1]
        if not several:
            return self._calls
        blocks = {block for call in several for block in call.visit.blocks}
        return [
            call
            for call in self._calls
            if call.version == several[0].version and not blocks.isdisjoint(call.visit.blocks)
        ]

    def _take_ended(self, now: float) -> None:
        """Give up late visits, add answers that arrived, and drop visits that no longer count."""
        # First, because other answers wait for a visit of several blocks until it is late.
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


class OrderedWalk:
    """Makes the visits of one request; `walk` holds its state and progress.

    Answers arrive in any order, but are added in the order of the steps, because
    `layershuffle.running` does so and float sums depend on the order.
    """

    def __init__(
        self, router: Caller, walk: Walk, *, order: ExecutionOrder, routing: Routing
    ) -> None:
        self._router, self._walk, self._routing = router, walk, routing
        self._steps = Steps(order)
        self._calls: list[tuple[int, PendingVisit]] = []
        self._answers: dict[int, tuple[PendingVisit, State]] = {}
        # The versions that later steps read, kept until their last reader.
        self._last = order.last_readers()
        self._states = {0: walk.state} if 0 in self._last else {}

    async def run(self) -> Ending:
        """Make visits until the request ends."""
        router, walk = self._router, self._walk
        waited = False
        try:
            while True:
                # Read once: the deadline might pass between two reads, and no visit would be late.
                now = router.clock()
                self._take_ended(now)
                if waited and not self._answers and not any(c.waited for _, c in self._calls):
                    # The step that others were skipped for has failed, and their hosts may be back.
                    self._steps = self._steps.reopened()
                action = decide_step(
                    walk.progress,
                    self._now(),
                    swarm=router.swarm,
                    now=now,
                    limits=router.limits,
                    routing=self._routing,
                )
                if isinstance(action, Finish):
                    self._end()
                    return action.ending
                if isinstance(action, Ask):
                    self._ask(action, now=now)
                elif isinstance(action, PassOver):
                    self._pass_over()
                else:
                    await _wait(router, action, [call for _, call in self._calls])
                waited = isinstance(action, Wait)
        finally:
            for _, call in self._calls:
                call.task.cancel()

    def _now(self) -> Steps:
        """The current progress of the steps."""
        return replace(
            self._steps,
            # A visit of several blocks begins with the first step that is not over, so its answer
            # is added at once and none of its later positions is in this set.
            answered=frozenset(self._answers),
            under_way=tuple((position, _under_way(call)) for position, call in self._calls),
        )

    def _ask(self, action: Ask, *, now: float) -> None:
        steps, position = self._steps, action.position
        version = steps.order.steps[position][1]
        before = self._walk.state if version == steps.over else self._states[version]
        call = self._router.call(
            action.visit, before=before, version=steps.version_of(position), now=now
        )
        self._calls.append((position, call))

    def _take_ended(self, now: float) -> None:
        """Store the answers that arrived, add those whose turn it is, and give up late visits."""
        for position, call in self._calls[:]:
            # Another holder may have answered for this step a moment ago.
            if not call.task.done() or (position, call) not in self._calls:
                continue
            self._calls.remove((position, call))
            after = self._router.answer_to(self._walk, call)
            if after is not None:
                self._keep(position, call, after)
        _give_up_late(self._router, self._walk, [call for _, call in self._calls], now=now)
        self._join()

    def _keep(self, position: int, call: PendingVisit, after: State) -> None:
        """Store an answer, unless the state that its step reads has changed since.

        It decides about skips: its step may have been skipped while its visit was late, or steps
        before it, which were to run after all when its visit was late.
        """
        if position < self._steps.over:
            self._steps = self._steps.reopened(position)
        while self._steps.over < self._steps.order.steps[position][1]:
            self._pass_over()
        if call.version == self._steps.version_of(position):
            self._answers[position] = call, after
            self._drop([position])

    def _join(self) -> None:
        """Add the answers up to the first open step."""
        walk, steps = self._walk, self._steps.order.steps
        while answer := self._answers.pop(self._steps.over, None):
            call, after = answer
            position = self._steps.over
            _add(walk, call, after)
            self._over(len(call.visit.blocks), ran=True)
            # Visits that were sent while this step was skipped, and their answers.
            stale = [later for later, (_, read) in enumerate(steps) if read > position]
            self._drop(stale)
            self._answers = {
                later: answer for later, answer in self._answers.items() if later not in stale
            }

    def _over(self, count: int, *, ran: bool) -> None:
        """The next `count` steps are over, so the state has a new version."""
        self._steps = self._steps.after(count, ran=ran)
        version = self._steps.over
        if version in self._last:
            self._states[version] = self._walk.state
        if ran:  # which makes the skips before it final
            self._drop(range(version))
            for old in [old for old in self._states if self._last[old] < version]:
                del self._states[old]

    def _pass_over(self) -> None:
        """Skip the first step that is not over; its late visit may still be answered."""
        if self._now().is_repeated(self._steps.over):
            self._drop([self._steps.over])
        self._over(1, ran=False)
        self._join()

    def _end(self) -> None:
        """Add the answers that arrived, and skip all other steps."""
        while self._steps.over < len(self._steps.order):
            self._pass_over()

    def _drop(self, positions: Container[int]) -> None:
        """Cancel the visits for the steps at `positions`."""
        for position, call in self._calls[:]:
            if position in positions:
                call.task.cancel()
                self._calls.remove((position, call))


def _under_way(call: PendingVisit) -> UnderWay:
    return UnderWay(
        call.visit.host, call.visit.blocks, call.version, waited=call.waited, late=call.reported
    )


async def _wait(router: Caller, action: Wait, calls: Sequence[PendingVisit]) -> None:
    """Wait until one of `calls` ends or is late, time is up or, if it matters, the swarm changes.

    All visits for which the request waits have to be among `calls`.
    """
    limits = [call.ends for call in calls if call.waited]
    until = min([action.until, *limits])
    await router.wait([call.task for call in calls], until=until, changes=action.for_hosts)


def _give_up_late(router: Caller, walk: Walk, calls: Iterable[PendingVisit], *, now: float) -> None:
    """Record late visits for which the request waits as failed."""
    for call in calls:
        if call.waited and now >= call.ends and not call.task.done():
            router.fail(walk, call, outcome="late", why="no answer in time")


def _add(walk: Walk, call: PendingVisit, after: State) -> None:
    """Add the answer of a visit to the state of its request."""
    # The host's answer itself if it read the newest state; otherwise add its residual.
    newest = call.version == len(walk.progress.done)
    walk.state = after if newest else walk.state + (after - call.before)
    walk.progress = walk.progress.after(call.visit.blocks, version=call.version)
