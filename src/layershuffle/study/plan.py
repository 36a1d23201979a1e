"""The plan of a study as plain data: tasks, their settings and their dependencies.

A plan is a pure function of the study's settings. `--dry-run` prints it, the runner executes it,
and `plan.json` stores the recipe. A task is a run (one training and its scores), a merging (all
merges of an arm's models) or an analysis (of one model); it is done if and only if its directory
holds `result.json`.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, TypeVar

from layershuffle._version import __version__
from layershuffle.analysis.settings import AnalysisSettings
from layershuffle.core.policies import parse_modes
from layershuffle.errors import UsageError
from layershuffle.files import refuse_foreign, remove_stale_stages, write_text
from layershuffle.merging.settings import MergingSettings
from layershuffle.results import current_method
from layershuffle.settings import EvalSettings, FitSettings
from layershuffle.study.settings import AnalysisTask, Arm, Merging, StudySettings
from layershuffle.text import one_line

PLAN_FILE = "plan.json"
RESULT_FILE = "result.json"
FAILURE_FILE = "failure.txt"
KEPT_FILE = "runs.json"
"""Replaces the directories of the runs if only the results of a study are kept."""
_SCHEMA = 1

ReportPart = Literal["main", "budget"]
Scoring = TypeVar("Scoring", EvalSettings, MergingSettings, AnalysisSettings)


@dataclass(frozen=True, kw_only=True)
class RunSpec:
    """One training and its evaluation; `part` is the part of the report that it belongs to."""

    name: str
    arm: str
    part: ReportPart
    settings: FitSettings
    evaluate: EvalSettings

    @property
    def needs(self) -> tuple[str, ...]:
        """Names of the tasks that must be done first."""
        return ()

    def directory(self, out: Path) -> Path:
        """The directory of the run."""
        return out / "runs" / self.name


@dataclass(frozen=True, kw_only=True)
class MergingSpec:
    """Merges, soups and ensembles of an arm's models."""

    name: str
    arm: str
    needs: tuple[str, ...]
    """The donors: the runs of all seeds of the arm."""
    options: Merging

    def directory(self, out: Path) -> Path:
        """The directory of its results."""
        return out / "merging" / self.arm


@dataclass(frozen=True, kw_only=True)
class AnalysisSpec:
    """One analysis of one model."""

    name: str
    arm: str
    seed: int
    needs: tuple[str, ...]
    options: AnalysisTask

    def directory(self, out: Path) -> Path:
        """The directory of its files."""
        return out / "analysis" / self.name


Task = RunSpec | MergingSpec | AnalysisSpec


def tasks_of(study: StudySettings) -> tuple[Task, ...]:
    """All tasks, each after the tasks that it needs."""
    runs = runs_of(study)
    return (*runs, *_mergings(study, runs), *_analyses(study))


def runs_of(study: StudySettings) -> tuple[RunSpec, ...]:
    """All runs, seed by seed, so an unfinished study has every arm; then the budget curve."""
    seeds = dict.fromkeys(seed for arm in study.arms for seed in study.seeds_of(arm))
    main = tuple(
        _run(study, arm, seed, part="main")
        for seed in seeds
        for arm in study.arms
        if seed in study.seeds_of(arm)
    )
    return (*main, *_budget_runs(study))


def _run(study: StudySettings, arm: Arm, seed: int, *, part: ReportPart) -> RunSpec:
    settings = study.fit_settings(arm, seed)
    return RunSpec(
        name=run_name(arm.label, seed),
        arm=arm.label,
        part=part,
        settings=settings,
        evaluate=_as_trained(study.evaluate_settings(arm), settings),
    )


def _as_trained(scoring: Scoring, settings: FitSettings) -> Scoring:
    """`scoring` with the data settings of the training, so images are prepared the same way."""
    names = {"resize", "skip_corrupt"} & type(scoring).model_fields.keys()
    return scoring.model_copy(update={name: getattr(settings, name) for name in names})


def run_name(label: str, seed: int) -> str:
    """The name of a run."""
    return f"{label}-seed{seed}"


def _budget_runs(study: StudySettings) -> tuple[RunSpec, ...]:
    return tuple(
        _run(study, arm, seed, part="budget")
        for curve in study.budget
        for steps in curve.steps
        for seed in curve.seeds or study.seeds
        for arm in study.curve_arms(curve, steps)
    )


def _mergings(study: StudySettings, runs: Sequence[RunSpec]) -> list[MergingSpec]:
    return [
        MergingSpec(
            name=f"merging-{label}",
            arm=label,
            needs=tuple(run.name for run in runs if run.arm == label),
            options=merging.model_copy(
                update={"options": _as_trained(merging.options, _settings(study, label))}
            ),
        )
        for merging in study.merging
        for label in merging.arms
    ]


def _settings(study: StudySettings, label: str) -> FitSettings:
    """The settings of an arm; its runs differ only in the seed."""
    arm = study.arm(label)
    return study.fit_settings(arm, study.seeds_of(arm)[0])


def _analyses(study: StudySettings) -> list[AnalysisSpec]:
    return [
        AnalysisSpec(
            name=f"{options.name}-{run_name(options.arm, seed)}",
            arm=options.arm,
            seed=seed,
            needs=(run_name(options.arm, seed),),
            options=options.model_copy(
                update={"options": _as_trained(options.options, _settings(study, options.arm))}
            ),
        )
        for options in study.analyses
        for seed in options.seeds or study.seeds_of(study.arm(options.arm))[:1]
    ]


def is_finished(task: Task, out: Path) -> bool:
    """Whether the task's result exists, which is written last.

    A merging counts as unfinished if its arm has got more donors since.
    """
    path = task.directory(out) / RESULT_FILE
    if not path.is_file():
        return False
    # A merging is repeated if its arm has more seeds, hence more donors.
    if isinstance(task, MergingSpec):
        donors: list[str] = json.loads(path.read_text(encoding="utf-8")).get("donors", [])
        return donors == list(task.needs)
    return True


def write_plan(study: StudySettings, out: Path) -> None:
    """Write the plan into `out`. Raises the errors of `check_plan`."""
    check_plan(study, out)
    plan = {
        "schema": _SCHEMA,
        "code_version": __version__,
        "recipe": study.model_dump(mode="json"),
    }
    write_text(out / PLAN_FILE, json.dumps(plan, indent=2))
    remove_stale_stages(out)


def check_plan(study: StudySettings, out: Path) -> None:
    """Raises `UsageError` if the study contradicts finished tasks in `out`, or `out` is foreign.

    A study may grow by arms, seeds, lengths and analyses, but finished tasks must not change.
    """
    # Otherwise all of its runs would count as unfinished and be trained again.
    if (out / KEPT_FILE).exists():
        raise UsageError(
            "This directory holds the kept results of a study, without its models",
            place=out,
            hint="give another --out",
        )
    refuse_foreign(out, mark=PLAN_FILE, kind="study")
    if (out / PLAN_FILE).is_file():
        _check_unchanged(read_study_plan(out), study, out)


def _check_unchanged(old: StudySettings, new: StudySettings, out: Path) -> None:
    planned = {task.name: task for task in tasks_of(new)}
    # Unfinished tasks may change, because they have no results.
    done = [task for task in tasks_of(old) if is_finished(task, out)]
    changed = [task.name for task in done if not same_task(task, planned.get(task.name))]
    if old.name != new.name or changed:
        details = f"finished already: {', '.join(changed[:3])}" if changed else f"of {old.name!r}"
        # For the message, because names of settings are clearer than names of tasks.
        differing = [n for n in type(old).model_fields if getattr(old, n) != getattr(new, n)]
        raise UsageError(
            f"This directory holds a study with other settings ({', '.join(differing)}), {details}",
            place=out / PLAN_FILE,
            hint="give the same recipe to continue, or another --out to start again",
        )


def same_task(done: Task, planned: Task | None) -> bool:
    """Whether a finished task is unchanged in the new plan; a merging may get more donors."""
    if isinstance(done, MergingSpec) and isinstance(planned, MergingSpec):
        # Not all of `options`, whose list of arms may grow without a change to this arm.
        return set(done.needs) <= set(planned.needs) and done.options.options == (
            planned.options.options
        )
    if isinstance(done, RunSpec) and isinstance(planned, RunSpec):
        modes = done.evaluate.modes, planned.evaluate.modes
        if parse_modes(modes[0]) == parse_modes(modes[1]):  # "kept:1-2" and "kept:2,kept:1"
            evaluate = done.evaluate.model_copy(update={"modes": modes[1]})
            return replace(done, evaluate=evaluate) == planned
    return done == planned


def _current(arm: dict[str, Any]) -> dict[str, Any]:
    """An arm of an older plan in today's words; it keeps its label."""
    method, fit = current_method(arm["method"], arm.get("fit", {}))
    label = arm.get("name") or (arm["method"] if method != arm["method"] else None)
    return {**arm, "method": method, "name": label, "fit": fit}


def read_study_plan(out: Path) -> StudySettings:
    """The study in `out`. Raises `UsageError` if there is none or it cannot be read.

    Older versions also stored the tasks, which follow from the recipe; they are not read.
    """
    path = out / PLAN_FILE
    hint = "layershuffle reproduce RECIPE --out DIR makes one"
    try:
        stored = json.loads(path.read_text(encoding="utf-8"))
        schema = stored["schema"]
        if schema == _SCHEMA:
            recipe = dict(stored["recipe"])
            recipe["arms"] = [_current(arm) for arm in recipe["arms"]]
            _, recipe["fit"] = current_method("", recipe.get("fit", {}))
            return StudySettings(**recipe)
    except FileNotFoundError as error:
        cause = f"There is no readable study here: no {PLAN_FILE}"
        raise UsageError(cause, place=out, hint=hint) from error
    except (OSError, ValueError, KeyError, TypeError) as error:
        cause = f"There is no readable study here ({type(error).__name__}: {one_line(error)})"
        raise UsageError(cause, place=path, hint=hint) from error
    raise UsageError(
        f"The plan has schema {schema!r}, this version reads {_SCHEMA}",
        place=path,
        hint="use the version of layershuffle that wrote it",
    )
