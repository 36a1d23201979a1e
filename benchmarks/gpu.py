"""Claim: on one NVIDIA H200 ViT-B/16 trains and answers as fast as docs/performance.md foresees.

One command of less than ten minutes, without network: `make bench-gpu`. A section that fails, or
for which no time is left, becomes a row that says so, and the others continue. `--smoke` runs all
of it on a CPU with a tiny model.
"""

from __future__ import annotations

import gc
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import count
from typing import Any

import torch
import torch.nn.functional as F
from _clocks import PICO, SMOKE, VIT_B, Effort, Side, converted, timed_on
from _harness import GPU_TARGETS, Bound, Claim, ClaimRow, compare, ratio_row, run_claim
from _kinds import BenchConfig, BenchReport, bench, training_state, training_steps
from _machine import PhaseTimer
from _workload import Workload, make_workload
from hf_trainer import TINY, Case
from hf_trainer import row as row_against_plain
from shared_beginnings import one_by_one_and_together, sweeps
from torch._dynamo.exc import FailOnRecompileLimitHit

from layershuffle.core.compiling import BlockCompiler
from layershuffle.core.policies import OrderPolicy, Sequential, Shuffled
from layershuffle.core.stack import depth_of, running
from layershuffle.core.tensors import logits_of
from layershuffle.ground.errors import LayerShuffleError
from layershuffle.ground.text import one_line
from layershuffle.training.settings import FitSettings

MOST_SECONDS = 480  # after that no section begins; the longest one takes two minutes
FULL = BenchConfig(
    model=VIT_B, batch_size=640, steps=20, device="cuda", precision="bf16", compile=True,
    orders_per_batch=1,
)  # fmt: skip
TRIAL = replace(
    FULL, model=PICO.replace("depth=12", "depth=3"), batch_size=8, steps=2, device="cpu",
    precision="fp32", compile=False, backend="eager",
)  # fmt: skip
# Part of torch's warning at every sync, but not of its notice that this mode is a prototype.
SYNC = "called a synchronizing CUDA operation"
AGAINST_PLAIN_BATCH = 320  # unfused attention keeps three times as much for the backward pass
# Errors of torch, Triton and this package on a machine that was never tried. Not: interrupts.
FAILURES = (
    RuntimeError, LayerShuffleError, FailOnRecompileLimitHit, AssertionError, TypeError, ValueError,
    AttributeError, LookupError, ArithmeticError, ImportError, OSError, MemoryError,
    subprocess.SubprocessError,
)  # fmt: skip
GpuSection = Callable[[BenchConfig, Effort], Iterator[ClaimRow]]


def workload_of(config: BenchConfig) -> Workload:
    """Model and images."""
    return make_workload(config.model, batch_size=config.batch_size, device=config.device)


def compiler_of(config: BenchConfig) -> BlockCompiler:
    """A compiler, or one that is off."""
    off = None if config.compile else "compile is off"
    return BlockCompiler(reason=off, backend=config.backend)


def measured(name: str, *values: float, **facts: Any) -> ClaimRow:
    """A row of the table of targets."""
    what, unit, bound = GPU_TARGETS[name]
    return ClaimRow(name=name, what=what, values=values, unit=unit, bound=bound, facts=facts)


def as_target(name: str, row: ClaimRow) -> ClaimRow:
    """A paired row under the name, and with the bound, of the table of targets."""
    what, _, bound = GPU_TARGETS[name]
    return replace(row, name=name, what=what, bound=bound)


def compared_blocks(
    name: str, *, a: Side, b: Side, effort: Effort, compiler: BlockCompiler,
    compiled: Sequence[Side],
) -> ClaimRow:  # fmt: skip
    """A against B; the facts tell how the blocks of the sides `compiled` ran."""
    with compiler.limits():
        for side in compiled:
            compiler.or_eager(side)
        before = compiler.graphs
        row = as_target(name, compare("", "", a=a, b=b, effort=effort))
    what = row.what if compiler.on else f"{row.what}, NOT compiled: {compiler.reason}"
    facts = {**compiler.report(), "recompiles": compiler.graphs - before}
    return replace(row, what=what, facts=facts)


def throughput(name: str, report: BenchReport) -> ClaimRow:
    """The row of a throughput, told with what it was measured on."""
    row = measured(
        name,
        report.rate,
        blocks=report.blocks,
        lowest_and_highest=[min(report.rates), max(report.rates)],
        phases_ms=report.phases,
        orders_per_batch=report.orders_per_batch,
    )
    return replace(row, what=f"{report.conditions}:")


def training(config: BenchConfig, _: Effort) -> Iterator[ClaimRow]:
    """Throughput, recompiles, syncs and memory of the trainer of `fit`."""
    report = bench("train", config)
    yield throughput("training", report)
    yield measured("training, MFU", 100 * report.mfu, ceiling=report.ceiling)
    yield measured("training, recompiles", report.blocks["recompiles"])
    yield measured("training, memory", report.memory[0] / 1e9, of=report.memory[1])
    if config.device == "cuda":
        yield measured("training, syncs", syncs_of(config))


def syncs_of(config: BenchConfig) -> float:
    """How often the host waits for the GPU in a step, by torch's warnings."""
    workload = make_workload(config.model, batch_size=config.batch_size, device=config.device)
    settings = FitSettings(
        method="layershuffle", model=config.model, data="generated", batch_size=config.batch_size,
        device="cuda", precision=config.precision, log_every=1 << 30,
    )  # fmt: skip
    state = training_state(settings, workload, compiler=BlockCompiler(reason="compile is off"))
    take = training_steps(state, workload, timer=PhaseTimer(config.device))
    take(range(3))
    torch.cuda.synchronize()
    with warnings.catch_warnings(record=True) as caught:
        # Otherwise Python shows a warning only once per line of code.
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        take(range(config.steps))
        torch.cuda.set_sync_debug_mode("default")
    return sum(SYNC in str(warning.message) for warning in caught) / config.steps


def inference(config: BenchConfig, _: Effort) -> Iterator[ClaimRow]:
    """Throughput of forwards."""
    report = bench("eval", config)
    yield throughput("inference", report)
    yield measured("inference, MFU", 100 * report.mfu, ceiling=report.ceiling)


def order(config: BenchConfig, effort: Effort) -> Iterator[ClaimRow]:
    """Shuffled against fixed order, everything else equal."""
    workload, compiler = workload_of(config), compiler_of(config)
    compiler.add(workload.model)
    optimiser = torch.optim.AdamW(workload.model.train().parameters(), lr=1e-4, fused=True)
    shuffled = training_side(config, workload, Shuffled(), optimiser)
    fixed = training_side(config, workload, Sequential(), optimiser)
    yield compared_blocks(
        "training step, order",
        a=shuffled, b=fixed, effort=effort, compiler=compiler, compiled=[shuffled],
    )  # fmt: skip


def compiled(config: BenchConfig, effort: Effort) -> Iterator[ClaimRow]:
    """Compiled blocks against eager ones, in training and inference."""
    for name, make in (
        ("training step, compiled", training_side),
        ("inference, compiled", forward_side),
    ):
        eager, workload = workload_of(config), workload_of(config)
        compiler = BlockCompiler(backend=config.backend)
        compiler.add(workload.model)
        a, b = make(config, eager), make(config, workload)
        yield compared_blocks(name, a=a, b=b, effort=effort, compiler=compiler, compiled=[b])


def training_side(
    config: BenchConfig,
    workload: Workload,
    policy: OrderPolicy | None = None,
    optimiser: torch.optim.Optimizer | None = None,
) -> Side:
    """Seconds of forward and backward, and of the optimiser if there is one."""
    steps, depth, device = count(), depth_of(workload.model), config.device
    drawn = policy or Shuffled()
    workload.model.train()
    labels, images = workload.labels.to(device), workload.images

    def step() -> None:
        with (
            running(workload.model, drawn.draw(depth, seed=0, step=next(steps))),
            torch.autocast(device, torch.bfloat16, enabled=config.precision == "bf16"),
        ):
            logits = logits_of(workload.model(images), workload.model).float()
        F.cross_entropy(logits, labels).backward()
        if optimiser is not None:
            optimiser.step()
        workload.model.zero_grad()

    return timed_on(config.device, step)


def forward_side(config: BenchConfig, workload: Workload) -> Side:
    """Seconds of a forward in the dtype of `config`."""
    steps, depth = count(), depth_of(workload.model)
    workload = converted(workload, config.precision)
    model, images = workload.model.eval(), workload.images

    def step() -> None:
        with (
            torch.inference_mode(),
            running(model, Shuffled().draw(depth, seed=0, step=next(steps))),
        ):
            model(images)

    return timed_on(config.device, step)


def against_plain(config: BenchConfig, effort: Effort) -> Iterator[ClaimRow]:
    """Ours against what the authors' code does, both with half precision."""
    full = config.device == "cuda"
    case = Case(
        config={} if full else TINY,
        batch=AGAINST_PLAIN_BATCH if full else 2,
        steps=5 if full else 1,
        device=config.device,
        half=full,
        compiler=partial(compiler_of, config),
    )
    row = row_against_plain(
        "", case=case, attention="eager", effort=effort, bound=None, upside_down=True
    )
    yield as_target("training step, plain", row)


def four_orders(config: BenchConfig, _: Effort) -> Iterator[ClaimRow]:
    """A batch in four groups with an order each."""
    report = bench("train", replace(config, orders_per_batch=4))
    yield throughput("training, four orders per batch", report)


@torch.inference_mode()
def shared_beginnings(config: BenchConfig, effort: Effort) -> Iterator[ClaimRow]:
    """Shared beginnings run once, in the dtype of inference."""
    workload = workload_of(replace(config, batch_size=min(256, config.batch_size)))
    workload = converted(workload, config.precision)
    name = "leave-one-out and base"
    orders = sweeps(depth_of(workload.model))[name]
    pairs = one_by_one_and_together(workload, orders, effort=effort)
    yield as_target(name, ratio_row(name, "", pairs=pairs, settings=workload.settings))


SECTIONS = (
    training, inference, order, compiled, against_plain, four_orders, shared_beginnings,
)  # fmt: skip


def rows(effort: Effort) -> Iterator[ClaimRow]:
    """Section by section, the most important first."""
    config = TRIAL if effort is SMOKE else FULL
    effort = effort if effort is SMOKE else Effort(pairs=5)
    begun = time.monotonic()
    for section in SECTIONS:
        if time.monotonic() - begun > MOST_SECONDS:
            yield failed(section, "eight minutes were over; is the GPU busy with something else?")
            continue
        yield from attempted(section, config, effort)
        torch.compiler.reset()
        if config.device == "cuda":
            gc.collect()
            torch.cuda.empty_cache()


def attempted(section: GpuSection, config: BenchConfig, effort: Effort) -> Iterator[ClaimRow]:
    """The rows of a section; its failure is a row too, except in a smoke."""
    try:
        yield from section(config, effort)
    except FAILURES as error:
        if effort is SMOKE:
            raise
        yield failed(section, f"{type(error).__name__}: {one_line(error)}")


def failed(section: GpuSection, why: str) -> ClaimRow:
    """In place of the rows of a section."""
    return ClaimRow(
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
