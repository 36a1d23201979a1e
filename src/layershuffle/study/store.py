"""The files of a study, the same while it runs and where it is kept:

    OUT/plan.json      the recipe
    OUT/tasks.jsonl    the facts of every finished task, a line each
    OUT/results.csv    every score of every finished run
    OUT/merging.csv    every score of every finished merging
    OUT/figures/       the figures of analyses and report
    OUT/runs/NAME/     what a task works with: checkpoints, models, log; nothing is read from here

A repository keeps all but `runs/`. A finished task adds its result under a lock, its line in
tasks.jsonl last: a task is done if and only if it has a line there.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from filelock import FileLock

from layershuffle.ground.files import explained, write_text
from layershuffle.ground.rows import MergingRow, Row, ScoreRow, read_rows, write_rows
from layershuffle.ground.text import one_line
from layershuffle.study.plan import Plan, make_plan, read_plan, run_name
from layershuffle.study.settings import StudySettings
from layershuffle.study.tasks import (
    RESTORE,
    AnalysisResult,
    AnalysisSpec,
    MergingResult,
    MergingSpec,
    RunResult,
    RunSpec,
    Say,
    Stored,
    StudyError,
    Task,
)

TASKS_FILE = "tasks.jsonl"
SCORES_FILE = "results.csv"
MERGES_FILE = "merging.csv"
FAILURE_FILE = "failure.txt"


@dataclass(frozen=True, kw_only=True)
class Study:
    """A study as it is on disk.

    `runs`, `mergings`, `analyses`: the finished tasks in the order of the plan, with their results.
    `unfinished`: the names of the others, each with the reason why it failed ("" if it did not).
    """

    settings: StudySettings
    plan: Plan
    runs: tuple[tuple[RunSpec, RunResult], ...]
    mergings: tuple[tuple[MergingSpec, MergingResult], ...]
    analyses: tuple[tuple[AnalysisSpec, AnalysisResult], ...]
    unfinished: dict[str, str]


def read_study(out: Path) -> Study:
    """The study in directory `out`, finished or not.

    Raises `UsageError` if there is no plan, `StudyError` or `DataError` for a file that is cut off
    or contradicts the plan.
    """
    settings = read_plan(out)
    plan = make_plan(settings)
    stored = read_stored(out)
    _refuse_lost_rows(plan, stored, out)
    runs = []
    for run in plan.runs:
        if run.is_done(stored.facts):
            runs.append((run, run.read(stored)))
    mergings = []
    for merging in plan.mergings:
        if merging.is_done(stored.facts):
            mergings.append((merging, merging.read(stored)))
    analyses = []
    for analysis in plan.analyses:
        if analysis.is_done(stored.facts):
            analyses.append((analysis, analysis.read(stored)))
    unfinished = {}
    for task in plan.tasks:
        if not task.is_done(stored.facts):
            unfinished[task.name] = read_failure(task, out)
    return Study(
        settings=settings,
        plan=plan,
        runs=tuple(runs),
        mergings=tuple(mergings),
        analyses=tuple(analyses),
        unfinished=unfinished,
    )


def _refuse_lost_rows(plan: Plan, stored: Stored, out: Path) -> None:
    """Raises `StudyError` for a finished run or merging whose scores are not in their file."""
    for file, tasks in ((SCORES_FILE, plan.runs), (MERGES_FILE, plan.mergings)):
        for task in tasks:
            if task.name in stored.facts and task.name not in stored.rows:
                cause = f"{file} has no scores of {task.name}, which is finished"
                raise StudyError(cause, place=out, hint=RESTORE)


def read_failure(task: Task[Any], out: Path) -> str:
    """Why the task failed; "" if it did not."""
    path = task.directory(out) / FAILURE_FILE
    if not path.is_file():
        return ""
    # A full disk may have cut the text within a character.
    return path.read_text(encoding="utf-8", errors="replace").strip()


def read_facts(out: Path) -> dict[str, dict[str, Any]]:
    """The facts of every finished task by its name. Raises `StudyError` for a file that is cut."""
    path = out / TASKS_FILE
    if not path.is_file():
        return {}
    try:
        text = path.read_text(encoding="utf-8")
        if not text.endswith("\n"):
            raise ValueError("its last line is cut off")
        results = {}
        # Not `splitlines`: text of JSON may hold other ends of lines, as U+2028.
        for line in text.removesuffix("\n").split("\n"):
            facts = json.loads(line)
            results[facts["task"]] = facts
        return results
    except (OSError, ValueError, KeyError, TypeError) as error:
        cause = f"The file is cut off or cannot be read ({one_line(error)})"
        raise StudyError(cause, place=path, hint=RESTORE) from error


def read_stored(out: Path) -> Stored:
    """Everything in the files of the study in `out`. Raises `StudyError` or `DataError`."""
    # First: a task that ends meanwhile writes its rows before its facts, so those here have rows.
    facts = read_facts(out)
    rows: dict[str, list[Any]] = {}
    scores = out / SCORES_FILE
    if scores.is_file():
        for row in read_rows(scores, ScoreRow, hint=RESTORE):
            rows.setdefault(run_name(row.method, row.seed), []).append(row)
    merges = out / MERGES_FILE
    if merges.is_file():
        for merge in read_rows(merges, MergingRow, hint=RESTORE):
            rows.setdefault(f"merging-{merge.arm}", []).append(merge)
    grouped = {name: tuple(group) for name, group in rows.items()}
    return Stored(place=out / TASKS_FILE, facts=facts, rows=grouped)


def record(task: Task[Any], out: Path, *, say: Say) -> None:
    """Do a task, and add its result to the files of the study, all in the plan's order."""
    result = task.run(out, say)
    with writing(out):
        stored = read_stored(out)
        plan = make_plan(read_plan(out))
        _refuse_lost_rows(plan, stored, out)
        stored.facts[task.name] = {"task": task.name, **result.model_dump(mode="json")}
        stored.rows[task.name] = result.rows
        for file, tasks in ((SCORES_FILE, plan.runs), (MERGES_FILE, plan.mergings)):
            rows: list[Row] = []
            for each in tasks:
                if each.name in stored.facts:
                    rows += stored.rows[each.name]
            if rows:
                write_rows(out / file, rows)
        lines = []
        for planned in plan.tasks:
            if planned.name in stored.facts:
                line = json.dumps(stored.facts[planned.name], separators=(",", ":"))
                lines.append(f"{line}\n")
        # Last: from now on the task is done.
        write_text(out / TASKS_FILE, "".join(lines))


@contextmanager
def writing(out: Path) -> Iterator[None]:
    """Nobody else writes the files of the study meanwhile; a killed process frees the lock."""
    with explained(out):
        out.mkdir(parents=True, exist_ok=True)
        with FileLock(out / ".lock"):
            os.listdir(out)  # makes NFS look again: another machine may have replaced a file
            yield
