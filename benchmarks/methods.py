"""Claim: a method costs the blocks that it runs; position parts and groups of a batch come on top.

A training step of every method against one of ordinary training: forward, backward and optimiser,
as `fit` takes it. Methods that leave out blocks draw others in every step, so a turn is many steps.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from _harness import Claim, Row, compare, run_claim

from layershuffle.bench.timing import SMOKE, Effort, Side, cpu_timed
from layershuffle.bench.training import time_training, training_state
from layershuffle.bench.workloads import PICO, WIDTH_64, WIDTH_192, Workload, make_workload
from layershuffle.compiling import BlockCompiler
from layershuffle.models.tying import middle_blocks, tie
from layershuffle.position import EncodingForm, add_position
from layershuffle.settings import FitSettings
from layershuffle.stack import depth_of

METHODS: dict[str, dict[str, Any]] = {
    "layershuffle": {},
    "layershuffle-position": {},
    "layershuffle-predict": {},
    "layerdrop": {},
    "layershuffle-depth": {},
    "layershuffle-parallel": {},
    "layershuffle-tied": {"distinct": 3},
    "layershuffle-mixed": {"orders_per_batch": 4},
    "layershuffle-exit": {},
}
CASES = {"width 64, batch 64": (WIDTH_64, 64, 20), "width 192, batch 32": (WIDTH_192, 32, 4)}
SMOKES = {"smoke": (PICO, 8, 1)}
"""Model, batch, and steps of a turn."""


def training_step(spec: str, *, batch: int, method: str, steps: int, **options: Any) -> Side:
    """Seconds of a step of `layershuffle fit`: the mean over the steps of a turn."""
    workload = make_workload(spec, batch=batch)
    settings = FitSettings(
        method=method, model=spec, data="generated", batch_size=batch, device="cpu",
        precision="fp32", workers=0, log_every=1 << 30, **options,
    )  # fmt: skip
    if (distinct := settings.find_method().distinct) is not None:
        tie(workload.model, middle_blocks(distinct, depth_of(workload.model)))
    state = training_state(settings, workload, compiler=BlockCompiler(reason="compile is off"))

    def side() -> float:
        measured = time_training(
            state, workload, steps=steps, warm_up=0, phased=0, clock=time.process_time
        )
        return statistics.mean(measured.seconds)

    return side


def answer(workload: Workload, model: torch.nn.Module) -> Side:
    """Seconds of a forward of the whole batch."""
    model.eval()

    def forward() -> None:
        with torch.inference_mode():
            model(workload.images)

    return cpu_timed(forward)


def rows(effort: Effort) -> Iterator[Row]:
    """Every method against ordinary training, and an answer with a position encoding."""
    for name, (spec, batch, steps) in (SMOKES if effort is SMOKE else CASES).items():
        ordinary = training_step(spec, batch=batch, method="baseline", steps=steps)
        for method, options in METHODS.items():
            words = "".join(f", {key} {value}" for key, value in options.items())
            side = training_step(spec, batch=batch, method=method, steps=steps, **options)
            yield compare(
                f"step of {method}{words.replace('_', ' ')}, {name}",
                f"training step of {method} / of baseline",
                a=side,
                b=ordinary,
                effort=replace(effort, seconds=0.0),  # a turn is many steps already
                settings={"model": spec, "batch": batch, "method": method, **options},
            )
        workload = make_workload(spec, batch=batch)
        parts = add_position(
            make_workload(spec, batch=batch).model, encoding=EncodingForm(), seed=0
        )
        yield compare(
            f"answer with a position encoding, {name}",
            "forward with a position encoding / without",
            a=answer(workload, parts),
            b=answer(workload, workload.model),
            effort=effort,
            settings=workload.settings,
        )


CLAIM = Claim(theme="methods", text=__doc__.splitlines()[0].removeprefix("Claim: "), rows=rows)

if __name__ == "__main__":
    sys.exit(run_claim(CLAIM, __file__, tell=print))
