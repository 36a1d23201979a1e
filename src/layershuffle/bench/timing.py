"""Clocks: time two sides alternately, and the phases of steps.

Two sides run alternately, so a busy machine slows both equally. On a CPU the clock is the processor
time of this process, which excludes waiting; on a GPU it is the GPU's clock, by events.
"""

from __future__ import annotations

import gc
import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from layershuffle.core.hooks import Step
from layershuffle.machine import collector_paused

Side = Callable[[], float]
"""Does its work once and returns the seconds."""

# Otherwise sides of microseconds would run a million times per pair.
_MOST_TURNS = 200


@dataclass(frozen=True, kw_only=True)
class Effort:
    """The amount of measurement: `pairs` of at least `seconds` each, after `warm_up` runs."""

    pairs: int = 9
    seconds: float = 1.0
    warm_up: int = 2


SMOKE = Effort(pairs=1, seconds=0.0, warm_up=1)


@dataclass(frozen=True)
class Pairs:
    """Seconds of A and B, pair by pair; each number is the mean of `turns` runs."""

    seconds: tuple[tuple[float, float], ...]
    turns: int

    @property
    def ratios(self) -> tuple[float, ...]:
        """Seconds of A over seconds of B, pair by pair."""
        return tuple(a / b for a, b in self.seconds)


def cpu_timed(work: Callable[[], object]) -> Side:
    """A side that times `work` by the processor time of all threads of this process."""

    def side() -> float:
        started = time.process_time()
        work()
        return time.process_time() - started

    return side


def gpu_timed(work: Callable[[], object]) -> Side:
    """A side that times `work` by the current GPU's clock, from its first kernel to its last."""

    def side() -> float:
        first, last = _gpu_event(), _gpu_event()
        torch.cuda.synchronize()
        first.record()
        work()
        last.record()
        torch.cuda.synchronize()
        return float(first.elapsed_time(last)) / 1e3

    return side


def timed_on(device: str, work: Callable[[], object]) -> Side:
    """A side that times `work` by the clock of the device, "cpu" or "cuda"."""
    return gpu_timed(work) if device == "cuda" else cpu_timed(work)


def paired(a: Side, b: Side, *, effort: Effort) -> Pairs:
    """Time both sides alternately.

    Each side first runs `effort.warm_up` times, so one-time costs are not measured.
    """
    if effort is not SMOKE:
        gc.collect()  # in a large process it takes as long as a smoke test
    # A garbage collection during the measurement would slow one of the sides by chance.
    with collector_paused():
        # The fastest run, because the first one may include imports and compilation.
        turn_seconds = sum(min(side() for _ in range(effort.warm_up)) for side in (a, b))
        # An effort of 0 seconds, as in a smoke test, still takes one turn.
        turns = min(_MOST_TURNS, math.ceil(effort.seconds / max(turn_seconds, 1e-6))) or 1
        pairs = tuple(_pair(a, b, turns=turns, first=n % 2) for n in range(effort.pairs))
    return Pairs(pairs, turns)


def _pair(a: Side, b: Side, *, turns: int, first: int) -> tuple[float, float]:
    gc.collect(0)  # of the previous pair; a full collection takes long in a large process
    total_a = total_b = 0.0
    # The first side alternates, because the second side has warmer caches.
    for turn in range(first, first + turns):
        if turn % 2:
            total_b += b()
            total_a += a()
        else:
            total_a += a()
            total_b += b()
    return total_a / turns, total_b / turns


class PhaseTimer:
    """Records the beginning of each phase of a step. As a block hook it separates blocks and head.

    On a GPU a beginning is an event in the stream, so the host does not wait. torch.profiler would
    slow down small steps, and its ranges miss the kernels of the backward thread.
    `clock`: seconds on the host, for work that runs there.
    """

    def __init__(
        self, device: torch.device | str, *, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self._on_gpu = torch.device(device).type == "cuda"
        self._clock = clock
        self._beginnings: list[tuple[str, Any]] = []

    def begin(self, phase: str) -> None:
        """End the previous phase and begin this one."""
        if not self._on_gpu:
            self._beginnings.append((phase, self._clock()))
            return
        event = _gpu_event()
        event.record()
        self._beginnings.append((phase, event))

    def before(self, state: Tensor, step: Step) -> Tensor:
        """As a hook: a block begins, except if activation checkpointing recomputes it."""
        if not step.replay:
            self.begin("blocks")
        return state

    def after(self, state: Tensor, step: Step) -> None:
        """As a hook: a block has ended; the head or another block follows."""
        del state
        if not step.replay:
            self.begin("head")

    def steps(self, first: str) -> list[dict[str, float]]:
        """Seconds by phase of every complete step; a step begins with the phase `first`."""
        if self._on_gpu:
            torch.cuda.synchronize()
        steps: list[dict[str, float]] = []
        for (phase, begun), (_, ended) in pairwise(self._beginnings):
            seconds = begun.elapsed_time(ended) / 1e3 if self._on_gpu else ended - begun
            if phase == first:
                steps.append({})
            if steps:
                steps[-1][phase] = steps[-1].get(phase, 0.0) + seconds
        # A step is complete if another one began after it.
        is_whole = bool(self._beginnings) and self._beginnings[-1][0] == first
        return steps if is_whole else steps[:-1]


def median_phases(steps: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """The median seconds of every phase, in the order of the first step."""
    return {phase: statistics.median(step.get(phase, 0.0) for step in steps) for phase in steps[0]}


def _gpu_event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
