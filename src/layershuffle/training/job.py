"""What a run needs, resolved once: model, data, number of steps, Trainer's arguments."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import Subset
from transformers import TrainingArguments

from layershuffle.compiling import BlockCompiler
from layershuffle.data import DataOptions, ImageData, Split, open_data
from layershuffle.data.batches import DeviceBatches
from layershuffle.data.loading import loader_processes
from layershuffle.errors import DataError, UsageError
from layershuffle.machine import warn_of_slow_bf16
from layershuffle.methods import Method
from layershuffle.models import image_view, load, num_classes_of, truncate
from layershuffle.models.files import weights_digest
from layershuffle.orders import ExecutionOrder
from layershuffle.position import PositionedModel, add_position
from layershuffle.settings import DEFAULT_EPOCHS, FitSettings
from layershuffle.stack import depth_of, stack_of
from layershuffle.training.drawing import Orders, always_runs_all
from layershuffle.training.ranks import Ranks
from layershuffle.training.sharding import idle_parameters

METRIC = "eval_{}_cross_entropy"


@dataclass(frozen=True)
class Job:
    """Everything a run needs.

    `base_sha256`: of the pretrained blocks (the head may be new). `origin`: the pretrained blocks
    that a truncated model is made of. `steps` of the run, `eval_every` so many; `select_by` is the
    order mode whose held-out cross-entropy picks the checkpoint. `ranks`: who trains with us.
    """

    settings: FitSettings
    ranks: Ranks
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

    @cached_property
    def selection_batches(self) -> DeviceBatches:
        """Of that split what this process scores; it stays on the GPU if there is room for it."""
        return DeviceBatches(
            _share(self.data.splits[self.selection_split], self.ranks),
            self.data.finish,
            batch_size=self.settings.eval_batch_size,
            device=device_of(self.settings),
            processes=loader_workers(self.settings),
            keep=True,
        )

    @property
    def precision(self) -> str:
        """fp32, bf16 (autocast) or bf16-pure."""
        return _precision(self.settings)

    @property
    def round_to(self) -> torch.dtype | None:
        """What forwards are of altogether, if not of the weights' own dtype."""
        return torch.bfloat16 if self.precision == "bf16-pure" else None

    @property
    def sharded(self) -> bool:
        """Whether every process holds a part of the weights (FSDP2)."""
        return self.settings.parallel == "fsdp" and self.ranks.count > 1

    @property
    def orders(self) -> Orders:
        """Which orders the forwards go in."""
        return Orders(
            policy=self.method.policy,
            depth=depth_of(self.model),
            seed=self.settings.seed,
            per_batch=self.settings.orders_per_batch,
            rank=self.ranks.rank if self.settings.rank_orders == "own" else 0,
        )


def prepare(settings: FitSettings, out: Path, *, ranks: Ranks) -> Job:
    """Load the model and open the data; the head is resized to the classes of the data."""
    _images_per_forward(settings, ranks)
    warn_of_slow_bf16(settings.precision, device_of(settings))
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
        ranks=ranks,
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


def _share(split: Split, ranks: Ranks) -> Split:
    """The images that a process scores: every n-th, or all where that cannot be."""
    if ranks.count == 1 or split.size is None or split.size < ranks.count:
        return split
    rows = range(ranks.rank, split.size, ranks.count)
    return Split(dataset=Subset(split.dataset, rows), size=len(rows))


def _images_per_forward(settings: FitSettings, ranks: Ranks) -> int:
    """In one process; `batch_size` is that of all of them together."""
    parts = settings.accumulate * ranks.count
    if settings.batch_size % parts:
        raise UsageError(
            f"A step of {settings.batch_size} images cannot be shared by {ranks.count} processes "
            f"with {settings.accumulate} forwards each",
            hint=f"a --batch-size that {parts} divides",
        )
    return settings.batch_size // parts


def block_compiler(job: Job) -> BlockCompiler:
    """What compiles the blocks, or says why they are not compiled."""
    wanted, reason = job.settings.compile, None
    if wanted is False:
        reason = "compile is off"
    elif wanted is None and device_of(job.settings) == "cpu":
        reason = "off by default on a CPU, where it takes minutes and gains nothing"
    return BlockCompiler(reason=reason, dynamic=job.settings.orders_per_batch > 1)


def trainer_arguments(job: Job) -> TrainingArguments:
    """Trainer's arguments: what we decide ourselves (evaluation, saving, logging) is off there."""
    settings = job.settings
    on_gpu = device_of(settings) != "cpu"
    arguments = TrainingArguments(
        output_dir=str(job.out / "checkpoints"),
        per_device_train_batch_size=_images_per_forward(settings, job.ranks),
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
        use_cpu=not on_gpu,
        seed=(settings.seed + job.ranks.rank) % (1 << 32),  # of dropout; `Orders` has the other
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
        dataloader_pin_memory=on_gpu,
        accelerator_config={"non_blocking": on_gpu},  # or the host waits for every batch's copy
        **_parallel_arguments(job),
    )
    # More GPUs than processes would mean nn.DataParallel, which ignores execution orders.
    arguments._n_gpu = min(arguments.n_gpu, 1)
    return arguments


def _parallel_arguments(job: Job) -> dict[str, Any]:
    if job.ranks.count == 1 or job.sharded:
        return {}
    # Looking for unused parameters walks the graph at every step, so it is off where none can be.
    unused = not always_runs_all(job.method.policy) or bool(idle_parameters(job.model))
    return {"ddp_find_unused_parameters": unused}


def device_of(settings: FitSettings) -> str:
    """cpu or cuda."""
    if settings.device == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    return settings.device


def _precision(settings: FitSettings) -> str:
    if settings.precision != "auto":
        return settings.precision
    has_bf16 = device_of(settings) == "cuda" and torch.cuda.is_bf16_supported()
    return "bf16" if has_bf16 else "fp32"


def loader_workers(settings: FitSettings) -> int:
    """Loader processes."""
    return loader_processes(settings.data) if settings.workers is None else settings.workers
