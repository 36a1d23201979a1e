"""`bench train` times the training loop of `fit`, `bench eval` forwards, on a batch in memory."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Iterator
from itertools import count
from pathlib import Path

import torch
from torch.utils.data import TensorDataset

from layershuffle.bench.machine import DTYPES, PhaseTimer, flops_of, matmul_ceiling, peak_memory
from layershuffle.bench.report import BenchReport
from layershuffle.bench.settings import BenchConfig
from layershuffle.bench.workload import Workload, make_workload
from layershuffle.core.compiling import BlockCompiler
from layershuffle.core.policies import Shuffled
from layershuffle.core.position import PositionedModel, backbone_of
from layershuffle.core.stack import depth_of, running, with_hooks
from layershuffle.data import ImageData, Split
from layershuffle.errors import TrainingError, UsageError
from layershuffle.machine import hardware, versions
from layershuffle.settings import FitSettings
from layershuffle.text import Progress, unheard
from layershuffle.training.distributed import Ranks
from layershuffle.training.job import Job
from layershuffle.training.loop import TrainingBatch, train
from layershuffle.training.state import TrainState, new_state

WARM_UP, PHASED = 3, 5  # steps before the timed ones, and after them, to measure phases
_ENDLESS = 1 << 30
TakeSteps = Callable[[Iterable[object]], None]
"""Takes a step per item, and tells a `PhaseTimer` its phases."""


def bench(kind: str, config: BenchConfig, *, progress: Progress = unheard) -> BenchReport:
    """Measure `kind`: train or eval. Raises `TrainingError` for a batch that is too large,
    `UsageError` for forwards in several orders and for a model without classes."""
    if kind == "eval" and config.orders_per_batch > 1:
        cause = "bench eval runs every batch in one order"
        raise UsageError(cause, place="--orders-per-batch", hint="leave it out for eval")
    workload = make_workload(config.model, batch_size=config.batch_size, device=config.device)
    forward, training = flops_of(workload.model)
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
    done, total = 0, WARM_UP + config.steps + PHASED

    def steps(number: int) -> Iterator[None]:
        nonlocal done
        for _ in range(number):
            progress("steps", done, total)
            done += 1
            yield

    try:
        with compiler.limits():
            # Compile, or fall back to eager mode, before any step is timed.
            compiler.or_eager(lambda: take(steps(WARM_UP)))
            graphs = compiler.graphs
            timer.steps()
            if config.device == "cuda":
                torch.cuda.reset_peak_memory_stats()
            take(steps(config.steps))
            timed, peak = timer.steps(), peak_memory(config.device)
            # Hooks cost time, so phases are measured in further steps, after the timed ones.
            with with_hooks(workload.model, timer):
                take(steps(PHASED))
    except torch.OutOfMemoryError as error:
        raise TrainingError(
            f"A step of {config.batch_size} images does not fit into memory",
            hint=f"--batch-size {config.batch_size // 2}",
        ) from error
    phased = timer.steps()
    return BenchReport(
        kind=kind,
        model=config.model,
        batch_size=config.batch_size,
        orders_per_batch=config.orders_per_batch,
        hardware=hardware(config.precision),
        versions=versions(),
        rates=tuple(config.batch_size / sum(step.values()) for step in timed),
        blocks={**compiler.report(), "recompiles": compiler.graphs - graphs},
        # The higher of two, because other work on the machine may have slowed one of them.
        ceiling=max(ceiling, matmul_ceiling(config.device, config.precision)),
        flops_per_image=training if kind == "train" else forward,
        phases={
            name: 1e3 * statistics.median(step.get(name, 0.0) for step in phased)
            for name in phased[0]
        },
        memory=peak,
    )


def _forwards(workload: Workload, timer: PhaseTimer) -> TakeSteps:
    """Forwards, each batch in its own order."""
    model, numbers = workload.model, count()
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
    model = method.prepare(backbone_of(workload.model))
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
