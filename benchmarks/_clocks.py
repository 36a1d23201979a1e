"""Clocks that time two sides alternately, and the models that they time.

Two sides run alternately, so a busy machine slows both equally. On a CPU the clock is the processor
time of this process, which excludes waiting; on a GPU it is the GPU's clock, by events.
"""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from _machine import DTYPES
from _workload import Workload

from layershuffle.ground.machine import collector_paused

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


def _gpu_event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


# --- models ---------------------------------------------------------------------------------------

PICO = (
    "timm:vit_tiny_patch16_224?pretrained=false&num_classes=10&img_size=32&patch_size=16"
    "&embed_dim=16&num_heads=2&depth=12"
)
"""For smoke tests: 12 tiny blocks."""
WIDTH_64 = (
    "timm:vit_tiny_patch16_224?pretrained=false&num_classes=100&in_chans=1&img_size=12,20"
    "&patch_size=4&embed_dim=64&num_heads=4&mlp_ratio=2&depth=12"
)
"""The model of the digits recipes: 12 blocks, 16 tokens, 0.41 M parameters."""
WIDTH_192 = (
    "timm:vit_tiny_patch16_224?pretrained=false&num_classes=100&img_size=32&patch_size=4&depth=12"
)
"""A ViT-Ti for images of 32 pixels: 12 blocks, 65 tokens, 5.4 M parameters."""
VIT_B = "timm:vit_base_patch16_224?pretrained=false"
"""The paper's model: 12 blocks, 197 tokens, 86.6 M parameters."""


def converted(workload: Workload, precision: str) -> Workload:
    """The workload with weights and images in `precision`; converts its model in place."""
    dtype = DTYPES[precision]
    workload.model.to(dtype)
    return replace(workload, images=workload.images.to(dtype))
