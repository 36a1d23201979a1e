"""Simulated hosts as a transport of the router: links, queues, batches, and the death of a process.

A host has one worker. It runs the block of the oldest visit on all visits that wait for it, as the
real host does. A block leaves the state of a visit unchanged. The faults on the way to a host are
those of `chaos.ChaosTransport`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from layershuffle.gateway.brain.settings import Wire
from layershuffle.gateway.brain.state import Answer, State, Visit, VisitError

NOTICE_MS = 10.0
"""From the death of a process until its callers are told: SIGKILL of one here takes 5 to 11 ms."""
_MILLI = 1000.0
# Among 25,500 requests on a machine with a load of 10, some visits took ten times the usual time:
# a lognormal delay is as uneven.
_DELAY_STREAM, _DELAY_SPREAD = 3, 0.8


@dataclass(frozen=True, slots=True)
class SimulatedDevice:
    """A host: its blocks, milliseconds of one block for one image, and of a visit beyond compute
    and queue, both ways together."""

    blocks: frozenset[int]
    block_ms: float = 5.0
    link_ms: float = 5.0


@dataclass(eq=False, slots=True)
class SimulatedVisit:
    """A visit of one image on its way to a host, at the host, or on its way back.

    `answer` is done when the caller has the answer or has cancelled the visit.
    """

    visit: Visit
    state: State
    answer: asyncio.Future[Answer]
    arrived: float = 0.0

    def settle(self, reply: Answer | VisitError) -> None:
        """Give the caller its answer, if it still waits for it."""
        if self.answer.done():
            return
        if isinstance(reply, Answer):
            self.answer.set_result(reply)
        else:
            self.answer.set_exception(reply)


class SimulatedHost:
    """One host. The router calls `visit`; `die` and `start` are the ends of its process."""

    def __init__(self, device: SimulatedDevice, *, max_batch: int, delays: Iterator[float]) -> None:
        self.max_batch, self.delays, self.alive = max_batch, delays, True
        self._loop = asyncio.get_running_loop()
        self._half_link = device.link_ms / 2 / _MILLI
        self._block = device.block_ms / _MILLI
        self._died = 0.0
        # A restarted process does not finish the batch of its predecessor.
        self._process = 0
        # Visits without an answer yet; a dict, because a set would lose their order.
        self._open: dict[SimulatedVisit, None] = {}
        self._waiting: list[SimulatedVisit] = []
        self._busy = False

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

    def die(self) -> None:
        """End its process, which loses all of its visits."""
        self.alive, self._died, self._process = False, self._loop.time(), self._process + 1
        lost, self._open = self._open, {}
        self._waiting, self._busy = [], False
        for job in lost:
            self._lose(job)

    def start(self) -> None:
        """Replace its process by a new one."""
        if self.alive:
            self.die()
        self.alive = True

    def _arrive(self, job: SimulatedVisit) -> None:
        # Its caller may have cancelled it, or the process that it was sent to have died.
        if job in self._open:
            job.arrived = self._loop.time()
            self._waiting.append(job)
            self._start_batch()

    def _start_batch(self) -> None:
        if self._busy:
            return
        self._waiting = [job for job in self._waiting if not job.answer.done()]
        if not self._waiting:
            return
        # The oldest visit, and those for the same block that fit the largest batch with it.
        block = self._waiting[0].visit.block
        batch = [job for job in self._waiting if job.visit.block == block][: self.max_batch]
        self._waiting = [job for job in self._waiting if job not in batch]
        self._busy, seconds = True, self._block * len(batch)
        self._loop.call_later(seconds, self._end_batch, batch, seconds, self._process)

    def _end_batch(self, batch: list[SimulatedVisit], seconds: float, process: int, /) -> None:
        # This timer was set by a process that has died since.
        if process != self._process:
            return
        for job in batch:
            queue = max(0.0, self._loop.time() - job.arrived - seconds)
            reply = Answer(job.state, seconds * _MILLI, queue * _MILLI, len(batch))
            self._loop.call_later(self._half_link, job.settle, reply)
        self._busy = False
        self._start_batch()

    def _lose(self, job: SimulatedVisit) -> None:
        """Tell the caller that the process is dead, as soon as its connection ends."""
        notice = max(self._loop.time(), self._died + NOTICE_MS / _MILLI)
        self._loop.call_at(notice, job.settle, VisitError("Its process is dead", outcome="lost"))


class SimulatedHosts(dict[str, SimulatedHost]):
    """All hosts of a simulation, by name, as a transport (`router.Transport`).

    `visits` counts visits sent. `max_batch` and `delay_ms` are those of `run.simulate`.
    """

    def __init__(
        self,
        devices: Mapping[str, SimulatedDevice],
        *,
        max_batch: int,
        delay_ms: float,
        seed: int,
    ) -> None:
        delays = _delays(delay_ms, seed)
        super().__init__(
            (name, SimulatedHost(device, max_batch=max_batch, delays=delays))
            for name, device in devices.items()
        )
        self.visits = 0

    async def visit(self, visit: Visit, state: State, *, form: Wire = "fp32") -> Answer:
        """The answer of the host that `visit` names."""
        del form  # simulated hosts compute nothing
        self.visits += 1
        return await self[visit.host].visit(visit, state)


def _delays(delay_ms: float, seed: int) -> Iterator[float]:
    """The delays of successive visits in seconds, without end."""
    draw = np.random.default_rng((seed, _DELAY_STREAM))
    while True:
        # Nothing is drawn for a quiet machine, which saves time.
        yield delay_ms / _MILLI * draw.lognormal(0, _DELAY_SPREAD) if delay_ms else 0.0
