"""Means, spreads and intervals against closed forms and scipy's own slow paths."""

from __future__ import annotations

import math
import random
from itertools import product

import numpy as np
import pytest
from scipy import stats

from layershuffle.ground.stats import (
    Values,
    compare,
    deviation,
    estimate,
    half_width,
    independent_images,
    mean,
    pooled_deviation,
    quantile,
    t_interval,
    wilson_interval,
)

SCORES = [61.0, 64.5, 59.25, 70.0, 66.75]


def test_mean_and_deviation_of_a_known_sample():
    assert mean([2.0, 4.0, 9.0]) == 5.0
    assert deviation([2.0, 4.0, 9.0]) == math.sqrt((9 + 1 + 16) / 2)
    assert deviation([7.0]) is None


def test_mean_does_not_depend_on_the_order():
    values = [random.Random(0).gauss(0, 1) * 10.0**k for k in range(-8, 9)]
    assert mean(values) == mean(values[::-1])


def test_pooled_deviation_weighs_by_degrees_of_freedom():
    groups = [[1.0, 3.0], [10.0, 10.0, 16.0], [5.0]]
    expected = math.sqrt((2.0 * 1 + 12.0 * 2 + 0.0) / (1 + 2 + 0))
    assert pooled_deviation(groups) == pytest.approx(expected, rel=1e-15)
    assert pooled_deviation([[1.0], [2.0]]) is None


@pytest.mark.parametrize("count", [2, 3, 5])
def test_t_interval_equals_scipys(count: int):
    sample = SCORES[:count]
    slow = stats.t.interval(0.95, count - 1, loc=mean(sample), scale=stats.sem(sample))
    assert t_interval(sample) == pytest.approx(slow, rel=1e-12)


def test_t_interval_of_two_values_in_closed_form():
    # Student's t with one degree of freedom is Cauchy: its 97.5 % point is tan(0.475 pi).
    half = math.tan(0.475 * math.pi) * 1.0  # s / sqrt(2) = 1 for values two apart
    assert t_interval([9.0, 11.0]) == pytest.approx((10.0 - half, 10.0 + half), rel=1e-12)


def test_t_interval_of_one_value_is_refused():
    with pytest.raises(ValueError, match="at least two"):
        t_interval([1.0])


@pytest.mark.parametrize(
    ("correct", "images"), [(0, 40), (1, 40), (20, 40), (40, 40), (4321, 5000)]
)
def test_wilson_interval_equals_scipys(correct: int, images: int):
    slow = stats.binomtest(correct, images).proportion_ci(0.95, method="wilson")
    fast = wilson_interval(100 * correct / images, images)
    assert fast == pytest.approx((100 * slow.low, 100 * slow.high), abs=1e-10)


def test_wilson_interval_at_no_right_answer_in_closed_form():
    z2 = stats.norm.ppf(0.975) ** 2
    assert wilson_interval(0, 100) == pytest.approx((0.0, 100 * z2 / (100 + z2)), abs=1e-10)


def test_wilson_interval_of_a_single_image_in_closed_form():
    squared = stats.norm.ppf(0.975) ** 2
    low, high = wilson_interval(100.0, 1)
    assert (low, high) == (pytest.approx(100 / (1 + squared), rel=1e-12), 100.0)


def test_a_quantile_is_one_of_the_values_and_none_without_values():
    assert quantile([4.0, 1.0, 3.0, 2.0], 0.5) == 2.0
    assert quantile([4.0, 1.0, 3.0, 2.0], 0.51) == 3.0
    assert math.isnan(quantile([], 0.5))


def test_wilson_interval_of_the_impossible_is_refused():
    for top1, images in ((100.5, 4), (-1.0, 4), (50.0, 0.5), (math.nan, 4)):
        with pytest.raises(ValueError, match="impossible"):
            wilson_interval(top1, images)


def test_one_model_with_several_orders_gets_a_t_interval_over_orders():
    interval = estimate({3: SCORES}, images=1000)
    assert (interval.low, interval.high) == t_interval(SCORES)
    assert (interval.kind, interval.models, interval.orders, interval.images) == (
        "orders",
        1,
        5,
        1000,
    )
    assert interval.sd_orders == deviation(SCORES)
    assert interval.sd_models is None


def test_several_models_get_a_t_interval_over_their_means():
    interval = estimate({0: [10.0, 14.0], 1: [20.0, 22.0], 2: [16.0, 16.0]}, images=50)
    means = [12.0, 21.0, 16.0]
    assert interval.mean == mean(means)
    assert (interval.low, interval.high) == t_interval(means)
    assert interval.sd_models == deviation(means)
    assert interval.sd_orders == pytest.approx(math.sqrt((8 + 2 + 0) / 3), rel=1e-15)
    assert (interval.kind, interval.models, interval.orders) == ("models", 3, 2)


def test_models_weigh_the_same_however_many_orders_they_have():
    interval = estimate({0: [10.0] * 9, 1: [20.0]}, images=50)
    assert interval.mean == 15.0
    assert interval.orders == 1


def test_one_score_gets_a_wilson_interval_over_images():
    interval = estimate({0: [87.5]}, images=400)
    assert (interval.low, interval.high) == wilson_interval(87.5, 400)
    assert (interval.kind, interval.sd_orders, interval.sd_models) == ("images", None, None)


@pytest.mark.parametrize("scores", [{0: [100.0] * 20}, {0: [100.0, 100.0], 1: [100.0, 100.0]}])
def test_equal_scores_get_an_interval_over_images(scores: dict[int, list[float]]):
    """20 orders of a model that is right on all of 4 images do not show that it always is."""
    interval = estimate(scores, images=4)
    z2 = stats.norm.ppf(0.975) ** 2
    assert (interval.low, interval.high) == pytest.approx((100 * 4 / (4 + z2), 100.0), abs=1e-10)
    assert interval.kind == "images"
    assert estimate(scores, images=4, percent=False).kind == "none"
    assert estimate(scores).kind == "none", "nobody said how many images"


def test_equal_models_get_an_interval_over_orders():
    interval = estimate({0: [93.0, 94.0], 1: [94.0, 93.0]}, images=100)
    assert interval.kind == "orders"
    # Of one of them: both ran in the same orders.
    assert (interval.low, interval.high) == t_interval([93.0, 94.0])


def test_a_model_with_one_order_does_not_hide_the_spread_of_another():
    interval = estimate({0: [50.0], 1: [49.9, 50.1]}, images=100)
    low, high = t_interval([49.9, 50.1])
    assert (interval.low, interval.high, interval.kind) == (low, high, "orders")


@pytest.mark.parametrize("count", [2, 6, 20])
def test_equal_scores_are_equal_however_they_round(count: int):
    """The mean of several 99.9 is none of them, and 91.35 - 84.7 is not 87 - 80.35."""
    assert deviation([99.9] * count) == 0.0
    assert estimate({0: [99.9] * count}, images=2000).kind == "images"
    gaps = ((91.35, 84.7), (87.0, 80.35), (84.05, 77.4))
    sample, reference = (dict(enumerate(side)) for side in zip(*gaps, strict=True))
    gap = compare(sample, reference)
    assert (gap.points, gap.low, gap.seeds) == (pytest.approx(6.65), -math.inf, 3)
    assert deviation([99.9, 99.9 + 1e-6]) == pytest.approx(1e-6 / math.sqrt(2), rel=1e-4)


def test_one_cross_entropy_has_no_interval():
    interval = estimate({0: [2.5]}, images=400, percent=False)
    assert (interval.mean, interval.low, interval.high, interval.kind) == (2.5, None, None, "none")


def test_percentages_are_clipped_and_other_scores_are_not():
    near_zero = [0.0, 0.0, 3.0]
    assert estimate({0: near_zero}, images=10).low == 0.0
    assert estimate({0: near_zero}, images=10, percent=False).low == t_interval(near_zero)[0] < 0


def test_coverage_of_the_t_interval_is_near_95_percent():
    draw = random.Random(7)
    hits = 0
    for _ in range(2000):
        low, high = t_interval([draw.gauss(50, 4) for _ in range(5)])
        hits += low <= 50 <= high
    assert abs(hits / 2000 - 0.95) < 0.015, hits  # three standard errors


@pytest.mark.parametrize("scores", [{}, {0: []}, {0: [1.0], 1: []}])
def test_no_scores_are_refused(scores: dict[int, list[float]]):
    with pytest.raises(ValueError, match="at least one score"):
        estimate(scores, images=10)


def test_models_of_common_seeds_are_compared_in_pairs():
    """Effects of a seed on both arms affect neither the difference nor its interval."""
    ours = {0: 60.0, 1: 70.5, 2: 80.0, 7: 10.0}
    theirs = {2: 78.0, 1: 70.0, 0: 57.0, 9: 99.0}
    gap = compare(ours, theirs)
    assert (gap.seeds, gap.points) == (3, pytest.approx(5.5 / 3, rel=1e-15))
    slow = stats.ttest_rel([60.0, 70.5, 80.0], [57.0, 70.0, 78.0]).confidence_interval(0.95)
    assert (gap.low, gap.high) == pytest.approx((slow.low, slow.high), rel=1e-10)


@pytest.mark.parametrize("theirs", [{1: 50.0, 5: 58.5, 6: 49.0}, [50.0, 58.5, 49.0]])
def test_models_without_common_seeds_are_compared_by_welch(theirs: Values):
    """A single common seed makes no interval in pairs, and merges have no seeds."""
    gap = compare(dict(enumerate(SCORES)), theirs)
    assert (gap.seeds, gap.points) == (0, mean(SCORES) - 52.5)
    slow = stats.ttest_ind(SCORES, [50.0, 58.5, 49.0], equal_var=False).confidence_interval(0.95)
    assert (gap.low, gap.high) == pytest.approx((slow.low, slow.high), rel=1e-10)


def test_a_single_pair_is_compared_in_itself_where_welch_has_no_interval():
    """The mean of other seeds would say something about those seeds."""
    gap = compare({0: 80.0, 1: 90.0}, {1: 88.0})
    assert (gap.seeds, gap.points, gap.low, gap.high) == (1, 2.0, -math.inf, math.inf)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_scores_that_are_not_finite_are_refused(bad: float):
    with pytest.raises(ValueError, match="seed 1"):
        estimate({0: [1.0, 2.0], 1: [3.0, bad]})
    with pytest.raises(ValueError, match="sample"):
        compare({0: bad, 1: 1.0}, {0: 1.0, 1: 1.0})
    with pytest.raises(ValueError, match="reference"):
        compare([1.0, 2.0], [1.0, bad])


def test_one_model_says_nothing_about_others():
    gap = compare({0: 3.0}, {0: 1.0})
    assert (gap.points, gap.low, gap.high) == (2.0, -math.inf, math.inf)
    assert str(gap) == "+2.00 points (one model or equal differences, no interval)"
    for equal in ({0: 1.0, 1: 1.0}, [1.0, 1.0]):  # in pairs, and Welch's
        assert compare({0: 3.0, 1: 3.0}, equal).low == -math.inf
    with pytest.raises(ValueError, match="at least one value"):
        compare({}, {0: 1.0})


def test_means_and_spreads_of_seeds_are_those_of_their_values():
    by_seed = {3: 1.0, 90: 2.0, 17: 6.0}
    assert mean(by_seed) == 3.0
    assert deviation(by_seed) == deviation([1.0, 2.0, 6.0])


def slow_count(right: np.ndarray, groups: np.ndarray) -> float:
    """Every pair of images by itself."""
    errors = right - right.mean()
    sets = [set(row) for row in groups.tolist()]
    together = sum(
        errors[i] * errors[j] for i, j in product(range(len(right)), repeat=2) if sets[i] & sets[j]
    )
    count = len(np.unique(groups))
    images = len(right)
    few = stats.t.ppf(0.975, images - 1) / stats.t.ppf(0.975, count - 1)
    freedom = (count / (count - 1)) / (images / (images - 1))
    return max(1.0, images / max(1.0, freedom * together / (errors**2).sum()) * few**2)


@pytest.mark.parametrize("width", [1, 2, 3])
@pytest.mark.parametrize("seed", range(4))
def test_independent_images_equal_a_sum_over_all_pairs(width: int, seed: int):
    """Few groups: pairs that share two groups, in any columns, and pairs of one group twice."""
    draw = np.random.default_rng((width, seed))
    groups = draw.integers(7, size=(60, width))
    ease = draw.normal(0, 1.5, 7)[groups].sum(axis=1)
    right = ease + draw.normal(0, 1, 60) > 0
    fast, slow = float(independent_images(right, groups)), slow_count(right, groups)
    assert fast == pytest.approx(slow, rel=1e-9), abs(fast - slow)
    assert fast < 60


def test_independent_images_in_closed_form():
    """Two equal images count as one, except for the 29 degrees of freedom of their 30 groups."""
    right = np.arange(60) // 2 % 3 > 0
    freedom = (60 / 59) / (30 / 29) * (stats.t.ppf(0.975, 59) / stats.t.ppf(0.975, 29)) ** 2
    pairs = (np.arange(60) // 2)[:, None]
    assert independent_images(right, pairs) == pytest.approx(30 * freedom, rel=1e-12)
    # Two groups of images, each right or wrong as a whole, and one degree of freedom: one image.
    halves = np.arange(60) < 30
    assert independent_images(halves, halves[:, None].astype(np.int64)) == 1
    alone = np.arange(60)[:, None]
    assert independent_images(right, alone) == pytest.approx(60, rel=1e-12)
    assert independent_images(right, None) == 60
    with pytest.raises(ValueError, match="60 images, and groups of 59"):
        independent_images(right, alone[1:])


def test_every_column_is_counted_as_if_it_were_alone():
    draw = np.random.default_rng(6)
    groups = draw.integers(9, size=(40, 2))
    values = draw.normal(size=(9, 2, 3))[groups].sum(axis=1) + draw.normal(size=(40, 2, 3))
    counts = independent_images(values, groups)
    halves = half_width(values, groups)
    assert counts.shape == halves.shape == (2, 3)
    for place in np.ndindex(2, 3):
        column = values[:, *place]
        assert counts[place] == independent_images(column, groups)
        assert halves[place] == pytest.approx(float(half_width(column, groups)), rel=1e-12)
    assert len(set(counts.ravel().tolist())) == 6


def test_half_an_interval_is_the_t_intervals_and_that_of_the_groups_means():
    values = np.random.default_rng(4).normal(5.0, 2.0, 30)
    influence = (values - values.mean()) / 30
    low, high = t_interval(values.tolist())
    alone = np.arange(30)[:, None]
    assert 2 * half_width(influence, alone) == pytest.approx(high - low, rel=1e-12)
    assert 2 * half_width(influence, None) == pytest.approx(high - low, rel=1e-12)
    # Each value twice, as two images of a group: the same interval, not a narrower one.
    pairs = (np.arange(60) // 2)[:, None]
    twice = np.repeat(influence, 2) / 2
    assert 2 * half_width(twice, pairs) == pytest.approx(high - low, rel=1e-12)
    # Two images at a distance of 2: the deviation of their mean is 1, with one degree of freedom.
    assert half_width(np.array([0.5, -0.5]), None) == pytest.approx(stats.t.ppf(0.975, 1))
    with pytest.raises(ValueError, match="at least two images"):
        half_width(np.zeros(1), np.zeros((1, 1), dtype=np.int64))


def test_more_groups_than_images_make_no_image_count_twice():
    groups = np.arange(20).reshape(10, 2)
    assert independent_images(np.arange(10) < 5, groups) == 10


def test_images_that_are_all_right_count_as_those_that_share_no_group():
    groups = np.stack([np.arange(60) % 11, np.arange(60) % 7 + 20], axis=1)
    assert independent_images(np.ones(60, dtype=bool), groups) == 7
    pairs = np.stack([np.arange(60) % 11, np.arange(60) % 7], axis=1)  # of the same digits
    assert independent_images(np.ones(60, dtype=bool), pairs) == 11 / 2
    assert independent_images(np.arange(60) > 3, np.zeros((60, 1), dtype=np.int64)) == 1


def test_the_variance_of_pairs_is_that_of_digits_drawn_anew():
    """Pairs of digits of which some are hard, against the closed form over 600 sets of digits.

    Let digits have hardness h_u of variance s2, and pair (a, b) the error h_a + h_b + noise of
    variance v. The mean of n pairs, each of two of N digits, then has the variance
    s2 (4 / N + 2 (1 - 1 / N) / n) + v / n. Clusters by left and by right digit would miss that a
    digit on the left is as hard on the right: they give half of the first term.
    """
    draw = np.random.default_rng(5)
    digits, pairs, hard, noise = 60, 400, 0.04, 0.15
    truth = hard * (4 / digits + 2 * (1 - 1 / digits) / pairs) + noise / pairs
    means, guesses = [], []
    for _ in range(600):
        groups = draw.integers(digits, size=(pairs, 2))
        errors = draw.normal(0, hard**0.5, digits)[groups].sum(axis=1)
        errors += draw.normal(0, noise**0.5, pairs)
        means.append(errors.mean())
        guesses.append(errors.var() / independent_images(errors, groups))
    assert np.var(means) == pytest.approx(truth, rel=0.15)  # 2.6 standard errors
    assert np.mean(guesses) == pytest.approx(truth, rel=0.08)


def test_the_interval_over_grouped_images_covers():
    """Digits that are easy or hard: Wilson over all pairs covers 8 times of 10, ours 19 of 20."""
    draw = np.random.default_rng(8)
    hits = {"alone": 0, "grouped": 0}
    for _ in range(600):
        groups = draw.integers(90, size=(500, 2))
        ease = draw.normal(0, 0.5, 90)[groups].sum(axis=1)
        right = 1.2 + ease + draw.normal(0, 1, 500) > 0
        truth = 100 * stats.norm.cdf(1.2 / math.sqrt(1 + 2 * 0.5**2))
        count = float(independent_images(right, groups))
        for name, images in (("alone", 500), ("grouped", count)):
            low, high = wilson_interval(100 * right.mean(), images)
            hits[name] += low <= truth <= high
    assert hits["alone"] < 0.85 * 600, hits
    assert 0.92 * 600 < hits["grouped"] < 0.98 * 600, hits


def test_the_interval_over_few_batches_of_many_groups_covers():
    """Ten batches with an error each, and 360 groups: 9 degrees of freedom, and not 369."""
    draw = np.random.default_rng(9)
    groups = np.stack([np.arange(500) // 50, 500 + draw.integers(360, size=500)], axis=1)
    hits = 0
    for _ in range(600):
        values = draw.normal(0, 0.5, 10)[groups[:, 0]] + draw.normal(0, 1, 500)
        hits += abs(values.mean()) <= half_width((values - values.mean()) / 500, groups)
    assert 0.92 * 600 < hits < 0.98 * 600, hits
