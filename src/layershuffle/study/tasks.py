"""The tasks of a study: what each does, what it leaves, and what it needs first.

A *run* is one training and its scores, a *merging* all merges of an arm's models, an *analysis* one
question asked of one model. `task.run(out, say)` does the work in `task.directory(out)` and returns
its result, `task.read(stored)` takes the same result from the files of the study (`study.store`).
"""

from __future__ import annotations

import math
import shutil
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Generic, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from layershuffle.analysis.settings import AnalysisSettings
from layershuffle.core.draws import Stream
from layershuffle.core.policies import parse_modes
from layershuffle.ground.errors import LayerShuffleError
from layershuffle.ground.rows import AnyRow, MergingRow, ScoreRow
from layershuffle.merging.settings import MergingSettings
from layershuffle.scoring.settings import EvalSettings
from layershuffle.training.settings import DEFAULT_EPOCHS, FitSettings

FIT_DIRECTORY = "fit"
"""The directory of the training below that of a run; `layershuffle eval` accepts it."""
FIGURES = "figures"
Say = Callable[[str, float], None]
"""Called with what a task is doing and the share of it that is done."""
Sizes = Mapping[str, int]
"""The number of images of the splits "train" and "test"."""
_SCORING = 1 << 20  # a rank for these draws alone; orders are drawn with small ranks
_ANY_DEPTH = 1000  # for the number of orders of a model that has not been opened
# In scores of an image: a forward, a backward of twice the work, and twice the blocks of a usual
# score, because many are of pruned orders. Digits took 8.
_TRAINING_COST = 6
ASSUMED_SIZES: Sizes = {"train": 50_000, "test": 5_000}
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
    """What the checkpoint was picked by."""

    metric: str


class RunData(TaskResult):
    """The data of a run: what a reader must know of it, and the number of images by split."""

    notes: list[str]
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


class MergingResult(TaskResult):
    """A finished merging."""

    rows: tuple[MergingRow, ...] = Field(default=(), exclude=True)


class AnalysisResult(TaskResult):
    """A finished analysis. `facts`: its numbers, nested by name."""

    title: str
    facts: dict[str, Any]
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
    """A part of a study that runs by itself.

    `name`: that of its directory, and of its line in tasks.jsonl. `arm`: the label of its arm.
    `images`: test images that it asks for (`None`: all), each of which runs through a model in
    scoring `passes` times. `needs`: names of the tasks that must be done first.
    """

    result: ClassVar[type[Any]]
    """The class of its result."""
    name: str
    arm: str
    images: int | None
    passes: int
    needs: tuple[str, ...] = ()

    def directory(self, out: Path) -> Path:
        """Where it works: checkpoints, models, log."""
        return out / "runs" / self.name

    def run(self, out: Path, say: Say) -> ResultT:
        """Do the task in the study's directory `out`. Raises the errors of the work."""
        raise NotImplementedError

    def read(self, stored: Stored) -> ResultT:
        """The result of a task that is done. Raises `StudyError` for a fact of another type."""
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

    def scored(self, sizes: Sizes) -> int:
        """Images in scoring, each counted once per pass."""
        images = sizes["test"]
        if self.images is not None:
            images = min(images, self.images)
        return images * self.passes

    def cost(self, sizes: Sizes) -> float:
        """The work, in scores of an image."""
        return self.scored(sizes)


@dataclass(frozen=True, kw_only=True)
class RunSpec(Task[RunResult]):
    """One training and its evaluation.

    `row`: the arm in the main table, which models of several depths share.
    """

    result = RunResult
    row: str
    settings: FitSettings
    evaluate: EvalSettings

    def model(self, out: Path) -> str:
        """The spec of the trained model."""
        return f"dir:{self.directory(out) / FIT_DIRECTORY}"

    def run(self, out: Path, say: Say) -> RunResult:
        from layershuffle.scoring.evaluate_spec import check_modes, evaluate_spec, score_rows
        from layershuffle.training import fit

        method = self.settings.build_method()
        # Before the training, not after it.
        check_modes(self.settings.model, self.evaluate, kept=method.kept, fixed=method.fixed)
        training = self.training_share()
        fitted = fit(
            self.settings,
            self.directory(out) / FIT_DIRECTORY,
            on_event=_training_listener(lambda text, share: say(text, training * share)),
        )
        started = time.monotonic()
        facts = asdict(fitted)
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
            scored.scores,
            scored.data.splits["test"],
            method=self.arm,
            seed=self.settings.seed,
            draw=settings.draw,
        )
        # The recipe asks for compiled blocks, so the report must mention eager ones.
        if settings.compile and scored.blocks["mode"] == "eager":
            facts["data"]["notes"].append(f"scored in eager mode: {scored.blocks['reason']}")
        facts |= {
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

    def steps(self, sizes: Sizes) -> float:
        """Training steps."""
        if self.settings.steps is not None:
            return self.settings.steps
        # The last batch of an epoch may be smaller, but is a step too.
        return self.epochs * math.ceil(sizes["train"] / self.settings.batch_size)

    def cost(self, sizes: Sizes) -> float:
        trained = self.steps(sizes) * self.settings.batch_size
        return _TRAINING_COST * trained + self.scored(sizes)

    def training_share(self) -> float:
        """The share of its work that is training, in [0, 1], before the data are known."""
        return 1 - self.scored(ASSUMED_SIZES) / self.cost(ASSUMED_SIZES)


@dataclass(frozen=True, kw_only=True)
class MergingSpec(Task[MergingResult]):
    """Merges, soups and ensembles of an arm's models.

    `donors`: the runs of all seeds of the arm.
    """

    result = MergingResult
    donors: tuple[RunSpec, ...]
    options: MergingSettings

    def run(self, out: Path, say: Say) -> MergingResult:
        from layershuffle.merging.scoring import score_merging

        started = time.monotonic()
        first = self.donors[0]  # the donors differ only in their seed
        mode = first.settings.build_method().selects_by
        scores, notes = score_merging(
            [run.model(out) for run in self.donors],
            first.settings.data,
            settings=self.options,
            mode=mode,  # as in the paper, merges run in the order for which they were trained
            names=self.needs,
            progress=lambda what, done, total: say(what, done / total),
        )
        facts = _task_facts(self.options, started=started, precision=self.options.precision)
        facts |= {"mode": mode, "notes": notes, "donors": list(self.needs)}
        rows = []
        for score in scores:
            rows.append(_rounded(score).model_copy(update={"arm": self.arm}))
        return MergingResult(**facts, rows=tuple(rows))


@dataclass(frozen=True, kw_only=True)
class AnalysisSpec(Task[AnalysisResult]):
    """One analysis, `kind`, of the model of one run."""

    result = AnalysisResult
    kind: str
    model: RunSpec
    options: AnalysisSettings

    def run(self, out: Path, say: Say) -> AnalysisResult:
        from layershuffle.analysis import run_analysis

        started = time.monotonic()
        files = self.directory(out) / "files"
        answer = run_analysis(
            self.kind,
            self.model.model(out),
            data_spec=self.model.settings.data,
            settings=self.options,
            out=files,
            progress=lambda what, done, total: say(what, done / total),
        )
        (out / FIGURES).mkdir(exist_ok=True)
        for picture in files.glob("*.png"):
            shutil.copy(picture, out / FIGURES / f"{self.name}-{picture.name}")
        return AnalysisResult(
            **_task_facts(self.options, started=started),
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


def count_orders(scoring: EvalSettings, kept: int | None, *, fixed: tuple[int, int]) -> int:
    """The number of orders under which a model is scored.

    `kept`: its depth, if it is known; `fixed`: its ends.
    """
    depth = kept or _ANY_DEPTH
    count = 0
    for mode in parse_modes(scoring.modes):
        count += mode.draws(scoring.num_orders, depth=depth, fixed=fixed)
    return count


def _training_listener(say: Say) -> Callable[[dict[str, Any]], None]:
    """What `fit` calls with its events: it says the step and the share of the training."""
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
    rounded = {}
    for name, digits in _DIGITS.items():
        rounded[name] = round(getattr(row, name), digits)
    return row.model_copy(update=rounded)


def _numbers(facts: Mapping[str, Any]) -> dict[str, Any]:
    """The single numbers of nested facts; lists stay in the files of the analysis."""
    numbers: dict[str, Any] = {}
    for name, value in facts.items():
        if isinstance(value, Mapping):
            numbers[name] = _numbers(value)
        elif isinstance(value, int | float):
            numbers[name] = value
    return numbers


def _task_facts(options: Any, *, started: float, precision: str = "fp32") -> dict[str, Any]:
    """What every merging and analysis says of itself; `started` as `time.monotonic` has it."""
    from layershuffle.ground.machine import hardware, versions

    return {
        "options": options.model_dump(mode="json"),
        "finished": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "seconds": round(time.monotonic() - started, 2),
        "hardware": hardware(precision, device="auto"),
        "versions": versions(),
    }
