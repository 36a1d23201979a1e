"""Forwards and backwards that leave no trace: to compile before the first step, to try sizes."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from transformers import TrainerCallback

from layershuffle.compiling import OFF
from layershuffle.errors import TrainingError
from layershuffle.settings import FitSettings
from layershuffle.training.sharding import is_sharded
from layershuffle.training.trainer import OrderTrainer


class Rehearsal(TrainerCallback):
    """Compiles the blocks before the first step, where that is still without consequences."""

    def __init__(self, trainer: OrderTrainer) -> None:
        self._trainer = trainer

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Also finds out whether they compile at all; eager mode, said aloud, if not."""
        del state, control, kwargs
        trainer, compiler = self._trainer, self._trainer.compiler
        if not compiler.on:
            return
        from torch._dynamo.exc import FailOnRecompileLimitHit

        try:
            for images in forward_sizes(trainer):
                rehearse(trainer, images)
        except torch.OutOfMemoryError:
            raise
        except (RuntimeError, FailOnRecompileLimitHit) as error:
            compiler.give_up(error)
            rehearse(trainer, args.per_device_train_batch_size)  # what is no matter of compiling
        if compiler.on and not compiler.graphs:
            compiler.give_up(OFF)


def forward_sizes(trainer: OrderTrainer) -> list[int]:
    """Images in the forwards of a run: all but the last of an epoch, and the last if it has fewer.

    Several processes fill the last one up. How many images a stream has nobody knows beforehand.
    """
    args, data = trainer.args, trainer.train_dataset
    full = args.per_device_train_batch_size
    images = len(data) if hasattr(data, "__len__") else 0
    reached = args.max_steps * full * args.gradient_accumulation_steps >= images
    rest = images % full if reached and trainer.ranks.count == 1 else 0
    return [full, rest] if rest else [full]


def rehearse(trainer: OrderTrainer, images: int) -> None:
    """Forward and backward as in training, of `images` copies of one image, on the inner model.

    Weights, gradients, buffers and random generators are as before. Raises what a step raises.
    """
    model, data = trainer.model, trainer.train_dataset
    item = data[0] if hasattr(data, "__getitem__") else next(iter(data))
    batch = trainer.data_collator([item] * images)
    shape, every = batch["images"].shape, range(trainer.orders.depth)
    inputs = trainer._prepare_inputs(batch)
    devices = [trainer.args.device] if trainer.args.device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices), _untouched(model):
        model.train()
        for orders in trainer.orders.rehearsal():
            with trainer.running(orders, images), trainer.compiler.step(shape, every):
                loss, _ = trainer.loss_and_logits(model, inputs)
                trainer.accelerator.backward(loss)


@contextmanager
def _untouched(model: nn.Module) -> Iterator[None]:
    buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]
    try:
        yield
    finally:
        model.zero_grad()
        with torch.no_grad():
            for buffer, before in buffers:
                buffer.copy_(before)


def largest_that_fits(trial: Callable[[int], None], *, below: int) -> int:
    """The first of `below`/2, `below`/4, ... that `trial` has memory for; 0 if none."""
    size = below // 2
    while size and not _fits(trial, size):
        size //= 2
    return size


def _fits(trial: Callable[[int], None], size: int) -> bool:
    try:
        trial(size)
    except torch.OutOfMemoryError:
        fits = False
    else:
        fits = True
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    return fits


def too_large(trainer: OrderTrainer, settings: FitSettings) -> TrainingError:
    """The error for a batch that the memory does not hold: what would fit, and what helps."""
    images = trainer.args.per_device_train_batch_size
    cause = f"A forward of {images} images does not fit the memory of {_device_name()}"
    ways = ["a smaller --batch-size"]
    if not settings.activation_checkpointing:
        ways.insert(0, "--activation-checkpointing (computes every block twice)")
    if not is_sharded(trainer.model):  # there, one process cannot try alone
        fitting = largest_forward(trainer, below=images)
        cause += f"; the largest that did fit, halving it, is {fitting}" if fitting else ""
        ways = ([_accumulate(settings, images, fitting)] if fitting else []) + ways
    return TrainingError(cause, hint=" or ".join(ways))


def largest_forward(trainer: OrderTrainer, *, below: int) -> int:
    """Images of a forward and backward that fit (`largest_that_fits`), with room left for Adam's
    two moments, which may not be there yet."""
    trainer.model.zero_grad()
    moments = [] if trainer.optimizer and trainer.optimizer.state else [0, 1]
    held = [torch.empty_like(w) for w in trainer.model.parameters() for _ in moments]
    fitting = largest_that_fits(lambda size: rehearse(trainer, size), below=below)
    del held
    return fitting


def _accumulate(settings: FitSettings, images: int, fitting: int) -> str:
    share = images * settings.accumulate  # of a step, in this process
    accumulate = -(-share // fitting)
    while share % accumulate:
        accumulate += 1
    return f"--accumulate {accumulate} (as many images per step, in smaller forwards)"


def _device_name() -> str:
    return torch.cuda.get_device_name() if torch.cuda.is_available() else "this machine"
