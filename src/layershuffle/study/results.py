"""A study's results as typed rows, read from its directory and checked.

    OUT/plan.json                    what was to be run
    OUT/runs/NAME/results.csv        one row per (mode, blocks kept, order)
    OUT/runs/NAME/result.json        facts of the run; written last, so it marks a finished run
    OUT/runs/NAME/failure.txt        why a run failed
    OUT/merging/, OUT/analysis/      see `pieces`

A study may be half done: runs without `result.json` are failed (with `failure.txt`) or not done
yet. A file that is there but cut off, or of another schema, is refused: `StudyError`.
"""

from __future__ import annotations

import csv
import io
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeVar

from layershuffle.errors import LayerShuffleError

SCHEMA = 1
COLUMNS = (
    "method",
    "seed",
    "mode",
    "kept",
    "choose",
    "order_seed",
    "order",
    "n",
    "top1",
    "top5",
    "cross_entropy",
    "draw",
)
MODES = ("sequential", "arbitrary")
CHOICES = ("", "random", "spaced", "first", "last")
DRAWS = ("pass", "batch")

State = Literal["done", "failed", "missing"]
_T = TypeVar("_T")
_RUN_NAME = re.compile(r"[^./\s][^/\x00-\x1f\x7f]*")
_AGAIN = "delete the run's directory and run the study again; finished runs are not repeated"


class StudyError(LayerShuffleError):
    """A file of a study is missing, cut off, of another schema, or contradicts the plan."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """One score: an arm (column `method`) with a seed, run along one order. Accuracies in percent.

    `order` is empty where `draw` is "batch" (a fresh order for every batch). `extra` holds columns
    that this version does not know, as text.
    """

    method: str
    seed: int
    mode: str
    kept: int
    choose: str
    order_seed: int
    order: str
    n: int
    top1: float
    top5: float
    cross_entropy: float
    draw: str
    extra: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class PlannedRun:
    """One run of the plan; `arm` is the method with its options, as shown in the tables."""

    name: str
    arm: str
    method: str
    seed: int
    part: str = "main"


@dataclass(frozen=True, kw_only=True)
class RunFacts:
    """What `result.json` says about a finished run. Times in seconds."""

    settings_hash: str
    finished: str
    train_seconds: float
    eval_seconds: float
    images_per_second: float
    steps: int
    selected_step: int
    selected_metric: str
    selected_value: float
    paper_protocol: bool
    settings: Mapping[str, Any]
    data: Mapping[str, Any]
    hardware: Mapping[str, Any]
    versions: Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Run:
    """A planned run and what is there of it: `facts` and `rows` if done, `failure` if failed."""

    plan: PlannedRun
    state: State
    facts: RunFacts | None = None
    rows: tuple[Row, ...] = ()
    failure: str = ""


@dataclass(frozen=True, kw_only=True)
class Study:
    """All of a study that is on disk.

    `pieces`: what the plan says of merging and analysis tasks (`pieces.read_pieces`). `unplanned`:
    run directories that no plan names, ignored.
    """

    name: str
    code_version: str
    recipe: Mapping[str, Any]
    runs: tuple[Run, ...]
    pieces: tuple[Mapping[str, str], ...] = ()
    unplanned: tuple[str, ...] = ()

    @property
    def rows(self) -> tuple[Row, ...]:
        """The rows of all finished runs, in the order of the plan."""
        return tuple(row for run in self.runs for row in run.rows)

    def in_state(self, state: State) -> tuple[Run, ...]:
        """The runs that are done, failed or missing."""
        return tuple(run for run in self.runs if run.state == state)


def read_study(out: Path) -> Study:
    """The study in directory `out`, finished or not.

    Raises `StudyError` if there is no plan, or a file is cut off, of another schema, or
    contradicts the plan.
    """
    plan = _read_json(
        out / "plan.json", hint="give the --out directory of `layershuffle reproduce`"
    )
    planned = _planned_runs(plan)
    names = {run.name for run in planned}
    found = sorted(path.name for path in (out / "runs").glob("[!.]*") if path.is_dir())
    return Study(
        name=plan.get("name", str),
        code_version=plan.get("code_version", str),
        recipe=plan.get("recipe", dict),
        runs=tuple(read_run(out / "runs" / run.name, run) for run in planned),
        pieces=tuple(plan.values.get("pieces", ())),
        unplanned=tuple(name for name in found if name not in names),
    )


def read_run(directory: Path, plan: PlannedRun) -> Run:
    """The run in `directory`, checked against its plan. Raises `StudyError`."""
    if (directory / "result.json").exists():
        facts = _read_facts(directory / "result.json", plan)
        rows = read_rows(directory / "results.csv", plan)
        return Run(plan=plan, state="done", facts=facts, rows=rows)
    failure = directory / "failure.txt"
    if failure.exists():
        return Run(plan=plan, state="failed", failure=_read_text(failure).strip())
    return Run(plan=plan, state="missing")


def read_rows(path: Path, plan: PlannedRun) -> tuple[Row, ...]:
    """The rows of one `results.csv`. Raises `StudyError` for anything that is not whole."""
    text = _read_text(path)
    if not text.endswith("\n"):
        raise StudyError("The last line is cut off", place=path, hint=_AGAIN)
    reader = csv.reader(io.StringIO(text, newline=""), strict=True)
    try:
        header, *lines = list(reader)
    except csv.Error as error:
        raise StudyError(f"This is not a CSV file ({error})", place=path, hint=_AGAIN) from error
    absent = [name for name in COLUMNS if name not in header]
    if absent or len(set(header)) < len(header):
        what = f"has no column {', '.join(absent)}" if absent else "names a column twice"
        raise StudyError(f"The results file {what}", place=path, hint=_AGAIN)
    rows = tuple(
        _row(header, values, plan, f"{path}, line {line}")
        for line, values in enumerate(lines, start=2)
    )
    _check_whole(rows, path)
    return rows


def results_csv(rows: Sequence[Row]) -> str:
    """All rows as one CSV text with the columns of `COLUMNS`, then any further ones by name."""
    extra = sorted({name for row in rows for name in row.extra})
    text = io.StringIO(newline="")
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow([*COLUMNS, *extra])
    for row in rows:
        known = [getattr(row, name) for name in COLUMNS]
        writer.writerow([*known, *(row.extra.get(name, "") for name in extra)])
    return text.getvalue()


@dataclass(frozen=True)
class _Fields:
    """A JSON object whose fields are fetched with their type; the error names file and field."""

    values: Mapping[str, Any]
    place: str

    def get(self, name: str, kind: type[_T]) -> _T:
        value = self.values.get(name)
        wrong = type(value) is not kind
        if kind is float and type(value) in (int, float):
            value, wrong = float(self.values[name]), False
        if wrong:
            state = "is missing" if name not in self.values else f"is {value!r}"
            raise StudyError(
                f'The field "{name}" {state}; it must be of type {kind.__name__}',
                place=self.place,
                hint=_AGAIN,
            )
        return value  # type: ignore[return-value]  # checked above

    def part(self, name: str) -> _Fields:
        return _Fields(self.get(name, dict), f'{self.place}, "{name}"')


def _read_json(path: Path, *, hint: str = _AGAIN) -> _Fields:
    def refuse(word: str) -> float:
        raise ValueError(f"{word} is not a number")

    try:
        values = json.loads(_read_text(path, hint=hint), parse_constant=refuse)
    except ValueError as error:
        cause = f"The file is cut off or not JSON ({error})"
        raise StudyError(cause, place=path, hint=_AGAIN) from error
    if not isinstance(values, dict):
        raise StudyError("The file holds no JSON object", place=path, hint=_AGAIN)
    if values.get("schema") != SCHEMA:
        raise StudyError(
            f"The file has schema {values.get('schema')!r}, this version reads {SCHEMA}",
            place=path,
            hint="use the version of layershuffle that wrote it, or run the study into a new --out",
        )
    return _Fields(values, str(path))


def _read_text(path: Path, *, hint: str = _AGAIN) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError as error:
        raise StudyError(f"There is no {path.name}", place=path.parent, hint=hint) from error
    except UnicodeDecodeError as error:
        raise StudyError(f"The file is not UTF-8 text ({error})", place=path, hint=hint) from error
    except OSError as error:
        raise StudyError(f"The file cannot be read ({error.strerror})", place=path) from error


def _planned_runs(plan: _Fields) -> tuple[PlannedRun, ...]:
    runs = []
    for index, values in enumerate(plan.get("runs", list)):
        place = f"{plan.place}, run {index}"
        if not isinstance(values, dict):
            raise StudyError("A run must be a JSON object", place=place)
        one = _Fields(values, place)
        name = one.get("name", str)
        if not _RUN_NAME.fullmatch(name):  # it names a directory below OUT/runs
            raise StudyError(f"{name!r} cannot be the name of a run", place=place)
        arm, method, seed = one.get("arm", str), one.get("method", str), one.get("seed", int)
        part = one.get("part", str) if "part" in values else "main"
        runs.append(PlannedRun(name=name, arm=arm, method=method, seed=seed, part=part))
    for what, keys in (
        ("name", [run.name for run in runs]),
        ("arm and seed", [(run.arm, run.seed) for run in runs]),
    ):
        if len(set(keys)) < len(keys):
            raise StudyError(f"Two runs of the plan have the same {what}", place=plan.place)
    return tuple(runs)


def _read_facts(path: Path, plan: PlannedRun) -> RunFacts:
    file = _read_json(path)
    for name, value in (("run", plan.name), ("arm", plan.arm), ("method", plan.method)):
        _check_same(name, file.get(name, str), value, file.place)
    _check_same("seed", file.get("seed", int), plan.seed, file.place)
    selected, data = file.part("selected"), file.part("data")
    data.get("spec", str)
    data.get("notes", list)
    return RunFacts(
        settings_hash=file.get("settings_hash", str),
        finished=file.get("finished", str),
        train_seconds=file.get("train_seconds", float),
        eval_seconds=file.get("eval_seconds", float),
        images_per_second=file.get("images_per_second", float),
        steps=file.get("steps", int),
        selected_step=selected.get("step", int),
        selected_metric=selected.get("metric", str),
        selected_value=selected.get("value", float),
        paper_protocol=file.get("paper_protocol", bool),
        settings=file.get("settings", dict),
        data=data.values,
        hardware=file.get("hardware", dict),
        versions=file.get("versions", dict),
    )


def _row(header: Sequence[str], values: Sequence[str], plan: PlannedRun, place: str) -> Row:
    if len(values) != len(header):
        raise StudyError(
            f"The line has {len(values)} fields, the header {len(header)}", place=place, hint=_AGAIN
        )
    text = dict(zip(header, values, strict=True))
    try:
        row = Row(
            method=text["method"],
            seed=int(text["seed"]),
            mode=text["mode"],
            kept=int(text["kept"]),
            choose=text["choose"],
            order_seed=int(text["order_seed"]),
            order=text["order"],
            n=int(text["n"]),
            top1=float(text["top1"]),
            top5=float(text["top5"]),
            cross_entropy=float(text["cross_entropy"]),
            draw=text["draw"],
            extra={name: text[name] for name in header if name not in COLUMNS},
        )
    except ValueError as error:
        raise StudyError(f"A number is unreadable ({error})", place=place, hint=_AGAIN) from error
    _check_same("method", row.method, plan.arm, place)
    _check_same("seed", row.seed, plan.seed, place)
    _check_row(row, place)
    return row


def _check_row(row: Row, place: str) -> None:
    in_order = len(row.order.split(",")) if row.order else None
    checks = {
        f"mode is {row.mode!r}": row.mode in MODES,
        f"choose is {row.choose!r}": row.choose in CHOICES,
        f"draw is {row.draw!r}": row.draw in DRAWS,
        f"kept is {row.kept}": row.kept >= 1,
        f"n is {row.n}": row.n >= 1,
        f"order {row.order!r} is not ids with commas": not row.order
        or re.fullmatch(r"\d+(,\d+)*", row.order) is not None,
        f"order has {in_order} blocks but kept is {row.kept}": in_order in (None, row.kept),
        "order is empty but it was drawn once per pass": bool(row.order) or row.draw == "batch",
        f"top1 {row.top1} and top5 {row.top5} are not percentages in this order": 0
        <= row.top1
        <= row.top5
        <= 100,
        f"cross_entropy is {row.cross_entropy}": math.isfinite(row.cross_entropy),
    }
    for what, right in checks.items():
        if not right:
            raise StudyError(f"The row is impossible: {what}", place=place, hint=_AGAIN)


def _check_whole(rows: Sequence[Row], path: Path) -> None:
    if not rows:
        raise StudyError("The results file has no rows", place=path, hint=_AGAIN)
    keys = [(row.mode, row.kept, row.choose, row.draw, row.order_seed) for row in rows]
    if len(set(keys)) < len(keys):
        raise StudyError("The results file has a score twice", place=path, hint=_AGAIN)


def _check_same(name: str, found: object, planned: object, place: str) -> None:
    if found != planned:
        raise StudyError(
            f"{name} is {found!r} here but {planned!r} in the plan",
            place=place,
            hint="the directory holds another study: choose a new --out",
        )
