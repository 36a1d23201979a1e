"""The output of `--dry-run`: the tasks of a study in words.

Nothing is opened or loaded: no model, no images, no network.
"""

from __future__ import annotations

from layershuffle.ground.text import counted
from layershuffle.study.plan import Plan
from layershuffle.study.settings import StudySettings
from layershuffle.study.tasks import RunSpec


def plan_text(study: StudySettings, plan: Plan) -> str:
    """The tasks in words: how many of each kind, then a line per arm, merging and analysis."""
    kinds = ((plan.runs, "run"), (plan.mergings, "merging"), (plan.analyses, "analysis task"))
    counts = []
    for tasks, noun in kinds:
        if tasks:
            counts.append(counted(len(tasks), noun))
    lines = [f"{study.name}: {', '.join(counts)}, on {study.data} from {study.model}"]
    runs_of_arms: dict[str, list[RunSpec]] = {}
    for run in plan.runs:
        runs_of_arms.setdefault(run.arm, []).append(run)
    for arm, runs in runs_of_arms.items():
        lines.append(f"  {arm}: {_arm_text(study, runs)}")
    for merging in plan.mergings:
        merges = counted(merging.options.merges, "merge")
        lines.append(f"  {merging.name}: {merges} of {len(merging.donors)} models")
    for analysis in plan.analyses:
        lines.append(f"  {analysis.name}: {analysis.images:,} images")
    return "\n".join(lines)


def _arm_text(study: StudySettings, runs: list[RunSpec]) -> str:
    """What the runs of one arm do; they differ in their seed alone."""
    first = runs[0]
    settings = first.settings
    method = settings.method
    if settings.model != study.model:
        method += f" from {settings.model}"
    seeds = ", ".join(str(run.settings.seed) for run in runs)
    if settings.steps is None:
        length = f"{first.epochs:g} x all images"
    else:
        length = f"{settings.steps:,} steps"
    images = "all" if first.images is None else f"{first.images:,}"
    return (
        f"{method}, seeds {seeds}; {length}, {settings.batch_size} at a time; "
        f"scored under {first.passes} orders on {images} test images"
    )
