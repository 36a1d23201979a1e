"""One request on its way through the swarm: its state, its visits, and who makes them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Protocol

from layershuffle.swarm.limits import Limits
from layershuffle.swarm.messages import Answer, Outcome, Route, State, Visit, Visited
from layershuffle.swarm.policy import Progress
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
    progress: Progress
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
