"""The kinds of `layershuffle bench`: train, eval, orders, input and merge."""

from __future__ import annotations

import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from itertools import cycle, islice
from pathlib import Path
from typing import Protocol

import torch
from torch.utils.data import DataLoader, Sampler

from layershuffle.bench.machine import Memory, Syncs, flops_of, matmul_ceiling
from layershuffle.bench.report import BenchReport, TimedSteps, mode_of, throughput
from layershuffle.bench.settings import PHASED, WARM_UP, BenchConfig
from layershuffle.bench.timing import Effort, PhaseTimer
from layershuffle.bench.training import bench_train
from layershuffle.bench.workloads import (
    JPEG_QUALITY,
    PHOTO,
    compare_forwards,
    converted,
    memory_of_merges,
    merge_group,
    random_spec,
    sweeps,
    write_photographs,
)
from layershuffle.core.policies import Shuffled
from layershuffle.core.stack import depth_of, running, with_hooks
from layershuffle.core.tensors import logits_of
from layershuffle.data import DataOptions, open_data
from layershuffle.machine import versions
from layershuffle.merging.plans import sample_plans
from layershuffle.models import image_view, load
from layershuffle.text import Progress, unheard

FILES, LEAST_INPUT_STEPS = 256, 4
# As in recipes/digits-paper.yaml: twelve donors and a hundred merges, as in the paper.
DONORS, MERGES = 12, 100
_QUICK = Effort(pairs=5, seconds=0.0, warm_up=1)


# --- eval -----------------------------------------------------------------------------------------


def bench_eval(config: BenchConfig, *, progress: Progress = unheard) -> BenchReport:
    """Measure forwards, each batch in its own order; weights and states in `config.precision`."""
    workload = config.workload()
    flops = flops_of(workload.model, image_view(workload.model)).forward
    ceiling = matmul_ceiling(config.device, config.precision)
    workload, compiler = converted(workload, config.precision), config.compiler()
    compiler.add(workload.model)
    images, depth = workload.images, depth_of(workload.model)
    timer, syncs, step = PhaseTimer(config.device), Syncs(), 0

    def forwards(count: int) -> None:
        nonlocal step
        for _ in range(count):
            step += 1
            progress("steps", step - 1, WARM_UP + config.steps + PHASED)
            timer.begin("data")
            pixels = workload.pixels.to(images.device, non_blocking=True)
            batch = workload.finish(pixels).to(images.dtype)
            timer.begin("stem")
            with running(workload.model, Shuffled().draw(depth, seed=0, step=step)):
                logits_of(workload.model(batch))

    with torch.inference_mode(), compiler.limits():
        # Compile, or fall back to eager mode, before any step is timed.
        compiler.or_eager(lambda: forwards(WARM_UP))
        graphs_before, memory = compiler.graphs, Memory(config.device)
        timer = PhaseTimer(config.device)
        with syncs.counted(config.device):
            forwards(config.steps)
        peak = memory.peak()
        # Hooks cost time, so phases are measured in further steps, after the timed ones.
        with with_hooks(workload.model, timer):
            forwards(PHASED)
    timer.begin("data")
    times = timer.steps("data")
    measured = TimedSteps(
        seconds=[sum(step.values()) for step in times[: config.steps]],
        phases=times[config.steps :],
        mode=mode_of(compiler, graphs_before=graphs_before),
        memory=(peak, memory.of),
        syncs=syncs.count,
    )
    facts = {"orders": "one per batch"}
    return measured.report(
        "eval",
        config.conditions(),
        device=config.device,
        flops=flops,
        ceiling=ceiling,
        facts=facts,
    )


# --- orders ---------------------------------------------------------------------------------------


@torch.inference_mode()
def bench_orders(
    config: BenchConfig, *, progress: Progress = unheard, effort: Effort = _QUICK
) -> BenchReport:
    """Measure sweeps of 64 random orders over one batch. A score is one image under one order."""
    workload = converted(config.workload(), config.precision)
    facts: dict[str, str] = {}
    seconds: list[float] = []
    planned = sweeps(depth_of(workload.model))
    for name, orders in planned.items():
        progress("sweeps", len(facts), len(planned))
        pairs, counts = compare_forwards(workload, orders, effort=effort)
        ratios, (naive, runs) = sorted(pairs.ratios), counts["block runs"]
        facts[name] = (
            f"{ratios[len(ratios) // 2]:.2f} times as fast ({ratios[0]:.2f} to {ratios[-1]:.2f}), "
            f"{runs:,} block runs for {naive:,}"
        )
        seconds = [in_trie for _, in_trie in pairs.seconds]  # the random orders are the last sweep
    return BenchReport(
        kind="orders",
        conditions=config.conditions(),
        rate=throughput(seconds, 64 * config.batch, unit="scores"),
        facts=facts,
        versions=versions(),
    )


# --- input ----------------------------------------------------------------------------------------


class EndlessBatches(Sampler[list[int]]):
    """Endless batches of the numbers below `count`, in ascending order, repeated.

    So a few files give any number of batches of any size.
    """

    def __init__(self, count: int, *, batch: int) -> None:
        self._count, self._batch = count, batch

    def __iter__(self) -> Iterator[list[int]]:
        numbers = cycle(range(self._count))
        while True:
            yield list(islice(numbers, self._batch))


def bench_input(
    config: BenchConfig, *, progress: Progress = unheard, files: int = FILES
) -> BenchReport:
    """Measure reading of images for `config.model`, without the batches of the cold start.

    A step is one batch from every process.
    """
    view = image_view(load(random_spec(config.model)))
    with tempfile.TemporaryDirectory(prefix="layershuffle-bench-") as place:
        write_photographs(Path(place), files)
        data = open_data(f"folder:{place}", view, options=DataOptions(holdout=None))
        split = data.splits["train"]
        # One long iterator, because a restart per pass reduced the rate by up to a half.
        loader = DataLoader(
            split.dataset,
            # Few files, which are in the page cache, so decoding is measured, not the disk.
            batch_sampler=EndlessBatches(split.size or 1, batch=config.batch),
            num_workers=config.workers,
            pin_memory=config.device == "cuda",
        )
        batches = iter(loader)
        seconds = steady(batches, workers=config.workers, steps=config.steps, progress=progress)
    return BenchReport(
        kind="input",
        conditions=config.conditions("uint8"),
        rate=throughput(seconds, max(1, config.workers) * config.batch),
        facts={
            "processes": config.workers,
            "files": f"{split.size} JPEG files of {PHOTO[0]} x {PHOTO[1]}, quality {JPEG_QUALITY}, "
            f"to {view.width} x {view.height}, read again and again",
        },
        versions=versions(),
    )


def steady(
    batches: Iterator[object],
    *,
    workers: int,
    steps: int,
    clock: Callable[[], float] = time.perf_counter,
    progress: Progress = unheard,
) -> list[float]:
    """Seconds of `steps` steps, no fewer than four, of one batch from each of `workers` processes.

    The two batches that every process prefetches at its start are not timed.
    """
    each = max(1, workers)
    deque(islice(batches, 2 * each), maxlen=0)
    seconds = []
    for number in range(max(LEAST_INPUT_STEPS, steps)):
        progress("steps", number, max(LEAST_INPUT_STEPS, steps))
        begun = clock()
        deque(islice(batches, each), maxlen=0)
        seconds.append(clock() - begun)
    return seconds


# --- merge ----------------------------------------------------------------------------------------


def bench_merge(config: BenchConfig, *, progress: Progress = unheard) -> BenchReport:
    """Measure merges per second, and the memory of a hundred merges beside twelve models."""
    workload = converted(config.workload(), config.precision)
    group = merge_group(workload.model, DONORS)
    plans = sample_plans(DONORS, depth_of(workload.model), count=config.steps + 1, seed=1)
    # Not timed, because the first merge includes imports and caches.
    group.merge(plans[0])
    seconds: list[float] = []
    for plan in plans[1:]:
        progress("merges", len(seconds), config.steps)
        begun = time.perf_counter()
        group.merge(plan)
        seconds.append(time.perf_counter() - begun)
    added = memory_of_merges(group, merges=MERGES)
    return BenchReport(
        kind="merge",
        conditions=config.conditions(),
        rate=throughput(seconds, 1, unit="merges"),
        facts={
            "memory": f"{MERGES} merges add {added.share:.2f} % to the {added.donors / 2**20:,.0f} "
            f"MiB of {DONORS} models: {added.tensors / 2**20:.2f} MiB of tensors, "
            f"{added.objects / MERGES / 2**10:.1f} KiB of Python objects each"
        },
        versions=versions(),
    )


class Bench(Protocol):
    """A kind of bench; `progress` is called for every repetition."""

    def __call__(self, config: BenchConfig, *, progress: Progress = ...) -> BenchReport: ...


BENCHES: Mapping[str, Bench] = {
    "train": bench_train,
    "eval": bench_eval,
    "orders": bench_orders,
    "input": bench_input,
    "merge": bench_merge,
}
