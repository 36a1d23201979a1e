"""Claim: samples with an order each run faster in groups by their next block than one by one.

What that costs against one order for all is bounded at width 192. At width 64 it is only told:
there blocks are called with five samples instead of 64, and these calls alone take twice the time
of one order's, whatever the grouping adds.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator

import torch
from _clocks import PICO, SMOKE, WIDTH_64, WIDTH_192, Effort, cpu_timed
from _harness import Bound, Claim, ClaimRow, compare, run_claim
from _workload import Workload, make_workload
from torch import Tensor

from layershuffle.core.orders import ExecutionOrder
from layershuffle.core.policies import Shuffled
from layershuffle.core.stack import depth_of, running

# Batch, the least ratio against one by one, the most against one order for all.
CASES = {
    "width 64, batch 64": (WIDTH_64, 64, 1.5, None),
    "width 192, batch 32": (WIDTH_192, 32, 1.15, 1.4),
}
SMOKES = {"smoke": (PICO, 4, 1.0, None)}


def grouped(workload: Workload, orders: list[ExecutionOrder]) -> Tensor:
    """One forward, an order per sample."""
    with running(workload.model, orders):
        return workload.model(workload.images)


def looped(workload: Workload, orders: list[ExecutionOrder]) -> Tensor:
    """A forward per sample."""
    outputs = []
    for order, image in zip(orders, workload.images.split(1), strict=True):
        with running(workload.model, order):
            outputs.append(workload.model(image))
    return torch.cat(outputs)


def shared(workload: Workload, order: ExecutionOrder) -> Tensor:
    """One forward, one order for all."""
    with running(workload.model, order):
        return workload.model(workload.images)


@torch.inference_mode()
def rows(effort: Effort) -> Iterator[ClaimRow]:
    """Against a loop over samples, and against one order for all."""
    for name, (spec, batch, least, most) in (SMOKES if effort is SMOKE else CASES).items():
        workload = make_workload(spec, batch_size=batch)
        depth = depth_of(workload.model)
        orders = [Shuffled().draw(depth, seed=0, step=sample) for sample in range(batch)]
        difference = float((grouped(workload, orders) - looped(workload, orders)).abs().max())
        assert difference < 1e-5, difference
        yield compare(
            f"per-sample orders, {name}",
            "sample by sample / grouped",
            a=cpu_timed(lambda workload=workload, orders=orders: looped(workload, orders)),
            b=cpu_timed(lambda workload=workload, orders=orders: grouped(workload, orders)),
            effort=effort,
            bound=Bound("at_least", least),
            settings=workload.settings,
            facts={"largest difference of logits": difference},
        )
        yield compare(
            f"an order per sample against one for all, {name}",
            "grouped / one order",
            a=cpu_timed(lambda workload=workload, orders=orders: grouped(workload, orders)),
            b=cpu_timed(lambda workload=workload, orders=orders: shared(workload, orders[0])),
            effort=effort,
            bound=None if most is None else Bound("at_most", most),
            settings=workload.settings,
        )


CLAIM = Claim(theme="grouped", text=__doc__.splitlines()[0].removeprefix("Claim: "), rows=rows)

if __name__ == "__main__":
    sys.exit(run_claim(CLAIM, __file__, tell=print))
