"""The state that the steps of a run change (weights, optimiser, schedule)."""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from transformers import get_scheduler, set_seed

from layershuffle.core.orders import ExecutionOrder
from layershuffle.core.stack import recomputing
from layershuffle.ground.errors import TrainingError
from layershuffle.training.features import KeptFeatures
from layershuffle.training.job import Job
from layershuffle.training.optimizer import make_optimizer
from layershuffle.training.sharding import WHOLE, shard


@dataclass(kw_only=True)
class TrainState:
    """The state of a run.

    `model` is saved and scored; `ddp` holds the same model and averages its gradients over several
    processes. `autocast` is the context of forwards, in the precision of the run. `whole` is a copy
    with room for all weights if every process holds only a part of them. `kept` are the features
    that the model has to keep, if the run asks for that. `best` is the lowest held-out
    cross-entropy so far, `earlier_seconds` the time before the last resume.
    `images_trained` counts the images of all processes so far, in steps that took `step_seconds`.
    """

    job: Job
    device: torch.device
    model: nn.Module
    ddp: DistributedDataParallel | None
    autocast: torch.autocast
    optimizer: Optimizer
    scheduler: LRScheduler
    whole: nn.Module | None
    kept: KeptFeatures | None
    step: int = 0
    best: float | None = None
    images_trained: int = 0
    earlier_seconds: float = 0.0
    step_seconds: float = 0.0
    started: float = field(default_factory=time.monotonic)

    def seconds(self) -> float:
        """Time spent on the run before and after every resume, scoring and compiling included."""
        return self.earlier_seconds + time.monotonic() - self.started

    def recomputing(self) -> AbstractContextManager[None]:
        """Around a forward and its backward: with activation checkpointing, the backward computes
        every block again."""
        if self.job.settings.activation_checkpointing:
            return recomputing(self.model)
        return nullcontext()

    def forward(
        self,
        model: nn.Module,
        images: Tensor,
        *,
        targets: Tensor,
        orders: Sequence[ExecutionOrder],
        step: int,
        micro_batch: int = 0,
        rank: int = 0,
    ) -> tuple[Tensor, Tensor]:
        """The loss of `images` along `orders`, and their logits `[n, classes]`.

        `model` is the model of the run, or that model inside DDP. `step`, `micro_batch` and `rank`
        are those of `Method.loss_and_logits`.
        """
        kept = self.kept
        asking = nullcontext() if kept is None else kept.asked_for(images)
        with self.autocast, asking as criterion:
            loss, answers = self.job.compiler.or_eager(
                partial(
                    self.job.method.loss_and_logits,
                    model,
                    images,
                    targets,
                    orders=orders,
                    criterion=criterion,
                    step=step,
                    micro_batch=micro_batch,
                    rank=rank,
                )
            )
        # The features follow the logits.
        return loss, answers if kept is None else answers[:, : kept.classes]

    def summing_gradients(self, *, last: bool) -> AbstractContextManager[None]:
        """Around a forward and its backward: the processes average the gradients of a step after
        its `last` micro-batch."""
        # Shards average theirs with every micro-batch, because those of a block that the last one
        # leaves out would be lost otherwise.
        if self.ddp is None or last:
            return nullcontext()
        return self.ddp.no_sync()

    def scored_model(self) -> nn.Module:
        """The model to score and to save; its shards are gathered by all processes."""
        if self.whole is None:
            return self.model
        self.whole.load_state_dict(get_model_state_dict(self.model, options=WHOLE))
        return self.whole

    def refuse_non_finite(self, value: float) -> None:
        """Raises `TrainingError` unless `value`, a loss or a score, is finite."""
        if math.isfinite(value):
            return
        saved = max(self.job.checkpoints.glob("step-*"), default=None)
        raise TrainingError(
            f"Loss or weights became {value} by step {self.step}; nothing was saved since "
            f"{saved.name if saved else 'the start'}",
            place=self.job.out,
            hint="start again in another --out with a lower --lr or a longer --warmup",
        )


def new_state(job: Job) -> TrainState:
    """The state before the first step. Seeds torch's global generator, which dropout draws from."""
    settings = job.settings
    device = torch.device(job.device)
    # Each process has its own dropout. Seeds of numpy are below 2 ** 32.
    set_seed((settings.seed + job.ranks.rank) % (1 << 32))
    model = job.model.to(device)
    # Before `shard`, because afterwards no process holds a whole model to copy.
    whole = copy.deepcopy(model) if job.sharded else None
    job.compiler.add(model)
    if whole is not None:
        job.compiler.add(whole)
    kept = None
    if job.untouched is not None and settings.keep_features is not None:
        untouched = job.untouched.to(device)
        kept = KeptFeatures(untouched, model=model, weight=settings.keep_features)
    if job.sharded:
        shard(model)
    optimizer = make_optimizer(model, settings)
    ddp = None
    if job.ranks.count > 1 and not job.sharded:  # shards reduce their gradients by themselves
        devices = [torch.cuda.current_device()] if job.device == "cuda" else None
        ddp = DistributedDataParallel(
            model, devices, find_unused_parameters=job.has_unused_parameters
        )
    scheduler = get_scheduler(
        # The schedule that transformers calls "constant" ignores the warm-up.
        "constant_with_warmup" if settings.schedule == "constant" else settings.schedule,
        optimizer,
        num_warmup_steps=settings.warmup,
        num_training_steps=job.steps,
    )
    return TrainState(
        job=job,
        device=device,
        model=model,
        ddp=ddp,
        autocast=torch.autocast(device.type, torch.bfloat16, enabled=job.precision == "bf16"),
        optimizer=optimizer,
        scheduler=scheduler,
        whole=whole,
        kept=kept,
    )
