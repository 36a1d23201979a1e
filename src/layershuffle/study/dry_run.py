"""The output of `--dry-run`: the tasks of a study, their work, and its time by finished tasks.

Nothing is opened or loaded: no model, no images, no network.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from layershuffle.study.plan import Plan
from layershuffle.study.runner import known_sizes, room, visible_gpus
from layershuffle.study.settings import StudySettings
from layershuffle.study.store import read_stored
from layershuffle.study.tasks import AnyTask, RunSpec, Stored
from layershuffle.text import clock, counted


def plan_text(study: StudySettings, plan: Plan) -> str:
    """The tasks in words: a line per arm, merging and analysis."""
    kinds = ((plan.runs, "run"), (plan.mergings, "merging"), (plan.analyses, "analysis task"))
    counts = (counted(len(tasks), noun) for tasks, noun in kinds if tasks)
    lines = [f"{study.name}: {', '.join(counts)}, on {study.data} from {study.model}"]
    arms: dict[str, list[RunSpec]] = {}
    for run in plan.runs:
        arms.setdefault(run.arm, []).append(run)
    for arm, runs in arms.items():
        first, fitted = runs[0], runs[0].settings
        length = f"{fitted.steps:,} steps" if fitted.steps else f"{first.epochs:g} x all images"
        seeds = ", ".join(str(run.settings.seed) for run in runs)
        model = "" if fitted.model == study.model else f" from {fitted.model}"
        images = "all" if first.images is None else f"{first.images:,}"
        lines.append(
            f"  {arm}: {fitted.method}{model}, seeds {seeds}; {length}, {fitted.batch_size} at a "
            f"time; scored under {first.passes} orders on {images} test images"
        )
    for merging in plan.mergings:
        merges = counted(merging.options.merges, "merge")
        lines.append(f"  {merging.name}: {merges} of {len(merging.donors)} models")
    for analysis in plan.analyses:
        lines.append(f"  {analysis.name}: {analysis.images:,} images")
    return "\n".join(lines)


def forecast_text(plan: Plan, out: Path, *, workers: int | None) -> str:
    """The work of the unfinished tasks, and its time by the finished ones in `out`."""
    stored = read_stored(out)
    sizes = known_sizes(stored.facts)
    left = [task for task in plan.tasks if not task.is_done(stored.facts)]
    # A run whose number of steps depends on the images is counted in epochs until one has finished.
    by_epochs = [run for run in plan.runs if run in left and run.steps(sizes) is None]
    steps = sum(run.steps(sizes) or 0 for run in plan.runs if run in left)
    scored = sum(task.scored(sizes) or 0 for task in left)
    unknown = sum(task.passes for task in left if task.scored(sizes) is None)
    parts = [f"{steps:,.0f} training steps"] if steps or not by_epochs else []
    if by_epochs:
        parts.append(f"{sum(run.epochs for run in by_epochs):,g} epochs of training")
    if scored:
        parts.append(f"{scored:,} images scored, once per order")
    if unknown:
        parts.append(f"{unknown:,} passes over all test images")
    total = counted(len(plan.tasks), "task")
    if not left:
        return f"All of {total} are finished"
    time = _time_text(left, plan, stored, workers=workers)
    return f"Left: {len(left)} of {total}: {', '.join(parts)}\n{time}"


def _time_text(left: Sequence[AnyTask], plan: Plan, stored: Stored, *, workers: int | None) -> str:
    sizes = known_sizes(stored.facts)
    # Seconds and work of the finished tasks of each kind; of all runs, for arms that have none.
    spent: dict[str, tuple[float, float]] = {}
    for task in plan.tasks:
        result, cost = task.read(stored), task.cost(sizes)
        if result is not None and result.seconds and cost:
            for kind in {task.kind, task.kind.partition(" ")[0]}:
                seconds, work = spent.get(kind, (0.0, 0.0))
                spent[kind] = (seconds + result.seconds, work + cost)
    times = []
    for task in left:
        seconds, work = spent.get(task.kind, spent.get(task.kind.partition(" ")[0], (0.0, 0.0)))
        cost = task.cost(sizes)
        if cost is not None and work:
            times.append(cost * seconds / work)
    if not times:
        return "Time: not known until a task has finished; then this command tells it"
    total, untimed = sum(times), len(left) - len(times)
    count = min(workers or room(visible_gpus()), len(left))
    unknown = f", and of {counted(untimed, 'task')} not known yet" if untimed else ""
    return (
        f"Time: about {clock(max(total / count, *times))} with {count} side by side "
        f"({clock(total)} of work){unknown}"
    )
