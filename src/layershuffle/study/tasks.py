"""The tasks of a study: what each does, what it leaves, and what it needs first.

A *run* is one training and its scores, a *merging* all merges of an arm's models, an *analysis* one
question asked of one model. `task.run(out, say)` does the work in `task.directory(out)` and returns
its result, `task.read(stored)` takes the same result from the files of the study (`study.store`).
"""

from __future__ import annotations

import json
import math
import shutil
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Generic, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from layershuffle.analysis.settings import AnalysisSettings
from layershuffle.core.draws import Stream
from layershuffle.core.policies import parse_modes
from layershuffle.errors import LayerShuffleError
from layershuffle.merging.settings import MergingSettings
from layershuffle.results import AnyRow, MergingRow, ScoreRow
from layershuffle.settings import DEFAULT_EPOCHS, EvalSettings, FitSettings, digest

FIT_DIRECTORY = "fit"
"""The directory of the training below that of a run; `layershuffle eval` accepts it."""
FIGURES = "figures"
Say = Callable[[str, float], None]
"""Called with what a task is doing and the share of it that is done."""
Sizes = Mapping[str, int]
"""The number of images by split, as far as it is known."""
_SCORING = 1 << 20  # a rank for these draws alone; orders are drawn with small ranks
_ANY_DEPTH = 1000  # for the number of orders of a model that has not been opened
# In scores of an image: a forward, a backward of twice the work, and twice the blocks of a usual
# score, because many are of pruned orders. Digits took 8.
_TRAINING_COST = 6
ASSUMED_SIZES = {"train": 50_000, "test": 5_000}
"""Numbers of images while no run has finished that knows them."""
RESTORE = "restore the file, or run the study into a new --out"
"""The hint of every `StudyError` of a file that was changed."""
_DIGITS = {"top1": 4, "top5": 4, "cross_entropy": 6}


class TaskResult(BaseModel):
    """What a task found: facts, a line of tasks.jsonl, and rows of scores.

    Fields are those that something reads; all others are kept as they are.
    """

    # Strict, because `true` is no number of steps.
    model_config = ConfigDict(frozen=True, strict=True, allow_inf_nan=False, extra="allow")


class Selected(TaskResult):
    """The checkpoint that was picked, and its score on the picking split."""

    metric: str
    value: float


class RunData(TaskResult):
    """The data of a run; `sizes` by split."""

    spec: str
    notes: list[str]
    classes: int
    sizes: dict[str, int | None] = Field(default_factory=dict)


class RunResult(TaskResult):
    """A finished run. Times in seconds."""

    train_seconds: float
    eval_seconds: float
    steps: int
    selected: Selected
    paper_protocol: bool
    data: RunData
    hardware: dict[str, Any]
    rows: tuple[ScoreRow, ...] = Field(default=(), exclude=True)

    @property
    def seconds(self) -> float:
        """Time of training and scoring."""
        return self.train_seconds + self.eval_seconds


class MergingResult(TaskResult):
    """A finished merging; `donors` are the names of the merged runs."""

    donors: list[str]
    seconds: float = 0.0
    rows: tuple[MergingRow, ...] = Field(default=(), exclude=True)


class AnalysisResult(TaskResult):
    """A finished analysis. `facts`: its numbers, nested by name."""

    title: str
    facts: dict[str, Any]
    seconds: float = 0.0
    rows: tuple[()] = Field(default=(), exclude=True)


ResultT = TypeVar("ResultT", RunResult, MergingResult, AnalysisResult)


class StudyError(LayerShuffleError):
    """A file of a study is missing, cut off, or contradicts the plan."""


@dataclass(kw_only=True)
class Stored:
    """What the files of a study hold: facts, which stand in `place`, and rows of scores, by the
    name of the task."""

    place: Path
    facts: dict[str, dict[str, Any]] = field(default_factory=dict)
    rows: dict[str, tuple[Any, ...]] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Task(Generic[ResultT]):
    """A part of a study that runs by itself; tasks of a `kind` take about as long for their work.

    `needs`: names of the tasks that must be done first. `images`: test images that it asks for
    (`None`: all), each of which runs through a model in scoring `passes` times.
    """

    result: ClassVar[type[Any]]
    name: str
    arm: str
    kind: str
    images: int | None
    passes: int
    needs: tuple[str, ...] = ()

    def directory(self, out: Path) -> Path:
        """Where it works: checkpoints, models, log."""
        return out / "runs" / self.name

    def run(self, out: Path, say: Say) -> ResultT:
        """Do the task in the study's directory `out`. Raises the errors of the work."""
        raise NotImplementedError

    def read(self, stored: Stored) -> ResultT | None:
        """Its result; `None` if it is not done. Raises `StudyError`."""
        if not self.is_done(stored.facts):
            return None
        try:
            answer: ResultT = self.result(
                **stored.facts[self.name], rows=stored.rows.get(self.name, ())
            )
        except ValidationError as error:
            first = error.errors()[0]
            name = ".".join(map(str, first["loc"]))
            raise StudyError(
                f'The field "{name}" of a {error.title} is wrong: {first["msg"]}',
                place=stored.place,
                hint=RESTORE,
            ) from error
        return answer

    def is_done(self, facts: Mapping[str, Mapping[str, Any]]) -> bool:
        """Whether `facts`, by name of the task, have its result."""
        return self.name in facts

    def continues(self, done: Any) -> bool:
        """Whether `done`, a finished task of this name and kind, is the same in this plan."""
        return bool(self == done)

    def scored(self, sizes: Sizes) -> int | None:
        """Images in scoring, each counted once per pass; `None` if their number is not known."""
        counts = [count for count in (self.images, sizes.get("test")) if count is not None]
        return min(counts) * self.passes if counts else None

    def cost(self, sizes: Sizes) -> float | None:
        """The work, in scores of an image; `None` if a number of images is not known."""
        return self.scored(sizes)


@dataclass(frozen=True, kw_only=True)
class RunSpec(Task[RunResult]):
    """One training and its evaluation.

    `part`: the part of the report that it belongs to. `row`: the arm in the main table, which
    models of several depths share; `curve`: the arm whose length of training varies.
    """

    result = RunResult
    part: Literal["main", "budget"]
    row: str
    curve: str
    settings: FitSettings
    evaluate: EvalSettings

    def model(self, out: Path) -> str:
        """The spec of the trained model."""
        return f"dir:{self.directory(out) / FIT_DIRECTORY}"

    def run(self, out: Path, say: Say) -> RunResult:
        from layershuffle.scoring import check_modes, evaluate_spec, score_rows
        from layershuffle.training import fit

        check_modes(self.settings, self.evaluate)  # before the training, not after it
        training = self.training_share()
        fitted = fit(
            self.settings,
            self.directory(out) / FIT_DIRECTORY,
            on_event=_said(lambda text, share: say(text, training * share)),
        )
        started, facts = time.monotonic(), asdict(fitted)
        seed = scoring_seed(self.evaluate.seed, self.settings.seed)
        settings = self.evaluate.model_copy(update={"seed": seed})
        scored = evaluate_spec(
            self.model(out),
            self.settings.data,
            settings=settings,
            progress=lambda _, done, total: say(
                f"scores image {done:,.0f}/{total:,.0f}", training + (1 - training) * done / total
            ),
        )
        rows = score_rows(
            scored.scores, method=self.arm, seed=self.settings.seed, draw=settings.draw
        )
        # The recipe asks for compiled blocks, so the report must mention eager ones.
        if settings.compile and scored.blocks["mode"] == "eager":
            facts["data"]["notes"].append(f"scored in eager mode: {scored.blocks['reason']}")
        facts |= {
            "settings_hash": facts["settings_hash"][:12],  # enough to tell settings apart
            "eval_seconds": round(time.monotonic() - started, 2),
            "eval_precision": settings.precision,
            "eval_blocks": scored.blocks,
            "eval_seed": seed,
        }
        return RunResult(**facts, rows=tuple(map(_rounded, rows)))

    @property
    def fixed(self) -> tuple[int, int]:
        """The ends that keep their place in the scores."""
        return self.evaluate.fixed or self.settings.build_method().fixed

    @property
    def epochs(self) -> float:
        """Passes over the training data; only for a run without a number of steps."""
        return self.settings.epochs or DEFAULT_EPOCHS

    def steps(self, sizes: Sizes) -> float | None:
        """Training steps; `None` if they depend on a number of images that is not known."""
        if self.settings.steps is not None or "train" not in sizes:
            return self.settings.steps
        # The last batch of an epoch may be smaller, but is a step too.
        return self.epochs * math.ceil(sizes["train"] / self.settings.batch_size)

    def cost(self, sizes: Sizes) -> float | None:
        steps, scored = self.steps(sizes), self.scored(sizes)
        if steps is None or scored is None:
            return None
        return _TRAINING_COST * steps * self.settings.batch_size + scored

    def training_share(self) -> float:
        """The share of its work that is training."""
        # Neither is `None`, because all sizes are given.
        return 1 - (self.scored(ASSUMED_SIZES) or 0) / (self.cost(ASSUMED_SIZES) or 1)


@dataclass(frozen=True, kw_only=True)
class MergingSpec(Task[MergingResult]):
    """Merges, soups and ensembles of an arm's models. `donors`: the runs of all of its seeds."""

    result = MergingResult
    donors: tuple[RunSpec, ...]
    options: MergingSettings

    def run(self, out: Path, say: Say) -> MergingResult:
        from layershuffle.merging.scoring import score_merging

        started = time.monotonic()
        first = self.donors[0]  # the donors differ only in their seed
        mode = first.settings.build_method().selects_by
        rows, notes = score_merging(
            [run.model(out) for run in self.donors],
            first.settings.data,
            settings=self.options,
            mode=mode,  # as in the paper, merges run in the order for which they were trained
            names=self.needs,
            progress=lambda what, done, total: say(what, done / total),
        )
        facts = _facts_of(self.options, started=started, precision=self.options.precision)
        return MergingResult(
            **facts | {"mode": mode, "notes": notes},
            donors=list(self.needs),
            rows=tuple(_rounded(row).model_copy(update={"arm": self.arm}) for row in rows),
        )

    def is_done(self, facts: Mapping[str, Mapping[str, Any]]) -> bool:
        # A merging is repeated if its arm has got more seeds, hence more donors.
        return facts.get(self.name, {}).get("donors") == list(self.needs)

    def continues(self, done: Any) -> bool:
        return set(done.needs) <= set(self.needs) and done.options == self.options


@dataclass(frozen=True, kw_only=True)
class AnalysisSpec(Task[AnalysisResult]):
    """One analysis, `kind`, of the model of one run."""

    result = AnalysisResult
    model: RunSpec
    options: AnalysisSettings

    def run(self, out: Path, say: Say) -> AnalysisResult:
        from layershuffle.analysis import run_analysis

        started = time.monotonic()
        files = self.directory(out) / "files"
        run_analysis(
            self.kind,
            self.model.model(out),
            data_spec=self.model.settings.data,
            settings=self.options,
            out=files,
            progress=lambda what, done, total: say(what, done / total),
        )
        answer = json.loads((files / "summary.json").read_text(encoding="utf-8"))
        (out / FIGURES).mkdir(exist_ok=True)
        for picture in files.glob("*.png"):
            shutil.copy(picture, out / FIGURES / f"{self.name}-{picture.name}")
        return AnalysisResult(
            **_facts_of(self.options, started=started),
            title=answer["title"],
            facts=_numbers(answer["facts"]),
        )


AnyTask = RunSpec | MergingSpec | AnalysisSpec


def scoring_seed(seed: int, model: int) -> int:
    """Seed of the orders that a model is scored under.

    It is the same for all arms, which can then be compared order by order. It differs between
    models, so the spread over models includes that over orders, and from the run's own seed, whose
    orders picked the checkpoint.
    """
    return Stream(seed, model, rank=_SCORING).below(1 << 32)


def orders_of(scoring: EvalSettings, kept: int | None, *, fixed: tuple[int, int]) -> int:
    """The number of orders under which a model is scored; `kept`: its depth, if it is known, and
    `fixed`: its ends."""
    modes, depth = parse_modes(scoring.modes), kept or _ANY_DEPTH
    return sum(mode.draws(scoring.num_orders, depth=depth, fixed=fixed) for mode in modes)


def _said(say: Say) -> Callable[[dict[str, Any]], None]:
    steps = 1

    def listen(event: dict[str, Any]) -> None:
        nonlocal steps
        if event["kind"] == "start":
            steps = event["steps"]
            say(f"step {event['at']}/{steps}", event["at"] / steps)
        elif event["kind"] == "log":
            step = event["step"]
            say(f"step {step}/{steps}, loss {event['loss']:.3f}", step / steps)

    return listen


def _rounded(row: AnyRow) -> AnyRow:
    """The row with as many decimals as the files of scores have."""
    values = {name: round(getattr(row, name), count) for name, count in _DIGITS.items()}
    return row.model_copy(update=values)


def _numbers(facts: Mapping[str, Any]) -> dict[str, Any]:
    """The single numbers of nested facts; lists stay in the files of the analysis."""
    return {
        name: _numbers(value) if isinstance(value, Mapping) else value
        for name, value in facts.items()
        if isinstance(value, Mapping | int | float)
    }


def _facts_of(options: Any, *, started: float, precision: str = "fp32") -> dict[str, Any]:
    from layershuffle.machine import hardware, versions

    return {
        "options": options.model_dump(mode="json"),
        "settings_hash": digest(options),
        "finished": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "seconds": round(time.monotonic() - started, 2),
        "hardware": hardware(precision),
        "versions": versions(),
    }
