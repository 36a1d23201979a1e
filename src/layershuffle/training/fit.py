"""`fit`: from settings to a refined model on disk."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader
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
    checkpoint_activations,
    loader_workers,
    prepare,
    trainer_arguments,
)
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


def fit(settings: FitSettings, out: Path, *, listeners: Sequence[Listener] = ()) -> FitResult:
    """Train as `settings` say in the directory `out`; the best state ends up in `out/model`.

    Killed at any moment and called again with the same settings it goes on where its last
    checkpoint is, to the same weights, bit for bit on a CPU. A finished run returns its result at
    once. Raises `UsageError` if `out` holds another run, `Interrupted` after SIGTERM with a
    checkpoint saved, `TrainingError` for a loss that is not finite.
    """
    with locked(out):
        prepare_run(out, settings)
        finished = read_result(out)
        if finished is not None:
            return finished
        if settings.threads is not None:
            torch.set_num_threads(settings.threads)
        return _run(prepare(settings, out), listeners)


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
    flow = Flow(
        eval_every=job.eval_every,
        checkpoint_every=job.settings.checkpoint_every or job.eval_every,
        listeners=(*listeners, tensorboard_listener(job.out / "tensorboard")),
    )
    trainer = _trainer(job, flow)
    checkpoint = latest_checkpoint(trainer.checkpoints)
    if checkpoint is not None:
        trainer.take_up(checkpoint)
    flow.tell("data", text=_what_was_read(job), notes=job.data.notes)
    begun = _step_of(checkpoint)
    flow.tell("start", steps=job.steps, at=begun)
    if begun < job.steps:  # else it was killed between its last checkpoint and its result
        with stopping_on_signals(flow.stop_asked):
            trainer.train(resume_from_checkpoint=str(checkpoint) if checkpoint else None)
    reached = max(begun, trainer.state.global_step)
    flow.tell("end", step=reached)
    if reached < job.steps:
        raise Interrupted(
            f"Stopped at step {reached} of {job.steps}; a checkpoint is saved",
            place=job.out,
            hint="the same command goes on from there",
        )
    result = _finish(job, trainer.seconds())
    shutil.rmtree(trainer.checkpoints)  # they serve to go on, and there is nothing left to do
    return result


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
        policy=job.method.policy,
        score=lambda model: _selection_scores(job, model),
        keep=keep,
        checkpoints=job.out / "checkpoints",
        ema_decay=job.settings.ema,
        args=trainer_arguments(job),
        train_dataset=job.data.splits["train"].dataset,
        data_collator=collate,
    )
    trainer.remove_callback(ProgressCallback)
    trainer.remove_callback(PrinterCallback)
    trainer.add_callback(flow)
    if job.settings.activation_checkpointing:
        checkpoint_activations(job.model.host)
    return trainer


def _selection_scores(job: Job, model: nn.Module) -> dict[str, float]:
    """Means over the drawn orders, per order mode, on the split that picks the checkpoint."""
    batches = DataLoader(
        job.data.splits[job.selection_split].dataset,
        batch_size=job.settings.eval_batch_size,
        num_workers=loader_workers(job.settings),
    )
    scores = evaluate(
        model,
        batches,
        modes=[Mode(order="sequential"), Mode(order="arbitrary")],
        num_orders=job.settings.eval_orders,
        seed=job.settings.seed,
    )
    metrics = {}
    for mode in ("sequential", "arbitrary"):
        rows = [score for score in scores if score.mode.order == mode]
        metrics[METRIC.format(mode)] = sum(row.cross_entropy for row in rows) / len(rows)
        metrics[f"eval_{mode}_top1"] = sum(row.top1 for row in rows) / len(rows)
    return metrics


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


def _finish(job: Job, seconds: float) -> FitResult:
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
    )
    write_text(job.out / RESULT_FILE, json.dumps(asdict(result), indent=2))
    return result


def collate(items: Sequence[tuple[Tensor, int]]) -> dict[str, Tensor]:
    """A batch: images `[n, channels, height, width]` and labels `[n]`."""
    images, labels = zip(*items, strict=True)
    return {"images": torch.stack(images), "labels": torch.as_tensor(labels)}


def _step_of(checkpoint: Path | None) -> int:
    return int(checkpoint.name.removeprefix("step-")) if checkpoint else 0
