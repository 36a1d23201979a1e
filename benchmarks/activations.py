"""Claim: a block of ViT-B/16 keeps as much for its backward pass as was foreseen.

Counted in units of one block's state, 197 x 768 numbers of two bytes per image: what decides which
batch fits a GPU.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import nullcontext

import torch
from _clocks import PICO, SMOKE, VIT_B, Effort
from _harness import Bound, Claim, ClaimRow, run_claim
from _workload import make_workload
from torch import Tensor, nn

from layershuffle.core.stack import blocks_of

# Parameters and states, autocast, and units expected.
CASES = {
    "bf16": (torch.bfloat16, False, 16.0),
    "bf16 autocast": (torch.float32, True, 18.0),
    "fp32": (torch.float32, False, 32.0),
}
TOLERANCE, TOKENS = 0.02, 197


def saved_bytes(block: nn.Module, state: Tensor, *, autocast: bool) -> int:
    """Bytes that autograd keeps of a forward, without weights; every storage counts once."""
    weights = {parameter.data_ptr() for parameter in block.parameters()}
    saved: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            saved[storage.data_ptr()] = storage.nbytes()
        return tensor

    context = torch.autocast("cpu", torch.bfloat16) if autocast else nullcontext()
    with context, torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        block(state)
    return sum(saved.values())


def rows(effort: Effort) -> Iterator[ClaimRow]:
    """One row per precision."""
    block = blocks_of(make_workload(PICO if effort is SMOKE else VIT_B, batch_size=1).model)[
        0
    ].train()
    width = block.norm1.normalized_shape[0]
    for name, (dtype, autocast, expected) in CASES.items():
        block.to(dtype)
        states = [
            torch.zeros(images, TOKENS, width, dtype=dtype, requires_grad=True) for images in (1, 2)
        ]
        small, large = (saved_bytes(block, state, autocast=autocast) for state in states)
        units = (large - small) / (2 * TOKENS * width)  # copies of weights are in both
        yield ClaimRow(
            name=f"activations kept by a block, {name}",
            what=f"expected {expected:g},",
            values=(units,),
            unit="states",
            bound=Bound("at_most", expected * (1 + TOLERANCE)),
            settings={"model": VIT_B},
        )


CLAIM = Claim(theme="activations", text=__doc__.splitlines()[0].removeprefix("Claim: "), rows=rows)

if __name__ == "__main__":
    sys.exit(run_claim(CLAIM, __file__, tell=print))
