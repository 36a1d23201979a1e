"""The tasks behind the paper's tables and figures, for `--only table1,fig5`."""

from __future__ import annotations

from layershuffle.analysis import ANALYSES
from layershuffle.core.methods import PRESETS
from layershuffle.errors import UsageError
from layershuffle.study.plan import Plan, plan_of
from layershuffle.study.settings import StudySettings
from layershuffle.text import did_you_mean

_TABLE_1 = {"baseline", "layershuffle", "layershuffle-position", "layershuffle-predict"}
_FIGURE_1 = PRESETS.keys() - {"layershuffle-position", "layershuffle-predict"}


def artefacts_of(plan: Plan) -> dict[str, set[str]]:
    """The names of the tasks behind every table, figure and analysis."""
    figure1 = {run.name for run in plan.runs if run.settings.method in _FIGURE_1}
    merged = {task.name for task in plan.mergings}
    return {
        "table1": {run.name for run in plan.runs if run.settings.method in _TABLE_1},
        "fig1b": figure1,
        "fig1c": figure1,
        "table2": merged,
        "fig5": merged,
        # The paper has a figure for one analysis; the others have their own names.
        **{
            "fig4" if name == "umap" else name: {
                task.name for task in plan.analyses if task.kind == name
            }
            for name in ANALYSES
        },
    }


def select(study: StudySettings, only: str | None) -> Plan:
    """The tasks behind a comma-separated list of artefacts, with those that they need.

    `None` means all tasks. Raises `UsageError` for an unknown name, and for a name without tasks in
    this study.
    """
    plan = plan_of(study)
    if only is None:
        return plan
    artefacts, selected = artefacts_of(plan), set[str]()
    for name in map(str.strip, only.split(",")):
        if name not in artefacts:
            raise UsageError(
                f"There is no table or figure {name!r}",
                hint=did_you_mean(name, artefacts, otherwise=f"one of {', '.join(artefacts)}"),
            )
        if not artefacts[name]:
            raise UsageError(
                f"The study {study.name!r} plans nothing for {name}",
                hint="add what it shows to the recipe, or leave --only out",
            )
        selected |= artefacts[name]
    # The needed tasks are runs, which need no other tasks.
    selected |= {need for task in plan.tasks if task.name in selected for need in task.needs}
    return Plan(
        runs=tuple(run for run in plan.runs if run.name in selected),
        mergings=tuple(task for task in plan.mergings if task.name in selected),
        analyses=tuple(task for task in plan.analyses if task.name in selected),
    )
