"""Read the files that the tasks of a study wrote, as checked models.

    OUT/plan.json                    the recipe, from which the tasks follow
    OUT/runs/NAME/results.csv        one row per (mode, blocks kept, order)
    OUT/merging/ARM/results.csv      one row per merge, soup, ensemble and donor
    OUT/analysis/NAME/files/         tables, figures and summary.json
    .../result.json                  facts of the task; written last, so it marks a finished task
    .../failure.txt                  why it failed

A study may be unfinished: tasks without `result.json` have failed (with `failure.txt`) or are not
done yet. A file that is truncated or contradicts the plan is refused.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, Generic, Literal, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, ValidationError

from layershuffle.errors import LayerShuffleError
from layershuffle.results import MergingRow, ScoreRow, current_method, read_rows
from layershuffle.settings import FitSettings
from layershuffle.study.plan import (
    FAILURE_FILE,
    RESULT_FILE,
    AnalysisSpec,
    MergingSpec,
    RunSpec,
    Task,
)
from layershuffle.study.settings import StudySettings
from layershuffle.text import one_line

AGAIN = "delete the task's directory and run the study again; finished tasks are not repeated"
_OTHER_VERSION = "use the version of layershuffle that wrote it, or run the study into a new --out"

OutcomeState = Literal["done", "failed", "missing"]
SpecT = TypeVar("SpecT", bound=Task)
ResultT = TypeVar("ResultT", bound="TaskResult")


class StudyError(LayerShuffleError):
    """A file of a study is missing, cut off, of another schema, or contradicts the plan."""


class _Model(BaseModel):
    # Strict, because `true` is no number of steps. Further fields, also those of later versions,
    # are preserved without a check, so a kept study loses none of them.
    model_config = ConfigDict(frozen=True, strict=True, allow_inf_nan=False, extra="allow")


class Selected(_Model):
    """The checkpoint that was picked, and its score on the picking split."""

    step: int
    metric: str
    value: float


class RunData(_Model):
    """The data of a run; sizes, classes and the like are further fields."""

    spec: str
    notes: list[str]


class TaskResult(_Model):
    """The result of one task."""


class RunResult(TaskResult):
    """A finished run: `result.json`, and its scores. Times in seconds."""

    schema_version: Literal[1]
    run: str
    arm: str
    method: str
    seed: int
    # 12 of the 64 digits are enough to distinguish settings.
    settings_hash: Annotated[str, AfterValidator(lambda digits: digits[:12])]
    finished: str
    train_seconds: float
    eval_seconds: float
    images_per_second: float
    steps: int
    selected: Selected
    paper_protocol: bool
    settings: dict[str, Any]
    data: RunData
    hardware: dict[str, Any]
    versions: dict[str, Any]
    rows: tuple[ScoreRow, ...] = ()


class MergingResult(TaskResult):
    """A finished merging: its scores, and its time in seconds."""

    seconds: float | None = None
    rows: tuple[MergingRow, ...] = ()


class AnalysisResult(TaskResult):
    """A finished analysis: its summary. `pictures`: figures below the study's directory."""

    title: str
    paragraph: str = ""
    facts: dict[str, Any]
    seconds: float | None = None
    pictures: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class TaskOutcome(Generic[SpecT, ResultT]):
    """A planned task and its outcome: `result` if done, `failure` if failed."""

    task: SpecT
    state: OutcomeState
    result: ResultT | None = None
    failure: str = ""


@dataclass(frozen=True, kw_only=True)
class Study:
    """A study as it is on disk.

    `unplanned`: directories of runs that the plan does not name, which are ignored. `kept`: only
    results and report are stored (`layershuffle.study.store`).
    """

    settings: StudySettings
    runs: tuple[TaskOutcome[RunSpec, RunResult], ...]
    mergings: tuple[TaskOutcome[MergingSpec, MergingResult], ...] = ()
    analyses: tuple[TaskOutcome[AnalysisSpec, AnalysisResult], ...] = ()
    unplanned: tuple[str, ...] = ()
    kept: bool = False

    @property
    def outcomes(self) -> tuple[TaskOutcome[Any, Any], ...]:
        """The outcomes of all tasks, in the order of the plan."""
        return (*self.runs, *self.mergings, *self.analyses)

    @property
    def main_analyses(self) -> tuple[TaskOutcome[AnalysisSpec, AnalysisResult], ...]:
        """The analyses of the main arms; those along a curve are in the table of that curve."""
        arms = {run.task.arm for run in self.runs if run.task.part == "main"}
        return tuple(outcome for outcome in self.analyses if outcome.task.arm in arms)

    @property
    def results(self) -> tuple[RunResult, ...]:
        """The finished runs."""
        return tuple(run.result for run in self.runs if run.result is not None)

    @property
    def rows(self) -> tuple[ScoreRow, ...]:
        """The rows of all finished runs, in the order of the plan."""
        return tuple(row for result in self.results for row in result.rows)


def read_outcome(task: SpecT, kind: type[ResultT], *, out: Path) -> TaskOutcome[SpecT, ResultT]:
    """The outcome of `task` in the study's directory `out`, as a model of `kind`. Raises
    `StudyError` or `DataError` for a broken file."""
    directory = task.directory(out)
    failure = directory / FAILURE_FILE
    if not (directory / RESULT_FILE).exists():
        # A run that was killed between its scores and result.json is not done, and resumes.
        if failure.exists():
            # A full disk may have truncated the text within a character.
            text = failure.read_text(encoding="utf-8", errors="replace").strip()
            return TaskOutcome(task=task, state="failed", failure=text)
        return TaskOutcome(task=task, state="missing")
    place = directory / RESULT_FILE
    try:
        fields = _json_object(place)
        # pydantic models have a method of the name `schema`.
        fields["schema_version"] = fields.pop("schema", 1)
        if isinstance(task, AnalysisSpec):
            # It is written before result.json, so it is complete.
            place = directory / "files" / "summary.json"
            fields = {**_json_object(place), "seconds": fields.get("seconds")}
            names = (name for name in fields.get("files", ()) if name.endswith(".svg"))
            inside = task.directory(Path()) / "files"
            fields["pictures"] = tuple((inside / name).as_posix() for name in names)
        result = check_result(fields, kind, task=task, place=place)
        if isinstance(task, RunSpec):
            scores = read_rows(directory / "results.csv", ScoreRow, hint=AGAIN)
            # A copied file would pass every other check.
            if {(row.method, row.seed) for row in scores} != {(task.arm, task.settings.seed)}:
                raise _another_study("results.csv holds other scores", directory)
            result = result.model_copy(update={"rows": scores})
        elif isinstance(task, MergingSpec):
            merges = read_rows(directory / "results.csv", MergingRow, hint=AGAIN)
            result = result.model_copy(update={"rows": merges})
    except FileNotFoundError as error:
        cause = f"A finished task has no {Path(error.filename).name}"
        raise StudyError(cause, place=directory, hint=AGAIN) from error
    except (OSError, ValueError) as error:
        raise StudyError(
            f"The file is cut off or cannot be read ({one_line(error)})", place=place, hint=AGAIN
        ) from error
    return TaskOutcome(task=task, state="done", result=result)


def check_result(
    fields: dict[str, Any], kind: type[ResultT], *, task: Task, place: Path
) -> ResultT:
    """The fields of a result as a model that agrees with its task. Raises `StudyError`."""
    try:
        result = kind.model_validate(fields)
    except ValidationError as error:
        first = error.errors()[0]
        name = ".".join(map(str, first["loc"])).replace("schema_version", "schema")
        # A result of a later version is intact, so users should not be advised to delete it.
        hint = _OTHER_VERSION if name == "schema" else AGAIN
        raise StudyError(
            f'The field "{name}" is wrong: {first["msg"]}', place=place, hint=hint
        ) from error
    # A result with the right name may come from another study or an older recipe.
    if isinstance(task, RunSpec) and isinstance(result, RunResult):
        settings = task.settings
        planned = (task.name, task.arm, settings.method, settings.seed)
        method, _ = current_method(result.method, {})
        if (result.run, result.arm, method, result.seed) != planned:
            raise _another_study(f"The result is that of {result.run}, {result.arm}", place)
        for name in _position_forms(settings):
            form, stored = asdict(getattr(settings, name)), result.settings.get(name, {})
            # The default forms have changed since some results were written, which lack `init`.
            if name == "prediction" and stored:
                stored = {"init": "default", **stored}
            if changed := [field for field in stored if stored[field] != form.get(field)]:
                trained_with = ", ".join(f"{name}.{field} {stored[field]}" for field in changed)
                raise _another_study(f"{result.run} was trained with {trained_with}", place)
    return result


def _position_forms(settings: FitSettings) -> list[str]:
    """The settings of the position parts that the method trains."""
    return {"encode": ["encoding"], "predict": ["prediction"]}.get(
        settings.build_method().position, []
    )


def _another_study(cause: str, place: Path) -> StudyError:
    return StudyError(
        f"{cause}, not what the plan has here",
        place=place,
        hint="the directory holds another study: choose a new --out",
    )


def _json_object(path: Path) -> dict[str, Any]:
    fields = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(fields, dict):
        raise ValueError("it holds no JSON object")
    return fields
