"""The training loop: batches, orders, forward, backward, optimiser, scores and checkpoints.

`train` is the whole of it, from top to bottom.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from itertools import cycle, islice
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_
from torch.utils.data import DataLoader

from layershuffle.core.draws import Stream
from layershuffle.core.evaluation import evaluate
from layershuffle.core.policies import Mode
from layershuffle.ground.errors import TrainingError
from layershuffle.ground.text import one_line, unheard
from layershuffle.training.checkpoints import save_checkpoint
from layershuffle.training.distributed import Ranks
from layershuffle.training.job import Job
from layershuffle.training.mixing import mixed
from layershuffle.training.state import TrainState
from layershuffle.training.warmup import compile_blocks

Event = dict[str, Any]
Listener = Callable[[Event], object]
"""Receives the events of a run. Their kinds, with their entries:

- "data": text, notes;
- "start": steps, at (the step that the run starts from);
- "step": step, and loss, the mean since the last log, if nobody has read it for 20 seconds;
- "log", in place of "step": step, loss, grad_norm, learning_rate, and in percent accuracy and
  waiting (the share of the steps' time spent waiting for data);
- "scoring": step, images (that were scored so far), total;
- "scores": step and metrics;
- "history": step and all that was logged there, a row of history.csv;
- "checkpoint": step;
- "best": step, cross_entropy;
- "end": step;
- "complete": steps; a run that was complete already tells this alone.
"""
Tell = Callable[..., None]
_clock = time.perf_counter
_LOSS_SECONDS = 20.0  # reading the loss makes the CPU wait for the GPU
OnPhase = Callable[[str, int], None]
"""Called with a phase and the number of steps taken when "data", "forward", "backward",
"optimizer" or "report" (logs, scores and checkpoints after a step) begins: for profilers."""
TrainingBatch = tuple[Tensor, Tensor]
"""Pixels uint8 [n, channels, height, width] and labels int64 [n] of one forward."""


def train(
    state: TrainState,
    *,
    tell: Tell,
    keep_best: Callable[[nn.Module, dict[str, float]], None],
    stop_asked: threading.Event | None = None,
    on_phase: OnPhase = unheard,
    batches: Iterator[list[TrainingBatch]] | None = None,
) -> None:
    """Take the remaining steps of a run; `state.step` is the number of steps taken so far.

    `tell(kind, **facts)` receives the events, `keep_best(model, scores)` saves a new best model,
    `stop_asked` ends the run after the current step with a checkpoint. `batches` (on the device,
    one list per step) replace the training data, and the run ends when they end.

    Raises `TrainingError` for a loss that is not finite and `torch.OutOfMemoryError` for a batch
    that does not fit.
    """
    job = state.job
    settings = job.settings
    model = state.model if state.ddp is None else state.ddp
    checkpoint_every = settings.checkpoint_every or job.eval_every
    # By the CPU's clock: asking the GPU would make every step wait for it. The CPU is enough,
    # because one that runs ahead of its GPU is held back where it launches work.
    sums = _Sums(state.device, step=state.step, seconds=state.step_seconds)
    compile_blocks(state)
    batches = batches or _batches(state)
    while state.step < job.steps:
        on_phase("data", state.step)
        began = _clock()
        micro_batches = next(batches, None)
        if micro_batches is None:
            return
        sums.waited += _clock() - began
        in_step = sum(len(labels) for _, labels in micro_batches)
        state.model.train()  # scoring leaves it in evaluation mode
        for micro_batch, (pixels, labels) in enumerate(micro_batches):
            on_phase("forward", state.step)
            images, targets = _inputs(state, pixels, labels, micro_batch)
            place: dict[str, Any] = {
                "step": state.step,
                "micro_batch": micro_batch,
                "rank": job.order_rank,
            }
            orders = job.method.orders(job.depth, **place)
            blocks = {block for order in orders for block in order}
            with (
                state.recomputing(),
                state.summing_gradients(last=micro_batch == len(micro_batches) - 1),
                job.compiler.step(images.shape, blocks),
            ):
                loss, logits = state.forward(model, images, targets=targets, orders=orders, **place)
                loss = loss / (in_step / len(labels))  # the last forward may be a smaller one
                on_phase("backward", state.step)
                torch.autograd.backward(loss)
            sums.add(loss.detach(), logits, labels)

        on_phase("optimizer", state.step)
        norm, learning_rate = _update(state)
        state.images_trained += job.ranks.count * in_step  # every process has as many

        on_phase("report", state.step)
        # Processes must stop together, or one would wait for the gradients of the others.
        stopping = job.ranks.any(stop_asked is not None and stop_asked.is_set())
        last = state.step == job.steps
        scoring = last or state.step % job.eval_every == 0
        saving = last or stopping or state.step % checkpoint_every == 0
        # Before every checkpoint, too, so that a resumed run has no sums to continue.
        if scoring or saving or state.step % settings.log_every == 0:
            row = sums.means(job.ranks, step=state.step)
            state.refuse_non_finite(row["loss"])
            row |= {"grad_norm": norm.item(), "learning_rate": learning_rate}
            state.step_seconds += _clock() - began
            waiting = sums.waiting(seconds=state.step_seconds)
            sums = _Sums(state.device, step=state.step, seconds=state.step_seconds)
            tell("log", step=state.step, **row, waiting=waiting)
            _finish_row(state, row, scores=scoring, saves=saving, tell=tell, keep_best=keep_best)
        else:
            state.step_seconds += _clock() - began
            tell("step", step=state.step, **sums.occasional_loss(step=state.step))
        if stopping:
            return


def _inputs(
    state: TrainState, pixels: Tensor, labels: Tensor, micro_batch: int
) -> tuple[Tensor, Tensor]:
    """The images `[n, channels, height, width]` of a forward, and what they are to be answered."""
    job = state.job
    settings = job.settings
    images = job.data.finish(pixels)
    if not (settings.smoothing or settings.mixup or settings.cutmix):
        return images, labels
    return mixed(
        images,
        labels,
        settings=settings,
        classes=len(job.data.classes),
        step=state.step,
        micro_batch=micro_batch,
        rank=job.ranks.rank,
    )


def _finish_row(
    state: TrainState,
    row: dict[str, float],
    *,
    scores: bool,
    saves: bool,
    tell: Tell,
    keep_best: Callable[[nn.Module, dict[str, float]], None],
) -> None:
    """Finish the `row` of the history at this step, and tell it.

    With `scores` the model is scored on held-out data and kept if it is the best so far. With
    `saves` a checkpoint is saved after the row is told.
    """
    if scores:
        model = state.scored_model()
        metrics = _scores(state, model, tell=tell)
        value = metrics[f"eval_{state.job.select_by}_cross_entropy"]
        state.refuse_non_finite(value)
        if state.best is None or value < state.best:
            state.best = value
            if state.job.ranks.first:
                keep_best(model, metrics)
                tell("best", step=state.step, cross_entropy=value)
        tell("scores", step=state.step, **metrics)
        row |= metrics
    tell("history", step=state.step, **row)
    if saves:
        save_checkpoint(state)
        tell("checkpoint", step=state.step)


def _update(state: TrainState) -> tuple[Tensor, float]:
    """Take the step with the gradients that are there. Returns their norm and the learning rate."""
    norm = clip_grad_norm_(state.model.parameters(), state.job.settings.clip or math.inf)
    state.optimizer.step()
    learning_rate = float(max(state.scheduler.get_last_lr()))
    state.scheduler.step()
    state.optimizer.zero_grad()
    state.step += 1
    return norm, learning_rate


class _Sums:
    """Loss, hits and seconds of waiting for data since the last log.

    Loss and hits stay on the device, because reading them makes the CPU wait. `seconds` is the time
    of all steps until now.
    """

    def __init__(self, device: torch.device, *, step: int, seconds: float) -> None:
        self.waited = 0.0
        self._seconds = seconds
        self.loss = torch.zeros((), device=device)
        self._hits = torch.zeros((), dtype=torch.long, device=device)
        self._images = 0
        self._step = step
        self._read = time.monotonic()

    def add(self, loss: Tensor, logits: Tensor, labels: Tensor) -> None:
        self.loss += loss
        self._hits += (logits.argmax(-1) == labels).sum()
        self._images += len(labels)

    def waiting(self, *, seconds: float) -> float:
        """The share of waiting in percent; `seconds` is the time of all steps until now."""
        return 100.0 * self.waited / max(seconds - self._seconds, 1e-9)

    def occasional_loss(self, *, step: int) -> dict[str, float]:
        """The mean loss up to `step` in this process, if nobody has read it for a while."""
        if time.monotonic() - self._read < _LOSS_SECONDS:
            return {}
        self._read = time.monotonic()
        return {"loss": self.loss.item() / (step - self._step)}

    def means(self, ranks: Ranks, *, step: int) -> dict[str, float]:
        """Means over the steps up to `step` in all processes."""
        sums = [self.loss.item(), float(self._hits.item()), float(self._images)]
        loss, hits, images = ranks.total(sums)
        return {
            "loss": loss / ranks.count / (step - self._step),
            "accuracy": 100.0 * hits / max(images, 1.0),
        }


def _scores(state: TrainState, model: nn.Module, *, tell: Tell) -> dict[str, float]:
    total = state.job.selection_batches.split.size

    def on_images(done: int) -> None:
        tell("scoring", step=state.step, images=done, total=total)

    try:
        with state.autocast, torch.no_grad():
            return state.job.compiler.or_eager(lambda: score(state.job, model, on_images=on_images))
    except torch.OutOfMemoryError as error:
        # The rest of torch's message describes its allocator; the first sentence is enough.
        cause = one_line(error).split(". ", maxsplit=1)[0]
        raise TrainingError(
            f"Scoring needs more than the memory of the device ({cause})",
            hint="give a smaller --eval-batch-size",
        ) from error


def score(
    job: Job, model: nn.Module, *, on_images: Callable[[int], object] | None = None
) -> dict[str, float]:
    """Mean cross-entropy and top-1 in percent over the drawn orders, for both order modes.

    The images are those of the split that picks the checkpoint; every process scores its share.
    `on_images` is called with the number of images that were scored so far.
    """
    rows = evaluate(
        model,
        job.selection_batches,
        modes=[Mode(order="sequential"), Mode(order="arbitrary")],
        num_orders=job.settings.eval_orders,
        seed=job.settings.seed,
        on_images=on_images,
    )
    metrics: dict[str, float] = {}
    for mode in ("sequential", "arbitrary"):
        scores = [row for row in rows if row.label == mode]
        metrics[f"eval_{mode}_cross_entropy"] = sum(s.cross_entropy for s in scores) / len(scores)
        metrics[f"eval_{mode}_top1"] = sum(s.top1 for s in scores) / len(scores)
    if job.ranks.count == 1:
        return metrics
    # Shares of the processes can differ by one image, so means are weighted by images.
    images = rows[0].images
    weighted = [mean * images for mean in metrics.values()]
    *sums, total = job.ranks.total([*weighted, images])
    for name, value in zip(metrics, sums, strict=True):
        metrics[name] = value / total
    return metrics


def epoch_rows(images: int, *, seed: int, epoch: int) -> list[int]:
    """A new permutation of the images for every epoch, a pure function of (seed, epoch).

    So a run can resume in the middle of an epoch without saved state.
    """
    generator = torch.Generator().manual_seed(Stream(seed, epoch).below(1 << 63))
    rows: list[int] = torch.randperm(images, generator=generator).tolist()
    return rows


def _batches(state: TrainState) -> Iterator[list[TrainingBatch]]:
    """Yield the micro-batches of every step from `state.step` on, without end.

    The last step of an epoch gets the rest: fewer micro-batches, of which the last one is smaller.
    """
    job = state.job
    accumulate = job.settings.accumulate
    train = job.data.splits["train"]
    ranks = job.ranks
    together = job.images_per_forward * ranks.count
    forwards = math.ceil(train.size / together)
    epoch, done = divmod(state.step, math.ceil(forwards / accumulate))
    while True:
        if hasattr(train.dataset, "set_epoch"):  # augmentation is a function of it
            train.dataset.set_epoch(epoch)
        rows = epoch_rows(train.size, seed=job.settings.seed, epoch=epoch)
        own = []
        for start in range(done * accumulate * together, len(rows), together):
            part = rows[start : start + together]
            # Every process has as many, so a mean over processes is one over images; at the end of
            # an epoch some come twice.
            size = math.ceil(len(part) / ranks.count)
            own.append([*islice(cycle(part), ranks.rank * size, (ranks.rank + 1) * size)])
        loader = DataLoader(
            train.dataset,
            batch_sampler=own,
            num_workers=job.workers,
            pin_memory=job.device == "cuda",
        )
        # At the start of an epoch, torch's loader draws a seed for its processes. If the epoch
        # started before the checkpoint, the checkpoint's random state includes that draw.
        with torch.random.fork_rng(devices=[]) if done else nullcontext():
            iterator = iter(loader)
        micro_batches: list[TrainingBatch] = []
        for on_cpu in iterator:
            # Not blocking: otherwise the CPU waits until each batch has been copied to the GPU.
            pixels = on_cpu[0].to(state.device, non_blocking=True)
            labels = on_cpu[1].to(state.device, non_blocking=True)
            micro_batches.append((pixels, labels))
            if len(micro_batches) == accumulate:
                yield micro_batches
                micro_batches = []
        if micro_batches:
            yield micro_batches
        epoch += 1
        done = 0
