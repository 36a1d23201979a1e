"""Forwards and backwards without side effects, to compile before the first step."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn
from torch.utils.data import default_collate

from layershuffle.core.compiling import OFF
from layershuffle.core.orders import ExecutionOrder
from layershuffle.core.policies import drawn_blocks
from layershuffle.core.torch_private import graph_limit_error
from layershuffle.ground.errors import TrainingError
from layershuffle.training.job import Job
from layershuffle.training.state import TrainState


def compile_blocks(state: TrainState) -> None:
    """Compile the blocks before the first step, for every batch size of the run.

    Blocks that do not compile run in eager mode from then on, with a warning. Within a training
    step, some blocks would already have run before this decision.
    """
    job = state.job
    compiler = job.compiler
    if not compiler.on:
        return

    try:
        for images in forward_sizes(state):
            try_forward(state, images)
    # This is a RuntimeError too, but eager mode would not need less memory.
    except torch.OutOfMemoryError:
        raise
    except (RuntimeError, graph_limit_error()) as error:
        compiler.give_up(error)
        try_forward(state, job.images_per_forward)  # an error that compiling did not cause
    # A stance of torch.compile can switch it off without an error.
    if compiler.on and not compiler.graphs:
        compiler.give_up(OFF)


def forward_sizes(state: TrainState) -> list[int]:
    """Numbers of images in the forwards of a run: a full batch, and a last, partial one."""
    job = state.job
    full = job.images_per_forward
    processes = job.ranks.count
    images = job.data.splits["train"].size
    whole_epoch = job.steps * job.settings.batch_size >= images
    rest = math.ceil(images % (full * processes) / processes)
    return [full, rest] if whole_epoch and 0 < rest < full else [full]


def try_forward(state: TrainState, images: int) -> None:
    """A forward and backward of `images` copies of one image, as training runs them.

    It uses the model without DDP, so one process can try alone. Afterwards weights, gradients,
    buffers and random generators are unchanged. Raises the errors of a training step.
    """
    job = state.job
    model = state.model
    device = state.device
    data = job.data.splits["train"].dataset
    pixels, labels = default_collate([data[0]] * images)
    pixels = pixels.to(device)
    labels = labels.to(device)
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices), _untouched(model):
        model.train()
        inputs = job.data.finish(pixels)
        # One step: a group alone is a view of the batch, groups together are not, and each has
        # its graph.
        with job.compiler.step(inputs.shape, range(job.depth)):
            for orders in warmup_orders(job):
                with state.recomputing():
                    loss, _ = state.forward(model, inputs, targets=labels, orders=orders, step=0)
                    torch.autograd.backward(loss)


def warmup_orders(job: Job) -> tuple[tuple[ExecutionOrder, ...], ...]:
    """Orders of two forwards that run every block: groups share no block, then every block.

    Groups that share a block at a position run it together, so these two are the smallest and the
    largest batches that a block meets. Blocks that keep their place are shared in both.
    """
    groups = job.method.orders_per_batch
    fixed = job.method.fixed
    drawn = drawn_blocks(job.depth, fixed)
    first = range(fixed[0])
    last = range(job.depth - fixed[1], job.depth)
    orders: list[ExecutionOrder] = []
    for group in range(groups):
        shift = group % len(drawn)
        blocks = (*first, *drawn[shift:], *drawn[:shift], *last)
        orders.append(ExecutionOrder(blocks, job.depth))
    different = tuple(orders)
    equal = (orders[0],) * groups
    return (different,) if groups == 1 else (different, equal)


@contextmanager
def _untouched(model: nn.Module) -> Iterator[None]:
    # Restores only buffers and gradients, because the optimiser takes no step.
    buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]
    try:
        yield
    finally:
        model.zero_grad()
        with torch.no_grad():
            for buffer, content in buffers:
                buffer.copy_(content)


def too_large(job: Job) -> TrainingError:
    """The error for a batch that does not fit into memory, with what helps."""
    settings = job.settings
    images = job.images_per_forward
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "this machine"
    remedies = ["a smaller --batch-size"]
    if not settings.activation_checkpointing:
        remedies.insert(0, "--activation-checkpointing (computes every block twice)")
    share = images * settings.accumulate  # images of a step in this process
    # Every group of a forward needs an image.
    for forwards in range(2 * settings.accumulate, share // job.method.orders_per_batch + 1):
        # The settings accept only divisors: every forward holds the same number of images.
        if share % forwards == 0:
            remedy = f"--accumulate {forwards} (as many images per step, in smaller forwards)"
            remedies.insert(0, remedy)
            break
    cause = f"A forward of {images} images does not fit into the memory of {device}"
    return TrainingError(cause, hint=" or ".join(remedies))
