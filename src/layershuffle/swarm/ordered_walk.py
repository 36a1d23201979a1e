"""A request that names its steps: carries out what `ordered` decides."""

from __future__ import annotations

from dataclasses import replace

from layershuffle.orders import ExecutionOrder
from layershuffle.swarm.messages import Ending, State
from layershuffle.swarm.ordered import Ask, PassOver, Steps, decide_step
from layershuffle.swarm.policy import Finish, UnderWay, Wait
from layershuffle.swarm.walk import Caller, PendingVisit, Walk


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
        for _, call in self._calls:
            if call.waited and now >= call.ends:
                self._router.fail(self._walk, call, outcome="late", why="no answer in time")
        self._join()

    def _join(self) -> None:
        """Add up the answers, as far as no step before them is still open."""
        walk = self._walk
        while answer := self._answers.pop(self._steps.over, None):
            call, after = answer
            # Exactly the host's answer where it read the newest state; else what it added to its
            # own.
            newest = call.version == len(walk.progress.done)
            walk.state = after if newest else walk.state + (after - call.before)
            walk.progress = walk.progress.after(call.visit.blocks, version=call.version)
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
