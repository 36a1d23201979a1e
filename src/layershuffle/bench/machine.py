"""The peak performance of this machine, and the resources that a run uses."""

from __future__ import annotations

import copy
import resource
import sys
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from layershuffle.core.tensors import logits_of
from layershuffle.image_view import ImageView

_SIZE = {"cpu": 1024, "cuda": 8192}
_CALLS, _ROUNDS = 4, 5
# Part of torch's warning at every sync, but not of its notice that this mode is a prototype.
_SYNC = "called a synchronizing CUDA operation"
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def matmul_ceiling(device: str, precision: str) -> float:
    """Measured FLOP per second of a large square matrix product, an upper bound for models."""
    size = _SIZE[device]
    a, b = factors(device, precision)
    seconds = []
    for _ in range(_ROUNDS):
        _wait(device)
        started = time.perf_counter()
        for _ in range(_CALLS):
            a @ b
        _wait(device)
        seconds.append((time.perf_counter() - started) / _CALLS)
    # The fastest round, because other work on the machine can only slow it down.
    return 2 * size**3 / min(seconds)


def factors(device: str, precision: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Two fixed square matrices of normal numbers.

    Not ones, because equal bits take less power, and some processors run faster on them.
    """
    generator = torch.Generator().manual_seed(0)
    shape = (_SIZE[device], _SIZE[device])
    a, b = (torch.randn(shape, generator=generator) for _ in range(2))
    return a.to(device, DTYPES[precision]), b.to(device, DTYPES[precision])


def _wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


@dataclass(frozen=True)
class Flops:
    """Floating-point operations per image in matrix products and attention.

    `forward`: of a forward alone; `training`: of forward and backward.
    """

    forward: int
    training: int


def flops_of(model: nn.Module, view: ImageView) -> Flops:
    """The FLOPs of `model` for one image, counted on a copy on the meta device."""
    sketch = copy.deepcopy(model).to("meta").float()
    image = torch.empty(1, view.channels, view.height, view.width, device="meta")
    with FlopCounterMode(display=False) as counter:
        logits = logits_of(sketch(image))
        # The counter continues, so its value after the backward pass includes the forward pass.
        forward = counter.get_total_flops()
        F.cross_entropy(logits, torch.zeros(1, dtype=torch.long, device="meta")).backward()  # type: ignore[no-untyped-call]
    return Flops(forward, counter.get_total_flops())


class Memory:
    """Peak memory of the GPU since the creation of this object, else of this process."""

    def __init__(self, device: str) -> None:
        self._on_gpu = device == "cuda"
        if self._on_gpu:
            torch.cuda.reset_peak_memory_stats()

    def peak(self) -> int:
        """The peak in bytes."""
        if self._on_gpu:
            return torch.cuda.max_memory_allocated()
        # macOS reports bytes, Linux KiB.
        unit = 1 if sys.platform == "darwin" else 1024
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit

    @property
    def of(self) -> str:
        """A description of the memory."""
        return "tensors on the GPU" if self._on_gpu else "this process, libraries included"


class Syncs:
    """The number of times that the host waited for the GPU."""

    def __init__(self) -> None:
        self.count = 0

    @contextmanager
    def counted(self, device: str) -> Iterator[None]:
        """Count torch's warnings on synchronisation within."""
        if device != "cuda":
            yield
            return
        torch.cuda.synchronize()
        with warnings.catch_warnings(record=True) as caught:
            # Otherwise Python shows a warning only once per line of code.
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
            try:
                yield
            finally:
                torch.cuda.set_sync_debug_mode("default")
                self.count += sum(_SYNC in str(warning.message) for warning in caught)
