"""A study's results on disk: as its tasks wrote them, or in a kept form for a repository.

The kept form has no weights and no logs:

    OUT/plan.json       the recipe
    OUT/runs.json       the `result.json` of every run: the fields that all runs share, those that
                        the runs of an arm share, then a line per run
    OUT/results.csv     every score of every run
    OUT/merging.csv     every score of the mergings, by arm
    OUT/analysis.csv    title, paragraph and numbers of every analysis
    OUT/figures/*.png   the figures of the analyses

`layershuffle report OUT` writes the report again from these.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from layershuffle.files import write_text
from layershuffle.results import MergingRow, ScoreRow, read_rows, write_rows
from layershuffle.study.plan import (
    KEPT_FILE,
    PLAN_FILE,
    AnalysisSpec,
    MergingSpec,
    RunSpec,
    read_study_plan,
    same_task,
    tasks_of,
)
from layershuffle.study.tasks import (
    AnalysisResult,
    MergingResult,
    ResultT,
    RunResult,
    SpecT,
    Study,
    StudyError,
    TaskOutcome,
    check_result,
    read_outcome,
)
from layershuffle.text import one_line, shortened

_SCHEMA = 2
_OF_ONE_RUN = ("run", "arm", "seed")
"""Fields that identify the run of a line."""
_HINT = "restore the files of the study from the repository that keeps it"


def read_study(out: Path) -> Study:
    """The study in directory `out`, finished or not.

    Raises `UsageError` if there is no plan, `StudyError` or `DataError` for a file that is cut off
    or contradicts the plan.
    """
    if (out / KEPT_FILE).exists():
        return read_kept(out)
    settings = read_study_plan(out)
    tasks = tasks_of(settings)
    planned = {task.name for task in tasks}
    scores = out / "results.csv"
    if not (out / "runs").exists() and scores.exists() and read_rows(scores, ScoreRow):
        # A report writes results.csv from the runs, so it would write an empty one here.
        raise StudyError(
            "This directory holds scores, but neither the runs that gave them nor their facts "
            "(runs.json)",
            place=out,
            hint="run the recipe again elsewhere: layershuffle reproduce RECIPE --out DIR",
        )
    # Directories that begin with a dot are still being written.
    directories = sorted(path.name for path in (out / "runs").glob("[!.]*") if path.is_dir())
    return Study(
        settings=settings,
        runs=tuple(
            read_outcome(task, RunResult, out=out) for task in tasks if isinstance(task, RunSpec)
        ),
        mergings=tuple(
            read_outcome(task, MergingResult, out=out)
            for task in tasks
            if isinstance(task, MergingSpec)
        ),
        analyses=tuple(
            read_outcome(task, AnalysisResult, out=out)
            for task in tasks
            if isinstance(task, AnalysisSpec)
        ),
        unplanned=tuple(name for name in directories if name not in planned),
    )


def completed(study: Study, *, by: Study) -> Study:
    """`study`, with the results of `by` for tasks that only `by` has done.

    A task of the same name with other settings is another task, which stays unfinished.
    """
    done = {outcome.task.name: outcome for outcome in by.outcomes if outcome.state == "done"}

    def filled(outcome: TaskOutcome[Any, Any]) -> TaskOutcome[Any, Any]:
        task, other = outcome.task, done.get(outcome.task.name)
        if outcome.state == "done" or other is None or not same_task(other.task, task):
            return outcome
        # A merging with more donors than before must be repeated.
        return replace(other, task=task) if other.task.needs == task.needs else outcome

    return replace(
        study,
        runs=tuple(map(filled, study.runs)),
        mergings=tuple(map(filled, study.mergings)),
        analyses=tuple(map(filled, study.analyses)),
    )


def write_kept(study: Study, out: Path, *, plan: str) -> None:
    """Write the results of `study` into `out`; `plan` is the text of its plan.json."""
    write_text(out / PLAN_FILE, plan)
    leave_out = {"rows", "schema_version"}
    runs = [result.model_dump(mode="json", exclude=leave_out) for result in study.results]
    write_text(out / KEPT_FILE, _runs_text(runs))
    write_rows(out / "results.csv", study.rows, padded=False)
    merging = [
        row.model_copy(update={"arm": o.task.arm})
        for o in study.mergings
        if o.result
        for row in o.result.rows
    ]
    if merging:
        write_rows(out / "merging.csv", merging, padded=False)
    analysis = [["task", "name", "value"]]
    for entry in study.analyses:
        if entry.result is not None:
            texts = {"title": entry.result.title, "paragraph": entry.result.paragraph}
            numbers = dict(_numbers(entry.result.facts, "facts"))
            for name, value in (texts | numbers).items():
                # As JSON, a number stays a number and a paragraph may hold any character.
                analysis.append([entry.task.name, name, json.dumps(value, ensure_ascii=False)])
    if len(analysis) > 1:
        text = io.StringIO(newline="")
        csv.writer(text, lineterminator="\n").writerows(analysis)
        write_text(out / "analysis.csv", text.getvalue())


def _runs_text(runs: Sequence[Mapping[str, Any]]) -> str:
    """The text of runs.json: a line per arm and per run, so a diff shows which changed."""
    by_arm: dict[str, list[Mapping[str, Any]]] = {}
    for run in runs:
        by_arm.setdefault(run["arm"], []).append(run)
    arms = {arm: _shared_by(group) for arm, group in by_arm.items()}
    shared = _shared_by(list(arms.values()))

    def compact(value: object) -> str:
        return json.dumps(value, separators=(",", ":"))

    of_arms = ",\n".join(
        f"{compact(arm)}:{compact(_without(fields, shared))}" for arm, fields in arms.items()
    )
    of_runs = ",\n".join(compact(_without(run, arms[run["arm"]])) for run in runs)
    head = f'"schema": {_SCHEMA},\n"shared": {compact(shared)}'
    return f'{{{head},\n"arms": {{\n{of_arms}\n}},\n"runs": [\n{of_runs}\n]}}\n'


def _shared_by(runs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The fields that are equal in all runs; of a mapping, the keys whose values are."""

    def same_in_all(mappings: Sequence[Mapping[str, Any]], key: str) -> bool:
        return all(key in each and each[key] == mappings[0][key] for each in mappings)

    shared: dict[str, Any] = {}
    for name, value in runs[0].items() if runs else ():
        values: list[Any] = [run.get(name) for run in runs]
        if all(isinstance(each, dict) for each in values):
            shared[name] = {k: v for k, v in value.items() if same_in_all(values, k)}
        elif name not in _OF_ONE_RUN and same_in_all(runs, name):
            shared[name] = value
    return shared


def _without(run: Mapping[str, Any], shared: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a run, or of the runs of an arm, that are not in `shared`."""
    own: dict[str, Any] = {}
    for name, value in run.items():
        if name not in shared:
            own[name] = value
        elif isinstance(value, dict) and value.keys() - shared[name]:
            own[name] = {k: v for k, v in value.items() if k not in shared[name]}
    return own


def _with(run: Mapping[str, Any], shared: Mapping[str, Any]) -> dict[str, Any]:
    """The inverse of `_without`."""
    groups = {
        name: {**value, **run.get(name, {})}
        for name, value in shared.items()
        if isinstance(value, dict)
    }
    return {**shared, **run, **groups}


def read_kept(out: Path) -> Study:
    """The study that `write_kept` wrote into `out`.

    Raises `UsageError` without a readable plan, `StudyError` or `DataError` for a file that is cut
    off or contradicts the plan.
    """
    settings = read_study_plan(out)
    tasks = tasks_of(settings)
    path = out / KEPT_FILE
    try:
        stored = json.loads(path.read_text(encoding="utf-8"))
        if stored["schema"] not in (1, _SCHEMA):  # the first had no arms
            raise ValueError(f"it has schema {stored['schema']!r}, this version reads {_SCHEMA}")
        runs = {}
        for run in stored["runs"]:
            of_arm = _with(stored.get("arms", {}).get(run["arm"], {}), stored["shared"])
            # The file's own schema was checked above.
            runs[run["run"]] = {**_with(run, of_arm), "schema_version": 1}
        merging = _mergings(out / "merging.csv")
        analysis = _analyses(out / "analysis.csv")
    except (OSError, ValueError, KeyError, TypeError) as error:
        cause = f"The kept results cannot be read ({type(error).__name__}: {one_line(error)})"
        raise StudyError(cause, place=out, hint=_HINT) from error
    scores: dict[tuple[str, int], list[ScoreRow]] = {}
    # A study that was kept before its first run had finished has no scores.
    if runs:
        for row in read_rows(out / "results.csv", ScoreRow, hint=_HINT):
            scores.setdefault((row.method, row.seed), []).append(row)
    # A report rewrites results.csv, which would delete rows without a run.
    arms = {(t.arm, t.settings.seed) for t in tasks if isinstance(t, RunSpec) and t.name in runs}
    if unpaired := sorted(arms ^ scores.keys()):
        names = shortened(f"{arm} seed {seed}" for arm, seed in unpaired)
        cause = f"Runs and scores do not belong together: {names}"
        raise StudyError(cause, place=out, hint=_HINT)

    def run_result(task: RunSpec) -> RunResult | None:
        if task.name not in runs:
            return None
        result = check_result(runs[task.name], RunResult, task=task, place=path)
        rows = tuple(scores.get((task.arm, task.settings.seed), ()))
        return result.model_copy(update={"rows": rows})

    def analysis_result(task: AnalysisSpec) -> AnalysisResult | None:
        if task.name not in analysis:
            return None
        # The kept form has PNG files in one folder, not SVG files below each task.
        pictures = sorted((out / "figures").glob(f"{task.name}-*.png"))
        fields = {**analysis[task.name], "pictures": tuple(f"figures/{p.name}" for p in pictures)}
        return check_result(fields, AnalysisResult, task=task, place=out / "analysis.csv")

    return Study(
        settings=settings,
        runs=tuple(_outcome(t, run_result(t)) for t in tasks if isinstance(t, RunSpec)),
        mergings=tuple(
            _outcome(t, merging.get(t.arm)) for t in tasks if isinstance(t, MergingSpec)
        ),
        analyses=tuple(
            _outcome(t, analysis_result(t)) for t in tasks if isinstance(t, AnalysisSpec)
        ),
        kept=True,
    )


def _outcome(task: SpecT, result: ResultT | None) -> TaskOutcome[SpecT, ResultT]:
    return TaskOutcome(task=task, state="missing" if result is None else "done", result=result)


def _numbers(value: Any, path: str) -> Iterator[tuple[str, float]]:
    """(path, number) of every single number in nested facts; lists are skipped."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from _numbers(inner, f"{path}/{key}")
    elif isinstance(value, int | float):
        yield path, value


def _mergings(path: Path) -> dict[str, MergingResult]:
    """The scores of the merging of every arm."""
    if not path.exists():
        return {}
    rows: dict[str, list[MergingRow]] = {}
    for row in read_rows(path, MergingRow, hint=_HINT):
        rows.setdefault(row.arm, []).append(row.model_copy(update={"arm": ""}))
    return {arm: MergingResult(rows=tuple(scores)) for arm, scores in rows.items()}


def _analyses(path: Path) -> dict[str, dict[str, Any]]:
    """Title, paragraph and nested facts of every analysis by the name of its task."""
    if not path.exists():
        return {}
    text = path.read_text(encoding="utf-8")
    rows = list(csv.DictReader(io.StringIO(text, newline="")))
    # The csv module fills the missing fields of a short line with None. A file that is truncated
    # within its last number would give another number.
    if not text.endswith("\n") or any(None in row.values() for row in rows):
        raise ValueError(f"{path.name} is cut off")
    analyses: dict[str, dict[str, Any]] = {}
    for row in rows:
        fields = analyses.setdefault(row["task"], {"facts": {}})
        *parents, name = row["name"].split("/")
        for parent in parents:
            fields = fields.setdefault(parent, {})
        fields[name] = json.loads(row["value"])
    return analyses
