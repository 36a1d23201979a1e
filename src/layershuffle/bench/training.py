"""`bench train`: time the training loop of `fit` on one generated batch in memory."""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import TensorDataset

from layershuffle.bench.machine import Memory, Syncs, flops_of, matmul_ceiling
from layershuffle.bench.report import BenchReport, TimedSteps, mode_of
from layershuffle.bench.settings import PHASED, WARM_UP, BenchConfig
from layershuffle.bench.timing import PhaseTimer
from layershuffle.bench.workloads import Workload
from layershuffle.core.compiling import BlockCompiler
from layershuffle.core.position import PositionedModel, backbone_of
from layershuffle.core.stack import with_hooks
from layershuffle.data import ImageData, Split
from layershuffle.errors import TrainingError
from layershuffle.models import image_view
from layershuffle.settings import FitSettings
from layershuffle.text import Progress, unheard
from layershuffle.training.distributed import Ranks
from layershuffle.training.job import Job
from layershuffle.training.loop import TrainingBatch, train
from layershuffle.training.state import TrainState, new_state
from layershuffle.training.warmup import largest_forward


def bench_train(config: BenchConfig, *, progress: Progress = unheard) -> BenchReport:
    """Measure training steps of `fit` in shuffled orders.

    If the batch does not fit into memory, raises `TrainingError` with a size that does.
    """
    workload, settings = config.workload(), fit_settings(config)
    flops = flops_of(backbone_of(workload.model), image_view(workload.model)).training
    ceiling = matmul_ceiling(config.device, config.precision)
    state = training_state(settings, workload, compiler=config.compiler())
    measured = time_training(state, workload, steps=config.steps, progress=progress)
    facts = {"orders": f"{config.orders_per_batch} per batch"}
    return measured.report(
        "train",
        config.conditions(),
        device=config.device,
        flops=flops,
        ceiling=ceiling,
        facts=facts,
    )


def fit_settings(config: BenchConfig) -> FitSettings:
    """The settings of `fit` for the same steps."""
    return FitSettings(
        method="layershuffle",
        model=config.model,
        data="generated",
        batch_size=config.batch,
        orders_per_batch=config.orders_per_batch,
        device=config.device,
        precision=config.precision,
        compile=config.compile,
        workers=0,
        log_every=1 << 30,  # logging the loss would synchronise with the GPU
    )


def training_state(
    settings: FitSettings, workload: Workload, *, compiler: BlockCompiler
) -> TrainState:
    """The state of a run on `workload` that writes nothing.

    `settings`: method, batch size, device, precision and the like.
    """
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
            splits={"train": Split(dataset=images, size=len(images))},  # type: ignore[arg-type]
            finish=workload.finish,
        ),
        model=model,
        compiler=compiler,
        images_per_forward=settings.batch_size,
        # Without end, scores and checkpoints: it ends with the batches.
        steps=1 << 30,
        eval_every=1 << 30,
        select_by="sequential",
        precision=settings.precision,
    )
    return new_state(job)


def time_training(
    state: TrainState,
    workload: Workload,
    *,
    steps: int,
    warm_up: int = WARM_UP,
    phased: int = PHASED,
    clock: Callable[[], float] = time.perf_counter,
    progress: Progress = unheard,
) -> TimedSteps:
    """Train for `warm_up`, `steps` and `phased` steps on one batch in memory.

    Another call continues the run. If the batch does not fit into memory, raises `TrainingError`
    with a size that does.
    """
    device, compiler = state.accelerator.device, state.job.compiler
    timer, syncs, memory = PhaseTimer(device, clock=clock), Syncs(), Memory(device.type)
    first = state.step + warm_up
    last, end = first + steps, first + steps + phased
    graphs_before = peak = 0

    def batches() -> Iterator[list[TrainingBatch]]:
        for _ in range(state.step, end):
            pixels = workload.pixels.to(device, non_blocking=True)
            # Copied in every step, like a loader's batches; the copy is in the phase `data`.
            yield [(pixels, workload.labels.to(device, non_blocking=True))]

    with compiler.limits(), ExitStack() as counting, ExitStack() as hooks:

        def on_phase(phase: str, step: int) -> None:
            nonlocal graphs_before, peak, memory
            if phase == "data":
                progress("steps", step - first + warm_up, end - first + warm_up)
            if phase == "data" and step == first:
                graphs_before, memory = compiler.graphs, Memory(device.type)
                counting.enter_context(syncs.counted(device.type))
            if phase == "data" and step == last:
                counting.close()
                peak = memory.peak()
                # Hooks slow down steps, so phases are measured after the timed ones.
                hooks.enter_context(with_hooks(state.model, timer))
            if phase != "report":  # there are no logs and scores
                timer.begin({"forward": "stem", "optimizer": "optimiser"}.get(phase, phase))

        try:
            train(state, batches=batches(), tell=_ignore, keep_best=_ignore, on_phase=on_phase)
        except torch.OutOfMemoryError as error:
            traceback.clear_frames(error.__traceback__)  # they hold large tensors
        else:
            times = timer.steps("data")
            return TimedSteps(
                seconds=[sum(step.values()) for step in times[warm_up : warm_up + steps]],
                phases=times[warm_up + steps :],
                mode=mode_of(compiler, graphs_before=graphs_before),
                memory=(peak, memory.of),
                syncs=syncs.count,
            )
    images = state.job.images_per_forward
    fitting = largest_forward(state, below=images)
    raise TrainingError(
        f"A step of {images} images does not fit into memory"
        + (f"; the largest that did fit, halving it, is {fitting}" if fitting else ""),
        hint=f"--batch {fitting}" if fitting else "a smaller model",
    )


def _ignore(*args: Any, **kwargs: Any) -> None:
    """Ignore events and new best models."""
