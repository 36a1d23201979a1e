"""What `--dry-run` prints: the tasks, and what they will take in time and disk."""

from __future__ import annotations

import math
import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from layershuffle.machine import processor
from layershuffle.merging.settings import MergingSettings
from layershuffle.modes import parse_modes
from layershuffle.settings import DEFAULT_EPOCHS, EvalSettings, FitSettings
from layershuffle.study.facts import duration
from layershuffle.study.plan import AnalysisSpec, MergingSpec, RunSpec, Task, is_finished
from layershuffle.study.pool import gpu_count
from layershuffle.study.settings import StudySettings
from layershuffle.study.speed import Speed

_START_SECONDS = 8.0  # a process imports torch and transformers and reads its data
_PIECE_PASSES = 250  # block runs per block and image that an analysis takes, in round numbers
# Weights and Adam's two moments; a new checkpoint is whole before the old one goes.
_CHECKPOINT_COPIES = 2 * 3


@dataclass(frozen=True, kw_only=True)
class Forecast:
    """Seconds of work in all, workers, bytes at the end and at most, and the words to say it."""

    seconds: float
    workers: int
    bytes_left: int
    bytes_peak: int
    probe: str

    @property
    def wall(self) -> float:
        """Seconds until the study is done."""
        return self.seconds / self.workers


def plan_text(study: StudySettings, tasks: Sequence[Task]) -> str:
    """The tasks in words: a line per arm, merging and analysis."""
    runs = [task for task in tasks if isinstance(task, RunSpec)]
    lines = [
        f"{study.name}: {len(runs)} runs, {len(tasks) - len(runs)} mergings and analyses, on "
        f"{study.data} from {study.model}"
    ]
    for arm in dict.fromkeys(run.arm for run in runs):
        lines.append(_arm_text(study, [run for run in runs if run.arm == arm]))
    for task in tasks:
        if isinstance(task, MergingSpec):
            merges = task.options.options.merges
            lines.append(f"  {task.name}: {merges} merges of {len(task.needs)} models")
        elif isinstance(task, AnalysisSpec):
            lines.append(f"  {task.name}: {task.options.options.images} images")
    return "\n".join(lines)


def _arm_text(study: StudySettings, runs: Sequence[RunSpec]) -> str:
    fitted, scored = runs[0].settings, runs[0].evaluate
    model = "" if fitted.model == study.model else f" from {fitted.model}"
    return (
        f"  {runs[0].arm}: {fitted.method}{model}, seeds "
        f"{', '.join(str(run.settings.seed) for run in runs)}; {_length(fitted)} of "
        f"{fitted.batch_size} images at {fitted.lr:g}; scored under {orders_of(scored)} orders, "
        f"one per {scored.draw}, on {scored.max_images or 'all'} test images"
    )


def forecast(
    study: StudySettings, tasks: Sequence[Task], *, out: Path, workers: int | None
) -> Forecast:
    """Measure a short probe per model, batch and precision; add up what is not done in `out`."""
    from layershuffle.study.probe import measure

    gpus = gpu_count()
    count = workers or study.workers or gpus or len(os.sched_getaffinity(0))
    speeds: dict[tuple[str, str, int, str, bool], Speed] = {}
    runs = {task.name: task for task in tasks if isinstance(task, RunSpec)}

    def speed(task: Task) -> Speed:
        run = task if isinstance(task, RunSpec) else runs[task.needs[0]]
        fitted, scored = run.settings, _scoring_of(task, run)
        key = (fitted.model, fitted.data, fitted.batch_size, scored.precision, scored.compile)
        if key not in speeds:
            known = [one.step for other, one in speeds.items() if other[:3] == key[:3]]
            step = known[0] if known else None
            speeds[key] = measure(fitted, scored, threads=None if gpus else 1, step=step)
        return speeds[key]

    left = [task for task in tasks if not is_finished(task, out)]
    seconds = sum(task_seconds(task, speed(task)) for task in left)
    sizes = [speed(run).parameter_bytes for run in runs.values()]
    said = "; ".join(
        f"{one.step:.3g} s per step of {batch} images with {model}, {1e6 * one.image_block:.3g} us "
        f"per image and block in evaluation in {precision}{', compiled' if compiled else ''}"
        for (model, _, batch, precision, compiled), one in speeds.items()
    )
    return Forecast(
        seconds=seconds,
        workers=count,
        bytes_left=sum(sizes),
        bytes_peak=sum(sizes) + count * _CHECKPOINT_COPIES * max(sizes, default=0),
        probe=f"{said} ({processor()}, noise images, one process alone, compiling not counted)",
    )


def _scoring_of(task: Task, run: RunSpec) -> EvalSettings | MergingSettings:
    if isinstance(task, MergingSpec):
        return task.options.options
    if isinstance(task, AnalysisSpec):  # it looks into the blocks in fp32
        return run.evaluate.model_copy(update={"precision": "fp32", "compile": False})
    return run.evaluate


def task_seconds(task: Task, speed: Speed) -> float:
    """Seconds of one task in one process, from the probe."""
    block = speed.image_block * speed.test_images
    if isinstance(task, RunSpec):
        share = (task.settings.kept or speed.depth) / speed.depth
        steps = _steps(task.settings, speed.train_images)
        executions = block_runs(task.evaluate, task.settings.kept or speed.depth)
        return _START_SECONDS + steps * speed.step * share + executions * block
    if isinstance(task, MergingSpec):
        options = task.options.options
        passes = options.merges * len(options.ends) + len(task.needs) * 4 * options.num_orders
        return _START_SECONDS + passes * speed.depth * block
    images = task.options.options.images
    return _START_SECONDS + _PIECE_PASSES * speed.depth * speed.image_block * images


def _steps(settings: FitSettings, images: int | None) -> float:
    if settings.steps is not None or images is None:
        return settings.steps or 0
    return (settings.epochs or DEFAULT_EPOCHS) * math.ceil(images / settings.batch_size)


def orders_of(settings: EvalSettings) -> int:
    """How many orders a run is scored under."""
    return sum(mode.draws(settings.num_orders) for mode in parse_modes(settings.modes))


def block_runs(settings: EvalSettings, depth: int) -> int:
    """Block runs per image for all orders, shared prefixes counted once."""
    from layershuffle.trie import block_executions, build_trie

    orders = [
        mode.policy().draw(depth, seed=settings.seed, step=index)
        for mode in parse_modes(settings.modes)
        for index in range(mode.draws(settings.num_orders))
    ]
    return block_executions(build_trie(orders))


def forecast_text(one: Forecast, out: Path) -> str:
    """The forecast in words."""
    place = next(path for path in (out, *out.absolute().parents) if path.exists())
    free = shutil.disk_usage(place).free
    return "\n".join(
        [
            f"Time: about {duration(one.wall)} with {one.workers} side by side "
            f"({duration(one.seconds)} of work)",
            f"  probe: {one.probe}",
            f"Disk: {_size(one.bytes_left)} of models at the end, {_size(one.bytes_peak)} at most; "
            f"{_size(free)} free",
        ]
    )


def _size(count: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} TB"


def _length(settings: FitSettings) -> str:
    if settings.steps is not None:
        return f"{settings.steps} steps"
    return f"{settings.epochs or DEFAULT_EPOCHS:g} epochs"
