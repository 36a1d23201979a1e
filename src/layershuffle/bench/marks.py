"""Where the time of a step goes: marks put while it runs, read when it is over.

On a GPU a mark is an event in its stream, so that marking waits for nothing.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from layershuffle.hooks import Step


class Marks:
    """Names of phases and when they began. `clock`: seconds on the host, for what runs there."""

    def __init__(
        self, device: torch.device | str, *, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self._on_gpu = torch.device(device).type == "cuda"
        self._clock = clock
        self._marks: list[tuple[str, Any]] = []

    def mark(self, phase: str) -> None:
        """From here on it is `phase`."""
        if not self._on_gpu:
            self._marks.append((phase, self._clock()))
            return
        event = gpu_event()
        event.record()
        self._marks.append((phase, event))

    def spans(self) -> Iterator[tuple[str, float]]:
        """(phase, seconds) from every mark to the next."""
        if self._on_gpu:
            torch.cuda.synchronize()
        for (phase, begun), (_, ended) in pairwise(self._marks):
            seconds = begun.elapsed_time(ended) / 1e3 if self._on_gpu else ended - begun
            yield phase, float(seconds)

    def steps(self, first: str) -> list[dict[str, float]]:
        """Seconds by phase of every whole step; a step begins with the phase `first`."""
        found: list[dict[str, float]] = []
        for phase, seconds in self.spans():
            if phase == first:
                found.append({})
            if found:
                found[-1][phase] = found[-1].get(phase, 0.0) + seconds
        ended = bool(self._marks) and self._marks[-1][0] == first
        return found if ended else found[:-1]


class BlockMarks:
    """A hook (`layershuffle.hooks.BlockHook`) that marks where blocks begin and end."""

    def __init__(self, marks: Marks) -> None:
        self._marks = marks

    def before(self, state: Tensor, step: Step) -> Tensor:
        """A block begins."""
        if not step.replay:
            self._marks.mark("blocks")
        return state

    def after(self, state: Tensor, step: Step) -> None:
        """It ended: what comes next is the head, or another block at once."""
        del state
        if not step.replay:
            self._marks.mark("head")


def gpu_event() -> torch.cuda.Event:
    """An event that knows its time."""
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


def median_phases(steps: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """The median seconds of every phase, in the order of the first step."""
    return {phase: statistics.median(step.get(phase, 0.0) for step in steps) for phase in steps[0]}
