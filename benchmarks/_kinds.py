"""Throughput, phases and memory of training steps as `fit` takes them, and of forwards.

Both run on a batch in memory, with random weights.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any, Literal

import torch
from _machine import DTYPES, PhaseTimer, flops_of, matmul_ceiling, peak_memory
from _workload import Workload, make_workload
from torch.utils.data import TensorDataset

from layershuffle.core.compiling import BlockCompiler
from layershuffle.core.policies import Shuffled
from layershuffle.core.position import PositionedModel, backbone_of
from layershuffle.core.stack import depth_of, running, with_hooks
from layershuffle.data import ImageData, Split
from layershuffle.ground.machine import hardware
from layershuffle.ground.text import counted
from layershuffle.training.distributed import Ranks
from layershuffle.training.job import Job
from layershuffle.training.loop import TrainingBatch, train
from layershuffle.training.settings import FitSettings
from layershuffle.training.state import TrainState, new_state

WARM_UP = 3  # steps before the timed ones
PHASED = 5  # steps after the timed ones, to measure phases
_ENDLESS = 1 << 30
TakeSteps = Callable[[Iterable[object]], None]
"""Takes a step per item, and reports the phases to a `PhaseTimer`."""


@dataclass(frozen=True, kw_only=True)
class BenchConfig:
    """The model and the conditions of a measurement; `steps` are timed."""

    model: str
    batch_size: int
    steps: int
    device: Literal["cpu", "cuda"]
    precision: Literal["fp32", "bf16"]
    compile: bool
    orders_per_batch: int
    backend: str = "inductor"


@dataclass(frozen=True, kw_only=True)
class BenchReport:
    """The result of one measurement. A throughput is never given without its conditions.

    `rates`: images per second of every timed step. `blocks`: whether they were compiled, the
    reason if not, the graphs, and the recompiles after the warm-up. `ceiling`: FLOP/s of a matrix
    product in this run. `phases`: median milliseconds of a step by phase. `memory`: peak bytes, and
    a description of the memory.
    """

    model: str
    batch_size: int
    orders_per_batch: int
    hardware: Mapping[str, Any]
    rates: tuple[float, ...]
    blocks: Mapping[str, Any]
    ceiling: float
    flops_per_image: int
    phases: Mapping[str, float]
    memory: tuple[int, str]

    @property
    def rate(self) -> float:
        """The median rate, which a few slow steps on a shared machine do not change."""
        return statistics.median(self.rates)

    @property
    def mfu(self) -> float:
        """The model's FLOP/s as a share of the ceiling."""
        return self.rate * self.flops_per_image / self.ceiling

    @property
    def conditions(self) -> str:
        """Model, batch, dtype and hardware in words."""
        on = self.hardware["gpu"] or (
            f"{self.hardware['processor']}, {counted(self.hardware['threads'], 'thread')}"
        )
        return f"{self.model}, batch {self.batch_size}, {self.hardware['precision']}, on {on}"


def bench(kind: Literal["train", "eval"], config: BenchConfig) -> BenchReport:
    """Measure training steps, or forwards with an order per batch."""
    workload = make_workload(config.model, batch_size=config.batch_size, device=config.device)
    forward_flops, training_flops = flops_of(workload.model)
    ceiling = matmul_ceiling(config.device, config.precision)
    timer = PhaseTimer(config.device)
    compiler = BlockCompiler(
        reason=None if config.compile else "compile is off",
        dynamic=config.orders_per_batch > 1,
        backend=config.backend,
    )
    if kind == "train":
        settings = FitSettings(
            method="layershuffle",
            model=config.model,
            data="generated",
            batch_size=config.batch_size,
            orders_per_batch=config.orders_per_batch,
            device=config.device,
            precision=config.precision,
            log_every=_ENDLESS,  # logging the loss would synchronise with the GPU
        )
        state = training_state(settings, workload, compiler=compiler)
        take = training_steps(state, workload, timer=timer)
    else:
        compiler.add(workload.model.to(DTYPES[config.precision]))
        take = _forwards(workload, timer)
    with compiler.limits():
        # Compile, or fall back to eager mode, before any step is timed.
        compiler.or_eager(lambda: take(range(WARM_UP)))
        graphs = compiler.graphs
        timer.steps()
        if config.device == "cuda":
            torch.cuda.reset_peak_memory_stats()
        take(range(config.steps))
        timed = timer.steps()
        peak = peak_memory(config.device)
        # Hooks cost time, so phases are measured in further steps, after the timed ones.
        with with_hooks(workload.model, timer):
            take(range(PHASED))
    phased = timer.steps()
    phases = {
        name: 1e3 * statistics.median(step.get(name, 0.0) for step in phased) for name in phased[0]
    }
    return BenchReport(
        model=config.model,
        batch_size=config.batch_size,
        orders_per_batch=config.orders_per_batch,
        hardware=hardware(config.precision, device=config.device),
        rates=tuple(config.batch_size / sum(step.values()) for step in timed),
        blocks={**compiler.report(), "recompiles": compiler.graphs - graphs},
        # The higher of two, because other work on the machine may have slowed one of them.
        ceiling=max(ceiling, matmul_ceiling(config.device, config.precision)),
        flops_per_image=training_flops if kind == "train" else forward_flops,
        phases=phases,
        memory=peak,
    )


def _forwards(workload: Workload, timer: PhaseTimer) -> TakeSteps:
    """Forwards, each batch in its own order."""
    model = workload.model
    numbers = count()
    weight = next(model.parameters())

    @torch.inference_mode()
    def take(steps: Iterable[object]) -> None:
        for _ in steps:
            timer.begin("data")
            pixels = workload.pixels.to(weight.device, non_blocking=True)
            images = workload.finish(pixels).to(weight.dtype)
            timer.begin("stem")
            with running(model, Shuffled().draw(depth_of(model), seed=0, step=next(numbers))):
                model(images)
        timer.begin("data")

    return take


def training_state(
    settings: FitSettings, workload: Workload, *, compiler: BlockCompiler
) -> TrainState:
    """The state of a run on `workload` that writes nothing."""
    method = settings.build_method()
    model = method.prepare(backbone_of(workload.model), workload.images[:1])
    if not isinstance(model, PositionedModel):
        model = PositionedModel(model)
    images = TensorDataset(workload.pixels, workload.labels)
    job = Job(
        settings=settings,
        ranks=Ranks(),
        out=Path("generated"),  # nothing is written
        method=method,
        data=ImageData(
            spec="generated",
            classes=(),
            splits={"train": Split(dataset=images)},  # type: ignore[arg-type]
            finish=workload.finish,
        ),
        model=model,
        compiler=compiler,
        images_per_forward=settings.batch_size,
        steps=_ENDLESS,  # it ends with the batches, without scores and checkpoints
        eval_every=_ENDLESS,
        select_by="sequential",
        precision=settings.precision,
    )
    return new_state(job)


def training_steps(state: TrainState, workload: Workload, *, timer: PhaseTimer) -> TakeSteps:
    """Steps of the training loop of `fit` on the batch of `workload`."""
    device = state.device

    def batches(steps: Iterable[object]) -> Iterator[list[TrainingBatch]]:
        for _ in steps:
            pixels = workload.pixels.to(device, non_blocking=True)
            # Copied in every step, like a loader's batches; the copy is in the phase `data`.
            yield [(pixels, workload.labels.to(device, non_blocking=True))]

    def on_phase(phase: str, step: int) -> None:
        del step
        if phase != "report":  # there are no logs and scores
            timer.begin({"forward": "stem", "optimizer": "optimiser"}.get(phase, phase))

    def take(steps: Iterable[object]) -> None:
        train(state, batches=batches(steps), tell=_ignore, keep_best=_ignore, on_phase=on_phase)

    return take


def _ignore(*args: object, **facts: object) -> None:
    """Hear no event, keep no model."""
