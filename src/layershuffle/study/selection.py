"""The tasks behind a table or figure of the report, for `--only table1,fig5`."""

from __future__ import annotations

from layershuffle.analysis import ANALYSES
from layershuffle.core.methods import PRESETS
from layershuffle.errors import UsageError
from layershuffle.study.plan import AnalysisSpec, MergingSpec, Task, tasks_of
from layershuffle.study.settings import StudySettings
from layershuffle.text import did_you_mean

_TABLE_1 = {"baseline", "layershuffle", "layershuffle-position", "layershuffle-predict"}
_FIGURE_1 = PRESETS.keys() - {"layershuffle-position", "layershuffle-predict"}
# The paper has a figure for one analysis; the others have their own names.
_ANALYSES = {"fig4" if name == "umap" else name: name for name in ANALYSES}
ARTEFACTS = ("table1", "fig1b", "fig1c", "table2", "fig5", "budget", *_ANALYSES)
"""The tables and figures of the paper, and the analyses."""


def tasks_for(study: StudySettings, only: str | None) -> tuple[Task, ...]:
    """The tasks behind the artefacts of a comma-separated list, with the tasks that they need.

    `None` means all tasks. Raises `UsageError` for an unknown name, and for a name without tasks in
    this study.
    """
    tasks = tasks_of(study)
    if only is None:
        return tasks
    selected: set[str] = set()
    for name in (word.strip() for word in only.split(",")):
        if name not in ARTEFACTS:
            raise UsageError(
                f"There is no table or figure {name!r}",
                hint=did_you_mean(name, ARTEFACTS, otherwise=f"one of {', '.join(ARTEFACTS)}"),
            )
        members = {task.name for task in tasks if _belongs(task, name, study=study)}
        if not members:
            raise UsageError(
                f"The study {study.name!r} plans nothing for {name}",
                hint="add what it shows to the recipe, or leave --only out",
            )
        selected |= members
    # The needed tasks are runs, which need no other tasks.
    selected |= {need for task in tasks if task.name in selected for need in task.needs}
    return tuple(task for task in tasks if task.name in selected)


def _belongs(task: Task, artefact: str, *, study: StudySettings) -> bool:
    if isinstance(task, MergingSpec):
        return artefact in ("table2", "fig5")
    if isinstance(task, AnalysisSpec):
        return _ANALYSES.get(artefact) == task.options.name
    if artefact == "budget":
        # The arms of the main part belong to the curve, too.
        arms = {arm for curve in study.budget for arm in curve.arms}
        return task.part == "budget" or task.arm in arms
    methods = {"table1": _TABLE_1, "fig1b": _FIGURE_1, "fig1c": _FIGURE_1}.get(artefact, set())
    return task.part == "main" and task.settings.method in methods
