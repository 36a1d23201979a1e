"""Data-parallel training: shards of a model (FSDP2), and parameters that get no gradient (DDP)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from layershuffle.core.losses import loss_of_orders
from layershuffle.core.orders import ExecutionOrder
from layershuffle.core.stack import blocks_of, depth_of
from layershuffle.models import blank_images

WHOLE = StateDictOptions(full_state_dict=True)
"""Options for the weights of all processes together; all of them must ask at the same time."""


def shard(model: nn.Module) -> None:
    """Shard the model in place with FSDP2: one group of parameters per block, one for all others.

    accelerate's own wrapping does nothing on CPUs, without an error, so nothing could be tested.
    """
    device = next(model.parameters()).device.type
    mesh = init_device_mesh(device, (dist.get_world_size(),))
    for block in blocks_of(model):
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)


def all_finite(model: nn.Module) -> bool:
    """Whether every weight in this process is finite; waits for the device once."""
    flags: list[torch.Tensor] = []
    for weight in model.parameters():
        local = weight.to_local() if isinstance(weight, DTensor) else weight
        flags.append(torch.isfinite(local).all())
    # One flag for all weights: to read a flag per weight would make the CPU wait as many times.
    return bool(torch.stack(flags).all())


def idle_parameters(model: nn.Module) -> Sequence[str]:
    """Parameters that no loss reaches although every block runs, such as a mask token's.

    DDP waits for a gradient of every parameter and has to be told that some get none. A forward and
    backward of two grey images in evaluation mode finds them; gradients are removed afterwards.
    """
    images = blank_images(model, 2).to(next(model.parameters()).device)
    model.eval()
    labels = torch.zeros(2, dtype=torch.long, device=images.device)
    order = ExecutionOrder.sequential(depth_of(model))
    loss, _ = loss_of_orders(model, images, labels=labels, orders=[order])
    loss.backward()  # type: ignore[no-untyped-call]
    idle: list[str] = []
    for name, weight in model.named_parameters():
        if weight.requires_grad and weight.grad is None:
            idle.append(name)
    model.zero_grad()
    return idle
