"""Claim: blocks compiled one by one share one graph in every order; what that gains is measured.

Nothing is promised here: on this kind of processor a compiler gains little. Compiling needs a C++
compiler; without one the rows say so.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterator
from itertools import count

import torch
import torch.nn.functional as F
from _clocks import PICO, SMOKE, WIDTH_64, WIDTH_192, Effort, cpu_timed
from _harness import Bound, Claim, ClaimRow, compare, run_claim
from _workload import Workload, make_workload
from torch import nn

from layershuffle.core.compiling import BlockCompiler
from layershuffle.core.policies import Shuffled
from layershuffle.core.stack import depth_of, running

CASES = {"width 64, batch 64": (WIDTH_64, 64), "width 192, batch 8": (WIDTH_192, 8)}
SMOKES = {"smoke": (PICO, 2)}


def training_step(model: nn.Module, workload: Workload) -> Callable[[], None]:
    """Forward and backward in a new order each time; the optimiser is the same either way."""
    steps, depth = count(), depth_of(model)
    model.train()

    def step() -> None:
        with running(model, Shuffled().draw(depth, seed=0, step=next(steps))):
            loss = F.cross_entropy(model(workload.images), workload.labels)
        loss.backward()
        model.zero_grad()

    return step


def forward(model: nn.Module, workload: Workload) -> Callable[[], None]:
    """A forward in a new order each time."""
    steps, depth = count(), depth_of(model)
    model.eval()

    def step() -> None:
        with (
            torch.inference_mode(),
            running(model, Shuffled().draw(depth, seed=0, step=next(steps))),
        ):
            model(workload.images)

    return step


def rows(effort: Effort) -> Iterator[ClaimRow]:
    """A training step and a forward, eager over compiled; graphs are counted."""
    backend = "eager" if effort is SMOKE else "inductor"
    for name, (spec, batch) in (SMOKES if effort is SMOKE else CASES).items():
        for kind, make in (("training step", training_step), ("forward", forward)):
            workload = make_workload(spec, batch_size=batch)
            eager = make(copy.deepcopy(workload.model), workload)
            compiler = BlockCompiler(backend=backend)
            compiler.add(workload.model)
            with compiler.limits():
                yield from compared(
                    f"{kind}, {name}", eager, make(workload.model, workload), compiler, effort
                )


def compared(
    name: str,
    eager: Callable[[], None],
    compiled: Callable[[], None],
    compiler: BlockCompiler,
    effort: Effort,
) -> Iterator[ClaimRow]:
    """The ratio, and the graphs of twelve blocks in many orders; or why there are none."""
    compiler.or_eager(compiled)
    if compiler.on:
        yield compare(
            f"compiled blocks, {name}",
            "eager / compiled",
            a=cpu_timed(eager),
            b=cpu_timed(compiled),
            effort=effort,
            facts={"backend": "inductor"},
        )
    yield ClaimRow(
        name=f"graphs, {name}",
        what="for 12 blocks in every order" if compiler.on else f"eager: {compiler.reason}",
        values=(compiler.graphs,),
        unit="graphs",
        bound=Bound("equal", 1) if compiler.on else None,
    )


CLAIM = Claim(theme="compiled", text=__doc__.splitlines()[0].removeprefix("Claim: "), rows=rows)

if __name__ == "__main__":
    sys.exit(run_claim(CLAIM, __file__, tell=print))
