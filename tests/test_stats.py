"""Means, spreads and intervals against closed forms and scipy's own slow paths."""

from __future__ import annotations

import math
import random
import statistics

import pytest
from scipy import stats

from layershuffle.stats import (
    Values,
    compare,
    deviation,
    equal_spreads,
    estimate,
    mean,
    pooled_deviation,
    t_interval,
    welch_interval,
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
    fast = wilson_interval(correct, images)
    assert fast == pytest.approx((100 * slow.low, 100 * slow.high), abs=1e-10)


def test_wilson_interval_at_no_right_answer_in_closed_form():
    z2 = stats.norm.ppf(0.975) ** 2
    assert wilson_interval(0, 100) == pytest.approx((0.0, 100 * z2 / (100 + z2)), abs=1e-10)


def test_wilson_interval_of_an_impossible_count_is_refused():
    with pytest.raises(ValueError, match="impossible"):
        wilson_interval(5, 4)


def test_one_model_with_several_orders_gets_a_t_interval_over_orders():
    one = estimate({3: SCORES}, images=1000)
    assert (one.low, one.high) == t_interval(SCORES)
    assert (one.kind, one.models, one.orders, one.images) == ("orders", 1, 5, 1000)
    assert one.sd_orders == deviation(SCORES)
    assert one.sd_models is None
    assert (one.least, one.most) == (59.25, 70.0)


def test_several_models_get_a_t_interval_over_their_means():
    one = estimate({0: [10.0, 14.0], 1: [20.0, 22.0], 2: [16.0, 16.0]}, images=50)
    means = [12.0, 21.0, 16.0]
    assert one.mean == mean(means)
    assert (one.low, one.high) == t_interval(means)
    assert one.sd_models == deviation(means)
    assert one.sd_orders == pytest.approx(math.sqrt((8 + 2 + 0) / 3), rel=1e-15)
    assert (one.kind, one.models, one.orders) == ("models", 3, 2)


def test_models_weigh_the_same_however_many_orders_they_have():
    one = estimate({0: [10.0] * 9, 1: [20.0]}, images=50)
    assert one.mean == 15.0
    assert one.orders == 1


def test_one_score_gets_a_wilson_interval_over_images():
    one = estimate({0: [87.5]}, images=400)
    assert (one.low, one.high) == wilson_interval(350, 400)
    assert (one.kind, one.sd_orders, one.sd_models) == ("images", None, None)


def test_one_cross_entropy_has_no_interval():
    one = estimate({0: [2.5]}, images=400, percent=False)
    assert (one.mean, one.low, one.high, one.kind) == (2.5, None, None, "none")


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


def test_welch_interval_equals_scipys():
    other = [50.0, 58.5, 49.0]
    slow = stats.ttest_ind(SCORES, other, equal_var=False).confidence_interval(0.95)
    assert welch_interval(SCORES, other) == pytest.approx((slow.low, slow.high), rel=1e-10)
    assert welch_interval([3.0, 3.0], [1.0, 1.0]) == (2.0, 2.0)
    with pytest.raises(ValueError, match="at least two"):
        welch_interval([1.0], SCORES)


def test_models_of_common_seeds_are_compared_in_pairs():
    """What a seed does to both arms is in neither the difference nor its interval."""
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
    assert (gap.low, gap.high) == welch_interval(SCORES, [50.0, 58.5, 49.0])


def test_one_model_says_nothing_about_others():
    gap = compare({0: 3.0}, {0: 1.0})
    assert (gap.points, gap.low, gap.high) == (2.0, -math.inf, math.inf)
    with pytest.raises(ValueError, match="at least one value"):
        compare({}, {0: 1.0})


def test_means_and_spreads_of_seeds_are_those_of_their_values():
    by_seed = {3: 1.0, 90: 2.0, 17: 6.0}
    assert mean(by_seed) == 3.0
    assert deviation(by_seed) == deviation([1.0, 2.0, 6.0])


def test_spreads_that_cannot_be_told_apart():
    """Brown and Forsythe: a one-way analysis of variance of the distances from the medians."""
    samples = [[86.6, 86.3, 86.7, 86.9, 87.4], [89.0, 89.9, 88.8, 90.1, 88.2], [1.0, 9.0, 4.0]]
    distances = [[abs(v - statistics.median(sample)) for v in sample] for sample in samples]
    assert equal_spreads(samples) == pytest.approx(stats.f_oneway(*distances).pvalue)
    assert equal_spreads([[1.0, 1.0], [2.0, 2.0]]) == 1.0
    with pytest.raises(ValueError, match="at least two values"):
        equal_spreads([[1.0], [2.0, 3.0]])
