"""A block host: holds some blocks and runs visits through them, in batches where it can.

Visits wait in one queue. One thread computes, so that the event loop stays free to answer; each of
its turns runs one block on the visits that need it next (`next_batch`, a pure function). It needs
torch, numpy and the light modules of this package, so that a host process starts quickly.
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
"""Turns after which the oldest visit goes first, however few others need its block."""


@dataclass(frozen=True)
class HostInfo:
    """A host's report about itself. `blocks`: SHA-256 of each block's tensors.

    `waiting`: visits that are not being computed now; `computing`: those that are. `channel`:
    address and port of its data channel, "" without one.
    """

    name: str
    blocks: dict[int, str]
    pid: int
    waiting: int
    computing: int
    draining: bool
    channel: str = ""


@dataclass(eq=False)
class QueuedVisit:
    """A visit at this host. `steps`: the blocks it is to run, as they were when it came.

    `compute`: seconds of the batches that it was in, `each`: their seconds per image.
    """

    # The blocks themselves and not their ids: a swap does not change a visit that is here.
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
        """Visits of one key can go through their next block together."""
        # Blocks compare by identity, so that old and new weights of one id never share a batch.
        return self if self.alone else self.steps[self.done]


class Waiting(Protocol):
    """What the choice reads of a visit that waits; the simulation's visits have it too."""

    @property
    def images(self) -> int:
        """Number of images in its state."""

    @property
    def batch_key(self) -> object:
        """Visits of one key can go through their next block together."""

    passed: int
    """How often others went before it."""


_Waiting = TypeVar("_Waiting", bound=Waiting)


def next_batch(jobs: Sequence[_Waiting], *, images: int) -> list[_Waiting]:
    """The waiting `jobs` (oldest first) that go through one block together next.

    They need the block that most of the jobs need; if there are several such blocks, the one that
    the oldest job needs. The batch holds as many jobs as `images` allows, and at least one. An
    oldest job that was passed over `MAX_SKIPS` times goes first.
    """
    groups: dict[object, list[_Waiting]] = {}
    for job in jobs:
        groups.setdefault(job.batch_key, []).append(job)
    oldest = jobs[0]
    # The fullest block first lets visits meet, but alone it could leave one behind for as long as
    # others keep coming (decision 009).
    patient = oldest.passed < MAX_SKIPS
    # Groups stand in the order of their oldest jobs, and of equal ones `max` takes the first.
    group = max(groups.values(), key=len) if patient else groups[oldest.batch_key]
    chosen, total = group[:1], group[0].images
    # A job that is too large is passed over, and smaller ones behind it still go.
    for job in group[1:]:
        if total + job.images <= images:
            chosen.append(job)
            total += job.images
    return chosen


class BlockHost:
    """Runs visits through the blocks it holds. One event loop calls it; see `messages.Transport`.

    `threads`: of torch, for all of the process, so only for a host that has a process of its own;
    by default the number stays as it is.
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
        self.channel = ""  # whoever opens one for this host writes its address here
        self._blocks: dict[int, Block] = {}
        self._lock = Lock()  # over all that follows: the loop and the worker share it
        self._jobs: list[QueuedVisit] = []
        self._turn_of: list[QueuedVisit] = []
        self._busy = self._draining = self._closed = False
        # A new thread has torch's default number of threads, and the last bits depend on it.
        self._worker = ThreadPoolExecutor(
            max_workers=1,
            thread_name_prefix=f"host-{name}",
            initializer=_begin,
            initargs=(threads or torch.get_num_threads(),),
        )

    # --- what it holds ----------------------------------------------------------------------------

    def load(self, program: bytes, blocks: Sequence[int], *tensors: bytes) -> None:
        """Add or replace `blocks`, of these weights, in one step.

        Visits that are here finish with the old ones. Raises `ModelFileError` for what is damaged
        or does not fit together, `UsageError` for blocks of another shape of state than those
        held; the host is then as before.
        """
        # Weights are arguments of their own because Ray hands those over without another copy.
        programs = {block.program.digest: block.program for block in self._blocks.values()}
        code = programs.get(digest_of(program)) or read_program(program)
        # Tied places share their weights here too.
        bound = {content: code.bind(content) for content in dict.fromkeys(tensors)}
        new = {block: bound[content] for block, content in zip(blocks, tensors, strict=True)}
        rest = [block.program.shape for id_, block in self._blocks.items() if id_ not in new]
        if any(shape != code.shape for shape in rest):
            raise UsageError(
                f"Host {self.name} holds blocks for states {rest[0]}, these are for {code.shape}",
                hint="a host serves one model: load all its blocks, or unload the old ones first",
            )
        with self._lock:
            self._blocks = {**self._blocks, **new}

    def unload(self, blocks: Sequence[int]) -> None:
        """Forget blocks; visits that are here finish with them."""
        with self._lock:
            self._blocks = {id_: block for id_, block in self._blocks.items() if id_ not in blocks}

    def info(self) -> HostInfo:
        """What the host holds and does now."""
        with self._lock:
            jobs, computing = [*self._jobs], [*self._turn_of]
            blocks = {id_: block.digest for id_, block in sorted(self._blocks.items())}
            draining = self._draining
        wanted = [job for job in jobs if not job.future.cancelled()]
        waiting = sum(job not in computing for job in wanted)
        return HostInfo(
            self.name, blocks, os.getpid(), waiting, len(wanted) - waiting, draining, self.channel
        )

    def drain(self) -> None:
        """Take no new visits; those that are here finish."""
        self._draining = True

    def close(self) -> None:
        """Turn all visits away, those that are here too. The thread ends with its turn."""
        with self._lock:
            self._draining = self._closed = True
            jobs, self._jobs = self._jobs, []
            for job in jobs:
                self._end(job, HostUnavailable(f"Host {self.name} is closed"))
        self._worker.shutdown(wait=False)

    # --- visits -----------------------------------------------------------------------------------

    async def visit(self, blocks: Sequence[int], packet: Packet, *, budget_ms: float) -> Answer:
        """What `blocks` make of the state of `packet`, in that order (`messages.pack_answer`).

        A visit that runs alone gives what the model gives, bit for bit (fp32 wire). Being cancelled
        drops it. Raises `HostUnavailable` (queue full, draining, block not held), `WorkExpired`
        (not done within the budget when its turn came), `HostFailed` (it cannot be computed).
        """
        return await asyncio.wrap_future(self.begin(blocks, packet, budget_ms=budget_ms))

    def begin(self, blocks: Sequence[int], packet: Packet, *, budget_ms: float) -> Future[Answer]:
        """A visit that has begun; `visit` awaits it. What is wrong at once is raised here."""
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
        if self._draining:
            raise HostUnavailable(f"Host {self.name} is leaving")
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
        """Turn after turn, as long as visits are here."""
        # In one piece of work: to hand each turn to the thread anew took as long as a small block.
        while self._busy:
            failure: Exception | None = None
            try:
                self._turn()
            # The thread goes on with the other visits, whatever a block raises.
            except Exception as error:  # noqa: BLE001 -- `_after` tells the visits
                failure = error
            self._after(failure)

    def _turn(self) -> None:
        """Run one block on the visits that go next."""
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
                # Of float32 a copy: what arrives may be read-only, or in use by the sender. What
                # was rounded on the wire is unpacked into new memory.
                exact = job.packet.wire == "fp32"
                job.state = torch.tensor(state) if exact else torch.from_numpy(state)
        begun = self._clock()
        states = [job.state for job in jobs if job.state is not None]
        block = jobs[0].steps[jobs[0].done]
        after = block(states[0] if len(states) == 1 else torch.cat(states))
        took = self._clock() - begun
        parts = torch.split(after, [job.images for job in jobs])
        last = [job.done + 1 == len(job.steps) for job in jobs]
        packets = [
            pack_answer(part.numpy(), job.packet) if ends else job.packet
            for job, part, ends in zip(jobs, parts, last, strict=True)
        ]
        # Nothing can fail from here on: a turn changes all of its visits, or none.
        for job, part, packet in zip(jobs, parts, packets, strict=True):
            job.state, job.packet, job.done = part, packet, job.done + 1
            job.compute, job.each = job.compute + took, job.each + took / len(after)

    def _after(self, error: Exception | None) -> None:
        """Answer the visits that are done, or failed with `error`; the others go on."""
        with self._lock:
            jobs, self._turn_of = self._turn_of, []
            for job in jobs:
                if error is not None and len(jobs) > 1:
                    job.alone = True  # each again by itself: one broken visit must not fail others
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
    # Asking makes a new thread take the number of the process; setting it would reset other things.
    if torch.get_num_threads() != threads:
        torch.set_num_threads(threads)
