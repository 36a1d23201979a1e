"""A request with several visits under way at once: carries out what `overlap` decides."""

from __future__ import annotations

from dataclasses import replace

from layershuffle.swarm.messages import Ending, Visit
from layershuffle.swarm.overlap import MOST_BESIDE, counts, decide_overlap
from layershuffle.swarm.policy import Finish, UnderWay, Wait
from layershuffle.swarm.rounds import Rounds
from layershuffle.swarm.walk import Caller, PendingVisit, Walk


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
        for call in self._calls:
            if call.waited and now >= call.ends and not call.task.done():
                self._router.fail(self._walk, call, outcome="late", why="no answer in time")
        while ended := [call for call in self._joinable if call.task.done()]:
            self._calls.remove(ended[0])
            self._take(ended[0])
            self._drop_stale()
        self._drop_stale()

    def _take(self, call: PendingVisit) -> None:
        walk = self._walk
        after = self._router.answer_to(walk, call)
        if after is None:
            return
        # Exactly the host's answer where it read the newest state; else what it added to its own.
        newest = call.version == len(walk.progress.done)
        walk.state = after if newest else walk.state + (after - call.before)
        walk.progress = walk.progress.after(call.visit.blocks, version=call.version)

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


def _under_way(call: PendingVisit) -> UnderWay:
    return UnderWay(call.visit.host, call.visit.blocks, call.version, call.waited)
