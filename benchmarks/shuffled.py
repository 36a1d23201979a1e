"""Claim: a training step in a new random order costs what one in the fixed order costs."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from itertools import count

import torch
import torch.nn.functional as F

from layershuffle.bench.claims import Claim, run_claim
from layershuffle.bench.pairs import SMOKE, Bound, Effort, Row, cpu_timed, paired
from layershuffle.bench.subjects import PICO, WIDTH_64, WIDTH_192, Subject, subject
from layershuffle.policies import OrderPolicy, Sequential, Shuffled
from layershuffle.stack import depth_of, running

CASES = {"width 64, batch 64": (WIDTH_64, 64), "width 192, batch 8": (WIDTH_192, 8)}
SMOKES = {"smoke": (PICO, 2)}
MOST = 1.05


def step_of(
    on: Subject, policy: OrderPolicy, optimiser: torch.optim.Optimizer
) -> Callable[[], None]:
    """A whole step: order, forward, backward, optimiser."""
    steps, depth = count(), depth_of(on.model)

    def step() -> None:
        with running(on.model, policy.draw(depth, seed=0, step=next(steps))):
            loss = F.cross_entropy(on.model(on.images), on.labels)
        loss.backward()
        optimiser.step()
        optimiser.zero_grad()

    return step


def rows(effort: Effort) -> Iterator[Row]:
    """One model for both sides: they read and write the same memory."""
    for name, (spec, batch) in (SMOKES if effort is SMOKE else CASES).items():
        on = subject(spec, batch=batch)
        on.model.train()
        optimiser = torch.optim.AdamW(on.model.parameters(), lr=1e-4, fused=True)
        yield paired(
            f"training step, {name}",
            "shuffled / fixed order",
            a=cpu_timed(step_of(on, Shuffled(), optimiser)),
            b=cpu_timed(step_of(on, Sequential(), optimiser)),
            effort=effort,
            bound=Bound("at_most", MOST),
            settings={**on.settings, "optimiser": "AdamW, fused"},
        )


CLAIM = Claim(theme="shuffled", text=__doc__.removeprefix("Claim: "), rows=rows)

if __name__ == "__main__":
    sys.exit(run_claim(CLAIM, __file__, tell=print))
