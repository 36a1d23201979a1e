"""The accuracy to expect of an answer, by the number of blocks it used.

Measured once on held-out images, stored as calibration.json beside the model and looked up at every
answer. Every number of blocks gets as many orders. Those of one seed are prefixes of the same
permutations (`policies.Kept`), so all numbers of blocks together cost hardly more than all blocks.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from statistics import harmonic_mean
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from layershuffle.errors import ModelFileError, UsageError
from layershuffle.files import write_text
from layershuffle.machine import Device, device_of
from layershuffle.modes import Mode
from layershuffle.progress import Progress, unheard
from layershuffle.stats import deviation, mean, t_interval, wilson_interval

if TYPE_CHECKING:
    from torch import nn

    from layershuffle.data import ImageData
    from layershuffle.evaluation import Score

CALIBRATION = "calibration.json"
SPLIT = "test"
"""Neither trained on nor used to pick a checkpoint, whatever made the model."""
NEVER = "the model was never calibrated (layershuffle swarm calibrate MODEL --data SPEC)"
_SCHEMA = 2
_AGAIN = "run layershuffle swarm calibrate again"
_TAIL = 0.05  # of the orders, beyond either end of the range over orders
_USEFUL = 0.5  # of the accuracy with all blocks
_SURE = 1.96  # standard deviations on either side of a 95 % interval

Percent = Annotated[float, Field(ge=0, le=100)]
Count = Annotated[int, Field(ge=1)]


@dataclass(frozen=True)
class CalibrationFacts:
    """What the expected accuracies were measured on."""

    data: str
    split: str
    orders: int
    images: int


@dataclass(frozen=True)
class Expected:
    """The accuracy of answers with this many blocks in arbitrary order, from the calibration.

    Percent of the first guesses that were right. `top1` is the mean over orders, and `low` and
    `high` bound this mean at 95 %. An answer comes from a single order of the blocks that could be
    reached, whose accuracy is another: nine of ten orders, and choices of blocks, lie within
    `orders_low` and `orders_high`. `effective`: how many independent images the `images` count as;
    null where the data named no groups of images that are wrong together.
    """

    top1: float
    low: float
    high: float
    orders_low: float
    orders_high: float
    kept: int
    orders: int
    images: int
    data: str
    split: str
    effective: float | None = None


class _CalibrationModel(BaseModel):
    # Strict: a number that somebody wrote as a text is refused, not converted.
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class Row(_CalibrationModel):
    """Top-1 in percent with `kept` blocks; `sd_orders`: its spread over orders.

    `orders_low`, `orders_high`: the 5 % and 95 % quantiles over orders, each of which keeps blocks
    of its own. `effective`: how many independent images it was measured on; `None` without groups
    of images.
    """

    kept: Count
    top1: Percent
    low: Percent
    high: Percent
    orders_low: Percent
    orders_high: Percent
    sd_orders: float | None
    effective: Annotated[float, Field(ge=1)] | None = None


class Calibration(_CalibrationModel):
    """The content of calibration.json. `weights`: digest of the model it was measured on."""

    schema_: Literal[2] = Field(2, alias="schema")
    weights: str
    data: str
    split: str
    seed: int
    orders: Count
    images: Count
    classes: tuple[str, ...]
    rows: tuple[Row, ...]

    @property
    def facts(self) -> CalibrationFacts:
        """What it was measured on, as answers show it."""
        return CalibrationFacts(
            data=self.data, split=self.split, orders=self.orders, images=self.images
        )


def calibrate(
    model: nn.Module,
    data: str,
    *,
    orders: int = 20,
    images: int = 2000,
    seed: int = 0,
    batch_size: int = 250,
    device: Device = "auto",
    progress: Progress = unheard,
) -> Calibration:
    """Measure `model` on the test split of the data spec, with 1 to all blocks, in one pass.

    `progress` hears of images. Raises `StackError` for models that a swarm cannot serve,
    `DataError` for data with other classes, `UsageError` for fewer than two orders.
    """
    from layershuffle.data import DataOptions, match_classes, open_data
    from layershuffle.models import class_names_of, file_view, num_classes_of
    from layershuffle.models.files import weights_digest
    from layershuffle.swarm.remote_model import served_host

    # One order has no spread, and so no interval.
    if orders < 2:
        raise UsageError("A calibration takes two orders or more", hint="20 is a good number")
    host = served_host(model)
    options = DataOptions(train=False, max_test=images)
    opened = match_classes(
        open_data(data, file_view(host), options=options),
        class_names_of(host),
        outputs=num_classes_of(host),
        place="the model",
    )
    weights = weights_digest(host)
    scores = _scores(
        host.to(device_of(device)), opened, orders=orders, seed=seed, batch_size=batch_size,
        progress=progress,
    )  # fmt: skip
    return Calibration(
        schema=2,
        weights=weights,
        data=data,
        split=SPLIT,
        seed=seed,
        orders=orders,
        images=scores[0].images,
        classes=opened.classes,
        rows=rows_of(scores),
    )


def _scores(
    host: nn.Module,
    data: ImageData,
    *,
    orders: int,
    seed: int,
    batch_size: int,
    progress: Progress,
) -> list[Score]:
    from layershuffle.data.batches import DeviceBatches
    from layershuffle.data.loading import loader_processes
    from layershuffle.evaluation import evaluate
    from layershuffle.stack import depth_of

    split = data.splits[SPLIT]
    batches = DeviceBatches(
        split,
        data.finish,
        batch_size=batch_size,
        device=next(host.parameters()).device,
        processes=loader_processes(data.spec),
    )
    modes = [Mode(order="arbitrary", kept=kept) for kept in range(1, depth_of(host) + 1)]
    return evaluate(
        host, batches, modes=modes, num_orders=orders, seed=seed, groups=split.groups,
        on_images=lambda done: progress("images", done, split.size),
    )  # fmt: skip


def rows_of(scores: Iterable[Score]) -> tuple[Row, ...]:
    """One row per number of blocks, ascending, of scores of single orders."""
    by_kept: dict[int, list[Score]] = {}
    for score in scores:
        by_kept.setdefault(score.kept, []).append(score)
    return tuple(_row(kept, group) for kept, group in sorted(by_kept.items()))


def _row(kept: int, scores: Sequence[Score]) -> Row:
    """The mean with a 95 % interval over orders and over images.

    Both spreads matter: the orders of a request are new, and so are its images. Their half-widths
    (t-interval over orders; Wilson's over images, which is wide enough for any correlation between
    orders) add as independent errors do: by their squares, each side for itself.
    """
    top1 = [score.top1 for score in scores]
    centre = mean(top1)
    low_orders, high_orders = t_interval(top1)
    counts = [score.top1_n for score in scores if score.top1_n is not None]
    # The harmonic mean, so that p (1 - p) / n is the mean of the orders' variances: that of their
    # mean is no larger.
    effective = harmonic_mean(counts) if counts else None
    # Wilson's interval stays within 0 and 100 %, where accuracies near 100 % lie.
    low_images, high_images = wilson_interval(centre, effective or scores[0].images)
    low = centre - math.hypot(centre - low_orders, centre - low_images)
    high = centre + math.hypot(high_orders - centre, high_images - centre)
    ordered, last = sorted(top1), len(top1) - 1
    return Row(
        kept=kept,
        top1=centre,
        low=max(0.0, low),
        high=min(100.0, high),
        # Rounded outwards, so that few orders give their whole range and no narrower one.
        orders_low=ordered[math.floor(_TAIL * last)],
        orders_high=ordered[math.ceil((1 - _TAIL) * last)],
        sd_orders=deviation(top1),
        effective=effective,
    )


def expected_at(calibration: Calibration, kept: int) -> Expected | None:
    """The accuracy to expect of an answer with `kept` blocks; `None` for none."""
    for row in calibration.rows:
        if row.kept == kept:
            return Expected(
                top1=row.top1,
                low=row.low,
                high=row.high,
                orders_low=row.orders_low,
                orders_high=row.orders_high,
                kept=kept,
                orders=calibration.orders,
                images=calibration.images,
                data=calibration.data,
                split=calibration.split,
                effective=row.effective,
            )
    return None


def useful_blocks(calibration: Calibration | None) -> int:
    """Fewest blocks with at least half of the accuracy that all have; 1 without a calibration."""
    if calibration is None:
        return 1
    enough = _USEFUL * calibration.rows[-1].top1
    return next(row.kept for row in calibration.rows if row.top1 >= enough)


def expected_over(calibration: Calibration, kept: Sequence[int]) -> tuple[float, float, float]:
    """(top-1, low, high) to expect of answers with these numbers of blocks, one image each.

    Beside the calibration's own uncertainty the interval holds the chance of which images these
    were, and of which groups of images: of few answers it is wide. An answer without blocks counts
    as wrong. Raises `UsageError` for no answers.
    """
    if not kept:
        raise UsageError("No answers, no accuracy to expect")
    rows = [expected_at(calibration, one) for one in kept]
    top1 = mean([0.0 if row is None else row.top1 for row in rows])
    # The calibration's own error is the same for all answers: it does not shrink with their number.
    below = mean([0.0 if row is None else row.top1 - row.low for row in rows])
    above = mean([0.0 if row is None else row.high - row.top1 for row in rows])
    # The share of pairs of images that err together is the same for fewer images of such groups,
    # so the design effect beyond 1 falls with their number.
    shared = [
        (row.images / row.effective - 1) / (row.images - 1)
        for row in rows
        if row is not None and row.effective is not None and row.images > 1
    ]
    effect = 1 + sum(shared) / len(kept) * (len(kept) - 1)
    chance = _SURE * math.sqrt(top1 * (100 - top1) / len(kept) * effect)
    return (
        top1,
        max(0.0, top1 - math.hypot(below, chance)),
        min(100.0, top1 + math.hypot(above, chance)),
    )


def calibration_path(model: str) -> Path:
    """Where the calibration of the model with this spec stands: beside its weights.

    Raises `UsageError` for models without a directory of their own.
    """
    from layershuffle.models.metadata import METADATA_FILE
    from layershuffle.models.spec import parse_spec

    spec = parse_spec(model)
    if spec.scheme == "bundled":
        return Path(
            str(resources.files("layershuffle").joinpath("assets", spec.place, CALIBRATION))
        )
    if spec.scheme != "dir":
        raise UsageError(
            f"{model} has no directory of its own to keep a calibration in",
            hint="save it first: layershuffle.save(model, DIR), or layershuffle fit",
        )
    place = Path(spec.place).expanduser()
    inside = place if (place / METADATA_FILE).is_file() else place / "model"
    return inside / CALIBRATION


def write_calibration(calibration: Calibration, path: Path) -> None:
    """Store `calibration` at `path`, whole or not at all."""
    write_text(path, calibration.model_dump_json(by_alias=True, indent=1) + "\n")


def read_calibration(path: Path, *, weights: str) -> Calibration | None:
    """The calibration stored at `path`, or `None` if there is none.

    Raises `ModelFileError` if it is damaged, of another version, or was measured on weights of
    another digest.
    """
    from layershuffle.models.files import read_json

    if not path.is_file():
        return None
    stored = read_json(path)  # checked for size and nesting
    # The first version has no range over orders, and a mean alone says little about an answer.
    if stored.get("schema") != _SCHEMA:
        raise ModelFileError(
            f"The calibration is of version {stored.get('schema')}, not {_SCHEMA}: it was written "
            "by another version of layershuffle",
            place=path,
            hint=_AGAIN,
        )
    content = json.dumps(stored)
    try:
        calibration = Calibration.model_validate_json(content)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        key = ".".join(map(str, first["loc"]))
        raise ModelFileError(
            f"The key {key!r} is wrong ({first['msg']})", place=path, hint=_AGAIN
        ) from error
    if [row.kept for row in calibration.rows] != list(range(1, len(calibration.rows) + 1)):
        raise ModelFileError("The rows do not count the blocks up from 1", place=path, hint=_AGAIN)
    # A model that was refined further has other accuracies, and must not be told by the old file.
    if calibration.weights != weights:
        raise ModelFileError(
            "The calibration was measured on other weights than the model has",
            place=path,
            hint=_AGAIN,
        )
    return calibration
