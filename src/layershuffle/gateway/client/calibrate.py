"""Measure a calibration: how accurate the answers of a model are, and how sure they may be.

Every cell has the same number of orders. Those of one seed are prefixes of the same permutations
(`policies.Kept`), so all numbers of blocks together cost hardly more than all blocks.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from statistics import harmonic_mean

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from layershuffle.core.checks.trials import forget
from layershuffle.core.evaluation import Score, evaluate, micro_batches
from layershuffle.core.forwards import run_many
from layershuffle.core.orders import ExecutionOrder
from layershuffle.core.policies import Shuffled, drawn_blocks
from layershuffle.core.position import PositionedModel, backbone_of
from layershuffle.core.runs import in_eval
from layershuffle.core.stack import blocks_of, depth_of, fixed_of, stack_of, wrap
from layershuffle.core.tensors import logits_of
from layershuffle.data import DataOptions, ImageData, Split, open_data
from layershuffle.data.splits import DeviceBatches, limited_test
from layershuffle.gateway.brain.policy import Cell, Rounds, late_last, overlapped, probabilities
from layershuffle.gateway.brain.sureness import (
    STOPS,
    Accuracy,
    CellAccuracy,
    Stop,
    Sureness,
    calibration_error,
    chances_of,
    default_confidence,
    ending_at,
    first_sure,
    temperature_of,
)
from layershuffle.gateway.calibration.calibration import Calibration, rounds_of, useful_blocks
from layershuffle.ground.errors import DataError, StackError, UsageError
from layershuffle.ground.machine import Device, device_of
from layershuffle.ground.stats import deviation, mean, t_interval, wilson_interval
from layershuffle.ground.text import Progress, unheard
from layershuffle.models import file_view, image_view
from layershuffle.models.files import weights_digest
from layershuffle.models.onnx_models import ExportedModel
from layershuffle.models.origin import training_settings
from layershuffle.models.stem_head import refuse_more_than_blocks
from layershuffle.scoring.evaluate_spec import batches_of, matched
from layershuffle.scoring.settings import ScoreSettings

_TEST, _HELD_OUT = "test", "holdout"
"""The split that no training and no choice of a checkpoint uses; the one that chose it."""
_TAIL = 0.05  # share of the orders outside of each end of the range over orders
_PARALLEL = 4  # with 6, a model of four orders with an exit lost 8 points on digit pairs
_PASSES = {2: 0.75, 3: 0.5}  # up to this share of the blocks; with more there was no gain
_FEWEST = 20  # answers of a kind in every order
_BATCH = 250  # images
_SURE_ORDERS = 6  # the logits of every number of blocks are in memory at once
_log = logging.getLogger(__name__)


def calibrate(
    model: nn.Module,
    data: str,
    *,
    orders: int = 20,
    images: int = 2000,
    seed: int = 0,
    device: Device = "auto",
    progress: Progress = unheard,
) -> Calibration:
    """Measure `model` on the test split of the data spec, with 1 to all blocks, in one pass.

    If it has ends that keep their place, they run for every answer, and blocks are counted without
    them, because only the others can be lost.

    Then fit, on as many held-out images, how sure its answers are (`sureness`). `progress` is
    called with the images done. Raises `StackError` for models that a swarm cannot serve,
    `DataError` for data with other classes, `UsageError` for fewer than two orders.
    """
    # One order has no spread, hence no interval.
    if orders < 2:
        raise UsageError("A calibration needs at least two orders", hint="20 is a good number")
    backbone = servable_model(model)
    tested = _opened(backbone, data, DataOptions(train=False, max_test=images))
    # The weights of exported files are not in the module; their manifest names them.
    if isinstance(backbone, ExportedModel):
        weights = backbone.manifest.weights
    else:
        weights = weights_digest(backbone)
    depth = depth_of(backbone)
    fixed = fixed_of(backbone)
    hosted = drawn_blocks(depth, fixed)
    policy = Shuffled(fixed=fixed)
    permutations = []
    for step in range(orders):
        drawn = policy.draw(depth, seed=seed, step=step)
        permutations.append(drawn.blocks[hosted.start : hosted.stop])
    batches = _batches(backbone.to(device_of(device)), tested, _TEST)
    cells = cells_of(len(hosted), parallel=_PARALLEL)
    split = tested.splits[_TEST]
    scored = []
    for cell in cells:
        for permutation in permutations:
            scored.append(overlapped(permutation, cell, depth=depth).within_ends(fixed))
    # Those with a last block that is 1, 2 ... versions late.
    for age in range(1, len(hosted)):
        for permutation in permutations:
            scored.append(late_last(permutation, age, depth=depth).within_ends(fixed))
    scores = evaluate(
        backbone,
        batches,
        orders=scored,
        on_images=lambda done: progress("images", done, split.size),
    )
    each = []
    for start in range(0, len(scores), orders):
        each.append(scores[start : start + orders])
    late = []
    for group in each[len(cells) :]:
        late.append(mean([score.top1 for score in group]))
    calibration = Calibration(
        schema=4,
        weights=weights,
        data=data,
        split=_TEST,
        seed=seed,
        orders=orders,
        images=each[0][0].images,
        classes=tested.classes,
        rows=rows_of(dict(zip(cells, each, strict=False)), split),
        late=tuple(late),
    )
    sureness = _sureness(
        backbone,
        tested,
        permutations[:_SURE_ORDERS],
        calibration=calibration,
        images=images,
    )
    return calibration.model_copy(update={"sureness": sureness})


def servable_model(model: nn.Module) -> nn.Module:
    """The wrapped model, without a position prediction, as hosts run it.

    Raises `StackError` for models with position encoding, and for models that compute something
    between their blocks.
    """
    if isinstance(model, PositionedModel) and model.encoding is not None:
        raise StackError(
            "A model with position encoding cannot be served by a swarm: its blocks compute "
            "something else at every position, and block hosts do not know theirs",
            hint="serve a model refined by layershuffle or anyorder",
        )
    backbone = wrap(backbone_of(model))
    weight = next(blocks_of(backbone)[0].parameters())
    view = image_view(backbone)
    images = weight.new_zeros(2, view.channels, view.height, view.width)
    refuse_more_than_blocks(
        backbone, images, forward=lambda pixels: logits_of(backbone(pixels), backbone)
    )
    return backbone


def cells_of(depth: int, *, parallel: int) -> tuple[Cell, ...]:
    """The measured cells: all numbers of blocks, and repeated passes as far as they may help."""
    cells = []
    for under_way in range(1, parallel + 1):
        for passes, share in {1: 1.0, **_PASSES}.items():
            for kept in range(1, math.floor(share * depth) + 1):
                cells.append(Cell(kept, passes, under_way))
    return tuple(cells)


def _opened(backbone: nn.Module, data: str, options: DataOptions) -> ImageData:
    opened = open_data(data, file_view(backbone), options=options)
    fitting = matched(backbone, opened, name="the model")
    for note in fitting.notes[len(opened.notes) :]:
        _log.warning(note)
    return fitting


def _batches(backbone: nn.Module, data: ImageData, split: str) -> DeviceBatches:
    device = next(backbone.parameters()).device.type
    return batches_of(data, split, settings=ScoreSettings(batch_size=_BATCH), device=device)


def rows_of(scores: Mapping[Cell, Sequence[Score]], split: Split) -> tuple[CellAccuracy, ...]:
    """A row per cell, from the scores of its orders on `split`."""
    rows = []
    for cell, group in scores.items():
        rows.append(_row(cell, group, split=split))
    return tuple(rows)


def _row(cell: Cell, scores: Sequence[Score], *, split: Split) -> CellAccuracy:
    """The row of a cell."""
    # With the harmonic mean, p (1 - p) / n is the mean of the orders' variances, which the variance
    # of their mean does not exceed.
    counts = split.independent(torch.stack([score.right for score in scores], dim=1))
    accuracy = accuracy_over([score.top1 for score in scores], images=harmonic_mean(counts))
    return CellAccuracy(
        kept=cell.kept, passes=cell.passes, parallel=cell.parallel, **accuracy.model_dump()
    )


def accuracy_over(top1: Sequence[float], *, images: float) -> Accuracy:
    """The accuracy of answers, from the top-1 of every order on so many independent images: the
    mean with a 95 % interval over orders and over images.

    Both spreads matter: the orders of a request are new, and so are its images. Their half-widths
    (t-interval over orders; Wilson's over images, which is wide enough for any correlation between
    orders) add as independent errors do: by their squares, separately on each side.
    """
    centre = mean(top1)
    low_orders, high_orders = t_interval(top1)
    # Wilson's interval stays within 0 and 100 %, also for accuracies near 100 %.
    low_images, high_images = wilson_interval(centre, images)
    ordered = sorted(top1)
    last = len(top1) - 1
    return Accuracy(
        top1=centre,
        low=max(0.0, centre - math.hypot(centre - low_orders, centre - low_images)),
        high=min(100.0, centre + math.hypot(high_orders - centre, high_images - centre)),
        # Rounded outwards, so few orders give their whole range.
        orders_low=ordered[math.floor(_TAIL * last)],
        orders_high=ordered[math.ceil((1 - _TAIL) * last)],
        sd_orders=deviation(top1),
    )


def _sureness(
    backbone: nn.Module,
    tested: ImageData,
    permutations: Sequence[tuple[int, ...]],
    *,
    calibration: Calibration,
    images: int,
) -> Sureness | None:
    """How sure the answers of `backbone` are; `None` if the data hold no images out.

    It is fitted on at most `images` held-out images and scored on those of `tested`, in these
    orders. `calibration` has the rest, and says how often blocks run where others are missing.
    """
    run = training_settings(backbone_of(backbone))
    share = run.get(_HELD_OUT, DataOptions.holdout)
    try:
        if run.get("paper_protocol"):
            raise DataError("the model was trained on all training images (paper_protocol)")
        fitted = _opened(backbone, tested.spec, DataOptions(holdout=share))
    except DataError as error:
        _log.warning("How sure answers are is not known, so requests run all blocks: %s", error)
        return None
    split = fitted.splits[_HELD_OUT]
    split = limited_test(split.dataset, limit=images)
    fitted = replace(fitted, splits={_HELD_OUT: split})
    logits, labels = answers_by_blocks(
        backbone, _batches(backbone, fitted, _HELD_OUT), permutations=permutations
    )
    many = np.tile(labels, len(permutations))
    fits = []
    for answers in logits.swapaxes(0, 1):
        fits.append(temperature_of(answers.reshape(len(many), -1), many))
    temperatures = tuple(fits)
    right = logits.argmax(axis=-1) == labels
    least = useful_blocks(calibration)
    chances = chances_of(logits, temperatures)
    confidence = default_confidence(chances, right, least=least)
    test_batches = _batches(backbone, tested, _TEST)
    logits, labels = answers_by_blocks(backbone, test_batches, permutations=permutations)
    right = logits.argmax(axis=-1) == labels
    chances = chances_of(logits, temperatures)
    raw = chances_of(logits, (1.0,) * len(temperatures))
    raw_errors = []
    errors = []
    for place in range(len(temperatures)):
        hits = right[:, place].ravel()
        raw_errors.append(calibration_error(raw[:, place].ravel(), hits))
        errors.append(calibration_error(chances[:, place].ravel(), hits))
    # As how many independent images one image counts.
    independent = harmonic_mean(tested.splits[_TEST].independent(torch.from_numpy(right[:, -1].T)))
    answers = answers_after(
        backbone,
        test_batches,
        cells=walked_cells(rounds_of(calibration), least=least),
        permutations=permutations,
        temperatures=temperatures,
    )
    answers[Cell(len(temperatures))] = (chances, right)
    walks = Walks(answers, least=least, weight=independent / len(labels))
    stops = []
    for limit in sorted({*STOPS} if confidence is None else {*STOPS, confidence}):
        stops.append(walks.stop(limit))
    return Sureness(
        split=_HELD_OUT,
        orders=len(permutations),
        images=split.size,
        temperatures=temperatures,
        raw_error=tuple(raw_errors),
        error=tuple(errors),
        least=least,
        stops=tuple(stops),
        confidence=confidence,
    )


def walked_cells(rounds: Rounds, *, least: int) -> tuple[Cell, ...]:
    """The cells that requests walk through other than one block after the other, each once: what
    `rounds` lets them run, with fewer side by side, and the first pass of each.

    No request ends before `least` blocks.
    """
    cells = set[Cell]()
    for kept, cell in rounds.cells.items():
        for parallel in range(1, cell.parallel + 1):
            if kept >= least:
                cells.add(Cell(kept, 1, parallel))
                cells.add(Cell(kept, cell.passes, parallel))
    walked = [cell for cell in cells if cell.passes > 1 or cell.parallel > 1]
    return tuple(sorted(walked, key=lambda cell: (cell.kept, cell.passes, cell.parallel)))


AnswersAfter = tuple[NDArray[np.float64], NDArray[np.bool_]]
"""The chances of answers and whether they are right, `[orders, steps, images]`."""


@dataclass(eq=False)
class Walks:
    """What requests come to that may end when they are sure, from measured answers.

    `answers`: after every step of the cells that they walk through; of those with a second pass
    after the steps behind the first. All blocks, one after the other, are among them. No request
    ends before `least` blocks. One image counts as `weight` independent ones.
    """

    answers: Mapping[Cell, AnswersAfter]
    _: KW_ONLY
    least: int
    weight: float

    def __post_init__(self) -> None:
        self.depth = max(cell.kept for cell in self.answers)

    def stop(self, confidence: float) -> Stop:
        """The stop at this chance of being right."""
        chances, right = self.answers[Cell(self.depth)]
        blocks, top1 = ending_at(confidence, chances, right=right, least=self.least)
        # The last of all blocks ends a request, sure or not.
        ends = first_sure(confidence, chances[:, : self.depth - 1], least=self.least)
        sure = self._accuracy(_at(ends, right), ends > 0)
        sure_again = []
        unsure = []
        for kept in range(self.least, self.depth):
            never = self._never(confidence, chances[:, :kept])
            unsure.append((Cell(kept), self._accuracy(right[:, kept - 1], never)))
        for cell, (later, right_later) in self.answers.items():
            if cell.passes == 1:
                never = self._never(confidence, later[:, : self.depth - 1])
                unsure.append((cell, self._accuracy(right_later[:, -1], never)))
                continue
            one_by_one = cell.parallel == 1
            first = Cell(self.depth) if one_by_one else Cell(cell.kept, 1, cell.parallel)
            never = self._never(confidence, self.answers[first][0][:, : cell.kept])
            ends = first_sure(confidence, later)
            if one_by_one:
                again = self._accuracy(_at(ends, right_later), never & (ends > 0))
                sure_again.append((cell, again))
            unsure.append((cell, self._accuracy(right_later[:, -1], never & (ends == 0))))
        return Stop(
            confidence=confidence,
            blocks=blocks,
            top1=top1,
            sure=sure,
            sure_again=_measured(sure_again),
            unsure=_measured(unsure),
        )

    def _never(self, confidence: float, chances: NDArray[np.float64]) -> NDArray[np.bool_]:
        """Which requests are not sure in these steps of a first pass, `[orders, images]`."""
        never: NDArray[np.bool_] = first_sure(confidence, chances, least=self.least) == 0
        return never

    def _accuracy(self, right: NDArray[np.bool_], chosen: NDArray[np.bool_]) -> Accuracy | None:
        """That of the `chosen` answers, where `right` is, both `[orders, images]`."""
        counts = chosen.sum(axis=1)
        if counts.min() < _FEWEST:
            return None
        top1 = 100 * (right & chosen).sum(axis=1) / counts
        images = self.weight * harmonic_mean(counts.tolist())
        return accuracy_over(top1.tolist(), images=images).rounded()


def _at(ends: NDArray[np.int64], right: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """`right` after so many steps, `[orders, images]`; after 0 it says nothing."""
    at_end: NDArray[np.bool_] = np.take_along_axis(right, np.maximum(ends, 1)[:, None] - 1, axis=1)
    return at_end[:, 0]


def _measured(rows: Sequence[tuple[Cell, Accuracy | None]]) -> tuple[CellAccuracy, ...]:
    """The rows of the cells with an accuracy."""
    measured = []
    for cell, accuracy in rows:
        if accuracy is not None:
            row = CellAccuracy(
                kept=cell.kept,
                passes=cell.passes,
                parallel=cell.parallel,
                **accuracy.model_dump(),
            )
            measured.append(row)
    return tuple(measured)


def answers_by_blocks(
    backbone: nn.Module, batches: DeviceBatches, *, permutations: Sequence[tuple[int, ...]]
) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    """The logits after 1, 2 ... blocks of every permutation, and the labels.

    Logits are `[orders, blocks, images, classes]`, labels `[images]`. `permutations` are of the
    blocks between the ends of `backbone`, which run too.
    """
    depth = depth_of(backbone)
    counts = len(permutations[0])
    cuts = []
    for blocks in permutations:
        for count in range(1, counts + 1):
            cuts.append(ExecutionOrder(blocks[:count], depth))
    parts: list[NDArray[np.float32]] = []
    truth: list[NDArray[np.int64]] = []
    for logits, labels in _answers(backbone, batches, cuts):
        parts.append(logits.reshape(len(permutations), counts, *logits.shape[1:]))
        truth.append(labels)
    return np.concatenate(parts, axis=2), np.concatenate(truth)


def answers_after(
    backbone: nn.Module,
    batches: DeviceBatches,
    *,
    cells: Sequence[Cell],
    permutations: Sequence[tuple[int, ...]],
    temperatures: Sequence[float],
) -> dict[Cell, AnswersAfter]:
    """The answers after every step of each cell; with a second pass, of the steps behind the first.

    There are many steps, so the logits of a batch are dropped with it.
    """
    depth = depth_of(backbone)
    chances: dict[Cell, list[NDArray[np.float64]]] = {cell: [] for cell in cells}
    right: dict[Cell, list[NDArray[np.bool_]]] = {cell: [] for cell in cells}
    for blocks in permutations if cells else ():
        cuts = []
        divisors = []
        for cell in cells:
            whole = overlapped(blocks, cell, depth=depth)
            for number in range(_first_step(cell), len(whole.blocks) + 1):
                versions = None if whole.versions is None else whole.versions[:number]
                cuts.append(ExecutionOrder(whole.blocks[:number], depth, versions))
                divisors.append(temperatures[min(number, cell.kept) - 1])
        scales = np.array(divisors)[:, None, None]
        chance_parts = []
        right_parts = []
        for logits, labels in _answers(backbone, batches, cuts):
            chance_parts.append(probabilities(logits / scales).max(axis=-1))
            right_parts.append(logits.argmax(axis=-1) == labels)
        chance = np.concatenate(chance_parts, axis=1)
        hits = np.concatenate(right_parts, axis=1)
        start = 0
        for cell in cells:
            end = start + cell.kept * cell.passes + 1 - _first_step(cell)
            chances[cell].append(chance[start:end])
            right[cell].append(hits[start:end])
            start = end
    return {cell: (np.stack(chances[cell]), np.stack(right[cell])) for cell in cells}


def _first_step(cell: Cell) -> int:
    """The first step of a cell whose answers are measured."""
    return 1 if cell.passes == 1 else cell.kept + 1


def _answers(
    backbone: nn.Module, batches: DeviceBatches, cuts: Sequence[ExecutionOrder]
) -> Iterator[tuple[NDArray[np.float32], NDArray[np.int64]]]:
    """Of each batch the logits `[cuts, images, classes]` after these orders, and the labels."""
    fixed = fixed_of(backbone)
    orders = [cut.within_ends(fixed) for cut in cuts]
    forget(stack_of(backbone))
    with in_eval(backbone), torch.no_grad():
        for batch in batches:
            for pixels, labels in micro_batches(backbone, batch):
                answers = dict(run_many(backbone, pixels, orders=orders))
                every = torch.stack([answers[place].float() for place in range(len(orders))])
                yield every.cpu().numpy(), labels.cpu().numpy()
