"""Which tasks a table or figure of the report is made of: `--only table1,fig5`."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from difflib import get_close_matches

from layershuffle.analysis import ANALYSES
from layershuffle.errors import UsageError
from layershuffle.methods import METHODS
from layershuffle.study.plan import AnalysisSpec, MergingSpec, RunSpec, Task, tasks_of
from layershuffle.study.settings import StudySettings

_TABLE_1 = {"baseline", "layershuffle", "layershuffle-position", "layershuffle-predict"}
_FIGURE_1 = METHODS.keys() - {"layershuffle-position", "layershuffle-predict"}

Filter = Callable[[Task, StudySettings], bool]


def _main_runs(methods: set[str]) -> Filter:
    return lambda task, _: (
        isinstance(task, RunSpec) and task.part == "main" and task.settings.method in methods
    )


def _is_merging(task: Task, _: StudySettings) -> bool:
    return isinstance(task, MergingSpec)


def _in_budget(task: Task, study: StudySettings) -> bool:
    if study.budget is None or not isinstance(task, RunSpec):
        return False
    return task.part == "budget" or task.arm in study.budget.arms


def _analysis(name: str) -> Filter:
    return lambda task, _: isinstance(task, AnalysisSpec) and task.options.name == name


ARTEFACTS: dict[str, Filter] = {
    "table1": _main_runs(_TABLE_1),
    "fig1b": _main_runs(_FIGURE_1),
    "fig1c": _main_runs(_FIGURE_1),
    "fig4": _analysis("umap"),
    "table2": _is_merging,
    "fig5": _is_merging,
    "budget": _in_budget,
    **{name: _analysis(name) for name in ANALYSES if name != "umap"},
}


def tasks_for(study: StudySettings, only: str | None) -> tuple[Task, ...]:
    """The tasks behind the artefacts of a comma-separated list, with all that they need.

    `None` means everything. Raises `UsageError` for a name that is none, and for one that this
    study has nothing for.
    """
    tasks = tasks_of(study)
    if only is None:
        return tasks
    wanted: set[str] = set()
    for name in (word.strip() for word in only.split(",")):
        found = {task.name for task in tasks if _artefact(name)(task, study)}
        if not found:
            raise UsageError(
                f"The study {study.name!r} plans nothing for {name}",
                hint="add it to the recipe (docs/commands/reproduce.md), or leave --only out",
            )
        wanted |= found
    return tuple(task for task in tasks if task.name in _with_needs(wanted, tasks))


def _artefact(name: str) -> Filter:
    if name not in ARTEFACTS:
        near = get_close_matches(name, ARTEFACTS, n=1)
        raise UsageError(
            f"There is no table or figure {name!r}",
            hint=f"did you mean {near[0]}?" if near else f"one of {', '.join(ARTEFACTS)}",
        )
    return ARTEFACTS[name]


def _with_needs(names: set[str], tasks: Iterable[Task]) -> set[str]:
    return names | {need for task in tasks if task.name in names for need in task.needs}
