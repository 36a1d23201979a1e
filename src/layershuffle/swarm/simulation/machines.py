"""Simulated hosts: a queue, one worker, a link, and everything that can go wrong with them.

The worker takes turns as the real host's does (`swarm.batching`): one block at a time, on
the visits that need it. What the router knows of a host is not known here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import simpy

from layershuffle.swarm.batching import choose
from layershuffle.swarm.chaos import SLOW_FACTOR
from layershuffle.swarm.limits import Limits
from layershuffle.swarm.messages import Outcome, Visit
from layershuffle.swarm.simulation.scenario import HostTimes, Profile

_MILLI = 1000.0


@dataclass(frozen=True, slots=True)
class Result:
    """What came back from a visit, as in `messages.Answer`, and whether it is false."""

    outcome: Outcome
    compute_ms: float = 0.0
    queue_ms: float = 0.0
    false: bool = False
    batch: float = 1.0


@dataclass(eq=False, slots=True)
class Job:
    """A visit on its way, at a host, or on its way back.

    `ended` fires when `result` is there, just after `told` was called.
    """

    visit: Visit
    ended: simpy.Event
    told: Callable[[], None] | None = None
    arrived: float = 0.0
    expires: float = 0.0
    done: int = 0
    compute: float = 0.0
    each: float = 0.0
    passed: int = 0
    dropped: bool = False
    replied: bool = False
    images: int = 1
    result: Result = Result("failed")

    @property
    def meets(self) -> int:
        """The block it needs next."""
        return self.visit.blocks[self.done]


@dataclass(eq=False)
class Machine:
    """One host."""

    env: simpy.Environment
    times: HostTimes
    profile: Profile
    limits: Limits
    alive: bool = True
    silent: bool = False
    draining: bool = False
    false: bool = False
    factor: float = 1.0
    died: float = 0.0
    _jobs: list[Job] = field(default_factory=list)
    _turn: list[Job] = field(default_factory=list)
    _abroad: dict[Job, None] = field(default_factory=dict)  # in the order in which they were sent
    _held: list[Callable[[], None]] = field(default_factory=list)
    _life: int = 0

    # --- visits -----------------------------------------------------------------------------------

    def send(self, visit: Visit, told: Callable[[], None] | None = None) -> Job:
        """A visit sets out."""
        job = Job(visit, simpy.Event(self.env), told)
        if not self.alive:
            self._lose(job)
            return job
        self._abroad[job] = None
        self._after(self.times.link_ms / 2 / _MILLI, lambda: self._arrive(job))
        return job

    def drop(self, job: Job) -> None:
        """Nobody waits for the job any more: it is not computed if its turn has not come."""
        job.dropped = True
        self._abroad.pop(job, None)

    def _arrive(self, job: Job) -> None:
        if job.dropped or job not in self._abroad:
            return  # nobody waits for it, or it set out to a process that died meanwhile
        if self.silent:
            self._held.append(lambda: self._arrive(job))
            return
        job.arrived = self.env.now
        job.expires = self.env.now + job.visit.budget_ms / _MILLI
        self._drop_the_dead()
        waiting = len(self._jobs) - len(self._turn)
        if self.draining or waiting >= self.limits.max_queue:
            self._reply(job, Result("unavailable"))
            return
        self._jobs.append(job)
        self._wake()

    def _lose(self, job: Job) -> None:
        notice = self.died + self.profile.notice_ms / _MILLI
        self._after(max(0.0, notice - self.env.now), lambda: self._end(job, Result("lost")))

    def _reply(self, job: Job, result: Result) -> None:
        job.replied = True
        if self.silent:
            self._held.append(lambda: self._reply(job, result))
            return
        self._after(self.times.link_ms / 2 / _MILLI, lambda: self._end(job, result))

    def _end(self, job: Job, result: Result) -> None:
        if job.dropped or job.ended.triggered:
            return
        self._abroad.pop(job, None)
        if job.told is not None:
            job.told()
        job.result = result
        job.ended.succeed()

    # --- the worker -------------------------------------------------------------------------------

    def _drop_the_dead(self) -> None:
        """Forget what was dropped, and what cannot be in time any more, but for this turn."""
        for job in self._jobs:
            if self.env.now >= job.expires and job not in self._turn and not job.dropped:
                self._reply(job, Result("late"))
        self._jobs = [
            job for job in self._jobs if job in self._turn or not (job.dropped or job.replied)
        ]

    def _wake(self) -> None:
        if self._turn or not self._jobs:
            return
        self._drop_the_dead()
        if not self._jobs:
            return
        waiting: list[Any] = self._jobs  # they have what `choose` reads of a real host's jobs
        chosen: list[Any] = [*choose(waiting, images=self.limits.max_batch)]
        self._turn = chosen
        for job in self._jobs:
            job.passed = 0 if job in chosen else job.passed + 1
        more = self.profile.batch_share * (len(chosen) - 1)
        took = self.times.block_ms / _MILLI * self.factor * (1 + more)
        life = self._life
        self._after(took, lambda: self._turned(took, life=life))

    def _turned(self, took: float, *, life: int) -> None:
        if life != self._life:
            return  # it died meanwhile
        turn, self._turn = self._turn, []
        for job in turn:
            job.done += 1
            job.compute, job.each = job.compute + took, job.each + took / len(turn)
            if job.done == len(job.visit.blocks):
                queue = max(0.0, self.env.now - job.arrived - job.compute)
                self._reply(
                    job,
                    Result(
                        "answered", job.compute * _MILLI, queue * _MILLI, self.false,
                        job.compute / job.each if job.each else 1.0,
                    ),
                )  # fmt: skip
        self._jobs = [job for job in self._jobs if not (job.replied or job.dropped)]
        self._wake()

    # --- what happens to it -----------------------------------------------------------------------

    def die(self) -> None:
        """Its process ends; whoever has a visit there is told after a while."""
        self.alive, self.died, self._life = False, self.env.now, self._life + 1
        lost, self._abroad = self._abroad, {}
        self._jobs, self._turn, self._held = [], [], []
        for job in lost:
            self._lose(job)

    def start(self) -> None:
        """A new process in its place, with nothing wrong."""
        if self.alive:
            self.die()
        self.alive, self.silent, self.draining = True, False, False
        self.mend()

    def hush(self) -> None:
        """Nothing goes in or out, and nobody is told."""
        self.silent = True

    def slow(self) -> None:
        """Compute takes longer."""
        self.factor = SLOW_FACTOR

    def mend(self) -> None:
        """What was wrong with it ends; what waited goes on its way."""
        self.silent, self.false, self.factor = False, False, 1.0
        held, self._held = self._held, []
        for go in held:
            go()

    def _after(self, seconds: float, then: Callable[[], None]) -> None:
        if seconds > 0:
            timer = simpy.Timeout(self.env, seconds)
            assert timer.callbacks is not None
            timer.callbacks.append(lambda _: then())
        else:
            then()
