"""The difference of two models that were scored along the same orders on the same images."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from layershuffle.core.evaluation import Score
from layershuffle.data import Split
from layershuffle.ground.errors import UsageError
from layershuffle.ground.stats import half_width


@dataclass(frozen=True, kw_only=True)
class PairedScore:
    """The scores of two models in one mode, in percent of the images.

    `first` and `second` are means over the orders. `difference` is the second minus the first, and
    `low` to `high` its 95 % interval over the images, each of which counts with its mean over the
    orders. `orders` is the number of orders, `kept` that of the blocks that run.
    """

    mode: str
    kept: int
    orders: int
    first: float
    second: float
    difference: float
    low: float
    high: float


def paired_scores(
    first: Sequence[Score], second: Sequence[Score], *, split: Split
) -> list[PairedScore]:
    """The paired scores of every mode, of the scores that `evaluate` gave for two models.

    Raises `UsageError` where the orders or the numbers of images are not the same.
    """
    pairs: dict[str, list[tuple[Score, Score]]] = {}
    for one, other in zip(first, second, strict=True):
        if one.batch_orders != other.batch_orders or one.order != other.order:
            # Ends that both were trained with: with fewer a model runs orders that it never saw.
            first_ends = max(one.fixed[0], other.fixed[0])
            last_ends = max(one.fixed[1], other.fixed[1])
            raise UsageError(
                f"The models do not run in the same orders in the mode {one.label}: of one the "
                f"ends {one.fixed} keep their place, of the other {other.fixed}",
                hint=f"give --fixed {first_ends},{last_ends}, or --modes sequential",
            )
        if one.images != other.images:
            raise UsageError(
                f"The models were scored on {one.images} and {other.images} images",
                hint="leave out --skip-corrupt",
            )
        pairs.setdefault(one.label, []).append((one, other))
    groups = None if split.groups is None else split.groups.numpy()
    scores = []
    for mode, both in pairs.items():
        gaps = torch.stack([other.right.double() - one.right.double() for one, other in both])
        of_image = 100.0 * gaps.mean(dim=0).numpy()
        difference = float(of_image.mean())
        half = float(half_width(of_image[:, None] / len(of_image), groups)[0])
        one, _ = both[0]
        scores.append(
            PairedScore(
                mode=mode,
                kept=one.kept,
                orders=len(both),
                first=sum(score.top1 for score, _ in both) / len(both),
                second=sum(score.top1 for _, score in both) / len(both),
                difference=difference,
                low=difference - half,
                high=difference + half,
            )
        )
    return scores
