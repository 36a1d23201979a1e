"""Claim: orders with common beginnings are scored at a fraction of the block runs."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace

import torch
from _harness import Bound, Claim, ClaimRow, ratio_row, run_claim

from layershuffle.bench.timing import SMOKE, Effort
from layershuffle.bench.workloads import (
    PICO,
    WIDTH_64,
    compare_forwards,
    in_order_subsets,
    make_workload,
    sweeps,
)
from layershuffle.core.forwards import block_runs

DEPTH = 12
# Block runs one by one and together, and the least ratio of times.
EXPECTED = {
    "all truncations": (78, 12, 4.5),
    "leave-one-out and base": (144, 78, 1.55),
    "leave-two-out": (660, 285, 1.9),
    "64 random orders": (768, 705, None),
    "all in-order subsets": (24_576, 4_095, None),
}


@torch.inference_mode()
def rows(effort: Effort) -> Iterator[ClaimRow]:
    """Block runs are exact; times for all but the last sweep, which would say no more."""
    workload = (
        make_workload(PICO, batch=2) if effort is SMOKE else make_workload(WIDTH_64, batch=64)
    )
    subsets = [order for n in range(DEPTH) for order in in_order_subsets(n + 1, DEPTH)]
    for name, orders in (sweeps(DEPTH) | {"all in-order subsets": subsets}).items():
        naive, fewest, least = EXPECTED[name]
        assert sum(map(len, orders)) == naive
        yield ClaimRow(
            name=f"block runs, {name}",
            what=f"{len(orders):,} orders, {naive:,} block runs one by one; together",
            values=(block_runs(orders),),
            bound=Bound("equal", fewest),
        )
        if orders is not subsets and (effort is not SMOKE or len(orders) <= DEPTH + 1):
            pairs, facts = compare_forwards(workload, orders, effort=effort)
            row = ratio_row(name, "one by one / together", pairs=pairs, settings=workload.settings)
            bound = None if least is None else Bound("at_least", least)
            yield replace(row, bound=bound, facts=facts)


CLAIM = Claim(theme="shared-beginnings", text=__doc__.removeprefix("Claim: "), rows=rows)

if __name__ == "__main__":
    sys.exit(run_claim(CLAIM, __file__, tell=print))
