"""Claim: a method costs the blocks that it runs; position parts and groups of a batch come on top.

A training step of every method against one of ordinary training: forward, backward and optimiser,
as `fit` takes it. Methods that leave out blocks draw others in every step, so a turn is many steps.
And an answer of every method against one of an ordinary model: a forward of all blocks, in a new
order every time if the method shuffles.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from itertools import count
from typing import Any

import torch
from _clocks import PICO, SMOKE, WIDTH_64, WIDTH_192, Effort, Side, cpu_timed
from _harness import Claim, ClaimRow, compare, run_claim
from _kinds import training_state, training_steps
from _machine import PhaseTimer
from _workload import make_workload

from layershuffle.core.compiling import BlockCompiler
from layershuffle.core.methods import Method
from layershuffle.core.policies import Sequential, Shuffled
from layershuffle.core.stack import depth_of, running
from layershuffle.training.settings import FitSettings

METHODS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("layershuffle", {}),
    ("layershuffle-position", {}),
    ("layershuffle-predict", {}),
    ("layerdrop", {}),
    ("layershuffle", {"min_kept": 3}),
    ("layershuffle", {"max_parallel": 4}),
    ("layershuffle", {"distinct": 3}),
    ("layershuffle", {"sequential_every": 4, "orders_per_batch": 4}),
    ("layershuffle", {"exit_weight": 0.3}),
    # The two best recipes of docs/methods.md, after a longer training.
    ("anyorder", {}),
    ("anyorder", {"distinct": 3}),
)
CASES = {"width 64, batch 64": (WIDTH_64, 64, 20), "width 192, batch 32": (WIDTH_192, 32, 4)}
SMOKES = {"smoke": (PICO, 8, 1)}
"""Model, batch, and steps of a turn."""


def training_step(spec: str, *, batch: int, method: str, steps: int, **options: Any) -> Side:
    """Seconds of a step of `layershuffle fit`: the mean over the steps of a turn."""
    workload = make_workload(spec, batch_size=batch)
    settings = FitSettings(
        method=method, model=spec, data="generated", batch_size=batch, device="cpu",
        precision="fp32", workers=0, log_every=1 << 30, **options,
    )  # fmt: skip
    timer = PhaseTimer("cpu", clock=time.process_time)
    state = training_state(settings, workload, compiler=BlockCompiler(reason="compile is off"))
    take = training_steps(state, workload, timer=timer)

    def side() -> float:
        take(range(steps))
        return statistics.mean([sum(step.values()) for step in timer.steps()])

    return side


def answer(spec: str, *, batch: int, method: str, distinct: int | None = None) -> Side:
    """Seconds of a forward of the whole batch, in a new order every time if the method shuffles."""
    workload, parts = make_workload(spec, batch_size=batch), Method(method, distinct=distinct)
    model = parts.prepare(workload.model, workload.images[:1]).eval()
    policy = Shuffled(fixed=parts.fixed) if parts.selects_by == "arbitrary" else Sequential()
    steps = count()

    def forward() -> None:
        order = policy.draw(depth_of(model), seed=0, step=next(steps))
        with torch.inference_mode(), running(model, order):
            model(workload.images)

    return cpu_timed(forward)


def rows(effort: Effort) -> Iterator[ClaimRow]:
    """A step and an answer of every method against those of ordinary training."""
    for name, (spec, batch, steps) in (SMOKES if effort is SMOKE else CASES).items():
        ordinary = training_step(spec, batch=batch, method="baseline", steps=steps)
        plain_answer = answer(spec, batch=batch, method="baseline")
        for method, options in METHODS:
            words = "".join(f", {key} {value}" for key, value in options.items())
            label = f"{method}{words.replace('_', ' ')}, {name}"
            side = training_step(spec, batch=batch, method=method, steps=steps, **options)
            yield compare(
                f"step of {label}",
                f"training step of {method} / of baseline",
                a=side,
                b=ordinary,
                effort=replace(effort, seconds=0.0),  # a turn is many steps already
                settings={"model": spec, "batch": batch, "method": method, **options},
            )
            distinct = options.get("distinct")
            yield compare(
                f"answer of {label}",
                f"forward of {method} / of baseline",
                a=answer(spec, batch=batch, method=method, distinct=distinct),
                b=plain_answer,
                effort=effort,
                settings={"model": spec, "batch": batch, "method": method, "distinct": distinct},
            )


CLAIM = Claim(theme="methods", text=__doc__.splitlines()[0].removeprefix("Claim: "), rows=rows)

if __name__ == "__main__":
    sys.exit(run_claim(CLAIM, __file__, tell=print))
