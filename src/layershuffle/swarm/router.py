"""The router: a thin asyncio layer that carries out the policy's decisions over a transport.

Everything that it learns goes into `Swarm` values through the pure functions of `state`, and
`free.decide_free` or `ordered.decide_step` decide everything that it does. Use it from one event
loop only.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from itertools import count

import numpy as np

from layershuffle.core.orders import ExecutionOrder, order_of
from layershuffle.errors import UsageError
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
    pack,
    unpack_answer,
)
from layershuffle.swarm.policy import FREE, RequestProgress, Routing
from layershuffle.swarm.rounds import QUEUE, Rounds
from layershuffle.swarm.state import HostView, Swarm
from layershuffle.swarm.walk import FreeWalk, OrderedWalk, PendingVisit, Walk
from layershuffle.text import one_line

NOT_FINITE = "it answered with numbers that are not finite"
TOO_LONG = "it answered that it took longer than its visit"
_UNREADABLE = (
    AttributeError,
    OverflowError,
    TypeError,
    ValueError,
)  # raised while an invalid answer is read
_MILLI = 1000.0
_SLACK, _SLACK_MS = 1.1, 1.0
"""Allowed difference between the clocks of a host and of the router over one visit."""
_GROWTH = 1e4
"""Growth of the largest value above which an answer is wrong: blocks add to their state."""


class Router:
    """Sends states through the swarm. `swarm` is its knowledge about the hosts, as a value.

    `routing`, `rounds` (how many blocks run side by side, and how often, in free order), `wire` and
    `most_blocks` (blocks that are enough in free order; default: all) may be changed at any time; a
    running request keeps its routing and rounds. Each of `observers` is called with every hop and
    the states around it (metrics and audits use this). `walks`: the number of running requests.
    """

    def __init__(
        self,
        transport: Transport,
        *,
        depth: int,
        limits: Limits,
        routing: Routing = "order-free",
        wire: Wire = "fp32",
        most_blocks: int | None = None,
        rounds: Rounds = QUEUE,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.transport, self.depth, self.limits = transport, depth, limits
        self.routing, self.wire, self.clock = routing, wire, clock
        self.most_blocks, self.rounds, self.walks = most_blocks, rounds, 0
        self.observers: list[Callable[[Visited, State, State | None], None]] = []
        self._swarm = Swarm()
        self._changed = asyncio.Event()
        self._numbers = count()

    @property
    def swarm(self) -> Swarm:
        """The current state of the hosts, as far as the router knows it."""
        return self._swarm

    @swarm.setter
    def swarm(self, swarm: Swarm) -> None:
        self._swarm = swarm
        # A new event, because a waiting request may not have run before the next one waits.
        self._changed.set()
        self._changed = asyncio.Event()

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
        order: ExecutionOrder | str | Iterable[int] | None = None,
    ) -> tuple[State, Route]:
        """Run the blocks that can be reached; return the state after them, and the route.

        `start`: float32 `[images, tokens, width]`; `deadline`: the time to return, in seconds of
        the router's clock; `min_blocks`: with fewer blocks, the request waits for hosts that may
        come back; `order`: the steps to run. Failing hosts raise no exception: the route names the
        skipped blocks with the reasons. Raises `UsageError` for an order of rounds or passes while
        the routing is a pipeline.
        """
        begun = self.clock()
        routing = self.routing
        steps = None if order is None else order_of(order, self.depth)
        if routing not in FREE:
            steps = steps or ExecutionOrder.sequential(self.depth)
            if steps.versions or steps.has_repeats:
                raise UsageError(
                    f"The routing is a pipeline now ({routing}), which cannot run blocks side by "
                    "side or twice",
                    hint="name each block once, with commas, or serve with --routing order-free",
                )
        progress = RequestProgress(
            self.depth,
            deadline,
            min_blocks,
            None if steps is None else steps.blocks,
            seed=next(self._numbers),
            images=len(start),
            most=self.most_blocks,
        )
        walk = Walk(start, progress, begun)
        self.walks += 1
        try:
            if steps is not None:
                ending = await OrderedWalk(self, walk, order=steps, routing=routing).run()
            else:
                # In a queue no older state may be read, because a model may not add to its state.
                several = routing == "order-free" and not self.rounds.as_a_queue
                rounds = self.rounds if several else QUEUE
                ending = await FreeWalk(self, walk, rounds=rounds).run()
        finally:
            self.walks -= 1
        return walk.state, self._route(walk, ending)

    def _route(self, walk: Walk, ending: Ending) -> Route:
        done, versions = walk.progress.done, walk.progress.versions
        return Route(
            depth=self.depth,
            order=done,
            versions=None if versions == tuple(range(len(done))) else versions,
            skipped=policy.skipped(walk.progress, self._swarm, ending=ending, limits=self.limits),
            hops=tuple(walk.hops),
            ending=ending,
            ms=(self.clock() - walk.started) * _MILLI,
        )

    async def wait(
        self, tasks: Iterable[asyncio.Task[Answer]], *, until: float, changes: bool
    ) -> None:
        """Wait until one of `tasks` ends, the time `until` or, with `changes`, a swarm change.

        Call it directly after a decision, before any other await, so that no change is missed.
        """
        patience = max(0.0, until - self.clock())
        if not changes:
            await asyncio.wait(tasks, timeout=patience, return_when=asyncio.FIRST_COMPLETED)
            return
        changed = asyncio.ensure_future(self._changed.wait())
        try:
            await asyncio.wait(
                {changed, *tasks}, timeout=patience, return_when=asyncio.FIRST_COMPLETED
            )
        finally:
            changed.cancel()

    def call(self, visit: Visit, *, before: State, version: int, now: float) -> PendingVisit:
        """Send the state `before`, which has this `version`, to a host, as decided at `now`."""
        work = len(visit.blocks) * len(before)
        self.update(visit.host, lambda host: state.sent(host, work))
        task = asyncio.ensure_future(self.transport.visit(visit, pack(before, self.wire)))

        def over(task: asyncio.Task[Answer]) -> None:
            if not task.cancelled():
                task.exception()  # otherwise asyncio reports exceptions of dropped calls as lost
            # Also for a cancelled call, or the host would look busy forever.
            self.update(visit.host, lambda host: state.settled(host, work))

        task.add_done_callback(over)
        # From `now`: sending a large state takes time, and the limit must not pass the deadline.
        ends = now + visit.limit
        return PendingVisit(visit, task, self.clock(), before, version, ends)

    def answer_to(self, walk: Walk, call: PendingVisit) -> State | None:
        """The state from the ended call; `None`, and a strike for its host, if it failed."""
        try:
            answer = call.task.result()
        except VisitError as error:
            self.fail(walk, call, outcome=error.outcome, why=error.cause)
            return None
        elapsed_ms = (self.clock() - call.started) * _MILLI
        after, fault = unpacked(answer, like=call.before, ms=elapsed_ms)
        if fault:
            # An earlier host may have spoilt the state; a probe will show which host is wrong. Or
            # the router's clock may have stopped, on a machine that was paused.
            doubtful = fault == TOO_LONG or (fault == NOT_FINITE and call.version > 0)
            outcome: Outcome = "failed" if doubtful else "wrong"
            self.fail(walk, call, outcome=outcome, why=fault)
            return None
        hop = Visited(
            call.visit.host, call.visit.blocks, "answered", elapsed_ms,
            answer.compute_ms, answer.queue_ms, images=len(after), batch=answer.batch,
            lag_ms=elapsed_ms - call.visit.expected * _MILLI,
        )  # fmt: skip
        self._note(walk, call, hop=hop, after=after)
        self.update(hop.host, lambda host: state.answered(host, hop, limits=self.limits))
        return after

    def fail(self, walk: Walk, call: PendingVisit, *, outcome: Outcome, why: str) -> None:
        """Record a failed visit: one hop and at most one strike, even if it fails several times."""
        now = self.clock()
        elapsed = now - call.started
        hop = Visited(
            call.visit.host, call.visit.blocks, outcome, elapsed * _MILLI, why=why,
            images=len(call.before), lag_ms=(elapsed - call.visit.expected) * _MILLI,
        )  # fmt: skip
        if not call.reported:
            self._note(walk, call, hop=hop, after=None)
        if policy.strikes(call.visit, outcome, over=now >= call.ends, again=call.reported):
            self.report(hop)
        call.reported = True

    def report(self, hop: Visited) -> None:
        """Count a failed visit or probe against its host."""
        now = self.clock()
        self.update(hop.host, lambda host: state.failed(host, hop, now=now, limits=self.limits))

    def _note(self, walk: Walk, call: PendingVisit, *, hop: Visited, after: State | None) -> None:
        walk.hops.append(replace(hop, begun_ms=(call.started - walk.started) * _MILLI))
        for observe in self.observers:
            observe(hop, call.before, after)


def unpacked(answer: Answer, *, like: State, ms: float) -> tuple[State, str]:
    """The state in a host's answer to the state `like`, and the fault of the answer, or "".

    An answer is wrong if it cannot be read, has another shape, or holds numbers that are not finite
    (`NOT_FINITE`) or so large that no block produced them. If it cannot be read, the state is
    `like`. An answer is also wrong if its times or batch size are invalid, or if its times exceed
    the `ms` milliseconds of the visit (`TOO_LONG`), which would make a distant host look near.
    """
    try:
        after = unpack_answer(answer.packet, before=like)
        reported_ms = _reported_ms(answer)
        # One pass is enough, because `max` propagates NaN and infinity.
        largest = float(np.abs(after).max(initial=0.0))
    except _UNREADABLE as error:
        return like, f"its answer cannot be read ({one_line(error)})"
    if reported_ms > _SLACK * ms + _SLACK_MS:
        return after, TOO_LONG
    if not math.isfinite(largest):
        return after, NOT_FINITE
    # At least 1, because a state of zeros may grow by any factor.
    if largest > _GROWTH * max(1.0, float(np.abs(like).max(initial=0.0))):
        return after, f"it answered with numbers up to {largest:.1g}"
    return after, ""


def _reported_ms(answer: Answer) -> float:
    """Milliseconds at the host, as it reports them. Raises `ValueError` for invalid numbers."""
    times = (answer.compute_ms, answer.queue_ms)
    # Averages are divided by the batch size, which is at least 1.
    if not all(map(math.isfinite, (*times, answer.batch))) or min(*times, answer.batch - 1) < 0:
        raise ValueError("its times or batch size are invalid")
    return sum(times)
