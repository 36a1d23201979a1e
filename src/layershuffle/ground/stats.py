"""Means, spreads and 95 % intervals of scores, each saying what it varies over.

A score can vary over models (seeds), over execution orders within one model, and over the images
it was measured on. The three are kept apart (research practice the paper leaves open: it prints
one +-). The interval covers the widest source there is data for: models, else orders, else images.
Equal values show no spread (few images often give them), so they count as no data.

t-interval: mean +- t(0.975, n-1) s / sqrt(n), Student 1908. Wilson interval: Wilson 1927,
doi 10.1080/01621459.1927.10502953, which unlike the textbook form is sound near 0 and 100 %. Images
whose errors come together count as fewer (`independent_images`).
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

IntervalKind = Literal["models", "orders", "images", "none"]
Values = Sequence[float] | Mapping[int, float]
"""Values of no particular order, or one value per seed."""

_CONFIDENCE = 0.95
_ROUNDING = 1e-9  # relative; values that are no further apart are equal


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """One score with its spreads, in the unit of the score.

    `mean`: mean over models of the mean over orders. `sd_orders`: standard deviation over the
    orders within a model, pooled over models. `sd_models`: standard deviation of the models'
    means. `None` where there are fewer than two values to spread. `low`, `high`: 95 % interval
    of `mean` over what `kind` names. `orders`: per model (the fewest, if they differ). `images`: as
    how many independent images those of a model count, `None` if that was not said.
    """

    mean: float
    sd_orders: float | None
    sd_models: float | None
    low: float | None
    high: float | None
    kind: IntervalKind
    models: int
    orders: int
    images: float | None


@dataclass(frozen=True, kw_only=True)
class Difference:
    """mean(sample) - mean(reference), in the unit of the values, with its 95 % interval.

    `seeds`: how many common seeds it is paired over; 0 where it is Welch's. `low` and `high` are
    infinite where a sample has a single value, or nothing varies (for pairs: all differences are
    equal).
    """

    points: float
    low: float
    high: float
    seeds: int

    def __str__(self) -> str:
        interval = "one model or equal differences, no interval"
        if math.isfinite(self.low):
            pairs = f"{self.seeds} common seeds" if self.seeds else "not in pairs"
            interval = f"{self.low:+.2f} to {self.high:+.2f}, {pairs}"
        return f"{self.points:+.2f} points ({interval})"


def estimate(
    scores: Mapping[int, Sequence[float]],
    *,
    images: float | None = None,
    percent: bool = True,
) -> Estimate:
    """Mean and 95 % interval of `scores[seed]`, which has one value per order.

        top1 = {seed: [score.top1 for score in ls.evaluate(models[seed], ...)] for seed in models}
        result = ls.estimate(top1, images=5000)
        result.mean, result.low, result.high, result.kind  # kind: what the interval is over

    Several seeds: t-interval over the models' means. One seed, several orders: t-interval over
    orders. One value, or equal ones: Wilson interval over `images`, if they are given and scores
    are a `percent`, else none. `images`: as how many independent images those of a model count
    (`independent_images`). Percentages are clipped to [0, 100]. Raises `ValueError` for no scores,
    a seed without any, and a score that is not finite.
    """
    if not scores or not all(scores.values()):
        raise ValueError("an estimate needs at least one score of every seed")
    for seed, group in scores.items():
        _refuse_not_finite(group, what=f"the scores of seed {seed}")
    # By seed, so that the order of the mapping changes nothing.
    groups = [scores[seed] for seed in sorted(scores)]
    means = [mean(group) for group in groups]
    low, high, kind = _interval(means, groups, images, percent)
    return Estimate(
        mean=mean(means),
        sd_orders=pooled_deviation(groups),
        sd_models=deviation(means),
        low=low,
        high=high,
        kind=kind,
        models=len(groups),
        orders=min(map(len, groups)),
        images=images,
    )


def mean(values: Values) -> float:
    """The arithmetic mean, summed exactly so that it does not depend on the order."""
    # Runs come back in the order in which processes end; the report must not depend on that.
    return math.fsum(_numbers(values)) / len(values)


def deviation(values: Values) -> float | None:
    """The sample standard deviation (n - 1); `None` for fewer than two values.

    It is 0 where the values are equal but for rounding.
    """
    if len(values) < 2:
        return None
    values = _numbers(values)
    if math.isclose(min(values), max(values), rel_tol=_ROUNDING, abs_tol=_ROUNDING):
        return 0.0
    centre = mean(values)
    return math.sqrt(math.fsum((value - centre) ** 2 for value in values) / (len(values) - 1))


def pooled_deviation(groups: Sequence[Sequence[float]]) -> float | None:
    """The standard deviation within groups, each weighted by its degrees of freedom.

    `None` if no group has two values.
    """
    freedom = sum(len(group) - 1 for group in groups)
    if freedom == 0:
        return None
    squares = []
    for group in groups:
        centre = mean(group)
        for value in group:
            squares.append((value - centre) ** 2)
    return math.sqrt(math.fsum(squares) / freedom)


def _refuse_not_finite(values: Sequence[float], *, what: str) -> None:
    """Raises `ValueError` for NaN and infinity, which would pass through every mean."""
    for value in values:
        if not math.isfinite(value):
            raise ValueError(f"{what} hold {value}: leave it out, or look why it is there")


def _numbers(values: Values) -> Sequence[float]:
    """The values without their seeds."""
    if isinstance(values, Mapping):
        return list(values.values())
    return values


def t_interval(values: Sequence[float]) -> tuple[float, float]:
    """The 95 % t-interval of the mean of at least two values."""
    spread = deviation(values)
    if spread is None:
        raise ValueError("a t-interval needs at least two values")
    if spread == 0:
        return mean(values), mean(values)  # scipy has no t-distribution of width zero
    # scipy.stats takes a second to import: no command waits for it that computes no interval.
    from scipy import stats

    error = spread / math.sqrt(len(values))
    low, high = stats.t.interval(_CONFIDENCE, len(values) - 1, loc=mean(values), scale=error)
    return float(low), float(high)


def compare(sample: Values, reference: Values) -> Difference:
    """mean(sample) - mean(reference), with its 95 % interval.

    It is in pairs over common seeds if there are two or more, and Welch's (1947) otherwise. Where
    that needs more values, a single common seed gives the difference of its pair and no interval.

        print(ls.compare({0: 87.5, 1: 88.1}, {0: 90.7, 1: 90.2}))  # a value of each seed

    The result has `points`, and `low` and `high` of the interval, infinite if there is none. Models
    of one seed saw the same batches and are scored under the same orders, so most of what moves one
    of a pair moves the other, too. Raises `ValueError` for no values, and
    for one that is not finite.
    """
    if not (sample and reference):
        raise ValueError("a comparison needs at least one value of each")
    _refuse_not_finite(_numbers(sample), what="the values of the sample")
    _refuse_not_finite(_numbers(reference), what="the values of the reference")
    # With a single value on a side nothing tells by how much models of other seeds differ.
    alone = min(len(sample), len(reference)) == 1
    if isinstance(sample, Mapping) and isinstance(reference, Mapping):
        seeds = sorted(sample.keys() & reference.keys())
        if len(seeds) > 1 or (seeds and alone):
            gaps = [sample[seed] - reference[seed] for seed in seeds]
            low = -math.inf
            high = math.inf
            if deviation(gaps):
                low, high = t_interval(gaps)
            return Difference(points=mean(gaps), low=low, high=high, seeds=len(seeds))
    low = -math.inf
    high = math.inf
    if not alone and (deviation(sample) or deviation(reference)):
        from scipy import stats

        with warnings.catch_warnings():
            # Equal scores in one sample, 100 % for every model, are no rounding problem here.
            warnings.filterwarnings("ignore", message="Precision loss", category=RuntimeWarning)
            test = stats.ttest_ind(_numbers(sample), _numbers(reference), equal_var=False)
            low, high = map(float, test.confidence_interval(_CONFIDENCE))
    return Difference(points=mean(sample) - mean(reference), low=low, high=high, seeds=0)


def quantile(values: Sequence[float], q: float) -> float:
    """The value below which a share `q` of them lies (nearest rank); NaN without values."""
    import numpy as np

    if not values:
        return math.nan
    return float(np.quantile(values, q, method="inverted_cdf"))


def wilson_interval(top1: float, images: float) -> tuple[float, float]:
    """The 95 % Wilson interval, in percent, of `top1` percent right on `images` images.

    Images that are wrong together count as fewer, which may be no whole number
    (`independent_images`). Raises `ValueError` for a percentage or a number of images that is
    impossible.
    """
    if not 0 <= top1 <= 100 or images < 1:
        raise ValueError(f"{top1} % right on {images} images are impossible")
    from scipy import stats

    # In closed form, because scipy's takes whole numbers of right answers and images.
    share = top1 / 100
    z = float(stats.norm.ppf((1 + _CONFIDENCE) / 2))
    centre = share + z**2 / (2 * images)
    half = z * math.sqrt(share * (1 - share) / images + z**2 / (4 * images**2))
    low = (centre - half) / (1 + z**2 / images)
    high = (centre + half) / (1 + z**2 / images)
    # Rounding must not move an end past the percentage itself, where that is 0 or 100.
    return 100 * max(0.0, min(low, share)), 100 * min(1.0, max(high, share))


def independent_images(
    values: NDArray[Any], groups: NDArray[np.int64] | None
) -> NDArray[np.float64]:
    """How many independent images would show the mean of `values` as exactly as these do.

        counts = independent_images(right, groups)  # right [n, orders]: one count per order

    `values` [n, ...]: a number of each of the n images, such as whether it was answered right; the
    result has the remaining axes. `groups` int64 [n, k]: images that share a number, in whatever
    columns, may err together, as pairs with a digit in common; all others are independent, and all
    are without groups. Counts lie between 1 and n (Kish's effective sample size).

    The variance of the mean is the sum of e_i e_j over all pairs of images that share a group, e
    the deviations from the mean: the cluster-robust variance for k = 1, the dyadic-robust one for
    k = 2 (Aronow, Samii and Assenova 2015, doi 10.1093/pan/mpv018). Counts are lower where the
    variance of few groups is itself uncertain, by the t-quantiles of groups and images (Korn and
    Graubard 1998). Where all values are equal, nothing shows how errors come together; then it is
    as many as can share no group. Raises `ValueError` unless there is a row of groups per image.
    """
    import numpy as np

    images = len(values)
    if groups is None:
        return np.full(values.shape[1:], float(images))
    if len(groups) != images:
        raise ValueError(f"{images} images, and groups of {len(groups)}")
    from scipy import stats

    count, width = _smallest_family(groups)
    as_many_as_share_none = max(1.0, min(float(images), count / width))
    independent = np.full(values.shape[1:], as_many_as_share_none)
    if count < 2:
        return independent
    sums = _sums_over_groups(groups)
    # The degrees of freedom are those of the groups, not of the images.
    correction = (count / (count - 1)) / (images / (images - 1))
    quantiles = stats.t.ppf((1 + _CONFIDENCE) / 2, (count - 1, images - 1))
    wide = float(quantiles[0])
    narrow = float(quantiles[1])
    for place in np.ndindex(independent.shape):
        column = values[(slice(None), *place)]
        deviations = column - column.mean()
        alone = float((deviations**2).sum())
        if alone == 0:
            continue
        together = 0.0
        for sign, members, group in sums:
            of_groups = np.bincount(group, deviations[members])
            together += sign * float((of_groups**2).sum())
        effect = max(1.0, together / alone * correction)
        number = images / effect * (narrow / wide) ** 2
        # With two columns there may be more groups than images, and then the quantiles widen it.
        independent[place] = max(1.0, min(float(images), number))
    return independent


def half_width(
    influence: NDArray[np.float64], groups: NDArray[np.int64] | None
) -> NDArray[np.float64]:
    """Half the width of the 95 % interval of a number that each image moves by its influence.

    `influence` [n, ...]: that of each image; the result has the remaining axes. Of a mean the
    influence of an image is its distance to the mean, divided by n; of another smooth number it is
    the derivative (Hampel 1974, doi 10.1080/01621459.1974.10482962). `groups` as in
    `independent_images`. For a mean of images without common groups this is the t-interval. Raises
    `ValueError` for fewer than two images, and unless there is a row of groups per image.
    """
    from scipy import stats

    images = len(influence)
    if images < 2:
        raise ValueError("an interval needs at least two images")
    widening = images / independent_images(influence, groups)
    squares = ((influence - influence.mean(axis=0)) ** 2).sum(axis=0)
    alone = squares / (1 - 1 / images)
    quantile = float(stats.t.ppf((1 + _CONFIDENCE) / 2, images - 1))
    half: NDArray[np.float64] = quantile * (alone * widening) ** 0.5
    return half


def _smallest_family(groups: NDArray[np.int64]) -> tuple[int, int]:
    """The number of groups and of columns of the family that limits what all together can show.

    Columns with a number in common, as the two digits of pairs, are one family of groups.
    """
    families: list[tuple[set[int], int]] = []
    for column in groups.T:
        numbers = set(column.tolist())
        width = 1
        disjoint = []
        for others, columns in families:
            if others & numbers:
                numbers |= others
                width += columns
            else:
                disjoint.append((others, columns))
        families = [*disjoint, (numbers, width)]
    return min((len(numbers), width) for numbers, width in families)


def _sums_over_groups(
    groups: NDArray[np.int64],
) -> list[tuple[int, NDArray[np.int64], NDArray[np.int64]]]:
    """(sign, images, the group of each): the sums that together meet each pair of images once.

    Two images that share two groups are met in the sums over both. Sums over pairs of groups take
    them out again, and so on: inclusion and exclusion, in n k steps and not n * n.
    """
    import numpy as np

    rows = np.sort(groups, axis=1)
    # A pair of one digit with itself belongs to that digit's group once.
    fresh = np.ones(rows.shape, dtype=bool)
    fresh[:, 1:] = rows[:, 1:] != rows[:, :-1]
    width = rows.shape[1]
    sums = []
    for size in range(1, width + 1):
        members = []
        names = []
        for chosen in combinations(range(width), size):
            columns = list(chosen)
            member = np.flatnonzero(fresh[:, columns].all(axis=1))
            members.append(member)
            names.append(rows[member][:, columns])
        _, group = np.unique(np.concatenate(names), axis=0, return_inverse=True)
        sums.append(((-1) ** (size + 1), np.concatenate(members), group.ravel()))
    return sums


def _interval(
    means: Sequence[float],
    groups: Sequence[Sequence[float]],
    images: float | None,
    percent: bool,
) -> tuple[float | None, float | None, IntervalKind]:
    """The bounds of an estimate, and what they are over."""
    # One model, or equal ones, say nothing about other seeds: the interval covers the orders of
    # one of them then, because all run in the same.
    kinds: tuple[tuple[IntervalKind, Sequence[float]], ...] = (
        ("models", means),
        ("orders", max(groups, key=lambda group: deviation(group) or 0.0)),
    )
    for kind, numbers in kinds:
        if deviation(numbers):
            low, high = t_interval(numbers)
            if percent:
                low = max(0.0, low)
                high = min(100.0, high)
            return low, high, kind
    if percent and images is not None:
        return *wilson_interval(mean(means), images), "images"
    return None, None, "none"
