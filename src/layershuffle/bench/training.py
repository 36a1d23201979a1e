"""The trainer of `fit`, timed step by step on one batch of generated images that lies ready."""

from __future__ import annotations

import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset
from transformers.trainer_callback import PrinterCallback, ProgressCallback

from layershuffle.bench.machine import Memory, Syncs
from layershuffle.bench.marks import BlockMarks, Marks
from layershuffle.bench.measured import PHASED, WARM_UP, Measured, mode_of
from layershuffle.bench.subjects import Subject
from layershuffle.compiling import BlockCompiler
from layershuffle.data import ImageData, Split
from layershuffle.data.contract import Item
from layershuffle.errors import TrainingError
from layershuffle.models import host_of
from layershuffle.position import add_position
from layershuffle.settings import FitSettings
from layershuffle.stack import with_hooks
from layershuffle.training.job import Job, trainer_arguments
from layershuffle.training.ranks import Ranks
from layershuffle.training.rehearsal import Rehearsal, largest_forward
from layershuffle.training.trainer import OrderTrainer


class Numbers(Dataset[int]):
    """As many items as asked for; the collator knows the images."""

    def __init__(self, count: int) -> None:
        self._count = count

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> int:
        return index


class TimedTrainer(OrderTrainer):
    """Marks the phases of every step: blocks too in the steps after the `timed` ones.

    Memory, syncs and graphs are counted in the timed steps.
    """

    marks: Marks
    timed: range
    memory: Memory
    syncs: Syncs
    graphs_before = memory_peak = 0

    def watch(self, timed: range, *, clock: Callable[[], float]) -> None:
        """Begin anew."""
        self.marks, self.timed = Marks(self.args.device, clock=clock), timed
        self.syncs, self._counting = Syncs(), ExitStack()

    def end_counting(self) -> None:
        """Of syncs, which changes settings of the process until it ends."""
        self._counting.close()

    def get_batch_samples(self, *args: Any, **kwargs: Any) -> Any:
        """A step begins."""
        step = self.state.global_step
        if step == self.timed.start:
            self.memory = Memory(self.args.device.type)
            self.graphs_before = self.compiler.graphs
            self._counting.enter_context(self.syncs.counted(self.args.device.type))
        if step == self.timed.stop:
            self.end_counting()
            self.memory_peak = self.memory.peak()
        self.marks.mark("data")
        return super().get_batch_samples(*args, **kwargs)

    def training_step(self, model: nn.Module, inputs: dict[str, Any], *args: Any) -> Tensor:
        """Forward and backward."""
        phased = self.state.global_step >= self.timed.stop
        with with_hooks(self.model, BlockMarks(self.marks)) if phased else nullcontext():
            loss = super().training_step(model, inputs, *args)
        self.marks.mark("optimiser")
        return loss

    def loss_and_logits(self, model: nn.Module, inputs: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        """The forward, and after it the backward."""
        self.marks.mark("stem")
        found = super().loss_and_logits(model, inputs)
        self.marks.mark("backward")
        return found


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
    total = warm_up + steps + phased + 1  # the last one only ends the one before
    with tempfile.TemporaryDirectory(prefix="layershuffle-bench-") as out:
        job = _job(settings, on, steps=total, out=Path(out))
        trainer = TimedTrainer(
            job.model,
            orders=job.orders,
            ranks=job.ranks,
            compiler=compiler,
            score=_no_scores,
            keep=_keep_nothing,
            checkpoints=job.out / "checkpoints",
            ema_decay=None,
            finish=job.data.finish,
            recompute=settings.activation_checkpointing,
            round_to=job.round_to,
            sharded=False,
            args=trainer_arguments(job),
            train_dataset=job.data.splits["train"].dataset,
            data_collator=_collator(on),
        )
        trainer.remove_callback(ProgressCallback)
        trainer.remove_callback(PrinterCallback)
        trainer.add_callback(Rehearsal(trainer))
        trainer.watch(range(warm_up, warm_up + steps), clock=clock)
        yield trainer


def time_training(trainer: TimedTrainer) -> Measured:
    """Run it. Raises `TrainingError` that names a batch that fits where this one does not."""
    images = trainer.args.per_device_train_batch_size
    try:
        with trainer.compiler.limits():
            trainer.train()
    except torch.OutOfMemoryError as error:
        traceback.clear_frames(error.__traceback__)  # they hold what does not fit
    else:
        return _measured(trainer)
    finally:
        trainer.end_counting()
    fits = largest_forward(trainer, below=images)
    raise TrainingError(
        f"A step of {images} images does not fit the memory"
        + (f"; the largest that did fit, halving it, is {fits}" if fits else ""),
        hint=f"--batch {fits}" if fits else "a smaller model",
    )


def _measured(trainer: TimedTrainer) -> Measured:
    found, timed = trainer.marks.steps("data"), trainer.timed
    return Measured(
        seconds=[sum(step.values()) for step in found[timed.start : timed.stop]],
        phases=found[timed.stop :],
        mode=mode_of(trainer.compiler, graphs_before=trainer.graphs_before),
        memory=(trainer.memory_peak, trainer.memory.of),
        syncs=trainer.syncs.count,
    )


def _no_scores(model: nn.Module) -> dict[str, float]:
    del model
    return {}


def _keep_nothing(model: nn.Module, step: int, value: float) -> None:
    del model, step, value


def _job(settings: FitSettings, on: Subject, *, steps: int, out: Path) -> Job:
    method = settings.find_method()
    count = steps * settings.batch_size
    images = Split(dataset=cast(Dataset[Item], Numbers(count)), size=count)
    return Job(
        settings=settings,
        ranks=Ranks(),
        out=out,
        method=method,
        base_sha256="",
        origin=None,
        data=ImageData(spec="generated", classes=(), splits={"train": images}, finish=on.finish),
        model=add_position(
            host_of(on.model),
            encoding=settings.encoding if method.encoding else None,
            prediction=settings.prediction if method.prediction else None,
            seed=settings.seed,
        ),
        steps=steps,
        eval_every=steps,
        select_by="sequential",
    )


def _collator(on: Subject) -> Callable[[Sequence[int]], dict[str, Tensor]]:
    """Pixels and labels as a loader has them ready."""
    return lambda items: {
        "images": on.pixels[: len(items)],
        "labels": on.labels[: len(items)],
    }
