"""Claim: orders with common beginnings are scored at a fraction of the block runs."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import combinations

import torch
from _clocks import PICO, SMOKE, WIDTH_64, Effort, Pairs, paired, timed_on
from _harness import Bound, Claim, ClaimRow, ratio_row, run_claim
from _workload import Workload, make_workload
from torch import Tensor

from layershuffle.core.forwards import block_runs, run_many
from layershuffle.core.orders import ExecutionOrder
from layershuffle.core.stack import running
from layershuffle.core.tensors import logits_of

DEPTH = 12
# Block runs one by one and together, and the least ratio of times.
EXPECTED = {
    "all truncations": (78, 12, 4.5),
    "leave-one-out and base": (144, 78, 1.55),
    "leave-two-out": (660, 285, 1.9),
    "64 random orders": (768, 705, None),
    "all in-order subsets": (24_576, 4_095, None),
}


def subsets(count: int, depth: int) -> list[ExecutionOrder]:
    """Every choice of `count` blocks, ascending."""
    return [ExecutionOrder(blocks, depth) for blocks in combinations(range(depth), count)]


def sweeps(depth: int) -> dict[str, list[ExecutionOrder]]:
    """Typical sets of orders in evaluations, by name."""
    shuffle, blocks = random.Random(0), range(depth)
    drawn = [shuffle.sample(blocks, depth) for _ in range(64)]
    return {
        "all truncations": [ExecutionOrder(tuple(blocks[: n + 1]), depth) for n in blocks],
        "leave-one-out and base": [*subsets(depth, depth), *subsets(depth - 1, depth)],
        "leave-two-out": subsets(depth - 2, depth),
        "64 random orders": [ExecutionOrder(tuple(order), depth) for order in drawn],
    }


def one_by_one_and_together(
    workload: Workload, orders: Sequence[ExecutionOrder], *, effort: Effort
) -> Pairs:
    """Separate forwards against `run_many`, which have to give the same logits, bit for bit."""
    model, images = workload.model, workload.images

    def one_by_one() -> list[Tensor]:
        outputs = []
        for order in orders:
            with running(model, order):
                outputs.append(logits_of(model(images), model))
        return outputs

    def together() -> list[Tensor]:
        logits = dict(run_many(model, images, orders=orders))
        return [logits[index] for index in range(len(orders))]

    assert all(map(torch.equal, one_by_one(), together())), "outputs are bit-equal"
    a, b = (timed_on(images.device.type, work) for work in (one_by_one, together))
    return paired(a, b, effort=effort)


@torch.inference_mode()
def rows(effort: Effort) -> Iterator[ClaimRow]:
    """Block runs are exact; times for all but the last sweep, which would say no more."""
    spec, batch = (PICO, 2) if effort is SMOKE else (WIDTH_64, 64)
    workload = make_workload(spec, batch_size=batch)
    every = [order for n in range(DEPTH) for order in subsets(n + 1, DEPTH)]
    for name, orders in (sweeps(DEPTH) | {"all in-order subsets": every}).items():
        naive, fewest, least = EXPECTED[name]
        assert sum(map(len, orders)) == naive
        yield ClaimRow(
            name=f"block runs, {name}",
            what=f"{len(orders):,} orders, {naive:,} block runs one by one; together",
            values=(block_runs(orders),),
            bound=Bound("equal", fewest),
        )
        if orders is not every and (effort is not SMOKE or len(orders) <= DEPTH + 1):
            pairs = one_by_one_and_together(workload, orders, effort=effort)
            row = ratio_row(name, "one by one / together", pairs=pairs, settings=workload.settings)
            bound = None if least is None else Bound("at_least", least)
            yield replace(row, bound=bound)


CLAIM = Claim(theme="shared-beginnings", text=__doc__.removeprefix("Claim: "), rows=rows)

if __name__ == "__main__":
    sys.exit(run_claim(CLAIM, __file__, tell=print))
