"""The settings of `layershuffle bench`, and their resolved values on this machine.

The command line imports this file, so torch is only imported to resolve a configuration.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field

from layershuffle.machine import Device, choose_precision, device_of
from layershuffle.settings import Positive, Settings

if TYPE_CHECKING:
    from layershuffle.bench.report import Conditions
    from layershuffle.bench.workloads import Workload
    from layershuffle.core.compiling import BlockCompiler

WARM_UP, PHASED = 3, 5
"""Numbers of steps before the timed ones, not counted, and after them, to measure the phases."""
KINDS = {
    "train": "training steps as fit takes them: images per second, and where the time goes",
    "eval": "forwards, each batch in an order of its own",
    "orders": "many orders over one batch: one by one, and with shared beginnings run once",
    "input": "reading JPEG files as training does",
    "merge": "making merges of twelve models: time and memory",
}


class BenchSettings(Settings):
    """The subject and the conditions of a measurement."""

    model: str | None = None
    """Model spec, built with random weights (default: ViT-B/16 on a GPU, the digits model on a
    CPU)."""
    batch: Positive | None = None
    """Images per step (default: 640 on a GPU, 64 on a CPU)."""
    steps: Annotated[int, Field(ge=5)] = 20
    """Number of timed steps or merges."""
    device: Device = "auto"
    """Where to compute; auto takes a GPU if there is one."""
    precision: Literal["auto", "fp32", "bf16"] = "auto"
    """auto: bf16 on GPUs that support it, else fp32. train: as in fit; other kinds have weights and
    states in bf16."""
    threads: Positive | None = None
    """CPU threads of torch (default: torch's own choice)."""
    compile: bool | None = None
    """Compile the blocks (default: on a GPU yes, on a CPU no)."""
    orders_per_batch: Positive = 1
    """train: groups of the images of a forward, each with its own order."""
    workers: Annotated[int, Field(ge=0)] | None = None
    """input: loader processes (default: the cores but one, at most 16)."""


@dataclass(frozen=True, kw_only=True)
class BenchConfig:
    """`BenchSettings` with every "auto" and default resolved for this machine."""

    model: str
    batch: int
    steps: int
    device: Literal["cpu", "cuda"]
    precision: Literal["fp32", "bf16"]
    compile: bool
    orders_per_batch: int
    workers: int
    backend: str = "inductor"

    def conditions(self, dtype: str | None = None) -> Conditions:
        """The conditions of a throughput. `dtype`: of the data, if it is not `precision`."""
        from layershuffle.bench.report import Conditions
        from layershuffle.machine import hardware

        dtype = dtype or self.precision
        return Conditions(model=self.model, batch=self.batch, dtype=dtype, hardware=hardware(dtype))

    def workload(self) -> Workload:
        """Model and images, on the device."""
        from layershuffle.bench.workloads import make_workload

        return make_workload(self.model, batch=self.batch, device=self.device)

    def compiler(self) -> BlockCompiler:
        """A compiler for the blocks, or the reason why they stay in eager mode."""
        from layershuffle.core.compiling import BlockCompiler

        return BlockCompiler(
            reason=None if self.compile else "compile is off",
            dynamic=self.orders_per_batch > 1,
            backend=self.backend,
        )


def resolve(settings: BenchSettings) -> BenchConfig:
    """The configuration on this machine. Raises `UsageError` for a missing GPU."""
    from layershuffle.bench.workloads import VIT_B
    from layershuffle.data.loading import loader_processes

    device = device_of(settings.device)
    precision, _ = choose_precision(settings.precision, device=device, training=True)
    # 640 is a batch size of the paper.
    model, batch = (VIT_B, 640) if device == "cuda" else ("bundled:digits", 64)
    return BenchConfig(
        model=settings.model or model,
        batch=settings.batch or batch,
        steps=settings.steps,
        device=device,
        precision=precision,
        compile=device == "cuda" if settings.compile is None else settings.compile,
        orders_per_batch=settings.orders_per_batch,
        workers=loader_processes() if settings.workers is None else settings.workers,
    )
