"""The plan of a study: its tasks, which follow from its recipe alone, and plan.json.

A study may grow by arms, seeds, lengths and analyses, but finished tasks must not change.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

from layershuffle._version import __version__
from layershuffle.analysis import find_analysis
from layershuffle.analysis.settings import AnalysisSettings
from layershuffle.errors import SettingsError, UsageError
from layershuffle.files import refuse_foreign, write_text
from layershuffle.merging.settings import MergingSettings
from layershuffle.settings import EvalSettings, FitSettings
from layershuffle.study.settings import AnalysisTask, Arm, Merging, StudySettings
from layershuffle.study.tasks import (
    AnalysisSpec,
    AnyTask,
    MergingSpec,
    RunSpec,
    orders_of,
)
from layershuffle.text import one_line

PLAN_FILE = "plan.json"
_SCHEMA = 1
ANALYSIS_PASSES = 40  # measured 26 to 48, and 128 for UMAP
ReportPart = Literal["main", "budget"]
Key = TypeVar("Key", str, int)
Choice = TypeVar("Choice")
Scoring = TypeVar("Scoring", EvalSettings, MergingSettings, AnalysisSettings)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """All tasks of a study."""

    runs: tuple[RunSpec, ...]
    mergings: tuple[MergingSpec, ...]
    analyses: tuple[AnalysisSpec, ...]

    @property
    def tasks(self) -> tuple[AnyTask, ...]:
        """All of them, each after those that it needs."""
        return (*self.runs, *self.mergings, *self.analyses)


def plan_of(study: StudySettings) -> Plan:
    """The tasks of a study.

    Runs come seed by seed, so an unfinished study has every arm; then the budget curve. Raises
    `UsageError` for an arm or an analysis that does not exist, and for two tasks of one name, which
    would share their results; `SettingsError` for settings that a run cannot have.
    """
    arms = {arm.label: arm for arm in study.arms}
    seeds = dict.fromkeys(seed for arm in study.arms for seed in study.seeds_of(arm))
    runs = [
        _run(study, arm, seed, part="main", curve=arm.label)
        for seed in seeds
        for arm in study.arms
        for own in study.seeds_of(arm)
        if own == seed
    ]
    runs += [
        _run(study, _with_steps(_the(arms, label), steps), seed, part="budget", curve=label)
        for curve in study.budget
        for steps in curve.steps
        for seed in curve.seeds or study.seeds
        for label in curve.arms
    ]
    models: dict[str, dict[int, RunSpec]] = {}
    for run in runs:
        models.setdefault(run.arm, {})[run.settings.seed] = run
    mergings = [
        _merging(label, [*_the(models, label).values()], merging)
        for merging in study.merging
        for label in merging.arms
    ]
    analyses = [
        _analysis(task, _the(_the(models, task.arm), seed, what="seed"))
        for task in study.analyses
        for seed in task.seeds or [*_the(models, task.arm)][:1]
    ]
    plan = Plan(runs=tuple(runs), mergings=tuple(mergings), analyses=tuple(analyses))
    names = [task.name for task in plan.tasks]
    if twice := [name for name in names if names.count(name) > 1]:
        hint = "name a seed, a length and an arm of merges once, and give equal arms a name"
        raise UsageError(f"The study has the task {twice[0]} twice", hint=hint)
    return plan


def _the(choices: Mapping[Key, Choice], name: Key, *, what: str = "arm") -> Choice:
    if name not in choices:
        hint = f"it has {', '.join(map(str, choices))}"
        raise UsageError(f"The study has no {what} {name!r}", hint=hint)
    return choices[name]


def _with_steps(arm: Arm, steps: int) -> Arm:
    """The arm at another length, with four evaluations that may pick the checkpoint."""
    # Without `epochs`, which would contradict the number of steps.
    fit = {**arm.fit, "steps": steps, "epochs": None, "eval_every": max(1, steps // 4)}
    evaluate = {**arm.evaluate, "modes": "sequential,arbitrary"}
    name = f"{arm.label}-{steps}-steps"
    return Arm(**{**arm.model_dump(), "name": name, "fit": fit, "evaluate": evaluate})


def _run(study: StudySettings, arm: Arm, seed: int, *, part: ReportPart, curve: str) -> RunSpec:
    settings = study.fit_settings(arm, seed)
    evaluate = _as_trained(study.evaluate_settings(arm), settings)
    # Models refined at several depths share a row: truncated-3, truncated-6.
    is_short = settings.method == "truncated"
    return RunSpec(
        name=run_name(arm.label, seed),
        arm=arm.label,
        kind=f"runs of {curve}",
        images=evaluate.max_images,
        passes=orders_of(
            evaluate, settings.kept, fixed=evaluate.fixed or settings.build_method().fixed
        ),
        part=part,
        row=arm.label.removesuffix(f"-{settings.kept}") if is_short else arm.label,
        curve=curve,
        settings=settings,
        evaluate=evaluate,
    )


def _merging(label: str, donors: Sequence[RunSpec], merging: Merging) -> MergingSpec:
    options = _as_trained(merging.options, donors[0].settings)
    return MergingSpec(
        name=f"merging-{label}",
        arm=label,
        kind="mergings",
        images=options.max_images,
        # One for each merge; and the donors alone, as two soups and in ensembles.
        passes=options.merges * len(options.variants) + len(donors) * 4 * options.num_orders,
        needs=tuple(run.name for run in donors),
        donors=tuple(donors),
        options=options,
    )


def _analysis(analysis: AnalysisTask, model: RunSpec) -> AnalysisSpec:
    find_analysis(analysis.name)  # raises for an unknown name, hours before the analysis would
    options = _as_trained(analysis.options, model.settings)
    return AnalysisSpec(
        name=f"{analysis.name}-{model.name}",
        arm=analysis.arm,
        kind=analysis.name,
        images=options.max_images,
        passes=ANALYSIS_PASSES,
        needs=(model.name,),
        model=model,
        options=options,
    )


def _as_trained(scoring: Scoring, settings: FitSettings) -> Scoring:
    """`scoring` with the data settings of the training, so images are prepared the same way."""
    names = {"resize", "skip_corrupt"} & type(scoring).model_fields.keys()
    return scoring.model_copy(update={name: getattr(settings, name) for name in names})


def run_name(label: str, seed: int) -> str:
    """The name of a run."""
    return f"{label}-seed{seed}"


def write_plan(study: StudySettings, out: Path) -> None:
    """Write plan.json into `out`; the tasks follow from it."""
    recipe = study.model_dump(mode="json")
    plan = {"schema": _SCHEMA, "code_version": __version__, "recipe": recipe}
    write_text(out / PLAN_FILE, json.dumps(plan, indent=1) + "\n")


def check_plan(study: StudySettings, out: Path, *, facts: Mapping[str, Mapping[str, Any]]) -> None:
    """Raises `UsageError` if the study contradicts finished tasks in `out`, or `out` is foreign.

    `facts`: those of the finished tasks, by name.
    """
    refuse_foreign(out, mark=PLAN_FILE, kind="study")
    if not (out / PLAN_FILE).is_file():
        return
    old = read_plan(out)
    planned = {task.name: task for task in plan_of(study).tasks}
    changed = [
        task.name
        for task in plan_of(old).tasks
        # Unfinished tasks may change, because they have no results.
        if task.is_done(facts) and not _is_continued(task, planned.get(task.name))
    ]
    if old.name != study.name or changed:
        details = f"finished already: {', '.join(changed[:3])}" if changed else f"of {old.name!r}"
        # For the message, because names of settings are clearer than names of tasks.
        differing = [n for n in type(old).model_fields if getattr(old, n) != getattr(study, n)]
        raise UsageError(
            f"This directory holds a study with other settings ({', '.join(differing)}), {details}",
            place=out / PLAN_FILE,
            hint="give the same recipe to continue, or another --out to start again",
        )


def _is_continued(done: AnyTask, planned: AnyTask | None) -> bool:
    return type(planned) is type(done) and planned is not None and planned.continues(done)


def read_plan(out: Path) -> StudySettings:
    """The study in `out`. Raises `UsageError` if there is none or it cannot be read."""
    path = out / PLAN_FILE
    hint = "layershuffle reproduce RECIPE --out DIR makes one"
    try:
        stored = json.loads(path.read_text(encoding="utf-8"))
        schema = stored["schema"]
        if schema == _SCHEMA:
            return StudySettings(**stored["recipe"])
    except FileNotFoundError as error:
        cause = f"There is no readable study here: no {PLAN_FILE}"
        raise UsageError(cause, place=out, hint=hint) from error
    except (OSError, ValueError, KeyError, TypeError, SettingsError) as error:
        cause = f"There is no readable study here ({type(error).__name__}: {one_line(error)})"
        raise UsageError(cause, place=path, hint=hint) from error
    raise UsageError(
        f"The plan has schema {schema!r}, this version reads {_SCHEMA}",
        place=path,
        hint="use the version of layershuffle that wrote it",
    )
