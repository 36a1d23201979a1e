"""Claim: a wrapped model computes what the untouched one does, in the same time."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterator

import torch
from _clocks import PICO, SMOKE, WIDTH_64, WIDTH_192, Effort, cpu_timed
from _harness import Bound, Claim, ClaimRow, compare, run_claim
from _workload import make_workload
from torch import Tensor, nn

from layershuffle.core.orders import ExecutionOrder
from layershuffle.core.stack import depth_of, running, unwrap

# Small enough that what wrapping adds could be seen: forwards of about 20 and 100 ms.
CASES = {"width 64, batch 64": (WIDTH_64, 64), "width 192, batch 8": (WIDTH_192, 8)}
SMOKES = {"smoke": (PICO, 2)}
MOST = 1.02


def untouched(model: nn.Module) -> nn.Module:
    """A copy that shares the tensors, so that both sides read the same memory, and no wrapping."""
    tensors = [*model.parameters(), *model.buffers()]
    return unwrap(copy.deepcopy(model, {id(tensor): tensor for tensor in tensors}))


def in_order(model: nn.Module) -> Callable[[Tensor], Tensor]:
    """A forward that is given the sequential order, made before it as a policy makes all orders."""
    order = ExecutionOrder.sequential(depth_of(model))

    def forward(images: Tensor) -> Tensor:
        with running(model, order):
            return model(images)

    return forward


@torch.inference_mode()
def rows(effort: Effort) -> Iterator[ClaimRow]:
    """Wrapped only, and given an order."""
    for name, (spec, batch) in (SMOKES if effort is SMOKE else CASES).items():
        workload = make_workload(spec, batch_size=batch)
        plain, images = untouched(workload.model), workload.images
        for how, forward in (
            ("wrapped", workload.model),
            ("given an order", in_order(workload.model)),
        ):
            assert torch.equal(forward(images), plain(images)), "outputs are bit-equal"
            yield compare(
                f"forward, {how}, {name}",
                f"{how} / untouched",
                a=cpu_timed(lambda forward=forward, images=images: forward(images)),
                b=cpu_timed(lambda plain=plain, images=images: plain(images)),
                effort=effort,
                bound=Bound("at_most", MOST),
                settings=workload.settings,
                facts={"outputs": "bit-equal"},
            )


CLAIM = Claim(theme="wrapped", text=__doc__.removeprefix("Claim: "), rows=rows)

if __name__ == "__main__":
    sys.exit(run_claim(CLAIM, __file__, tell=print))
