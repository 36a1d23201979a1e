"""Claim: on one NVIDIA H200 ViT-B/16 trains and answers as fast as docs/performance.md foresees.

One command of less than ten minutes, without network: `make bench-gpu`. A section that fails, or
for which no time is left, becomes a row that says so, and the others continue. `--smoke` runs all
of it on a CPU with a tiny model.
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
from _harness import GPU_TARGETS, Bound, Claim, ClaimRow, compare, ratio_row, run_claim
from hf_trainer import TINY, Case
from hf_trainer import row as row_against_plain
from torch._dynamo.exc import FailOnRecompileLimitHit
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.profiler import ProfilerActivity, profile

from layershuffle.bench.kinds import bench_eval, bench_input
from layershuffle.bench.report import BenchReport, mode_of
from layershuffle.bench.settings import BenchConfig
from layershuffle.bench.timing import SMOKE, Effort, Side, timed_on
from layershuffle.bench.training import bench_train
from layershuffle.bench.workloads import (
    PICO,
    VIT_B,
    Workload,
    compare_forwards,
    converted,
    sweeps,
)
from layershuffle.core.compiling import BlockCompiler
from layershuffle.core.policies import OrderPolicy, Sequential, Shuffled
from layershuffle.core.stack import depth_of, running
from layershuffle.core.tensors import logits_of
from layershuffle.errors import LayerShuffleError
from layershuffle.text import one_line

MOST_SECONDS = 480  # after that no section begins; the longest one takes two minutes
FULL = BenchConfig(
    model=VIT_B, batch=640, steps=20, device="cuda", precision="bf16", compile=True,
    orders_per_batch=1, workers=min(16, len(os.sched_getaffinity(0))),
)  # fmt: skip
TRIAL = replace(
    FULL, model=PICO.replace("depth=12", "depth=3"), batch=8, steps=2, device="cpu",
    precision="fp32", compile=False, workers=0, backend="eager",
)  # fmt: skip
# The order in which `training_cudnn_first` prefers them.
ATTENTION = {
    "cuDNN": SDPBackend.CUDNN_ATTENTION,
    "flash": SDPBackend.FLASH_ATTENTION,
    "memory-efficient": SDPBackend.EFFICIENT_ATTENTION,
    "plain": SDPBackend.MATH,
}
ONLY_ON_GPUS = ("cuDNN", "memory-efficient")
ATTENTION_TIMES = 9
AGAINST_PLAIN_BATCH = 320  # unfused attention keeps three times as much for the backward pass
# Errors of torch, Triton and this package on a machine that was never tried. Not: interrupts.
FAILURES = (
    RuntimeError, LayerShuffleError, FailOnRecompileLimitHit, AssertionError, TypeError, ValueError,
    AttributeError, LookupError, ArithmeticError, ImportError, OSError, MemoryError,
    subprocess.SubprocessError,
)  # fmt: skip
GpuSection = Callable[[BenchConfig, Effort], Iterator[ClaimRow]]


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
    mode = mode_of(compiler, graphs_before=before)
    what = row.what if compiler.on else f"{row.what}, NOT compiled: {compiler.reason}"
    return replace(row, what=what, facts=asdict(mode))


def throughput(name: str, report: BenchReport) -> ClaimRow:
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


def training(config: BenchConfig, _: Effort) -> Iterator[ClaimRow]:
    """Throughput, recompiles, syncs and memory of the trainer of `fit`."""
    report = bench_train(config)
    assert report.mode is not None
    assert report.memory is not None
    yield throughput("training", report)
    yield measured("training, MFU", 100 * (report.mfu or 0), ceiling=report.ceiling)
    yield measured("training, recompiles", report.mode.recompiles, graphs=report.mode.graphs)
    if report.syncs is not None:
        yield measured("training, syncs", report.syncs)
    yield measured("training, memory", report.memory[0] / 1e9, of=report.memory[1])


def inference(config: BenchConfig, _: Effort) -> Iterator[ClaimRow]:
    """Throughput of forwards."""
    report = bench_eval(config)
    yield throughput("inference", report)
    yield measured("inference, MFU", 100 * (report.mfu or 0), ceiling=report.ceiling)


def attention(config: BenchConfig, _: Effort) -> Iterator[ClaimRow]:
    """Forward and backward of the attention of a block of ViT-B/16: each kernel that torch has."""
    on_gpu = config.device == "cuda"
    images, dtype = (config.batch, torch.bfloat16) if on_gpu else (2, torch.float32)
    *inputs, gradient = (
        torch.randn(images, 12, 197, 64, device=config.device, dtype=dtype) for _ in range(4)
    )
    q, k, v = (tensor.requires_grad_() for tensor in inputs)

    def step() -> None:
        torch.autograd.grad(F.scaled_dot_product_attention(q, k, v), (q, k, v), gradient)

    side = timed_on(config.device, step)
    activity = ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU
    for name, backend in {"as torch chooses": None, **ATTENTION}.items():
        if not on_gpu and name in ONLY_ON_GPUS:
            continue
        with nullcontext() if backend is None else sdpa_kernel(backend):
            side()  # the first one builds plans
            seconds = [side() for _ in range(ATTENTION_TIMES)]
            with profile(activities=[activity]) as profiled:
                side()
        longest = sorted(profiled.key_averages(), key=lambda event: -event.device_time_total)
        row = measured("attention", *(1000 * s for s in seconds))
        facts = {"kernels": [event.key for event in longest[:2]]}
        yield replace(row, name=f"attention, {name}", facts=facts)


def training_cudnn_first(config: BenchConfig, _: Effort) -> Iterator[ClaimRow]:
    """The throughput of training where cuDNN's attention comes before the others."""
    with sdpa_kernel(list(ATTENTION.values()), set_priority=True):
        yield throughput("training, cuDNN attention first", bench_train(config))


def order(config: BenchConfig, effort: Effort) -> Iterator[ClaimRow]:
    """Shuffled against fixed order, everything else equal."""
    workload, compiler = config.workload(), config.compiler()
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
        eager, workload = config.workload(), config.workload()
        compiler = replace(config, compile=True).compiler()
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
            logits = logits_of(workload.model(images)).float()
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
        compiler=config.compiler,
    )
    row = row_against_plain(
        "", case=case, attention="eager", effort=effort, bound=None, upside_down=True
    )
    yield as_target("training step, plain", row)


def four_orders(config: BenchConfig, _: Effort) -> Iterator[ClaimRow]:
    """A batch in four groups with an order each."""
    report = bench_train(replace(config, orders_per_batch=4))
    yield throughput("training, four orders per batch", report)


def reading(config: BenchConfig, effort: Effort) -> Iterator[ClaimRow]:
    """The loader alone."""
    smoke = effort is SMOKE
    report = bench_input(replace(config, steps=1 if smoke else 5), files=8 if smoke else 512)
    yield throughput("reading", report)


@torch.inference_mode()
def trie(config: BenchConfig, effort: Effort) -> Iterator[ClaimRow]:
    """Shared beginnings run once, in the dtype of inference."""
    workload = replace(config, batch=min(256, config.batch)).workload()
    workload = converted(workload, config.precision)
    name = "leave-one-out and base"
    orders = sweeps(depth_of(workload.model))[name]
    pairs, facts = compare_forwards(workload, orders, effort=effort)
    row = ratio_row(name, "", pairs=pairs, settings=workload.settings)
    yield as_target(name, replace(row, facts=facts))


SECTIONS = (
    training, attention, training_cudnn_first, inference, order, compiled, against_plain,
    four_orders, trie, reading,
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
