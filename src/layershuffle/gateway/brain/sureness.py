"""How sure answers are: temperatures by the number of blocks, and when a request may end.

A model is surer of its answers than it should be, and how much depends on how many blocks ran.
Dividing the logits by a temperature, measured on held-out images for every number of blocks, makes
the largest probability the chance of being right (Guo et al. 2017, arXiv 1706.04599).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field

from layershuffle.ground.rows import Count, Percent

Chance = Annotated[float, Field(gt=0, le=1)]

LOSS = 0.3
"""Points of top-1 that requests may lose by ending early, if they do not say how sure to be."""
STOPS = (0.8, 0.9, 0.95, 0.97, 0.98, 0.99)
"""That the file and the docs show."""
_CANDIDATES = tuple(thousandths / 1000 for thousandths in range(500, 1000))
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
