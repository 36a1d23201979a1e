"""How sure answers are: temperatures by the number of blocks, and when a request may end.

A model is surer of its answers than it should be, and how much depends on how many blocks ran.
Dividing the logits by a temperature, measured on held-out images for every number of blocks, makes
the largest probability the chance of being right (Guo et al. 2017, arXiv 1706.04599).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field

from layershuffle.core.orders import ExecutionOrder
from layershuffle.results import Count, Percent

if TYPE_CHECKING:
    from torch import nn

    from layershuffle.data import ImageData, Split
    from layershuffle.data.batches import DeviceBatches

Chance = Annotated[float, Field(gt=0, le=1)]

LOSS = 0.3
"""Points of top-1 that requests may lose by ending early, if they do not say how sure to be."""
_STOPS = (0.8, 0.9, 0.95, 0.97, 0.98, 0.99)  # that the file and the docs show
_CANDIDATES = tuple(thousandths / 1000 for thousandths in range(500, 1000))
_HELD_OUT, _TESTED = "holdout", "test"
_ORDERS = 6  # the logits of every number of blocks are in memory at once
_BINS = 15  # as Guo et al.
_TEMPERATURES = (0.02, 50.0)


class CalibrationPart(BaseModel):
    """A part of calibration.json."""

    # Strict: a number written as text is refused, not converted.
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class Stop(CalibrationPart):
    """Requests that end at this chance of being right: mean number of blocks, top-1 in percent."""

    confidence: Chance
    blocks: Annotated[float, Field(ge=1)]
    top1: Percent


class Sureness(CalibrationPart):
    """What makes the largest probability the chance of being right (`sureness`).

    `temperatures`: by the number of blocks, fitted on `images` images of `split` in `orders`
    orders. On test images: `raw_error` and `error`, the calibration errors in points without and
    with them, and `stops`. `confidence`: the default of requests, chosen on `split`; `None`: they
    run all blocks.
    """

    split: str
    orders: Count
    images: Count
    temperatures: tuple[Annotated[float, Field(gt=0)], ...]
    raw_error: tuple[Percent, ...]
    error: tuple[Percent, ...]
    stops: tuple[Stop, ...]
    confidence: Chance | None


def probabilities(logits: NDArray[np.float32], temperature: float = 1.0) -> NDArray[np.float64]:
    """The probabilities `[..., classes]` of logits of that shape, in float64.

    In float32 the probabilities of many classes would not add up to 1.

        chance = probabilities(logits, temperature).max(axis=-1)
    """
    scaled = logits.astype(np.float64) / temperature
    powers = np.exp(scaled - scaled.max(axis=-1, keepdims=True))
    return powers / powers.sum(axis=-1, keepdims=True)  # type: ignore[no-any-return]


def temperature_of(logits: NDArray[np.float32], labels: NDArray[np.int64]) -> float:
    """The temperature with the least cross-entropy of logits `[n, classes]`, labels `[n]`."""
    from scipy.optimize import minimize_scalar

    rows = np.arange(len(labels))

    def loss(log_temperature: float) -> float:
        chances = probabilities(logits, float(np.exp(log_temperature)))[rows, labels]
        return -float(np.log(np.maximum(chances, np.finfo(np.float64).tiny)).mean())

    low, high = np.log(_TEMPERATURES)
    best = minimize_scalar(loss, bounds=(low, high), method="bounded", options={"xatol": 1e-4})
    return float(np.exp(best.x))


def calibration_error(chances: NDArray[np.float64], right: NDArray[np.bool_]) -> float:
    """The expected calibration error in points: in bins of the chances `[n]`, the mean distance of
    the chance from the share of `right` `[n]`, weighted by the number of answers."""
    bins = np.minimum((chances * _BINS).astype(int), _BINS - 1)
    gaps = np.bincount(bins, weights=chances - right, minlength=_BINS)
    return 100.0 * float(np.abs(gaps).sum()) / len(chances)


def ending_at(
    confidence: float, chances: NDArray[np.float64], *, right: NDArray[np.bool_]
) -> tuple[float, float]:
    """(mean number of blocks, top-1 in percent) if requests end at that chance of being right.

    `chances` and `right` `[orders, depth, images]`: after 1, 2 ... blocks of every order.
    """
    sure = chances >= confidence
    sure[:, -1] = True
    first = sure.argmax(axis=1)
    ended = np.take_along_axis(right, first[:, None], axis=1)
    return float(first.mean()) + 1, 100.0 * float(ended.mean())


def default_confidence(chances: NDArray[np.float64], right: NDArray[np.bool_]) -> float | None:
    """The least confidence, from one half, that loses at most `LOSS`; `None` if all lose more."""
    least = 100.0 * float(right[:, -1].mean()) - LOSS
    return next((c for c in _CANDIDATES if ending_at(c, chances, right=right)[1] >= least), None)


def chances_of(logits: NDArray[np.float32], temperatures: Sequence[float]) -> NDArray[np.float64]:
    """The chances `[orders, depth, images]` of logits `[orders, depth, images, classes]`."""
    each = [probabilities(logits[:, n], t).max(axis=-1) for n, t in enumerate(temperatures)]
    return np.stack(each, axis=1)


def measured_sureness(
    host: nn.Module,
    *,
    held_out: ImageData,
    tested: ImageData,
    permutations: Sequence[tuple[int, ...]],
    images: int,
    batch_size: int,
) -> Sureness:
    """How sure the answers of `host` are, fitted on at most `images` images of the holdout of
    `held_out`, and scored on the test images of `tested`, in the first of `permutations`."""
    from layershuffle.data.contract import limited_test

    permutations = permutations[:_ORDERS]
    split = held_out.splits[_HELD_OUT]
    split = limited_test(split.dataset, split.size, limit=images)
    logits, labels = answers_by_blocks(
        host, held_out, split=split, permutations=permutations, batch_size=batch_size
    )
    many = np.tile(labels, len(permutations))
    temperatures = tuple(
        temperature_of(answers.reshape(len(many), -1), many) for answers in logits.swapaxes(0, 1)
    )
    chances, right = chances_of(logits, temperatures), logits.argmax(axis=-1) == labels
    confidence = default_confidence(chances, right)
    logits, labels = answers_by_blocks(
        host,
        tested,
        split=tested.splits[_TESTED],
        permutations=permutations,
        batch_size=batch_size,
    )
    chances, right = chances_of(logits, temperatures), logits.argmax(axis=-1) == labels
    raw = chances_of(logits, (1.0,) * len(temperatures))
    shown = sorted({*_STOPS} if confidence is None else {*_STOPS, confidence})
    stops = [(c, *ending_at(c, chances, right=right)) for c in shown]
    return Sureness(
        split=_HELD_OUT,
        orders=len(permutations),
        images=split.size,
        temperatures=temperatures,
        raw_error=_errors(raw, right),
        error=_errors(chances, right),
        stops=tuple(Stop(confidence=c, blocks=blocks, top1=top1) for c, blocks, top1 in stops),
        confidence=confidence,
    )


def _errors(chances: NDArray[np.float64], right: NDArray[np.bool_]) -> tuple[float, ...]:
    places = range(chances.shape[1])
    return tuple(calibration_error(chances[:, n].ravel(), right[:, n].ravel()) for n in places)


def batches_for(
    host: nn.Module, data: ImageData, *, split: Split, batch_size: int
) -> DeviceBatches:
    """The images of a split of `data`, prepared and on the device of `host`."""
    from layershuffle.data.batches import DeviceBatches
    from layershuffle.data.loading import loader_processes

    return DeviceBatches(
        split,
        data.finish,
        batch_size=batch_size,
        device=next(host.parameters()).device,
        processes=loader_processes(data.spec),
    )


def answers_by_blocks(
    host: nn.Module,
    data: ImageData,
    *,
    split: Split,
    permutations: Sequence[tuple[int, ...]],
    batch_size: int,
) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    """Logits `[orders, depth, images, classes]` after 1, 2 ... blocks of every order, and labels
    `[images]`; `data` prepares the images of `split`."""
    import torch

    from layershuffle.core.evaluation import micro_batches
    from layershuffle.core.forwards import run_many
    from layershuffle.core.runs import in_eval
    from layershuffle.core.sharing import forget
    from layershuffle.core.stack import depth_of, stack_of

    depth = depth_of(host)
    orders = [ExecutionOrder(blocks, depth) for blocks in permutations]
    cuts = [order.beginning(count) for order in orders for count in range(1, depth + 1)]
    batches = batches_for(host, data, split=split, batch_size=batch_size)
    parts: list[NDArray[np.float32]] = []
    truth: list[NDArray[np.int64]] = []
    forget(stack_of(host))
    with in_eval(host), torch.no_grad():
        for batch in batches:
            for pixels, labels in micro_batches(host, batch):
                answers = dict(run_many(host, pixels, orders=cuts))
                every = torch.stack([answers[place].float() for place in range(len(cuts))])
                parts.append(every.view(len(orders), depth, *every.shape[1:]).cpu().numpy())
                truth.append(labels.cpu().numpy())
    return np.concatenate(parts, axis=2), np.concatenate(truth)
