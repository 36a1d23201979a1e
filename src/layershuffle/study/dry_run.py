"""The output of `--dry-run`: the tasks, and a forecast of their work, time and disk space."""

from __future__ import annotations

import math
import os
import re
import shutil
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from layershuffle.core.policies import parse_modes
from layershuffle.settings import DEFAULT_EPOCHS, EvalSettings, FitSettings
from layershuffle.study.plan import AnalysisSpec, MergingSpec, RunSpec, Task, is_finished
from layershuffle.study.pool import gpu_count
from layershuffle.study.settings import StudySettings
from layershuffle.study.tables import duration
from layershuffle.study.tasks import AnalysisResult, RunResult, read_outcome
from layershuffle.text import counted

_START_SECONDS = 8.0  # a process imports torch and transformers and reads its data
# Time of an analysis in scoring passes over its images: 26 to 48 measured, 128 for UMAP.
_ANALYSIS_PASSES = 40
# Weights and Adam's two moments; a new checkpoint is complete before the old one is deleted.
_CHECKPOINT_COPIES = 2 * 3
# By kind of data or name of the directory: title, training images, test images, classes.
_PUBLISHED = {
    "cifar100": ("CIFAR-100", 50_000, 10_000, 100),
    "imagenet": ("ImageNet-1k", 1_281_167, 50_000, 1_000),
}


@dataclass(frozen=True, kw_only=True)
class StudySubject:
    """The facts on model and data that the work depends on.

    The numbers of images are `None` if they are unknown, as for a stream. `notes` list what was
    estimated, and from what.
    """

    depth: int
    parameter_bytes: int
    train_images: int | None
    test_images: int | None
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Work:
    """Amounts of work that can be counted in advance.

    `steps`: optimiser steps; `trained`: images in all steps, each counted by the share of the
    blocks that it runs through; `block_runs`: runs of one block on one image in scoring.
    """

    steps: float = 0.0
    trained: float = 0.0
    block_runs: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Forecast:
    """A forecast for the unfinished tasks.

    `seconds` of work in all, from the times of `measured` finished runs and of finished analyses:
    `None` if no run is finished.
    `work` is `None` where the number of images is not known. `notes`: what was estimated.
    """

    work: Work | None
    seconds: float | None
    measured: int
    workers: int
    bytes_left: int
    bytes_peak: int
    notes: tuple[str, ...]


def plan_text(
    study: StudySettings, tasks: Sequence[Task], *, subjects: Mapping[str, StudySubject]
) -> str:
    """The tasks as text: a line per arm, merging and analysis. `subjects`: by task name."""
    runs = [task for task in tasks if isinstance(task, RunSpec)]
    mergings = sum(isinstance(task, MergingSpec) for task in tasks)
    analyses = len(tasks) - len(runs) - mergings
    parts = [f"{study.name}: {counted(len(runs), 'run')}"]
    if mergings:
        parts.append(counted(mergings, "merging"))
    if analyses:
        parts.append("1 analysis" if analyses == 1 else f"{analyses} analyses")
    lines = [f"{', '.join(parts)}, on {study.data} from {study.model}"]
    for arm in dict.fromkeys(run.arm for run in runs):
        of_arm = [run for run in runs if run.arm == arm]
        fitted, scored = of_arm[0].settings, of_arm[0].evaluate
        model = "" if fitted.model == study.model else f" from {fitted.model}"
        orders = orders_of(scored, fitted.kept or subjects[of_arm[0].name].depth)
        length = f"{fitted.steps or 0:,} steps"
        if fitted.steps is None:
            epochs = fitted.epochs or DEFAULT_EPOCHS
            length = "1 epoch" if epochs == 1 else f"{epochs:g} epochs"
        seeds = [str(run.settings.seed) for run in of_arm]
        images = "all" if scored.max_images is None else f"{scored.max_images:,}"
        lines.append(
            f"  {arm}: {fitted.method}{model}, seed{'s' if len(seeds) > 1 else ''} "
            f"{', '.join(seeds)}; {length} of "
            f"{fitted.batch_size} images at {fitted.lr:g}; scored under {orders} "
            f"orders, one per {scored.draw}, on {images} test images"
        )
    for task in tasks:
        if isinstance(task, MergingSpec):
            merges = task.options.options.merges
            lines.append(f"  {task.name}: {counted(merges, 'merge')} of {len(task.needs)} models")
        elif isinstance(task, AnalysisSpec):
            lines.append(f"  {task.name}: {task.options.options.max_images:,} images")
    return "\n".join(lines)


def open_subjects(tasks: Sequence[Task]) -> dict[str, StudySubject]:
    """The subject of every task, by the task's name. Raises as `open_subject`."""
    # Most arms share model and data, so each pair is opened once.
    opened: dict[tuple[object, ...], StudySubject] = {}
    runs = {task.name: task for task in tasks if isinstance(task, RunSpec)}
    subjects = {}
    for task in tasks:
        fitted = runs[task.name if isinstance(task, RunSpec) else task.needs[0]].settings
        split = (fitted.holdout, fitted.paper_protocol, fitted.streaming)
        key = (fitted.model, fitted.data, *split)
        if key not in opened:
            opened[key] = open_subject(fitted)
        subjects[task.name] = opened[key]
    return subjects


def forecast(
    study: StudySettings,
    tasks: Sequence[Task],
    *,
    subjects: Mapping[str, StudySubject],
    out: Path,
    workers: int | None,
) -> Forecast:
    """Count the work that is not done in `out`; its time is estimated from the finished runs.

    The block runs of an analysis take as long as those of finished ones of its kind; before that,
    as those of scoring. `subjects`: of every task. Nothing is trained: a probe of a few batches
    would say little of compiled blocks, of the data's decoding, or of other work on the machine,
    all of which a finished run has met.
    """
    runs = [task for task in tasks if isinstance(task, RunSpec)]
    left = [task for task in tasks if not is_finished(task, out)]
    works = [work_of(task, subjects[task.name]) for task in left]
    counted = [work for work in works if work is not None]
    whole = len(counted) == len(works)
    trained = executed = train_seconds = eval_seconds = 0.0
    results = [
        (run, result)
        for run in runs
        if (result := read_outcome(run, RunResult, out=out).result) is not None
    ]
    for run, result in results:
        done = work_of(run, subjects[run.name]) or Work()
        trained, executed = trained + done.trained, executed + done.block_runs
        train_seconds += result.train_seconds
        eval_seconds += result.eval_seconds
    # Two rates, pooled over the runs: training by images and blocks, scoring by block runs.
    seconds = None
    if whole and trained and executed:
        rate = eval_seconds / executed
        rates = _analysis_rates(tasks, subjects=subjects, out=out)
        seconds = sum(
            _START_SECONDS
            + work.trained * train_seconds / trained
            + work.block_runs
            * (rates.get(task.options.name, rate) if isinstance(task, AnalysisSpec) else rate)
            for task, work in zip(left, counted, strict=True)
        )
    # As in `local_pool`: the number of workers that would run.
    count = workers or study.workers or gpu_count() or len(os.sched_getaffinity(0))
    sizes = [subjects[run.name].parameter_bytes for run in runs]
    return Forecast(
        work=Work(
            steps=sum(task.steps for task in counted),
            trained=sum(task.trained for task in counted),
            block_runs=sum(task.block_runs for task in counted),
        )
        if whole
        else None,
        seconds=seconds,
        measured=len(results),
        workers=count,
        bytes_left=sum(sizes),
        # Every run keeps its best model, but only those that run side by side have checkpoints.
        bytes_peak=sum(sizes) + count * _CHECKPOINT_COPIES * max(sizes, default=0),
        notes=tuple(dict.fromkeys(note for s in subjects.values() for note in s.notes)),
    )


def _analysis_rates(
    tasks: Sequence[Task], *, subjects: Mapping[str, StudySubject], out: Path
) -> dict[str, float]:
    """Seconds per block run of the analyses that are finished, by their names."""
    executed, seconds = defaultdict[str, float](float), defaultdict[str, float](float)
    for task in tasks:
        if isinstance(task, AnalysisSpec):
            result = read_outcome(task, AnalysisResult, out=out).result
            work = work_of(task, subjects[task.name])
            if result is not None and result.seconds is not None and work is not None:
                executed[task.options.name] += work.block_runs
                seconds[task.options.name] += result.seconds
    return {name: seconds[name] / executed[name] for name in executed}


def open_subject(fitted: FitSettings) -> StudySubject:
    """The sizes of a run's model and data, without weights and without the network.

    What is not on this machine is estimated, and `notes` say so: a model of the hub by the
    architecture of its name, published data by their published sizes. Raises the errors of a spec
    that is wrong or names no known architecture.
    """
    from layershuffle.core.stack import depth_of
    from layershuffle.data import DataOptions, open_data
    from layershuffle.errors import DataError
    from layershuffle.models import image_view, load, num_classes_of, replace_head

    # Built, because only the host library knows the sizes of a spec with options.
    spec, notes = architecture(fitted.model)
    model = load(spec, seed=fitted.seed)
    holdout = None if fitted.paper_protocol else fitted.holdout
    options = DataOptions(holdout=holdout, streaming=fitted.streaming)
    train: int | None
    test: int | None
    classes: int | None
    try:
        data = open_data(fitted.data, image_view(model), options=options)
        train, test = data.splits["train"].size, data.splits["test"].size
        classes = len(data.classes)
    except DataError as error:
        train, test, classes, counted = published_sizes(fitted.data, holdout)
        notes = (*notes, f"{fitted.data} cannot be opened: {error.cause}; {counted}")
    if classes is not None and num_classes_of(model) != classes:  # as training gives it a new head
        replace_head(model, classes, seed=fitted.seed)
    return StudySubject(
        depth=depth_of(model),
        parameter_bytes=sum(p.numel() * p.element_size() for p in model.parameters()),
        train_images=train,
        test_images=test,
        notes=notes,
    )


def architecture(model: str) -> tuple[str, tuple[str, ...]]:
    """A spec of an equally large model that needs no weights and no network, and notes on it."""
    from huggingface_hub import try_to_load_from_cache
    from timm import is_model

    from layershuffle.bundled import recipe_of_model
    from layershuffle.models.spec import parse_spec

    spec = parse_spec(model)
    recipe = None if Path(spec.place).exists() else recipe_of_model(Path(spec.place))
    if spec.scheme == "dir" and recipe is not None:
        return str(recipe["model"]), (
            f"{model} is not on this machine: depth and size are those of its recipe",
        )
    if spec.scheme not in ("timm", "hf", "torchvision"):
        return model, ()
    place, _, query = model.partition("?")
    pairs = [pair for pair in query.split("&") if pair.partition("=")[0] in spec.settings]
    named = [pair for pair in pairs if pair.partition("=")[0] not in ("pretrained", "weights")]
    plain = f"{place}?{'&'.join([*named, 'pretrained=false'])}"
    # Any other text is the path of a directory, which may not exist; opening it shows that.
    named_on_hub = re.fullmatch(r"\w[\w.-]*(/\w[\w.-]*)?", spec.place) is not None
    if spec.scheme != "hf" or not named_on_hub or Path(spec.place).is_dir():
        return plain, ()
    config = try_to_load_from_cache(
        spec.place, "config.json", revision=spec.settings.get("revision")
    )
    if isinstance(config, str):
        return f"hf:{Path(config).parent}?pretrained=false", ()
    # Most names of the hub are those of timm with other hyphens: deit-base-patch16-224.
    name = spec.place.rpartition("/")[2].replace("-", "_")
    if not is_model(name):
        return plain, ()
    return f"timm:{name}?pretrained=false", (
        f"{model} is not on this machine: depth and size are those of timm's {name}",
    )


def published_sizes(
    data: str, holdout: float | None
) -> tuple[int | None, int | None, int | None, str]:
    """(training images, test images, classes, note) of data that are not on this machine."""
    from layershuffle.data.loading import parse_spec

    scheme, place, _ = parse_spec(data)
    name = scheme if scheme in _PUBLISHED else Path(place).name
    if name not in _PUBLISHED:
        return None, None, None, "the work is not known"
    title, train, test, classes = _PUBLISHED[name]
    left = train - round((holdout or 0) * train)
    return left, test, classes, f"counted as {title}, {train:,} images and {test:,} test images"


def work_of(task: Task, subject: StudySubject) -> Work | None:
    """The work of one task; `None` if it depends on an unknown number of images."""

    def scored(most: int | None) -> int | None:
        return min((count for count in (subject.test_images, most) if count), default=None)

    if isinstance(task, RunSpec):
        fitted, depth = task.settings, task.settings.kept or subject.depth
        images = scored(task.evaluate.max_images)
        if images is None or (fitted.steps is None and subject.train_images is None):
            return None
        steps = float(fitted.steps or 0)
        if fitted.steps is None and subject.train_images is not None:
            # The last batch of an epoch may be smaller, but is a step too.
            batches = math.ceil(subject.train_images / fitted.batch_size)
            steps = (fitted.epochs or DEFAULT_EPOCHS) * batches
        return Work(
            steps=steps,
            # A truncated model trains a part of the blocks; stem and head are small in comparison.
            trained=steps * fitted.batch_size * depth / subject.depth,
            block_runs=block_runs(task.evaluate, depth) * images,
        )
    if isinstance(task, MergingSpec):
        options = task.options.options
        images = scored(options.max_images)
        if images is None:
            return None
        return Work(block_runs=passes_of(task) * subject.depth * images)
    images = scored(task.options.options.max_images) or 0
    return Work(block_runs=passes_of(task) * subject.depth * images)


def passes_of(task: MergingSpec | AnalysisSpec) -> int:
    """How often an image runs through the model, or what takes as long as so many passes."""
    if isinstance(task, AnalysisSpec):
        return _ANALYSIS_PASSES
    options = task.options.options
    return options.merges * len(options.variants) + len(task.needs) * 4 * options.num_orders


def orders_of(settings: EvalSettings, depth: int) -> int:
    """The number of orders under which a model with `depth` blocks is scored."""
    modes = parse_modes(settings.modes)
    return sum(mode.draws(settings.num_orders, depth=depth) for mode in modes)


def block_runs(settings: EvalSettings, depth: int) -> int:
    """Block runs per image for all orders, shared prefixes counted once."""
    from layershuffle.core.forwards import block_runs

    orders = [
        mode.policy().draw(depth, seed=settings.seed, step=index)
        for mode in parse_modes(settings.modes)
        for index in range(mode.draws(settings.num_orders, depth=depth))
    ]
    return block_runs(orders)


def forecast_text(forecast: Forecast, out: Path) -> str:
    """The forecast as text."""
    # `out` may not exist yet; its nearest parent lies on the same disk.
    place = next(path for path in (out, *out.absolute().parents) if path.exists())
    free = shutil.disk_usage(place).free
    time = "Time: not known until a run has finished; then this command tells it"
    if forecast.seconds is not None:
        time = (
            f"Time: about {duration(forecast.seconds / forecast.workers)} with "
            f"{forecast.workers} side by side ({duration(forecast.seconds)} of work), from "
            f"{counted(forecast.measured, 'finished run')}"
        )
    work = "Work: not known, because the number of images is not"
    if forecast.work is not None:
        # Three digits, written without an exponent.
        block_runs = float(f"{forecast.work.block_runs:.3g}")
        work = (
            f"Work: {forecast.work.steps:,.0f} training steps, and "
            f"{block_runs:,.0f} runs of a block on an image in scoring"
        )
    return "\n".join(
        [
            *(f"Estimated: {note}" for note in forecast.notes),
            work,
            time,
            f"Disk: {_size(forecast.bytes_left)} of models at the end, "
            f"{_size(forecast.bytes_peak)} at most; {_size(free)} free",
        ]
    )


def _size(count: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} TB"
