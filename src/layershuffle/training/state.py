"""The state that the steps of a run change (weights, optimiser, schedule, average)."""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from accelerate import Accelerator, DistributedDataParallelKwargs
from accelerate.state import AcceleratorState
from accelerate.utils import DataLoaderConfiguration, set_seed
from timm.utils import ModelEmaV3
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer
from torch.optim.lr_scheduler import LRScheduler
from transformers import get_scheduler
from transformers.trainer_pt_utils import get_parameter_names

from layershuffle.core.losses import logits_of
from layershuffle.core.orders import ExecutionOrder
from layershuffle.core.position import PositionedModel
from layershuffle.core.stack import recomputing, running
from layershuffle.errors import TrainingError
from layershuffle.training.job import Job
from layershuffle.training.order_schedule import orders_by_row
from layershuffle.training.sharding import gathered, shard
from layershuffle.training.weights_cast import weights_cast_to

# Recipes for transformers do not apply decoupled weight decay to these parameters.
_NO_DECAY = [r"bias", r"layernorm", r"rmsnorm", r"(?:^|\.)norm(?:$|\.)", r"_norm(?:$|\.)"]


@dataclass(kw_only=True)
class TrainState:
    """The state of a run.

    `model` is saved and scored; `wrapped` is the same model inside the wrappers that average
    gradients over processes (DDP) and cast (autocast). `ema` averages the weights of `model`, and
    `whole` is a copy with room for all weights if every process holds only a part of them. `best`
    is the lowest held-out cross-entropy so far, `seconds_before` the time before the last resume.
    `images_trained` counts those of all processes so far, in steps that took `step_seconds`.
    """

    job: Job
    accelerator: Accelerator
    model: PositionedModel
    wrapped: nn.Module
    optimizer: Optimizer
    scheduler: LRScheduler
    ema: ModelEmaV3 | None
    whole: PositionedModel | None
    step: int = 0
    best: float | None = None
    images_trained: int = 0
    seconds_before: float = 0.0
    step_seconds: float = 0.0
    started: float = field(default_factory=time.monotonic)

    def seconds(self) -> float:
        """Time spent on the run before and after every resume, scoring and compiling included."""
        return self.seconds_before + time.monotonic() - self.started

    def scored_model(self) -> nn.Module:
        """The model to score and to save: averaged or gathered from shards if necessary."""
        if self.whole is not None:
            return gathered(self.model, into=self.whole)
        return self.model if self.ema is None else self.ema.module

    @contextmanager
    def running(
        self, orders: Sequence[ExecutionOrder], images: int, *, exit_after: int | None
    ) -> Iterator[None]:
        """Run forwards and backwards of `images` along `orders`, as the settings say.

        `exit_after` as in `layershuffle.running`.
        """
        with ExitStack() as stack:
            rows = orders_by_row(orders, images)
            if exit_after is not None and isinstance(rows, ExecutionOrder):
                rows = (rows,) * images
            stack.enter_context(running(self.model, rows, exit_after=exit_after))
            if self.job.settings.activation_checkpointing:
                stack.enter_context(recomputing(self.model))
            stack.enter_context(self.cast(self.model))
            yield

    @contextmanager
    def cast(self, model: nn.Module) -> Iterator[None]:
        """Cast the weights of `model` to bf16 under bf16-pure; otherwise do nothing."""
        pure = self.job.precision == "bf16-pure"
        with weights_cast_to(model, torch.bfloat16) if pure else nullcontext():
            yield

    def images(self, pixels: Tensor) -> Tensor:
        """The model's input, computed from a batch of pixels on the device."""
        images = self.job.data.finish(pixels)
        # Without autocast nothing else casts the images to the dtype of the weights.
        return images.bfloat16() if self.job.precision == "bf16-pure" else images

    def loss_and_logits(
        self, model: nn.Module, *, images: Tensor, labels: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Mean cross-entropy of the classes plus the losses of the method, and logits [n, classes].

        A method adds the position loss of the paper's section 3.4, or the cross-entropy at an exit.
        `model` is `self.wrapped`, or `self.model` for a forward that other processes do not join.
        """
        logits, position_loss = self.job.compiler.or_eager(lambda: self._forward(model, images))
        weight = self.job.method.exit_weight
        if weight is None:
            loss = F.cross_entropy(logits, labels)
        else:
            logits, early = logits.chunk(2)  # `_forward` puts the rows of the exit last
            loss = F.cross_entropy(logits, labels) + weight * F.cross_entropy(early, labels)
        return (loss if position_loss is None else loss + position_loss), logits

    def _forward(self, model: nn.Module, images: Tensor) -> tuple[Tensor, Tensor | None]:
        # Losses are computed in fp32 under every precision, so logits are widened here.
        if self.model.prediction is None:
            return self._logits(model(images)), None
        # DDP treats parameters as unused if no output of the model's call depends on them. So the
        # loss of the position guesses must be an output: a hook inside the DDP wrapper adds it.
        with self.model.guessing() as guesses:
            hook = self.model.register_forward_hook(
                # The trial of an order per sample is not recorded, and nothing is guessed.
                lambda *call: (call[-1], guesses.loss() if guesses.items else None)
            )
            with hook:
                output, position_loss = model(images)
        return self._logits(output), position_loss

    def _logits(self, output: Any) -> Tensor:
        if self.job.method.exit_weight is None:
            return logits_of(output).float()
        return torch.cat(output).float()  # those of the exit come last

    def refuse_non_finite(self, value: float) -> None:
        """Raises `TrainingError` unless `value`, a loss or a score, is finite."""
        if math.isfinite(value):
            return
        saved = sorted(self.job.checkpoints.glob("step-*"))
        raise TrainingError(
            f"Loss or weights became {value} by step {self.step}; nothing was saved since "
            f"{saved[-1].name if saved else 'the start'}",
            place=self.job.out,
            hint="start again in another --out with a lower --lr or a longer --warmup",
        )


def new_state(job: Job) -> TrainState:
    """The state before the first step. Seeds torch's global generator, which dropout draws from."""
    settings, on_gpu = job.settings, job.device == "cuda"
    unused = job.has_unused_parameters
    # accelerate keeps one state per process and refuses another precision in a second run.
    AcceleratorState._reset_state(reset_partial_state=True)
    accelerator = Accelerator(
        cpu=not on_gpu,
        mixed_precision="bf16" if job.precision == "bf16" else "no",
        # Otherwise the host waits until each batch has been copied to the GPU.
        dataloader_config=DataLoaderConfiguration(non_blocking=on_gpu),
        kwargs_handlers=[DistributedDataParallelKwargs(find_unused_parameters=unused)],
    )
    # Each process has its own dropout. Seeds of numpy are below 2 ** 32.
    set_seed((settings.seed + job.ranks.rank) % (1 << 32))
    model = job.model.to(accelerator.device)
    ema = ModelEmaV3(model, decay=settings.ema) if settings.ema is not None else None
    # Before `shard`, because afterwards no process holds a whole model to copy.
    whole = copy.deepcopy(model) if job.sharded else None
    for compiled in (model, whole, ema.module if ema else None):
        if compiled is not None:
            job.compiler.add(compiled)
    if job.sharded:
        shard(model)
    optimizer = _optimizer(job)
    # accelerate would wrap the model into DDP: a sharded one reduces its gradients by itself.
    wrapped = accelerator.prepare_model(model, evaluation_mode=job.sharded)
    scheduler = get_scheduler(
        # The schedule that transformers calls "constant" ignores the warm-up.
        "constant_with_warmup" if settings.schedule == "constant" else settings.schedule,
        optimizer,
        num_warmup_steps=settings.warmup,
        num_training_steps=job.steps,
    )
    return TrainState(
        job=job,
        accelerator=accelerator,
        model=model,
        wrapped=wrapped,
        optimizer=optimizer,
        scheduler=scheduler,
        ema=ema,
        whole=whole,
    )


def _optimizer(job: Job) -> Optimizer:
    """Adam; with weight decay AdamW, which leaves biases and norms alone."""
    decayed = set(get_parameter_names(job.model, [nn.LayerNorm], _NO_DECAY))
    weights = [(name, weight) for name, weight in job.model.named_parameters()]
    groups = [
        {
            "params": [w for name, w in weights if w.requires_grad and (name in decayed) is decay],
            "weight_decay": job.settings.weight_decay if decay else 0.0,
        }
        for decay in (True, False)
    ]
    # Fused is 2.7 times as fast as torch's default on a CPU. Without decay AdamW is Adam exactly.
    return AdamW(groups, lr=job.settings.lr, betas=(0.9, 0.999), eps=1e-6, fused=True)
