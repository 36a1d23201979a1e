"""The settings of `layershuffle bench`, and their resolved values on this machine.

The command line imports this file, so torch is only imported to resolve a configuration.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import Field

from layershuffle.machine import Device, choose_precision, device_of
from layershuffle.settings import Positive, Settings


class BenchSettings(Settings):
    """The subject and the conditions of a measurement."""

    model: str | None = None
    """Model spec, with random weights (default: ViT-B/16, on a CPU the digits model)."""
    batch_size: Positive | None = None
    """Images per step (default: 640 on a GPU, 64 on a CPU)."""
    steps: Annotated[int, Field(ge=5)] = 20
    """Number of timed steps."""
    device: Device = "auto"
    """Where to compute; auto takes a GPU if there is one."""
    precision: Literal["auto", "fp32", "bf16"] = "auto"
    """auto: bf16 on GPUs that have it, else fp32. eval: of weights and states, too."""
    threads: Positive | None = None
    """CPU threads of torch (default: torch's own choice)."""
    compile: bool | None = None
    """Compile the blocks (default: on a GPU yes, on a CPU no)."""
    orders_per_batch: Positive = 1
    """train: groups of the images of a forward, each with its own order."""


@dataclass(frozen=True, kw_only=True)
class BenchConfig:
    """`BenchSettings` with every "auto" and default resolved for this machine."""

    model: str
    batch_size: int
    steps: int
    device: Literal["cpu", "cuda"]
    precision: Literal["fp32", "bf16"]
    compile: bool
    orders_per_batch: int
    backend: str = "inductor"


def resolve(settings: BenchSettings) -> BenchConfig:
    """The configuration on this machine. Raises `UsageError` for a missing GPU."""
    device = device_of(settings.device)
    precision, _ = choose_precision(settings.precision, device=device, training=True)
    # 640 is a batch size of the paper.
    on_gpu = device == "cuda"
    return BenchConfig(
        model=settings.model or ("timm:vit_base_patch16_224" if on_gpu else "bundled:digits"),
        batch_size=settings.batch_size or (640 if on_gpu else 64),
        steps=settings.steps,
        device=device,
        precision=precision,
        compile=on_gpu if settings.compile is None else settings.compile,
        orders_per_batch=settings.orders_per_batch,
    )
