"""The router: carries out what the policy decides, over a transport. A thin asyncio shell.

Everything it learns goes into `Swarm` values through the pure functions of `state`; everything it
does comes from `policy.decide`. Used from one event loop only.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count

import numpy as np
from numpy.typing import NDArray

from layershuffle.swarm import policy, state
from layershuffle.swarm.limits import Limits
from layershuffle.swarm.messages import (
    Answer,
    Ending,
    Outcome,
    Route,
    Transport,
    Visit,
    Visited,
    VisitError,
)
from layershuffle.swarm.policy import Finish, Progress, Routing, Wait
from layershuffle.swarm.state import HostView, Swarm
from layershuffle.swarm.wire import Wire, pack, unpack

State = NDArray[np.float32]
_MILLI = 1000.0


@dataclass
class Call:
    """A visit under way."""

    visit: Visit
    task: asyncio.Task[Answer]
    started: float


@dataclass
class Walk:
    """One request in the making: its state now, where it stands, and what was tried."""

    state: State
    progress: Progress
    started: float
    hops: list[Visited] = field(default_factory=list)
    late: Call | None = None


class Router:
    """Sends states through the swarm. `swarm` is what it knows of the hosts, as a value.

    `routing` and `wire` may be changed at any time; a request keeps those it began with.
    `observe` is told every hop (for metrics and audits).
    """

    def __init__(
        self,
        transport: Transport,
        *,
        depth: int,
        limits: Limits,
        routing: Routing = "order-free",
        wire: Wire = "fp32",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.transport, self.depth, self.limits = transport, depth, limits
        self.routing, self.wire, self.clock = routing, wire, clock
        self.observers: list[Callable[[Visited, State, State | None], None]] = []
        self._swarm = Swarm()
        self._changed = asyncio.Event()
        self._numbers = count()

    @property
    def swarm(self) -> Swarm:
        """What is known of the hosts now."""
        return self._swarm

    @swarm.setter
    def swarm(self, swarm: Swarm) -> None:
        self._swarm = swarm
        self._changed.set()

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
        order: tuple[int, ...] | None = None,
    ) -> tuple[State, Route]:
        """The state after the blocks that could be run, and the route.

        `start`: float32 `[images, tokens, width]`; `deadline`: when to be back, in seconds of the
        router's clock. Raises nothing for failing hosts: the route says what was skipped and why.
        """
        begun = self.clock()
        seed = next(self._numbers)
        walk = Walk(start, Progress(self.depth, deadline, min_blocks, order, seed=seed), begun)
        routing = self.routing
        try:
            while True:
                action = policy.decide(
                    walk.progress,
                    self._swarm,
                    now=self.clock(),
                    limits=self.limits,
                    routing=routing,
                )
                if isinstance(action, Finish):
                    return walk.state, self._route(walk, action.ending)
                if isinstance(action, Wait):
                    await self._change(action.until)
                else:
                    await self._step(walk, action)
        finally:
            _drop(walk.late)

    def _route(self, walk: Walk, ending: Ending) -> Route:
        return Route(
            depth=self.depth,
            order=walk.progress.done,
            skipped=policy.skipped(walk.progress, self._swarm, ending=ending, limits=self.limits),
            hops=tuple(walk.hops),
            ending=ending,
            ms=(self.clock() - walk.started) * _MILLI,
        )

    async def _change(self, until: float) -> None:
        """Wait until the swarm changes, or until that time."""
        self._changed.clear()
        try:
            async with asyncio.timeout(max(0.0, until - self.clock())):
                await self._changed.wait()
        except TimeoutError:
            return

    async def _step(self, walk: Walk, visit: Visit) -> None:
        """Make one visit; a late one that it repeats keeps running beside it, first answer wins."""
        if walk.late is not None and not policy.hedges(walk.late.visit, visit):
            _drop(walk.late)
            walk.late = None
        call = self._call(walk.state, visit)
        racing = [call] if walk.late is None else [walk.late, call]
        while call in racing:
            left = call.started + visit.limit - self.clock()
            tasks = {one.task for one in racing}
            try:
                done, _ = await asyncio.wait(
                    tasks, timeout=left, return_when=asyncio.FIRST_COMPLETED
                )
            except asyncio.CancelledError:
                _drop(call)  # the walk drops the late one
                raise
            if not done:
                self._fail(walk, call, outcome="late", why="no answer in time")
                _drop(walk.late)
                walk.late = call
                return
            for ended in [one for one in racing if one.task in done]:
                racing.remove(ended)
                if self._take(walk, ended):
                    for other in racing:
                        _drop(other)
                    walk.late = None
                    return
        walk.late = racing[0] if racing else None

    def _call(self, before: State, visit: Visit) -> Call:
        self.update(visit.host, lambda host: state.sent(host, len(visit.blocks)))
        task = asyncio.ensure_future(self.transport.visit(visit, pack(before, self.wire)))

        def over(task: asyncio.Task[Answer]) -> None:
            if not task.cancelled():
                task.exception()  # else asyncio reports those of dropped calls as lost
            self.update(visit.host, lambda host: state.settled(host, len(visit.blocks)))

        task.add_done_callback(over)
        return Call(visit, task, self.clock())

    def _take(self, walk: Walk, call: Call) -> bool:
        """Whether the ended call brought a good answer, which is then the walk's state."""
        try:
            answer = call.task.result()
        except VisitError as error:
            self._fail(walk, call, outcome=error.outcome, why=error.cause)
            return False
        after = unpack(answer.packet)
        fault = fault_of(after, like=walk.state)
        if fault:
            self._fail(walk, call, outcome="wrong", why=fault)
            return False
        hop = Visited(
            call.visit.host, call.visit.blocks, "answered", (self.clock() - call.started) * _MILLI,
            answer.compute_ms, answer.queue_ms,
        )  # fmt: skip
        self._note(walk, hop, after)
        self.update(hop.host, lambda host: state.answered(host, hop, limits=self.limits))
        walk.state, walk.progress = after, walk.progress.after(hop.blocks)
        return True

    def _fail(self, walk: Walk, call: Call, *, outcome: Outcome, why: str) -> None:
        elapsed = (self.clock() - call.started) * _MILLI
        hop = Visited(call.visit.host, call.visit.blocks, outcome, elapsed, why=why)
        self._note(walk, hop, None)
        self.report(hop)

    def report(self, hop: Visited) -> None:
        """Hold a failed visit or probe against its host."""
        now = self.clock()
        self.update(hop.host, lambda host: state.failed(host, hop, now=now, limits=self.limits))

    def _note(self, walk: Walk, hop: Visited, after: State | None) -> None:
        walk.hops.append(hop)
        for observe in self.observers:
            observe(hop, walk.state, after)


def fault_of(after: State, *, like: State) -> str:
    """What is wrong with a host's answer, or "": another shape, or numbers that are not finite."""
    if after.shape != like.shape:
        return f"it answered with the shape {after.shape}, not {like.shape}"
    if not np.isfinite(after).all():
        return "it answered with numbers that are not finite"
    return ""


def _drop(call: Call | None) -> None:
    if call is not None:
        call.task.cancel()
