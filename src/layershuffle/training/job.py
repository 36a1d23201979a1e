"""What a run needs, resolved once: model, data, number of steps, Trainer's arguments."""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn
from transformers import TrainingArguments

from layershuffle.data import DataOptions, ImageData, Split, open_data
from layershuffle.data.loading import loader_processes
from layershuffle.errors import DataError, TrainingError, UsageError
from layershuffle.machine import cpu_has_bf16
from layershuffle.methods import Method
from layershuffle.models import image_view, load, num_classes_of, truncate
from layershuffle.models.digest import weights_digest
from layershuffle.orders import ExecutionOrder
from layershuffle.position import PositionedModel, add_position
from layershuffle.settings import DEFAULT_EPOCHS, FitSettings
from layershuffle.stack import depth_of, stack_of

_log = logging.getLogger("layershuffle")
METRIC = "eval_{}_cross_entropy"


@dataclass(frozen=True)
class Job:
    """Everything a run needs.

    `base_sha256`: of the pretrained blocks (the head may be new). `origin`: the pretrained blocks
    that a truncated model is made of. `steps` of the run, `eval_every` so many; `select_by` is the
    order mode whose held-out cross-entropy picks the checkpoint.
    """

    settings: FitSettings
    out: Path
    method: Method
    base_sha256: str
    origin: ExecutionOrder | None
    data: ImageData
    model: PositionedModel
    steps: int
    eval_every: int
    select_by: str

    @property
    def selection_split(self) -> str:
        """The split that picks the checkpoint; the paper used the one it reports."""
        return "test" if self.settings.paper_protocol else "holdout"

    @property
    def precision(self) -> str:
        """fp32 or bf16."""
        return _precision(self.settings)


def prepare(settings: FitSettings, out: Path) -> Job:
    """Load the model and open the data; the head is resized to the classes of the data."""
    if settings.precision == "bf16" and _device(settings) == "cpu" and not cpu_has_bf16():
        _log.warning("this processor has no bf16 arithmetic: bf16 will be several times slower")
    if settings.device == "cuda" and not torch.cuda.is_available():
        raise UsageError("There is no GPU that torch can use here", hint="leave --device at auto")
    method = settings.find_method()
    host = load(settings.model, seed=settings.seed)
    options = DataOptions(
        # The paper picked on the split that it reports, and trained on all the rest.
        holdout=None if settings.paper_protocol else settings.holdout,
        augment=settings.augment,
        resize=settings.resize,
        skip_corrupt=settings.skip_corrupt,
        streaming=settings.streaming,
        seed=settings.seed,
    )
    data = open_data(settings.data, image_view(host), options=options)
    if num_classes_of(host) != len(data.classes):
        host = load(settings.model, num_classes=len(data.classes), seed=settings.seed)
    base_sha256 = weights_digest(stack_of(host))
    origin = None
    if method.blocks is not None:
        origin = method.blocks.draw(depth_of(host), seed=settings.seed, step=0)
        truncate(host, origin)
    steps, per_epoch = steps_of(settings, data.splits["train"])
    return Job(
        settings=settings,
        out=out,
        method=method,
        base_sha256=base_sha256,
        origin=origin,
        data=data,
        model=_positioned(host, method, settings),
        steps=steps,
        eval_every=min(settings.eval_every or per_epoch, steps),
        select_by=method.selects_by if settings.select_by == "method" else settings.select_by,
    )


def _positioned(host: nn.Module, method: Method, settings: FitSettings) -> PositionedModel:
    if isinstance(host, PositionedModel):
        _check_parts(host, method, settings)
        return host
    return add_position(
        host,
        encoding=settings.encoding if method.encoding else None,
        prediction=settings.prediction if method.prediction else None,
        seed=settings.seed,
    )


def _check_parts(host: PositionedModel, method: Method, settings: FitSettings) -> None:
    found = (host.encoding is not None, host.prediction is not None)
    if found != (method.encoding, method.prediction):
        raise UsageError(
            f"The model has position encoding: {found[0]}, prediction: {found[1]}; the method "
            f"{method.name!r} trains encoding: {method.encoding}, prediction: {method.prediction}",
            place=settings.model,
            hint="go on with the method that the model was trained by",
        )


def steps_of(settings: FitSettings, train: Split) -> tuple[int, int]:
    """(steps of the run, steps of an epoch)."""
    if train.size is None and settings.steps is None:
        raise DataError(
            "The size of this stream is not known, so epochs cannot be counted",
            place=settings.data,
            hint="give --steps",
        )
    per_epoch = math.ceil((train.size or 0) / settings.batch_size)
    epochs = settings.epochs or DEFAULT_EPOCHS
    steps = settings.steps or math.ceil(epochs * per_epoch)
    return steps, per_epoch or steps


def trainer_arguments(job: Job) -> TrainingArguments:
    """Trainer's arguments: what we decide ourselves (evaluation, saving, logging) is off there."""
    settings = job.settings
    arguments = TrainingArguments(
        output_dir=str(job.out / "checkpoints"),
        per_device_train_batch_size=settings.batch_size // settings.accumulate,
        gradient_accumulation_steps=settings.accumulate,
        max_steps=job.steps,
        learning_rate=settings.lr,
        lr_scheduler_type={"constant": "constant_with_warmup"}.get(
            settings.schedule, settings.schedule
        ),
        warmup_steps=settings.warmup,
        optim="adamw_torch_fused",  # without weight decay AdamW is Adam
        adam_beta1=0.9,
        adam_beta2=0.999,
        adam_epsilon=1e-6,
        weight_decay=settings.weight_decay,
        max_grad_norm=settings.clip or 0.0,
        bf16=job.precision == "bf16",
        use_cpu=_device(settings) == "cpu",
        seed=settings.seed,
        logging_strategy="steps",
        logging_steps=min(settings.log_every, job.steps),
        logging_nan_inf_filter=False,  # a loss that is not finite must be seen
        metric_for_best_model=METRIC.format(job.select_by),
        greater_is_better=False,
        eval_strategy="no",  # `Flow` decides when to evaluate and to save
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        remove_unused_columns=False,
        label_names=["labels"],
        dataloader_num_workers=loader_workers(settings),
        dataloader_pin_memory=_device(settings) != "cpu",
    )
    # More GPUs than processes would mean nn.DataParallel, which ignores execution orders.
    arguments._n_gpu = min(arguments.n_gpu, 1)
    return arguments


def checkpoint_activations(host: nn.Module) -> None:
    """Switch the host library's own activation checkpointing on."""
    for switch in ("set_grad_checkpointing", "activation_checkpointing_enable"):
        if hasattr(host, switch):
            getattr(host, switch)()
            return
    raise TrainingError(
        f"{type(host).__name__} offers no activation checkpointing",
        hint="leave --activation-checkpointing out, or use the timm or transformers model",
    )


def _device(settings: FitSettings) -> str:
    if settings.device == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    return settings.device


def _precision(settings: FitSettings) -> str:
    if settings.precision != "auto":
        return settings.precision
    has_bf16 = _device(settings) == "cuda" and torch.cuda.is_bf16_supported()
    return "bf16" if has_bf16 else "fp32"


def loader_workers(settings: FitSettings) -> int:
    """Loader processes."""
    return loader_processes(settings.data) if settings.workers is None else settings.workers
