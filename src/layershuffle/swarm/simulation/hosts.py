"""Simulated hosts as a transport of the router: links, queues, batches, and faults.

A host has one worker. It runs the block of the oldest visit on all visits that wait for it, as the
real host does. A block leaves the state of a visit
unchanged, and a block of a lying host adds 1, so canaries, audits and the client can detect it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from layershuffle.swarm.messages import (
    Answer,
    HostGone,
    HostUnavailable,
    State,
    Visit,
    VisitError,
    Wire,
    WorkExpired,
)
from layershuffle.swarm.simulation.scenario import Machines, SimulatedDevice

_MILLI = 1000.0


@dataclass(eq=False, slots=True)
class SimulatedVisit:
    """A visit of one image on its way to a host, at the host, or on its way back.

    `answer` is done when the caller has the answer or has cancelled the visit.
    """

    visit: Visit
    state: State
    answer: asyncio.Future[Answer]
    arrived: float = 0.0
    expires: float = 0.0
    replied: bool = False

    @property
    def over(self) -> bool:
        """Whether its result is no longer needed."""
        return self.replied or self.answer.done()


class SimulatedHost:
    """One host. The router calls `visit`; the other public methods inject and end faults.

    `silent`: it delivers no visits and no answers, as a frozen process or a cut cable; `factor`: of
    its compute time.
    """

    def __init__(
        self,
        device: SimulatedDevice,
        *,
        machines: Machines,
        delays: Iterator[float],
    ) -> None:
        self.machines, self.delays = machines, delays
        self.alive, self.silent, self.lying, self.factor = True, False, False, 1.0
        self._loop = asyncio.get_running_loop()
        self._half_link = device.link_ms / 2 / _MILLI
        self._block = device.block_ms / _MILLI
        self._died = 0.0
        # A restarted process does not finish the batch of its predecessor.
        self._process = 0
        # Visits without an answer yet; a dict, because a set would lose their order.
        self._open: dict[SimulatedVisit, None] = {}
        self._jobs: list[SimulatedVisit] = []
        self._batch: list[SimulatedVisit] = []
        self._delayed: list[Callable[[], None]] = []

    async def visit(self, visit: Visit, state: State) -> Answer:
        """The answer after link, queue and compute. Raises a `VisitError` as real transports do."""
        job = SimulatedVisit(visit, state, self._loop.create_future())
        if self.alive:
            self._open[job] = None
            self._loop.call_later(self._half_link + next(self.delays), self._arrive, job)
        else:
            self._lose(job)
        try:
            return await job.answer
        finally:
            self._open.pop(job, None)

    def _arrive(self, job: SimulatedVisit) -> None:
        if job not in self._open:
            return  # its caller has cancelled it, or the process that it was sent to has died
        if self.silent:
            # Not lost: a real host answered 3 ms after it was thawed (SIGCONT).
            self._delayed.append(partial(self._arrive, job))
            return
        job.arrived = self._loop.time()
        job.expires = job.arrived + job.visit.budget_ms / _MILLI
        self._forget_expired()
        if len(self._jobs) - len(self._batch) >= self.machines.max_queue:
            self._reply(job, HostUnavailable("The host takes no more work"))
            return
        self._jobs.append(job)
        self._start_batch()

    def _forget_expired(self) -> None:
        """Drop the visits outside of the running batch that are over or have expired."""
        if len(self._jobs) == len(self._batch):
            return
        now = self._loop.time()
        for job in self._jobs:
            if now >= job.expires and job not in self._batch and not job.over:
                self._reply(job, WorkExpired("The budget ran out before its turn"))
        self._jobs = [job for job in self._jobs if job in self._batch or not job.over]

    def _start_batch(self) -> None:
        if self._batch:
            return
        self._forget_expired()
        if not self._jobs:
            return
        # The oldest visit, and those for the same block that fit the largest batch with it.
        same = [job for job in self._jobs if job.visit.block == self._jobs[0].visit.block]
        self._batch = same[: self.machines.max_batch]
        images = len(self._batch)
        seconds = self._block * self.factor * (1 + self.machines.batch_share * (images - 1))
        self._loop.call_later(seconds, self._end_batch, seconds, images, self._process)

    def _end_batch(self, seconds: float, images: int, process: int, /) -> None:
        # This timer was set by a process that has died since.
        if process != self._process:
            return
        batch, self._batch = self._batch, []
        for job in batch:
            queue = max(0.0, self._loop.time() - job.arrived - seconds)
            state = job.state + np.float32(1) if self.lying else job.state
            self._reply(job, Answer(state, seconds * _MILLI, queue * _MILLI, images))
        self._jobs = [job for job in self._jobs if not job.over]
        self._start_batch()

    def _reply(self, job: SimulatedVisit, reply: Answer | VisitError) -> None:
        job.replied = True
        if self.silent:
            self._delayed.append(partial(self._reply, job, reply))
        else:
            self._loop.call_later(self._half_link, _settle, job, reply)

    def _lose(self, job: SimulatedVisit) -> None:
        """Tell the caller that the process is dead, as soon as its connection ends."""
        notice = max(self._loop.time(), self._died + self.machines.notice_ms / _MILLI)
        self._loop.call_at(notice, _settle, job, HostGone("Its process is dead"))

    # --- faults -----------------------------------------------------------------------------------

    def die(self) -> None:
        """End its process, which loses all of its visits."""
        self.alive, self._died, self._process = False, self._loop.time(), self._process + 1
        lost, self._open = self._open, {}
        self._jobs, self._batch, self._delayed = [], [], []
        for job in lost:
            self._lose(job)

    def start(self) -> None:
        """Replace its process by a new one without faults."""
        if self.alive:
            self.die()
        self.alive = True
        self.mend()

    def mend(self) -> None:
        """End its faults, and deliver what was delayed."""
        self.silent, self.lying, self.factor = False, False, 1.0
        delayed, self._delayed = self._delayed, []
        for deliver in delayed:
            deliver()


class SimulatedHosts:
    """All hosts of a simulation, by name; the router's transport. `visits` counts visits sent."""

    def __init__(
        self,
        devices: Mapping[str, SimulatedDevice],
        *,
        machines: Machines,
        seed: int,
    ) -> None:
        delays = machines.delays(seed)
        self.hosts = {
            name: SimulatedHost(device, machines=machines, delays=delays)
            for name, device in devices.items()
        }
        self.visits = 0

    def visit(
        self, visit: Visit, state: State, *, form: Wire = "fp32"
    ) -> Coroutine[Any, Any, Answer]:
        """The answer of the host that `visit` names."""
        del form  # simulated hosts compute nothing
        self.visits += 1
        return self.hosts[visit.host].visit(visit, state)


def _settle(job: SimulatedVisit, reply: Answer | VisitError) -> None:
    # Its caller has cancelled it meanwhile.
    if job.answer.done():
        return
    if isinstance(reply, Answer):
        job.answer.set_result(reply)
    else:
        job.answer.set_exception(reply)
