"""Claim: four orders per batch cost little more than one at width 192; at width 64 it is told.

As many images run through as many blocks, in more and smaller calls. At width 64 a call with a
quarter of the images takes well over a quarter of the time.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from itertools import count

import torch.nn.functional as F

from layershuffle.bench.claims import Claim, run_claim
from layershuffle.bench.pairs import SMOKE, Bound, Effort, Row, cpu_timed, paired
from layershuffle.bench.subjects import PICO, WIDTH_64, WIDTH_192, Subject, subject
from layershuffle.policies import Shuffled
from layershuffle.stack import depth_of, running
from layershuffle.training.order_schedule import OrderSchedule, orders_by_row

GROUPS = (2, 4, 8)
CASES = {"width 64, batch 64": (WIDTH_64, 64, None), "width 192, batch 32": (WIDTH_192, 32, 1.15)}
SMOKES = {"smoke": (PICO, 8, None)}


def training_step(on: Subject, *, groups: int) -> Callable[[], None]:
    """Forward and backward, in new orders each time, as `fit` draws and spreads them."""
    steps = count()
    orders = OrderSchedule(policy=Shuffled(), depth=depth_of(on.model), seed=0, per_batch=groups)

    def step() -> None:
        drawn = orders.draw(step=next(steps), micro_batch=0)
        with running(on.model, orders_by_row(drawn, len(on.images))):
            loss = F.cross_entropy(on.model(on.images), on.labels)
        loss.backward()
        on.model.zero_grad()

    return step


def rows(effort: Effort) -> Iterator[Row]:
    """2, 4 and 8 orders per batch, each against one."""
    for name, (spec, batch, most) in (SMOKES if effort is SMOKE else CASES).items():
        on = subject(spec, batch=batch)
        on.model.train()
        one = cpu_timed(training_step(on, groups=1))
        for groups in GROUPS:
            yield paired(
                f"{groups} orders per batch, {name}",
                f"training step with {groups} orders / with one",
                a=cpu_timed(training_step(on, groups=groups)),
                b=one,
                effort=effort,
                bound=Bound("at_most", most) if most and groups == 4 else None,
                settings=on.settings,
                facts={"images per group": batch / groups},
            )


CLAIM = Claim(
    theme="orders-per-batch", text=__doc__.splitlines()[0].removeprefix("Claim: "), rows=rows
)

if __name__ == "__main__":
    sys.exit(run_claim(CLAIM, __file__, tell=print))
