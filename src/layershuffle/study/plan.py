"""The plan of a study: its tasks, which follow from its recipe alone, and plan.json."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from layershuffle.analysis import find_analysis
from layershuffle.analysis.settings import AnalysisSettings
from layershuffle.ground.errors import SettingsError, UsageError
from layershuffle.ground.files import refuse_foreign, write_text
from layershuffle.ground.text import one_line
from layershuffle.merging.settings import MergingSettings
from layershuffle.scoring.settings import EvalSettings
from layershuffle.study.settings import AnalysisTask, Arm, Merging, StudySettings
from layershuffle.study.tasks import AnalysisSpec, AnyTask, MergingSpec, RunSpec, count_orders
from layershuffle.training.settings import FitSettings

PLAN_FILE = "plan.json"
_SCHEMA = 1
ANALYSIS_PASSES = 40  # measured 26 to 48, and 128 for UMAP
# What a recipe says for the training alone -> what to do instead.
_OF_TRAINING = {
    "resize": "set it under fit: a model is scored on images prepared as in its training",
    "skip_corrupt": "set it under fit, which reads all splits of the data",
    "classes": "leave it out: the models of a study know the classes of their training data",
}
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


def make_plan(study: StudySettings) -> Plan:
    """The tasks of a study.

    Runs come seed by seed, so an unfinished study has every arm.

    Raises `UsageError` for an arm or an analysis that does not exist, and for two tasks of one
    name, which would share their results; `SettingsError` for settings that a run cannot have.
    """
    seeds: list[int] = []
    for arm in study.arms:
        seeds += study.arm_seeds(arm)
    runs: list[RunSpec] = []
    for seed in dict.fromkeys(seeds):
        for arm in study.arms:
            if seed in study.arm_seeds(arm):
                runs.append(_run(study, arm, seed))

    models: dict[str, dict[int, RunSpec]] = {}
    for run in runs:
        models.setdefault(run.arm, {})[run.settings.seed] = run

    mergings: list[MergingSpec] = []
    for merging in study.merging:
        for label in merging.arms:
            donors = list(_choose(models, label, what="arm").values())
            mergings.append(_merging(label, donors, merging))

    analyses: list[AnalysisSpec] = []
    for task in study.analyses:
        runs_of_arm = _choose(models, task.arm, what="arm")
        first_seed = next(iter(runs_of_arm))
        for seed in task.seeds or (first_seed,):
            analyses.append(_analysis(task, _choose(runs_of_arm, seed, what="seed")))

    plan = Plan(runs=tuple(runs), mergings=tuple(mergings), analyses=tuple(analyses))
    names = Counter(task.name for task in plan.tasks)
    for name, count in names.items():
        if count > 1:
            hint = "name an arm of merges or analyses once, and give equal arms a name"
            raise UsageError(f"The study has the task {name} twice", hint=hint)
    return plan


def _choose(choices: Mapping[Key, Choice], name: Key, *, what: str) -> Choice:
    """The choice of this name. Raises `UsageError`, which lists the names, if there is none."""
    if name not in choices:
        hint = f"it has {', '.join(map(str, choices))}"
        raise UsageError(f"The study has no {what} {name!r}", hint=hint)
    return choices[name]


def _run(study: StudySettings, arm: Arm, seed: int) -> RunSpec:
    """The training and scoring of one arm with one seed."""
    settings = study.fit_settings(arm, seed)
    evaluate = _with_data_settings(study.evaluate_settings(arm), settings)
    kept = settings.build_method().kept
    row = arm.label
    if settings.method == "truncated":
        # Models refined at several depths share a row: truncated-3, truncated-6.
        row = row.removesuffix(f"-{kept}")
    return RunSpec(
        name=run_name(arm.label, seed),
        arm=arm.label,
        images=evaluate.max_images,
        passes=count_orders(evaluate, kept, fixed=evaluate.fixed or settings.build_method().fixed),
        row=row,
        settings=settings,
        evaluate=evaluate,
    )


def _merging(label: str, donors: Sequence[RunSpec], merging: Merging) -> MergingSpec:
    """The merges of an arm whose runs are `donors`."""
    options = _with_data_settings(merging.options, donors[0].settings)
    # A pass for every merge; the donors run alone, as two soups and in ensembles.
    passes_of_merges = options.merges * len(options.variants)
    passes_of_donors = 4 * len(donors) * options.num_orders
    return MergingSpec(
        name=f"merging-{label}",
        arm=label,
        images=options.max_images,
        passes=passes_of_merges + passes_of_donors,
        needs=tuple(run.name for run in donors),
        donors=tuple(donors),
        options=options,
    )


def _analysis(analysis: AnalysisTask, model: RunSpec) -> AnalysisSpec:
    """One analysis of the model of one run."""
    find_analysis(analysis.name)  # raises for an unknown name, hours before the analysis would
    options = _with_data_settings(analysis.options, model.settings)
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


def _with_data_settings(scoring: Scoring, settings: FitSettings) -> Scoring:
    """`scoring` with the data settings of the training, so images are prepared the same way.

    Raises `UsageError` if it has others of its own.
    """
    usual = type(scoring)()
    for name, hint in _OF_TRAINING.items():
        if getattr(scoring, name, None) != getattr(usual, name, None):
            cause = f"The recipe sets {name} for scores, mergings or analyses"
            raise UsageError(cause, hint=hint)
    return scoring.model_copy(
        update={"resize": settings.resize, "skip_corrupt": settings.skip_corrupt}
    )


def run_name(label: str, seed: int) -> str:
    """The name of the run of the arm `label` with this seed, as "layerdrop-seed2"."""
    return f"{label}-seed{seed}"


def write_plan(study: StudySettings, out: Path) -> None:
    """Write plan.json into `out`; the tasks follow from it."""
    recipe = study.model_dump(mode="json")
    plan = {"schema": _SCHEMA, "recipe": recipe}
    write_text(out / PLAN_FILE, json.dumps(plan, indent=1) + "\n")


def check_plan(study: StudySettings, out: Path) -> None:
    """Refuse a directory that holds something else than this study.

    A study is run by one recipe from its beginning to its end: results of two recipes in one report
    would be compared as if they were of one. `workers` may differ, because no result depends on it.

    Raises `UsageError` if `out` holds a study of another recipe, a plan that cannot be read, or
    files that are no study.
    """
    refuse_foreign(out, mark=PLAN_FILE, kind="study")
    if not (out / PLAN_FILE).is_file():
        return
    old = read_plan(out)
    differing = []
    for name in type(study).model_fields:
        if name != "workers" and getattr(old, name) != getattr(study, name):
            differing.append(name)
    if differing:
        raise UsageError(
            f"This directory holds a study of another recipe, which differs in "
            f"{', '.join(differing)}",
            place=out / PLAN_FILE,
            hint="give the recipe that it was begun with to continue, or another --out to run "
            "the changed one from its beginning",
        )


def check_defaults(plan: Plan, facts: Mapping[str, Mapping[str, Any]], *, place: Path) -> None:
    """Refuse to add runs to finished ones that were trained with other settings.

    A recipe names only what differs from the defaults, and those of this version may be others than
    when the study was begun: seeds of one row would then be models of two trainings.

    `facts`: those of the finished tasks by name, which stand in `place`. Raises `UsageError`.
    """
    unfinished = {run.arm for run in plan.runs if not run.is_done(facts)}
    for run in plan.runs:
        trained = facts.get(run.name, {}).get("settings", {})
        # Records of 0.2.0 do not have the values that a method has of its own.
        if run.arm not in unfinished or trained.get("branch_scale") is None:
            continue
        now = run.settings.resolved()
        differing = []
        for name, value in trained.items():
            if name in now and value != now[name]:
                differing.append(f"{name} ({value!r} there, {now[name]!r} now)")
        if differing:
            raise UsageError(
                f"{run.name} was trained with other defaults: {', '.join(differing)}",
                place=place,
                hint="name these settings in the recipe as they were and begin again in another "
                "--out, or continue with the version of layershuffle that began the study",
            )


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
