"""The training loop of `fit`, timed step by step on a generated batch that lies ready."""

from __future__ import annotations

import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import Dataset, TensorDataset

from layershuffle.bench.machine import Memory, Syncs
from layershuffle.bench.marks import BlockMarks, Marks
from layershuffle.bench.measured import PHASED, WARM_UP, Measured, mode_of
from layershuffle.bench.subjects import Subject
from layershuffle.compiling import BlockCompiler
from layershuffle.data import ImageData, Split
from layershuffle.errors import TrainingError
from layershuffle.models import host_of
from layershuffle.position import add_position
from layershuffle.settings import FitSettings
from layershuffle.stack import with_hooks
from layershuffle.training.distributed import Ranks
from layershuffle.training.job import Job
from layershuffle.training.loop import Batch, train
from layershuffle.training.state import TrainState, new_state
from layershuffle.training.warmup import largest_forward


class Numbers(Dataset[int]):
    """As many items as asked for; the collator knows the images."""

    def __init__(self, count: int) -> None:
        self._count = count

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> int:
        return index


class TimedTrainer:
    """Runs the training loop and marks the phases of every step.

    Blocks are marked too in the steps after the `timed` ones. Memory, syncs and graphs are counted
    in the timed steps.
    """

    def __init__(self, job: Job, on: Subject, *, timed: range) -> None:
        self.job, self.compiler, self.timed = job, job.compiler, timed
        self._on = on
        self.watch(timed, clock=time.perf_counter)

    def watch(self, timed: range, *, clock: Callable[[], float]) -> None:
        """Begin anew."""
        self.marks, self.timed = Marks(self.job.device, clock=clock), timed
        self.syncs, self._counting, self._hooks = Syncs(), ExitStack(), ExitStack()
        self.memory = Memory(self.job.device)
        self.graphs_before = self.memory_peak = 0

    def end_counting(self) -> None:
        """Of syncs, which changes settings of the process until it ends."""
        self._counting.close()
        self._hooks.close()

    def on_phase(self, phase: str, step: int) -> None:
        """Called by the loop where a phase begins."""
        if phase == "data":
            if step == self.timed.start:
                self.memory = Memory(self.job.device)
                self.graphs_before = self.compiler.graphs
                self._counting.enter_context(self.syncs.counted(self.job.device))
            if step == self.timed.stop:
                self._counting.close()
                self.memory_peak = self.memory.peak()
                self._hooks.enter_context(with_hooks(self.job.model, BlockMarks(self.marks)))
        if phase != "report":
            self.marks.mark({"forward": "stem", "optimizer": "optimiser"}.get(phase, phase))

    def run(self) -> None:
        """Take all steps. Raises `TrainingError` naming a batch that fits where this does not."""
        state, images = new_state(self.job), self.job.images_per_forward
        try:
            with self.compiler.limits():
                train(
                    state,
                    tell=_tell_nobody,
                    keep_best=_keep_nothing,
                    on_phase=self.on_phase,
                    batches=self._batches(state),
                )
        except torch.OutOfMemoryError as error:
            traceback.clear_frames(error.__traceback__)  # they hold what does not fit
        else:
            self.marks.mark("data")  # which ends the last step
            return
        finally:
            self.end_counting()
        fits = largest_forward(state, below=images)
        raise TrainingError(
            f"A step of {images} images does not fit the memory"
            + (f"; the largest that did fit, halving it, is {fits}" if fits else ""),
            hint=f"--batch {fits}" if fits else "a smaller model",
        )

    def _batches(self, state: TrainState) -> Iterator[list[Batch]]:
        device = state.accelerator.device
        for _ in range(self.job.steps - 1):  # the loop would score the model after the last step
            pixels = self._on.pixels.to(device, non_blocking=True)
            yield [(pixels, self._on.labels.to(device, non_blocking=True))]


@contextmanager
def timed_trainer(
    settings: FitSettings,
    on: Subject,
    *,
    compiler: BlockCompiler,
    steps: int,
    warm_up: int = WARM_UP,
    phased: int = PHASED,
    clock: Callable[[], float] = time.perf_counter,
) -> Iterator[TimedTrainer]:
    """A trainer for `warm_up` + `steps` + `phased` steps on `on`, and its directory while needed.

    `settings`: method, batch size, device, precision and the like; no data is opened.
    """
    total = warm_up + steps + phased + 1
    with tempfile.TemporaryDirectory(prefix="layershuffle-bench-") as out:
        job = _job(settings, on, steps=total, out=Path(out), compiler=compiler)
        trainer = TimedTrainer(job, on, timed=range(warm_up, warm_up + steps))
        trainer.watch(trainer.timed, clock=clock)
        yield trainer


def time_training(trainer: TimedTrainer) -> Measured:
    """Run it. Raises `TrainingError` that names a batch that fits where this one does not."""
    trainer.run()
    seconds, timed = trainer.marks.steps("data"), trainer.timed
    return Measured(
        seconds=[sum(step.values()) for step in seconds[timed.start : timed.stop]],
        phases=seconds[timed.stop :],
        mode=mode_of(trainer.compiler, graphs_before=trainer.graphs_before),
        memory=(trainer.memory_peak, trainer.memory.of),
        syncs=trainer.syncs.count,
    )


def _tell_nobody(kind: str, **facts: Any) -> None:
    del kind, facts


def _keep_nothing(model: object, value: float) -> None:
    del model, value


def _job(
    settings: FitSettings, on: Subject, *, steps: int, out: Path, compiler: BlockCompiler
) -> Job:
    method = settings.find_method()
    images = Split(dataset=TensorDataset(on.pixels, on.labels), size=len(on.pixels))  # type: ignore[arg-type]
    return Job(
        settings=settings,
        ranks=Ranks(),
        out=out,
        method=method,
        data=ImageData(spec="generated", classes=(), splits={"train": images}, finish=on.finish),
        model=add_position(
            host_of(on.model),
            encoding=settings.encoding if method.encoding else None,
            prediction=settings.prediction if method.prediction else None,
            seed=settings.seed,
        ),
        compiler=compiler,
        images_per_forward=settings.batch_size,
        steps=steps,
        eval_every=steps,
        select_by="sequential",
    )
