"""The baseline: a classical pipeline over the same hosts, by the same health checks.

It runs block i after block i - 1 and gives no answer without a block. It is a fair one: each block
may have several copies, a visit that fails or is late is sent to another copy within the same
request, and a request whose block no usable host holds waits for one until its deadline.
"""

from __future__ import annotations

import asyncio

from layershuffle.gateway.brain import state
from layershuffle.gateway.brain.policy import Route, hop_limit
from layershuffle.gateway.brain.state import (
    HostState,
    State,
    Visit,
    Visited,
    VisitError,
    expected,
    lag_of,
)
from layershuffle.gateway.hosts.router import Router

_LOOK = 0.01  # seconds between looks for a host of a block that nobody holds


class Pipeline:
    """Sends states through all blocks in their order, over the transport of `router`, whose
    knowledge of the hosts it uses and keeps up."""

    def __init__(self, router: Router) -> None:
        self.router = router

    async def walk(self, start: State, *, deadline: float) -> tuple[State, Route]:
        """The state after the blocks that ran, and the route; it is no answer unless complete.

        `deadline`: in seconds of the router's clock.
        """
        begun = self.router.clock()
        hops: list[Visited] = []
        values, blocks = await self._run(start, hops, deadline=deadline)
        route = Route(
            depth=self.router.depth,
            order=tuple(range(blocks)),
            versions=tuple(range(blocks)),
            skipped={},
            hops=tuple(hops),
            ending="complete" if blocks == self.router.depth else "unreachable",
            ms=1000 * (self.router.clock() - begun),
        )
        return values, route

    async def _run(
        self, values: State, hops: list[Visited], *, deadline: float
    ) -> tuple[State, int]:
        """The state, and the number of blocks that ran; the visits are added to `hops`."""
        ends = deadline - self.router.limits.reserve_ms / 1000
        for block in range(self.router.depth):
            answer = None
            while answer is None:
                left = ends - self.router.clock()
                if left <= 0:
                    return values, block
                holders = self._holders(block)
                if not holders:
                    await asyncio.sleep(min(_LOOK, left))
                    continue
                # Where there is no other copy, a late visit is waited for.
                patient = len(holders) == 1
                answer, hop = await self._visit(
                    holders[0], block, values=values, left=left, patient=patient
                )
                hops.append(hop)
            values = answer
        return values, self.router.depth

    def _holders(self, block: int) -> list[HostState]:
        """The usable hosts of a block, those first that are expected to answer first."""
        swarm = self.router.swarm
        pace = swarm.pace(self.router.limits)
        holders = [host for host in swarm.values() if host.usable and block in host.blocks]
        return sorted(holders, key=lambda host: expected(host, pace=pace))

    async def _visit(
        self, host: HostState, block: int, *, values: State, left: float, patient: bool
    ) -> tuple[State | None, Visited]:
        """The state after a block, `None` if the visit failed, and the hop."""
        router = self.router
        pace = router.swarm.pace(router.limits)
        seconds = expected(host, pace=pace)
        lag = lag_of(host, pace)
        limit = left
        if not patient:
            limit = hop_limit(seconds, lag=lag, left=left, limits=router.limits)
        visit = Visit(host.name, block, limit, budget=left, expected=seconds)
        begun = router.clock()
        router.update(host.name, state.sent)
        failure: VisitError
        try:
            async with asyncio.timeout(limit):
                answer = await router.transport.visit(visit, values)
        except TimeoutError:
            failure = VisitError("no answer in time", outcome="late")
        except VisitError as error:
            failure = error
        else:
            elapsed = router.clock() - begun
            answered = Visited(
                host.name,
                block,
                "answered",
                1000 * elapsed,
                answer.compute_ms,
                answer.queue_ms,
                batch=answer.batch,
                lag_ms=1000 * (elapsed - seconds),
            )
            router.update(
                host.name, lambda view: state.answered(view, answered, limits=router.limits)
            )
            for observe in router.observers:
                observe(answered, values, answer.state)
            return answer.state, answered
        elapsed = router.clock() - begun
        failed = Visited(
            host.name,
            block,
            failure.outcome,
            1000 * elapsed,
            why=failure.cause,
            lag_ms=1000 * (elapsed - seconds),
        )
        router.update(host.name, lambda view: state.sent(view, -1))
        # At the deadline lateness is not the host's fault.
        if failure.outcome != "late" or not patient:
            router.report(failed)
        return None, failed
