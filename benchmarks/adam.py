"""Claim: the fused Adam that training uses is faster than torch's default one."""

from __future__ import annotations

import copy
import sys
from collections.abc import Iterator

import torch
from _clocks import PICO, SMOKE, WIDTH_192, Effort, cpu_timed
from _harness import Bound, Claim, ClaimRow, compare, run_claim
from _workload import make_workload


def rows(effort: Effort) -> Iterator[ClaimRow]:
    """One row: gradients are there, the step alone is timed."""
    workload = make_workload(PICO if effort is SMOKE else WIDTH_192, batch_size=1)
    sides = []
    for fused in (None, True):
        model = copy.deepcopy(workload.model)
        optimiser = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=fused)
        for parameter in model.parameters():
            parameter.grad = torch.full_like(parameter, 1e-3)
        sides.append(cpu_timed(optimiser.step))
    yield compare(
        "AdamW step, 5.4 M parameters",
        "default / fused",
        a=sides[0],
        b=sides[1],
        effort=effort,
        bound=Bound("at_least", 2.5),
        settings={"model": workload.spec},
    )


CLAIM = Claim(theme="adam", text=__doc__.removeprefix("Claim: "), rows=rows)

if __name__ == "__main__":
    sys.exit(run_claim(CLAIM, __file__, tell=print))
