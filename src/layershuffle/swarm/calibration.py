"""The accuracy to expect of an answer, by how its blocks ran (`rounds.Cell`).

It is measured once on test images, stored as calibration.json beside the model and looked up for
every answer. Every cell has the same number of orders. Those of one seed are prefixes of the same
permutations (`policies.Kept`), so all numbers of blocks together cost hardly more than all blocks.
`expectations` applies it to answers and to the router.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import harmonic_mean
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field, ValidationError

from layershuffle.core.policies import Shuffled
from layershuffle.errors import DataError, ModelFileError, StackError, UsageError
from layershuffle.files import write_text
from layershuffle.machine import Device, device_of
from layershuffle.manifest import CALIBRATION
from layershuffle.results import Count, Percent
from layershuffle.stats import deviation, mean, t_interval, wilson_interval
from layershuffle.swarm.rounds import Cell, late_last, overlapped
from layershuffle.swarm.sureness import (
    CalibrationPart,
    Sureness,
    batches_for,
    measured_sureness,
)
from layershuffle.text import Progress, unheard

if TYPE_CHECKING:
    from torch import nn

    from layershuffle.core.evaluation import Score
    from layershuffle.data import DataOptions, ImageData
    from layershuffle.swarm.served import ServedModel

SPLIT = "test"
"""The split that no training and no choice of a checkpoint uses."""
_SCHEMA = 3
_AGAIN = "run layershuffle swarm calibrate again"
_TAIL = 0.05  # share of the orders outside of each end of the range over orders
_PARALLEL = 4  # the bundled model loses 3 points with 4 blocks side by side, and 7 with 6
_PASSES = {2: 0.75, 3: 0.5}  # up to this share of the blocks; with more there was no gain
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class CalibrationFacts:
    """The data that the expected accuracies were measured on."""

    data: str
    split: str
    orders: int
    images: int


class CellAccuracy(CalibrationPart):
    """Top-1 in percent of a cell (`rounds.Cell`); `sd_orders`: its spread over orders.

    `low`, `high`: 95 % interval of `top1`. `orders_low`, `orders_high`: the 5 % and 95 % quantiles
    over orders, which keep different blocks. `effective`: number of independent images; `None`
    without groups of images.
    """

    kept: Count
    passes: Count = 1
    parallel: Count = 1
    top1: Percent
    low: Percent
    high: Percent
    orders_low: Percent
    orders_high: Percent
    sd_orders: float | None
    effective: Annotated[float, Field(ge=1)] | None = None

    @property
    def cell(self) -> Cell:
        """The cell of this row."""
        return Cell(self.kept, self.passes, self.parallel)


class Calibration(CalibrationPart):
    """The content of calibration.json. `weights`: digest of the measured model.

    `late`: top-1 in percent with all blocks one after the other, if the last read a state that was
    1, 2 ... versions old. `tied`: for every place the first one with the same weights, `None` if no
    places share them; such places were measured apart (`rounds.overlapped`). `sureness`: `None` if
    the data have no held-out images.
    """

    schema_: Literal[3] = Field(3, alias="schema")
    weights: str
    data: str
    split: str
    seed: int
    orders: Count
    images: Count
    classes: tuple[str, ...]
    rows: tuple[CellAccuracy, ...]
    late: tuple[Percent, ...] = ()
    tied: tuple[int, ...] | None = None
    sureness: Sureness | None = None

    @property
    def temperatures(self) -> tuple[float, ...]:
        """By the number of blocks; none if they were not measured."""
        return () if self.sureness is None else self.sureness.temperatures

    @property
    def queue(self) -> tuple[CellAccuracy, ...]:
        """The rows in which blocks run one after the other, each once, by the number of blocks."""
        return tuple(row for row in self.rows if row.passes == row.parallel == 1)

    @property
    def facts(self) -> CalibrationFacts:
        """The measurement's data, as answers show it."""
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

    Then fit, on as many held-out images, how sure its answers are (`sureness`). `progress` is
    called with the images done. Raises `StackError` for models that a swarm cannot serve,
    `DataError` for data with other classes, `UsageError` for fewer than two orders.
    """
    from layershuffle.core.stack import blocks_of, depth_of
    from layershuffle.core.tying import places_tied
    from layershuffle.data import DataOptions
    from layershuffle.models.files import weights_digest

    # One order has no spread, hence no interval.
    if orders < 2:
        raise UsageError("A calibration needs at least two orders", hint="20 is a good number")
    host = served_host(model)
    opened = _opened(host, data, DataOptions(train=False, max_test=images))
    weights, tied = weights_digest(host), places_tied(blocks_of(host))
    permutations = [
        Shuffled().draw(depth_of(host), seed=seed, step=k).blocks for k in range(orders)
    ]
    measure = partial(
        _measure, host.to(device_of(device)), opened, permutations,
        tied=tied, batch_size=batch_size, progress=progress,
    )  # fmt: skip
    try:
        scores, late = measure(parallel=_PARALLEL)
    except StackError as error:
        # A swarm serves it nevertheless, one block after the other.
        _log.warning("Only one block after the other can be measured: %s", error)
        scores, late = measure(parallel=1)
    return Calibration(
        schema=3,
        weights=weights,
        data=data,
        split=SPLIT,
        seed=seed,
        orders=orders,
        images=scores[Cell(1)][0].images,
        classes=opened.classes,
        rows=rows_of(scores),
        late=late,
        tied=tied,
        sureness=_sureness(host, opened, permutations, images=images, batch_size=batch_size),
    )


def served_host(model: nn.Module) -> nn.Module:
    """The wrapped model, without a position prediction, as hosts run it.

    Raises `StackError` for models with position encoding, and for models that compute something
    between their blocks.
    """
    from layershuffle.core.position import PositionedModel, backbone_of
    from layershuffle.core.stack import blocks_of, wrap
    from layershuffle.core.tensors import logits_of
    from layershuffle.models import image_view
    from layershuffle.models.ends import refuse_more_than_blocks

    if isinstance(model, PositionedModel) and model.encoding is not None:
        raise StackError(
            "A model with position encoding cannot be served by a swarm: its blocks compute "
            "something else at every position, and block hosts do not know theirs",
            hint="serve a model refined by layershuffle or anyorder",
        )
    host = wrap(backbone_of(model))
    weight, view = next(blocks_of(host)[0].parameters()), image_view(host)
    images = weight.new_zeros(2, view.channels, view.height, view.width)
    refuse_more_than_blocks(host, images, forward=lambda pixels: logits_of(host(pixels)))
    return host


def cells_of(depth: int, *, parallel: int) -> tuple[Cell, ...]:
    """The measured cells: all numbers of blocks, and repeated passes as far as they may help."""
    return tuple(
        Cell(kept, passes, under_way)
        for under_way in range(1, parallel + 1)
        for passes, share in {1: 1.0, **_PASSES}.items()
        for kept in range(1, math.floor(share * depth) + 1)
    )


def _measure(
    host: nn.Module,
    data: ImageData,
    permutations: Sequence[tuple[int, ...]],
    *,
    parallel: int,
    tied: tuple[int, ...] | None,
    batch_size: int,
    progress: Progress,
) -> tuple[dict[Cell, list[Score]], tuple[float, ...]]:
    """The scores of all cells, one per permutation, and the accuracies with a last block that is
    1, 2 ... versions late (none if `parallel` is 1)."""

    from layershuffle.core.evaluation import evaluate
    from layershuffle.core.stack import depth_of

    split = data.splits[SPLIT]
    batches = batches_for(host, data, split=split, batch_size=batch_size)
    depth, groups = depth_of(host), split.groups
    cells = cells_of(depth, parallel=parallel)
    ages = range(1, depth if parallel > 1 else 1)
    orders = [
        overlapped(blocks, cell, depth=depth, tied=tied)
        for cell in cells
        for blocks in permutations
    ]
    orders += [late_last(blocks, age, depth=depth) for age in ages for blocks in permutations]
    scores = evaluate(
        host, batches, orders=orders, groups=groups,
        on_images=lambda done: progress("images", done, split.size),
    )  # fmt: skip
    each = [scores[i : i + len(permutations)] for i in range(0, len(scores), len(permutations))]
    late = tuple(mean([score.top1 for score in group]) for group in each[len(cells) :])
    return dict(zip(cells, each[: len(cells)], strict=True)), late


def _opened(host: nn.Module, data: str, options: DataOptions) -> ImageData:
    from layershuffle.data import match_classes, open_data
    from layershuffle.models import class_names_of, file_view, name_outputs, num_classes_of

    opened = open_data(data, file_view(host), options=options)
    for note in name_outputs(host, opened.classes, place="the model"):
        _log.warning(note)
    names = class_names_of(host)
    return match_classes(opened, names, outputs=num_classes_of(host), place="the model")


def _sureness(
    host: nn.Module,
    tested: ImageData,
    permutations: Sequence[tuple[int, ...]],
    *,
    images: int,
    batch_size: int,
) -> Sureness | None:
    from layershuffle.core.position import backbone_of
    from layershuffle.data import DataOptions
    from layershuffle.models.origin import trained_with

    share = trained_with(backbone_of(host)).get("holdout", DataOptions.holdout)
    try:
        held_out = _opened(host, tested.spec, DataOptions(holdout=share))
    except DataError as error:
        _log.warning("How sure answers are is not known, so requests run all blocks: %s", error)
        return None
    return measured_sureness(
        host,
        held_out=held_out,
        tested=tested,
        permutations=permutations,
        images=images,
        batch_size=batch_size,
    )


def rows_of(scores: Mapping[Cell, Sequence[Score]]) -> tuple[CellAccuracy, ...]:
    """A row per cell, from the scores of its orders."""
    return tuple(_row(cell, group) for cell, group in scores.items())


def _row(cell: Cell, scores: Sequence[Score]) -> CellAccuracy:
    """The row of a cell: the mean with a 95 % interval over orders and over images.

    Both spreads matter: the orders of a request are new, and so are its images. Their half-widths
    (t-interval over orders; Wilson's over images, which is wide enough for any correlation between
    orders) add as independent errors do: by their squares, separately on each side.
    """
    top1 = [score.top1 for score in scores]
    centre = mean(top1)
    low_orders, high_orders = t_interval(top1)
    counts = [score.top1_n for score in scores if score.top1_n is not None]
    # With the harmonic mean, p (1 - p) / n is the mean of the orders' variances, which the variance
    # of their mean does not exceed.
    effective = harmonic_mean(counts) if counts else None
    # Wilson's interval stays within 0 and 100 %, also for accuracies near 100 %.
    low_images, high_images = wilson_interval(centre, effective or scores[0].images)
    low = centre - math.hypot(centre - low_orders, centre - low_images)
    high = centre + math.hypot(high_orders - centre, high_images - centre)
    ordered, last = sorted(top1), len(top1) - 1
    return CellAccuracy(
        kept=cell.kept,
        passes=cell.passes,
        parallel=cell.parallel,
        top1=centre,
        low=max(0.0, low),
        high=min(100.0, high),
        # Rounded outwards, so few orders give their whole range.
        orders_low=ordered[math.floor(_TAIL * last)],
        orders_high=ordered[math.ceil((1 - _TAIL) * last)],
        sd_orders=deviation(top1),
        effective=effective,
    )


def calibration_path(model: str) -> Path:
    """The path of the calibration of the model with this spec, beside its weights.

    Raises `UsageError` for models without a directory of their own.
    """
    from layershuffle.models.output import own_directory

    directory = own_directory(model)
    if directory is None:
        raise UsageError(
            f"{model} has no directory of its own to keep a calibration in",
            hint="save it first: layershuffle.save(model, DIR), or layershuffle fit",
        )
    return directory / CALIBRATION


def write_calibration(calibration: Calibration, path: Path) -> None:
    """Write `calibration` to `path`, atomically."""
    write_text(path, calibration.model_dump_json(by_alias=True, indent=1) + "\n")


def calibration_of(model: ServedModel) -> Calibration | None:
    """The calibration among the files of an exported model, `None` without one.

    Raises `ModelFileError` if it is damaged, or was measured on other weights.
    """
    return read_calibration(model.directory / CALIBRATION, weights=model.manifest.weights)


def read_calibration(path: Path, *, weights: str) -> Calibration | None:
    """The calibration stored at `path`, or `None` if there is none.

    Raises `ModelFileError` if it is damaged, of another version, or was measured on weights of
    another digest.
    """
    if not path.is_file():
        return None
    try:
        stored = json.loads(path.read_bytes())
        version = stored.get("schema")
    except (OSError, ValueError, AttributeError, RecursionError) as error:
        raise ModelFileError(
            f"The calibration cannot be read ({type(error).__name__})", place=path, hint=_AGAIN
        ) from error
    # Version 1 lacks the range over orders, version 2 blocks side by side, and neither can be
    # computed from the rest.
    if version != _SCHEMA:
        raise ModelFileError(
            f"The calibration is of version {version}, not {_SCHEMA}: it was written "
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
    kept = [row.kept for row in calibration.queue]
    numbers = list(range(1, len(kept) + 1))
    if not kept or kept != numbers or len(calibration.temperatures) not in (0, len(kept)):
        raise ModelFileError(
            "The rows must have 1, 2, 3, ... blocks, with a temperature for each or for none",
            place=path,
            hint=_AGAIN,
        )
    # A model that was refined further has other accuracies than its old file says.
    if calibration.weights != weights:
        raise ModelFileError(
            "The calibration was measured on other weights than the model has",
            place=path,
            hint=_AGAIN,
        )
    return calibration
