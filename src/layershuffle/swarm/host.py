"""A block host: it holds some blocks and runs visits through them, in batches if possible.

Visits wait in one queue. One thread computes, so the event loop stays free to answer; each of its
turns runs one block on the visits that need it next (`next_batch`, a pure function). It needs only
torch, numpy and the light modules of this package, so a host process starts quickly.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from threading import Lock
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from layershuffle.errors import UsageError
from layershuffle.swarm.limits import Limits
from layershuffle.swarm.messages import (
    Answer,
    HostFailed,
    HostUnavailable,
    Packet,
    VisitError,
    WorkExpired,
    pack_answer,
    unpack,
)
from layershuffle.swarm.program import Block, digest_of, read_program
from layershuffle.text import one_line

_MILLI = 1000.0
MAX_SKIPS = 8
"""Turns after which the oldest visit goes first, even if few others need its block."""


@dataclass(frozen=True)
class HostInfo:
    """A host's report about itself. `blocks`: SHA-256 of each block's tensors.

    `waiting`: the number of visits that are not being computed now; `computing`: the number of
    those that are. `channel`: address and port of its data channel, "" without one.
    """

    name: str
    blocks: dict[int, str]
    pid: int
    waiting: int
    computing: int
    channel: str = ""


@dataclass(eq=False)
class QueuedVisit:
    """A visit at this host. `steps`: the blocks it must run, as they were when it arrived.

    `compute`: total seconds of its batches, `each`: total of their seconds per image.
    """

    # The blocks, not their ids, so a swap does not change a visit in progress.
    steps: tuple[Block, ...]
    packet: Packet
    arrived: float
    expires: float
    future: Future[Answer] = field(default_factory=Future)
    state: Tensor | None = None
    done: int = 0
    compute: float = 0.0
    each: float = 0.0
    passed: int = 0
    alone: bool = False

    @property
    def images(self) -> int:
        """Number of images in its state."""
        return self.packet.images

    @property
    def batch_key(self) -> object:
        """Visits with the same key can run their next block together."""
        # Blocks compare by identity, so old and new weights of one id never share a batch.
        return self if self.alone else self.steps[self.done]


class Waiting(Protocol):
    """The part of a waiting visit that `next_batch` reads; the simulation's visits have it too."""

    @property
    def images(self) -> int:
        """Number of images in its state."""

    @property
    def batch_key(self) -> object:
        """Visits with the same key can run their next block together."""

    passed: int
    """The number of times that others went first."""


_Waiting = TypeVar("_Waiting", bound=Waiting)


def next_batch(jobs: Sequence[_Waiting], *, images: int) -> list[_Waiting]:
    """The waiting `jobs` (oldest first) that run one block together next.

    It is the block that most of the jobs need next; among equals, the one that the oldest job
    needs. The batch holds as many jobs as `images` allows, and at least one. If the oldest job was
    passed over `MAX_SKIPS` times, its block goes first.
    """
    groups: dict[object, list[_Waiting]] = {}
    for job in jobs:
        groups.setdefault(job.batch_key, []).append(job)
    oldest = jobs[0]
    # Taking the fullest block lets visits meet, but without a limit one visit could wait as long as
    # others keep arriving (decision 009).
    patient = oldest.passed < MAX_SKIPS
    # Groups are in the order of their oldest jobs, and among equal ones `max` takes the first.
    group = max(groups.values(), key=len) if patient else groups[oldest.batch_key]
    chosen, total = group[:1], group[0].images
    # A job that is too large is passed over, but smaller ones behind it may still go.
    for job in group[1:]:
        if total + job.images <= images:
            chosen.append(job)
            total += job.images
    return chosen


class BlockHost:
    """Runs visits through the blocks it holds. One event loop calls it; see `messages.Transport`.

    `threads` sets torch's threads in the whole process, so give it only for a host with its own
    process; by default the number does not change.
    """

    def __init__(
        self,
        name: str,
        *,
        limits: Limits,
        threads: int | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.name, self._limits, self._clock = name, limits, clock
        self.channel = ""  # set by the code that opens a data channel for this host
        self._blocks: dict[int, Block] = {}
        self._lock = Lock()  # for all attributes below, which the loop and the worker share
        self._jobs: list[QueuedVisit] = []
        self._turn_of: list[QueuedVisit] = []
        self._busy = self._closed = False
        # A new thread has torch's default number of threads, on which the last bits depend.
        self._worker = ThreadPoolExecutor(
            max_workers=1,
            thread_name_prefix=f"host-{name}",
            initializer=_begin,
            initargs=(threads or torch.get_num_threads(),),
        )

    # --- blocks -----------------------------------------------------------------------------------

    def load(self, program: bytes, blocks: Sequence[int], *tensors: bytes) -> None:
        """Add or replace `blocks` with these weights, in one step.

        Visits in progress finish with the old blocks. Raises `ModelFileError` for data that are
        damaged or do not fit together, `UsageError` for blocks with another state shape than those
        held; the host does not change then.
        """
        # Weights are separate arguments because Ray passes those without another copy.
        programs = {block.program.digest: block.program for block in self._blocks.values()}
        code = programs.get(digest_of(program)) or read_program(program)
        # Tied places also share their weights here.
        bound = {content: code.bind(content) for content in dict.fromkeys(tensors)}
        new = {block: bound[content] for block, content in zip(blocks, tensors, strict=True)}
        shapes = [block.program.shape for id_, block in self._blocks.items() if id_ not in new]
        if any(shape != code.shape for shape in shapes):
            raise UsageError(
                f"Host {self.name} holds blocks for states {shapes[0]}, not for {code.shape}",
                hint="a host serves one model: load all its blocks, or unload the old ones first",
            )
        with self._lock:
            self._blocks = {**self._blocks, **new}

    def unload(self, blocks: Sequence[int]) -> None:
        """Forget blocks; visits in progress finish with them."""
        with self._lock:
            self._blocks = {id_: block for id_, block in self._blocks.items() if id_ not in blocks}

    def info(self) -> HostInfo:
        """The current blocks and work of the host."""
        with self._lock:
            jobs, computing = [*self._jobs], [*self._turn_of]
            blocks = {id_: block.digest for id_, block in sorted(self._blocks.items())}
        active = [job for job in jobs if not job.future.cancelled()]
        waiting = sum(job not in computing for job in active)
        running = len(active) - waiting
        return HostInfo(self.name, blocks, os.getpid(), waiting, running, self.channel)

    def close(self) -> None:
        """Refuse all visits, including those in progress. The thread ends after its turn."""
        with self._lock:
            self._closed = True
            jobs, self._jobs = self._jobs, []
            for job in jobs:
                self._end(job, HostUnavailable(f"Host {self.name} is closed"))
        self._worker.shutdown(wait=False)

    # --- visits -----------------------------------------------------------------------------------

    async def visit(self, blocks: Sequence[int], packet: Packet, *, budget_ms: float) -> Answer:
        """Run `blocks` in this order on the state of `packet` (`messages.pack_answer`).

        A visit that runs alone gives the result of the model, bit for bit (fp32 wire). Cancelling
        drops it. Raises `HostUnavailable` (queue full, closed, block not held), `WorkExpired`
        (its turn came after the budget was used up), `HostFailed` (it cannot be computed).
        """
        return await asyncio.wrap_future(self.begin(blocks, packet, budget_ms=budget_ms))

    def begin(self, blocks: Sequence[int], packet: Packet, *, budget_ms: float) -> Future[Answer]:
        """Begin a visit, which `visit` awaits. Errors that are known at once are raised here."""
        now = self._clock()
        with self._lock:
            job = QueuedVisit(self._steps(blocks, packet), packet, now, now + budget_ms / _MILLI)
            self._drop_expired(now)
            if len(self._jobs) - len(self._turn_of) >= self._limits.max_queue:
                raise HostUnavailable(
                    f"Host {self.name} is full: {self._limits.max_queue} visits wait"
                )
            self._jobs.append(job)
            self._wake()
        return job.future

    def _steps(self, blocks: Sequence[int], packet: Packet) -> tuple[Block, ...]:
        if self._closed:
            raise HostUnavailable(f"Host {self.name} is closed")
        missing = [block for block in blocks if block not in self._blocks]
        if missing:
            raise HostUnavailable(f"Host {self.name} does not hold block {missing[0]}")
        steps = tuple(self._blocks[block] for block in blocks)
        shape = packet.values.shape
        if not steps or packet.images < 1 or shape[1:] != steps[0].program.shape:
            raise HostFailed(
                f"Host {self.name} got a state of shape {shape} for {len(steps)} blocks; it takes "
                f"images of {steps[0].program.shape if steps else 'any'}"
            )
        return steps

    def _drop_expired(self, now: float) -> None:
        """Drop the visits that were cancelled or can no longer meet their deadline."""
        for job in self._jobs:
            if now >= job.expires and job not in self._turn_of:
                self._end(job, WorkExpired(f"Host {self.name} had no time for it in its budget"))
        self._jobs = [job for job in self._jobs if job in self._turn_of or not job.future.done()]

    # --- the worker's turns -----------------------------------------------------------------------

    def _wake(self) -> None:
        if self._jobs and not self._busy and not self._closed:
            self._busy = True
            self._worker.submit(self._turns)

    def _turns(self) -> None:
        """Take turns as long as there are visits."""
        # One task for all turns: submitting each turn to the thread took as long as a small block.
        while self._busy:
            failure: Exception | None = None
            try:
                self._turn()
            # The thread continues with the other visits if a block raises an exception.
            except Exception as error:  # noqa: BLE001 -- `_after` tells the visits
                failure = error
            self._after(failure)

    def _turn(self) -> None:
        """Run one block on the next visits."""
        with self._lock:
            self._drop_expired(self._clock())
            if not self._jobs:
                return
            jobs = self._turn_of = next_batch(self._jobs, images=self._limits.max_batch)
            for job in self._jobs:
                job.passed = 0 if job in jobs else job.passed + 1
        for job in jobs:
            if job.state is None:
                state = unpack(job.packet)
                # Float32 needs a copy: arriving data may be read-only, or in use by the sender.
                # Data that were rounded on the wire are unpacked into new memory.
                exact = job.packet.wire == "fp32"
                job.state = torch.tensor(state) if exact else torch.from_numpy(state)
        begun = self._clock()
        states = [job.state for job in jobs if job.state is not None]
        block = jobs[0].steps[jobs[0].done]
        after = block(states[0] if len(states) == 1 else torch.cat(states))
        seconds = self._clock() - begun
        parts = torch.split(after, [job.images for job in jobs])
        last = [job.done + 1 == len(job.steps) for job in jobs]
        packets = [
            pack_answer(part.numpy(), job.packet) if ends else job.packet
            for job, part, ends in zip(jobs, parts, last, strict=True)
        ]
        # Nothing can fail from here on, so a turn changes all of its visits or none.
        for job, part, packet in zip(jobs, parts, packets, strict=True):
            job.state, job.packet, job.done = part, packet, job.done + 1
            job.compute, job.each = job.compute + seconds, job.each + seconds / len(after)

    def _after(self, error: Exception | None) -> None:
        """Answer the visits that are done or failed with `error`; the others continue."""
        with self._lock:
            jobs, self._turn_of = self._turn_of, []
            for job in jobs:
                if error is not None and len(jobs) > 1:
                    job.alone = True  # run each again alone: one broken visit must not fail others
                elif error is not None:
                    self._end(job, _failure(self.name, error))
                elif job.done == len(job.steps):
                    self._end(job, _answer(job, now=self._clock()))
            self._jobs = [job for job in self._jobs if not job.future.done()]
            self._busy = bool(self._jobs) and not self._closed

    def _end(self, job: QueuedVisit, outcome: Answer | VisitError) -> None:
        """Give the caller its answer or error, unless it was cancelled."""
        if job.future.done() or not job.future.set_running_or_notify_cancel():
            return
        if isinstance(outcome, Answer):
            job.future.set_result(outcome)
        else:
            job.future.set_exception(outcome)


def _answer(job: QueuedVisit, *, now: float) -> Answer:
    spent = now - job.arrived
    return Answer(
        packet=job.packet,
        compute_ms=job.compute * _MILLI,
        queue_ms=max(0.0, spent - job.compute) * _MILLI,
        batch=round(job.compute / job.each, 6) if job.each else float(job.images),
    )


def _failure(name: str, error: Exception) -> HostFailed:
    return HostFailed(f"Host {name} cannot compute it ({type(error).__name__}: {one_line(error)})")


def _begin(threads: int) -> None:
    # Reading the number makes a new thread adopt that of the process; setting it has side effects.
    if torch.get_num_threads() != threads:
        torch.set_num_threads(threads)
