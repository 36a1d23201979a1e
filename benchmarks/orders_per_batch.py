"""Claim: four orders per batch cost little more than one at width 192; at width 64 it is stated.

As many images run through as many blocks, in more and smaller calls. At width 64 a call with a
quarter of the images takes well over a quarter of the time.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from itertools import count

from _clocks import PICO, SMOKE, WIDTH_64, WIDTH_192, Effort, cpu_timed
from _harness import Bound, Claim, ClaimRow, compare, run_claim
from _workload import Workload, make_workload

from layershuffle.core.methods import Method

GROUPS = (2, 4, 8)
CASES = {"width 64, batch 64": (WIDTH_64, 64, None), "width 192, batch 32": (WIDTH_192, 32, 1.15)}
SMOKES = {"smoke": (PICO, 8, None)}


def training_step(workload: Workload, *, groups: int) -> Callable[[], None]:
    """Forward and backward, in new orders each time, as `fit` draws and spreads them."""
    steps = count()
    method = Method("layershuffle", orders_per_batch=groups)

    def step() -> None:
        loss = method.loss(workload.model, workload.images, workload.labels, step=next(steps))
        loss.backward()
        workload.model.zero_grad()

    return step


def rows(effort: Effort) -> Iterator[ClaimRow]:
    """2, 4 and 8 orders per batch, each against one."""
    for name, (spec, batch, most) in (SMOKES if effort is SMOKE else CASES).items():
        workload = make_workload(spec, batch_size=batch)
        workload.model.train()
        single = cpu_timed(training_step(workload, groups=1))
        for groups in GROUPS:
            yield compare(
                f"{groups} orders per batch, {name}",
                f"training step with {groups} orders / with one",
                a=cpu_timed(training_step(workload, groups=groups)),
                b=single,
                effort=effort,
                bound=Bound("at_most", most) if most and groups == 4 else None,
                settings=workload.settings,
                facts={"images per group": batch / groups},
            )


CLAIM = Claim(
    theme="orders-per-batch", text=__doc__.splitlines()[0].removeprefix("Claim: "), rows=rows
)

if __name__ == "__main__":
    sys.exit(run_claim(CLAIM, __file__, tell=print))
