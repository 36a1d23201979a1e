"""`fit`: from settings to a refined model on disk."""

from __future__ import annotations

import json
import shutil
import time
import traceback
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers.trainer_callback import PrinterCallback, ProgressCallback

from layershuffle.errors import Interrupted, ModelFileError
from layershuffle.evaluation import evaluate
from layershuffle.files import locked, write_text
from layershuffle.machine import hardware, versions
from layershuffle.models import save
from layershuffle.modes import Mode
from layershuffle.policies import policy_to_json
from layershuffle.settings import FitSettings, digest
from layershuffle.stack import depth_of
from layershuffle.training.checkpoints import latest_checkpoint, prepare_run
from layershuffle.training.events import Flow, Listener, stopping_on_signals
from layershuffle.training.job import (
    METRIC,
    Job,
    block_compiler,
    device_of,
    prepare,
    trainer_arguments,
)
from layershuffle.training.ranks import joined
from layershuffle.training.rehearsal import Rehearsal, too_large
from layershuffle.training.tensorboard import tensorboard_listener
from layershuffle.training.trainer import OrderTrainer

RESULT_FILE = "result.json"


@dataclass(frozen=True, kw_only=True)
class FitResult:
    """What a finished run says of itself; also in `result.json`."""

    schema: int
    method: str
    seed: int
    settings_hash: str
    finished: str
    steps: int
    train_seconds: float
    images_per_second: float
    selected: dict[str, Any]
    paper_protocol: bool
    settings: dict[str, Any]
    data: dict[str, Any]
    hardware: dict[str, Any]
    versions: dict[str, str]
    processes: int = 1
    compile: dict[str, Any] = field(default_factory=dict)
    """mode, reason (of eager mode), graphs, recompiles; of the process that finished the run."""


def fit(settings: FitSettings, out: Path, *, listeners: Sequence[Listener] = ()) -> FitResult:
    """Train as `settings` say in the directory `out`; the best state ends up in `out/model`.

    Killed at any moment and called again with the same settings it goes on where its last
    checkpoint is, to the same weights, bit for bit on a CPU. A finished run returns its result at
    once. Raises `UsageError` if `out` holds another run, `Interrupted` after SIGTERM with a
    checkpoint saved, `TrainingError` for a loss that is not finite.
    """
    with joined(device_of(settings)) as ranks, locked(out) if ranks.first else nullcontext():
        if ranks.first:
            prepare_run(out, settings)
        ranks.check_same(digest(settings), what="The settings")
        finished = ranks.from_first(lambda: read_result(out))
        if finished is not None:
            return finished
        if settings.threads is not None:
            torch.set_num_threads(settings.threads)
        return _run(prepare(settings, out, ranks=ranks), listeners if ranks.first else ())


def read_result(out: Path) -> FitResult | None:
    """The result of the finished run in `out`, or `None`."""
    path = out / RESULT_FILE
    if not path.is_file():
        return None
    try:
        return FitResult(**json.loads(path.read_text(encoding="utf-8")))
    except (ValueError, TypeError) as error:
        raise ModelFileError(
            f"This result file cannot be read ({error})", place=path, hint="delete it and run again"
        ) from error


def _run(job: Job, listeners: Sequence[Listener]) -> FitResult:
    if job.ranks.first:
        listeners = (*listeners, tensorboard_listener(job.out / "tensorboard"))
    flow = Flow(
        eval_every=job.eval_every,
        checkpoint_every=job.settings.checkpoint_every or job.eval_every,
        listeners=tuple(listeners),
        ranks=job.ranks,
    )
    if job.ranks.count > 1 and job.settings.rank_orders == "same":
        job.ranks.check_same(job.orders.fingerprint(), what="The execution orders")
    trainer = _trainer(job, flow)
    checkpoint = job.ranks.from_first(lambda: latest_checkpoint(trainer.checkpoints))
    if checkpoint is not None:
        trainer.take_up(checkpoint)
    flow.tell("data", text=_what_was_read(job), notes=job.data.notes)
    begun = _step_of(checkpoint)
    flow.tell("start", steps=job.steps, at=begun)
    if begun < job.steps:  # else it was killed between its last checkpoint and its result
        with stopping_on_signals(flow.stop_asked), trainer.compiler.limits():
            _train(trainer, job, checkpoint)
    reached = max(begun, trainer.state.global_step)
    flow.tell("end", step=reached)
    if reached < job.steps:
        raise Interrupted(
            f"Stopped at step {reached} of {job.steps}; a checkpoint is saved",
            place=job.out,
            hint="the same command goes on from there",
        )
    return job.ranks.from_first(lambda: _finish(job, trainer))


def _train(trainer: OrderTrainer, job: Job, checkpoint: Path | None) -> None:
    try:
        trainer.train(resume_from_checkpoint=str(checkpoint) if checkpoint else None)
    except torch.OutOfMemoryError as error:
        # Its frames hold the very tensors that do not fit.
        traceback.clear_frames(error.__traceback__)
    else:
        return
    raise too_large(trainer, job.settings)


def _what_was_read(job: Job) -> str:
    sizes = (
        f"{'?' if split.size is None else format(split.size, ',')} {name}"
        for name in ("train", "holdout", "test")
        if (split := job.data.splits.get(name)) is not None
    )
    parameters = sum(parameter.numel() for parameter in job.model.parameters())
    return (
        f"{', '.join(sizes)} images of {len(job.data.classes)} classes; model of "
        f"{depth_of(job.model)} blocks, {parameters:,} parameters"
    )


def _trainer(job: Job, flow: Flow) -> OrderTrainer:
    def keep(model: nn.Module, step: int, value: float) -> None:
        save(model, job.out / "model", record=_record(job, step, value))
        flow.tell("best", step=step, cross_entropy=value)

    trainer = OrderTrainer(
        job.model,
        orders=job.orders,
        ranks=job.ranks,
        compiler=block_compiler(job),
        score=lambda model: _selection_scores(job, model),
        keep=keep,
        checkpoints=job.out / "checkpoints",
        ema_decay=job.settings.ema,
        finish=job.data.finish,
        recompute=job.settings.activation_checkpointing,
        round_to=job.round_to,
        sharded=job.sharded,
        args=trainer_arguments(job),
        train_dataset=job.data.splits["train"].dataset,
        data_collator=collate,
    )
    trainer.remove_callback(ProgressCallback)
    trainer.remove_callback(PrinterCallback)
    trainer.add_callback(Rehearsal(trainer))
    trainer.add_callback(flow)
    return trainer


def _selection_scores(job: Job, model: nn.Module) -> dict[str, float]:
    """Means over the drawn orders, per order mode, on the split that picks the checkpoint."""
    scores = evaluate(
        model,
        job.selection_batches,
        modes=[Mode(order="sequential"), Mode(order="arbitrary")],
        num_orders=job.settings.eval_orders,
        seed=job.settings.seed,
    )
    metrics = {}
    for mode in ("sequential", "arbitrary"):
        rows = [score for score in scores if score.label == mode]
        metrics[METRIC.format(mode)] = sum(row.cross_entropy for row in rows) / len(rows)
        metrics[f"eval_{mode}_top1"] = sum(row.top1 for row in rows) / len(rows)
    if job.ranks.count == 1:
        return metrics
    # Every process scored its share of the images.
    *sums, images = job.ranks.total([m * scores[0].images for m in (*metrics.values(), 1.0)])
    return {name: value / images for name, value in zip(metrics, sums, strict=True)}


def _record(job: Job, step: int, value: float) -> dict[str, Any]:
    return {
        "method": job.method.name,
        "policy": policy_to_json(job.method.policy),
        "selected": _selected(job, step, value),
        "settings": job.settings.model_dump(mode="json"),
        "provenance": {
            "base": job.settings.model,
            "base_sha256": job.base_sha256,
            **({"blocks_of_base": str(job.origin)} if job.origin else {}),
            "data": job.settings.data,
            **versions(),
        },
    }


def _selected(job: Job, step: int, value: float) -> dict[str, Any]:
    metric = f"{job.selection_split} cross-entropy, {job.select_by} order"
    return {"step": step, "metric": metric, "value": value}


def _finish(job: Job, trainer: OrderTrainer) -> FitResult:
    seconds = trainer.seconds()
    stored = json.loads((job.out / "model" / "layershuffle.json").read_text(encoding="utf-8"))
    sizes = {name: split.size for name, split in job.data.splits.items()}
    result = FitResult(
        schema=1,
        method=job.method.name,
        seed=job.settings.seed,
        settings_hash=digest(job.settings),
        finished=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        steps=job.steps,
        train_seconds=round(seconds, 2),
        images_per_second=round(job.steps * job.settings.batch_size / seconds, 1),
        selected=stored["selected"],
        paper_protocol=job.settings.paper_protocol,
        settings=job.settings.model_dump(mode="json"),
        data={
            "spec": job.data.spec,
            "classes": len(job.data.classes),
            "sizes": sizes,
            "notes": list(job.data.notes),
        },
        hardware=hardware(job.precision),
        versions=versions(),
        processes=job.ranks.count,
        compile=trainer.compiler.report(),
    )
    write_text(job.out / RESULT_FILE, json.dumps(asdict(result), indent=2))
    shutil.rmtree(trainer.checkpoints)  # they serve to go on, and there is nothing left to do
    return result


def collate(items: Sequence[tuple[Tensor, int]]) -> dict[str, Tensor]:
    """A batch: pixels uint8 `[n, channels, height, width]` and labels `[n]`."""
    images, labels = zip(*items, strict=True)
    return {"images": torch.stack(images), "labels": torch.as_tensor(labels)}


def _step_of(checkpoint: Path | None) -> int:
    return int(checkpoint.name.removeprefix("step-")) if checkpoint else 0
