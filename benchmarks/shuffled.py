"""Claim: a training step in a new random order costs what one in the fixed order costs."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from itertools import count

import torch
import torch.nn.functional as F
from _clocks import PICO, SMOKE, WIDTH_64, WIDTH_192, Effort, cpu_timed
from _harness import Bound, Claim, ClaimRow, compare, run_claim
from _workload import Workload, make_workload

from layershuffle.core.policies import OrderPolicy, Sequential, Shuffled
from layershuffle.core.stack import depth_of, running

CASES = {"width 64, batch 64": (WIDTH_64, 64), "width 192, batch 8": (WIDTH_192, 8)}
SMOKES = {"smoke": (PICO, 2)}
MOST = 1.05


def step_of(
    workload: Workload, policy: OrderPolicy, optimiser: torch.optim.Optimizer
) -> Callable[[], None]:
    """A whole step: order, forward, backward, optimiser."""
    steps, depth = count(), depth_of(workload.model)

    def step() -> None:
        with running(workload.model, policy.draw(depth, seed=0, step=next(steps))):
            loss = F.cross_entropy(workload.model(workload.images), workload.labels)
        loss.backward()
        optimiser.step()
        optimiser.zero_grad()

    return step


def rows(effort: Effort) -> Iterator[ClaimRow]:
    """One model for both sides: they read and write the same memory."""
    for name, (spec, batch) in (SMOKES if effort is SMOKE else CASES).items():
        workload = make_workload(spec, batch_size=batch)
        workload.model.train()
        optimiser = torch.optim.AdamW(workload.model.parameters(), lr=1e-4, fused=True)
        yield compare(
            f"training step, {name}",
            "shuffled / fixed order",
            a=cpu_timed(step_of(workload, Shuffled(), optimiser)),
            b=cpu_timed(step_of(workload, Sequential(), optimiser)),
            effort=effort,
            bound=Bound("at_most", MOST),
            settings={**workload.settings, "optimiser": "AdamW, fused"},
        )


CLAIM = Claim(theme="shuffled", text=__doc__.removeprefix("Claim: "), rows=rows)

if __name__ == "__main__":
    sys.exit(run_claim(CLAIM, __file__, tell=print))
