"""Claim: on one NVIDIA H200 ViT-B/16 trains and answers as fast as docs/performance.md foresees.

One command of less than ten minutes, without network: `make bench-gpu`. What fails, or finds no
time, is a row that says so, and the others go on. `--smoke` runs all of it on a CPU with a tiny
model.
"""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import asdict, replace
from itertools import count
from typing import Any

import torch
import torch.nn.functional as F
from hf_trainer import TINY, Case
from hf_trainer import row as row_against_plain
from torch._dynamo.exc import FailOnRecompileLimitHit

from layershuffle.bench.choices import Chosen, compiler_of, subject_of
from layershuffle.bench.claims import Claim, run_claim
from layershuffle.bench.forwards import bench_eval
from layershuffle.bench.measured import mode_of
from layershuffle.bench.orders import compared, sweeps
from layershuffle.bench.pairs import SMOKE, Bound, Effort, Row, Side, cpu_timed, gpu_timed, paired
from layershuffle.bench.reading import bench_input
from layershuffle.bench.report import Report
from layershuffle.bench.subjects import PICO, VIT_B, Subject, converted
from layershuffle.bench.targets import GPU
from layershuffle.bench.train import bench_train
from layershuffle.compiling import BlockCompiler
from layershuffle.errors import LayerShuffleError
from layershuffle.models import logits_of
from layershuffle.policies import OrderPolicy, Sequential, Shuffled
from layershuffle.stack import depth_of, running
from layershuffle.training.weights_cast import weights_cast_to

MOST_SECONDS = 480  # after that no section begins; the longest one takes two minutes
FULL = Chosen(
    model=VIT_B, batch=640, steps=20, device="cuda", precision="bf16", compile=True,
    orders_per_batch=1, workers=min(16, len(os.sched_getaffinity(0))),
)  # fmt: skip
TRIAL = replace(
    FULL, model=PICO.replace("depth=12", "depth=3"), batch=8, steps=2, device="cpu",
    precision="fp32", compile=False, workers=0, backend="eager",
)  # fmt: skip
AGAINST_PLAIN_BATCH = 320  # unfused attention keeps three times as much for the backward pass
# What can go wrong on a machine that was never tried, in torch, Triton or here. Not: interrupts.
FAILURES = (
    RuntimeError, LayerShuffleError, FailOnRecompileLimitHit, AssertionError, TypeError, ValueError,
    AttributeError, LookupError, ArithmeticError, ImportError, OSError, MemoryError,
    subprocess.SubprocessError,
)  # fmt: skip
Section = Callable[[Chosen, Effort], Iterator[Row]]


def measured(name: str, *values: float, **facts: Any) -> Row:
    """A row of the table of targets."""
    what, unit, bound = GPU[name]
    return Row(name=name, what=what, values=values, unit=unit, bound=bound, facts=facts)


def as_target(name: str, row: Row) -> Row:
    """A paired row under the name, and with the bound, of the table of targets."""
    what, _, bound = GPU[name]
    return replace(row, name=name, what=what, bound=bound)


def compared_blocks(
    name: str, *, a: Side, b: Side, effort: Effort, compiler: BlockCompiler,
    compiled: Sequence[Side],
) -> Row:  # fmt: skip
    """A against B, with what became of the blocks that the sides `compiled` run."""
    with compiler.limits():
        for side in compiled:
            compiler.or_eager(side)
        before = compiler.graphs
        row = as_target(name, paired("", "", a=a, b=b, effort=effort))
    mode = mode_of(compiler, graphs_before=before)
    what = row.what if compiler.on else f"{row.what}, NOT compiled: {compiler.reason}"
    return replace(row, what=what, facts=asdict(mode))


def throughput(name: str, report: Report) -> Row:
    """The row of a throughput, told with what it was measured on."""
    row = measured(
        name,
        report.rate.median,
        blocks=str(report.mode),
        lowest_and_highest=[report.rate.low, report.rate.high],
        phases_ms=dict(report.phases),
        **report.facts,
    )
    return replace(row, what=f"{report.conditions}:")


def training(chosen: Chosen, _: Effort) -> Iterator[Row]:
    """Throughput, recompiles, syncs and memory of the trainer of `fit`."""
    report = bench_train(chosen)
    assert report.mode is not None
    assert report.memory is not None
    yield throughput("training", report)
    yield measured("training, MFU", 100 * (report.mfu or 0), ceiling=report.ceiling)
    yield measured("training, recompiles", report.mode.recompiles, graphs=report.mode.graphs)
    if report.syncs is not None:
        yield measured("training, syncs", report.syncs)
    yield measured("training, memory", report.memory[0] / 1e9, of=report.memory[1])


def inference(chosen: Chosen, _: Effort) -> Iterator[Row]:
    """Throughput of forwards."""
    report = bench_eval(chosen)
    yield throughput("inference", report)
    yield measured("inference, MFU", 100 * (report.mfu or 0), ceiling=report.ceiling)


def order(chosen: Chosen, effort: Effort) -> Iterator[Row]:
    """Shuffled against fixed order, everything else equal."""
    on, compiler = subject_of(chosen), compiler_of(chosen)
    compiler.add(on.model)
    optimiser = torch.optim.AdamW(on.model.train().parameters(), lr=1e-4, fused=True)
    shuffled = training_side(chosen, on, Shuffled(), optimiser)
    fixed = training_side(chosen, on, Sequential(), optimiser)
    yield compared_blocks(
        "training step, order",
        a=shuffled, b=fixed, effort=effort, compiler=compiler, compiled=[shuffled],
    )  # fmt: skip


def precision(chosen: Chosen, effort: Effort) -> Iterator[Row]:
    """Autocast against forwards that are bf16 altogether, both over fp32 weights."""
    on, compiler = subject_of(chosen), compiler_of(chosen)
    compiler.add(on.model)
    optimiser = torch.optim.AdamW(on.model.train().parameters(), lr=1e-4, fused=True)
    autocast, pure = (
        training_side(replace(chosen, precision=one), on, optimiser=optimiser)
        for one in ("bf16", "bf16-pure")
    )
    yield compared_blocks(
        "training step, precision",
        a=autocast, b=pure, effort=effort, compiler=compiler, compiled=[autocast, pure],
    )  # fmt: skip


def compiled(chosen: Chosen, effort: Effort) -> Iterator[Row]:
    """Compiled blocks against eager ones, in training and inference."""
    for name, make in (
        ("training step, compiled", training_side),
        ("inference, compiled", forward_side),
    ):
        eager, on = subject_of(chosen), subject_of(chosen)
        compiler = compiler_of(replace(chosen, compile=True))
        compiler.add(on.model)
        a, b = make(chosen, eager), make(chosen, on)
        yield compared_blocks(name, a=a, b=b, effort=effort, compiler=compiler, compiled=[b])


def timed(chosen: Chosen, work: Callable[[], object]) -> Side:
    """On the clock of the device."""
    return gpu_timed(work) if chosen.device == "cuda" else cpu_timed(work)


def training_side(
    chosen: Chosen,
    on: Subject,
    policy: OrderPolicy | None = None,
    optimiser: torch.optim.Optimizer | None = None,
) -> Side:
    """Seconds of forward and backward, and of the optimiser if there is one."""
    steps, depth, device = count(), depth_of(on.model), chosen.device
    drawn = policy or Shuffled()
    on.model.train()
    labels, pure = on.labels.to(device), chosen.precision == "bf16-pure"
    images = on.images.bfloat16() if pure else on.images

    def step() -> None:
        with (
            running(on.model, drawn.draw(depth, seed=0, step=next(steps))),
            torch.autocast(device, torch.bfloat16, enabled=chosen.precision == "bf16"),
            weights_cast_to(on.model, torch.bfloat16) if pure else nullcontext(),
        ):
            logits = logits_of(on.model(images)).float()
        F.cross_entropy(logits, labels).backward()
        if optimiser is not None:
            optimiser.step()
        on.model.zero_grad()

    return timed(chosen, step)


def forward_side(chosen: Chosen, on: Subject) -> Side:
    """Seconds of a forward in the dtype of `chosen`."""
    steps, depth = count(), depth_of(on.model)
    on = converted(on, chosen.precision)
    model, images = on.model.eval(), on.images

    def step() -> None:
        with (
            torch.inference_mode(),
            running(model, Shuffled().draw(depth, seed=0, step=next(steps))),
        ):
            model(images)

    return timed(chosen, step)


def against_plain(chosen: Chosen, effort: Effort) -> Iterator[Row]:
    """Ours against what the authors' code does, both with half precision."""
    full = chosen.device == "cuda"
    case = Case(
        config={} if full else TINY,
        batch=AGAINST_PLAIN_BATCH if full else 2,
        steps=5 if full else 1,
        device=chosen.device,
        half=full,
        compiler=lambda: compiler_of(chosen),
    )
    row = row_against_plain(
        "", case=case, attention="eager", effort=effort, bound=None, upside_down=True
    )
    yield as_target("training step, plain", row)


def four_orders(chosen: Chosen, _: Effort) -> Iterator[Row]:
    """A batch in four groups with an order each."""
    report = bench_train(replace(chosen, orders_per_batch=4))
    yield throughput("training, four orders per batch", report)


def reading(chosen: Chosen, effort: Effort) -> Iterator[Row]:
    """The loader alone."""
    smoke = effort is SMOKE
    report = bench_input(replace(chosen, steps=1 if smoke else 5), files=8 if smoke else 512)
    yield throughput("reading", report)


@torch.inference_mode()
def trie(chosen: Chosen, effort: Effort) -> Iterator[Row]:
    """Shared beginnings run once, in the dtype of inference."""
    on = subject_of(replace(chosen, batch=min(256, chosen.batch)))
    on = converted(on, chosen.precision)
    name = "leave-one-out and base"
    row = compared(name, on, orders=sweeps(depth_of(on.model))[name], effort=effort)
    yield as_target(name, row)


SECTIONS = (
    training, inference, order, precision, compiled, against_plain, four_orders, trie, reading
)  # fmt: skip


def rows(effort: Effort) -> Iterator[Row]:
    """Section by section, the most important first."""
    chosen = TRIAL if effort is SMOKE else FULL
    effort = effort if effort is SMOKE else Effort(pairs=5)
    begun = time.monotonic()
    for section in SECTIONS:
        if time.monotonic() - begun > MOST_SECONDS:
            yield failed(section, "eight minutes were over; is the GPU busy with something else?")
            continue
        yield from attempted(section, chosen, effort)
        torch.compiler.reset()
        if chosen.device == "cuda":
            gc.collect()
            torch.cuda.empty_cache()


def attempted(section: Section, chosen: Chosen, effort: Effort) -> Iterator[Row]:
    """The rows of a section; its failure is a row too, except in a smoke."""
    try:
        yield from section(chosen, effort)
    except FAILURES as error:
        if effort is SMOKE:
            raise
        words = " ".join(str(error).split())[:300]
        yield failed(section, f"{type(error).__name__}: {words}")


def failed(section: Section, why: str) -> Row:
    """In place of the rows of a section."""
    return Row(
        name=f"{section.__name__.replace('_', ' ')}: failed",
        what=why,
        values=(1,),
        unit="failure",
        bound=Bound("equal", 0),
    )


CLAIM = Claim(
    theme="gpu",
    text=__doc__.splitlines()[0].removeprefix("Claim: "),
    rows=rows,
    precision="bf16",
    threads=None,
)

if __name__ == "__main__":
    if not torch.cuda.is_available() and "--smoke" not in sys.argv:
        sys.exit("There is no GPU that torch can use here; --smoke runs on a CPU.")
    sys.exit(run_claim(CLAIM, __file__, tell=print))
