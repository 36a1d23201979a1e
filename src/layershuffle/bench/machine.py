"""What this machine can do at most, and what a run uses of it."""

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

from layershuffle.data.view import ImageView
from layershuffle.models import logits_of

_SIZE = {"cpu": 1024, "cuda": 8192}
_CALLS, _ROUNDS = 4, 5
# torch's warning at every sync. Its notice that this mode is a prototype has other words.
_SYNC = "called a synchronizing CUDA operation"
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "bf16-pure": torch.bfloat16}


def matmul_ceiling(device: str, precision: str) -> float:
    """FLOP per second of a large square matrix product, measured: no model exceeds it."""
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
    # The fastest round: other work on the machine only ever makes one slower.
    return 2 * size**3 / min(seconds)


def factors(device: str, precision: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Two square matrices of normal numbers, the same ones always.

    Ones would not do: equal bits draw less power, and some processors run faster on them.
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

    `forward` is that of a forward alone, `training` that of forward and backward.
    """

    forward: int
    training: int


def flops_of(model: nn.Module, view: ImageView) -> Flops:
    """The FLOPs of `model` for one image; counted on a copy on the meta device."""
    sketch = copy.deepcopy(model).to("meta").float()
    image = torch.empty(1, view.channels, view.height, view.width, device="meta")
    with FlopCounterMode(display=False) as counter:
        logits = logits_of(sketch(image))
        # The counter goes on: what is read after the backward pass holds the forward pass too.
        forward = counter.get_total_flops()
        F.cross_entropy(logits, torch.zeros(1, dtype=torch.long, device="meta")).backward()  # type: ignore[no-untyped-call]
    return Flops(forward, counter.get_total_flops())


class Memory:
    """Peak memory: of the GPU since this was made, else of this process since it started."""

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
        """Whose memory it is."""
        return "tensors on the GPU" if self._on_gpu else "this process, libraries included"


class Syncs:
    """How often the host waited for the GPU."""

    def __init__(self) -> None:
        self.count = 0

    @contextmanager
    def counted(self, device: str) -> Iterator[None]:
        """Count inside, by torch's own warnings."""
        if device != "cuda":
            yield
            return
        torch.cuda.synchronize()
        with warnings.catch_warnings(record=True) as caught:
            # Otherwise Python shows a warning once per place, and every sync is to count.
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
            try:
                yield
            finally:
                torch.cuda.set_sync_debug_mode("default")
                self.count += sum(_SYNC in str(warning.message) for warning in caught)
