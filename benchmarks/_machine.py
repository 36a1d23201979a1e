"""The peak performance of this machine, the resources that a run uses, and the clock of phases."""

from __future__ import annotations

import copy
import resource
import sys
import time
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from layershuffle.core.hooks import Step
from layershuffle.core.tensors import logits_of
from layershuffle.models import image_view

_SIZE = {"cpu": 1024, "cuda": 8192}
_CALLS = 4
_ROUNDS = 5
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def matmul_ceiling(device: str, precision: str) -> float:
    """Measured FLOP per second of a large square matrix product, an upper bound for models."""
    size = _SIZE[device]
    seconds = []
    # Not ones: equal bits take less power, and some processors run faster on them.
    generator = torch.Generator().manual_seed(0)
    a, b = torch.randn(2, size, size, generator=generator).to(device, DTYPES[precision])
    wait = torch.cuda.synchronize if device == "cuda" else int
    for _ in range(_ROUNDS):
        wait()
        started = time.perf_counter()
        for _ in range(_CALLS):
            a @ b
        wait()
        seconds.append((time.perf_counter() - started) / _CALLS)
    # The fastest round, because other work on the machine can only slow it down.
    return 2 * size**3 / min(seconds)


def flops_of(model: nn.Module) -> tuple[int, int]:
    """FLOPs per image in matrix products and attention: of a forward, and with its backward.

    They are counted on a copy on the meta device.
    """
    view = image_view(model)
    sketch = copy.deepcopy(model).to("meta").float()
    image = torch.empty(1, view.channels, view.height, view.width, device="meta")
    with FlopCounterMode(display=False) as counter:
        logits = logits_of(sketch(image), sketch)
        # The counter continues, so its value after the backward pass includes the forward pass.
        forward = counter.get_total_flops()
        F.cross_entropy(logits, torch.zeros(1, dtype=torch.long, device="meta")).backward()  # type: ignore[no-untyped-call]
    return forward, counter.get_total_flops()


def peak_memory(device: str) -> tuple[int, str]:
    """Peak bytes on the GPU since torch's last reset, or of this process, and which of the two."""
    if device == "cuda":
        return torch.cuda.max_memory_allocated(), "tensors on the GPU"
    unit = 1 if sys.platform == "darwin" else 1024  # macOS reports bytes, Linux KiB
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    return peak, "this process, libraries included"


class PhaseTimer:
    """Records the beginning of each phase of a step. As a block hook it separates blocks and head.

    On a GPU a beginning is an event in the stream, so the CPU does not wait. torch.profiler would
    slow down small steps, and its ranges miss the kernels of the backward thread.
    `clock`: seconds on the CPU, for work that runs there.
    """

    def __init__(self, device: str, *, clock: Callable[[], float] = time.perf_counter) -> None:
        self._on_gpu = device == "cuda"
        self._clock = clock
        self._beginnings: list[tuple[str, Any]] = []

    def begin(self, phase: str) -> None:
        """End the previous phase and begin this one."""
        if not self._on_gpu:
            self._beginnings.append((phase, self._clock()))
            return
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
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

    def steps(self) -> list[dict[str, float]]:
        """Seconds by phase of the steps since the last call; a step begins with the phase data."""
        if self._on_gpu:
            torch.cuda.synchronize()
        steps: list[dict[str, float]] = []
        for (phase, begun), (_, ended) in pairwise(self._beginnings):
            seconds = begun.elapsed_time(ended) / 1e3 if self._on_gpu else ended - begun
            if phase == "data":
                steps.append({})
            if steps:
                steps[-1][phase] = steps[-1].get(phase, 0.0) + seconds
        # A step is complete if another one began after it.
        is_whole = bool(self._beginnings) and self._beginnings[-1][0] == "data"
        self._beginnings.clear()
        return steps if is_whole else steps[:-1]
