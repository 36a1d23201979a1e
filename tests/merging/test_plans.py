"""Plans of merges: pure draws with the properties that the paper's merges have."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import layershuffle as ls
from layershuffle.errors import UsageError
from layershuffle.merging.plans import MergePlan, orders_seed, sample_plans
from refusals import refuses

sizes = st.tuples(st.integers(2, 6), st.integers(0, 3)).map(lambda t: (t[0] + t[1], t[0]))


@settings(max_examples=60, deadline=None)
@given(sizes, st.integers(0, 1 << 31), st.data())
def test_no_two_blocks_of_one_donor_and_no_two_merges_alike(size, seed, data):
    num, depth = size
    count = data.draw(st.integers(1, min(24, math.perm(num, depth))))
    plans = sample_plans(num, depth, count=count, seed=seed)
    assert len({plan.donors for plan in plans}) == len(plans) == count
    for plan in plans:
        assert len(set(plan.donors)) == len(plan.donors) == depth
        assert set(plan.donors) <= set(range(num))
    assert plans == sample_plans(num, depth, count=count, seed=seed)
    assert plans[: count // 2 or 1] == sample_plans(num, depth, count=count // 2 or 1, seed=seed)


@settings(max_examples=40, deadline=None)
@given(st.integers(2, 4), st.integers(2, 4), st.integers(0, 1 << 31))
def test_all_merges_with_replacement_are_found(num, depth, seed):
    plans = sample_plans(num, depth, count=num**depth - num, seed=seed, replacement=True)
    assert len({plan.donors for plan in plans}) == num**depth - num
    assert all(len(set(plan.donors)) > 1 for plan in plans)  # all from one donor is no merge


def test_random_slots_are_permutations_for_the_same_donors() -> None:
    own = sample_plans(15, 12, count=50, seed=5)
    random = sample_plans(15, 12, count=50, seed=5, slots="random")
    assert [plan.donors for plan in own] == [plan.donors for plan in random]
    assert all(plan.slots is None and plan.blocks == tuple(range(12)) for plan in own)
    assert all(sorted(plan.blocks) == list(range(12)) for plan in random)
    assert len({plan.blocks for plan in random}) == 50
    assert str(MergePlan((2, 0), slots=(1, 0))) == "2:1,0:0"
    with refuses(UsageError):
        MergePlan((0, 1), slots=(0, 0)).check(2, 2)


def test_all_permutations_are_found_and_the_seed_decides():
    assert len({p.donors for p in sample_plans(4, 4, count=24, seed=3)}) == 24
    assert sample_plans(12, 12, count=3, seed=0) != sample_plans(12, 12, count=3, seed=1)


def test_the_draws_are_uniform():
    """Chi-square over the 24 permutations of 4 donors, one plan for each of 2,400 seeds."""
    counts = {}
    for seed in range(2400):
        (plan,) = sample_plans(4, 4, count=1, seed=seed)
        counts[plan.donors] = counts.get(plan.donors, 0) + 1
    chi2 = sum((n - 100) ** 2 / 100 for n in counts.values())
    assert len(counts) == 24
    assert chi2 < 49.7, chi2  # 0.999 quantile at 23 degrees of freedom


@pytest.mark.parametrize("end", ["first", "last", "donor", "average", "base"])
def test_ends(end):
    plans = sample_plans(15, 12, count=20, seed=5, end=end)
    assert [p.donors for p in plans] == [p.donors for p in sample_plans(15, 12, count=20, seed=5)]
    for plan in plans:
        assert plan.stem == plan.head
        if end in ("first", "last"):
            assert plan.stem == plan.donors[0 if end == "first" else -1]
        elif end == "donor":
            assert plan.stem in plan.donors
        else:
            assert plan.stem == end
    if end == "donor":
        assert len({plan.stem for plan in plans}) > 5


def test_merges_are_not_drawn_as_orders_are():
    plans = sample_plans(12, 12, count=20, seed=0)
    orders = [ls.Shuffled().draw(12, seed=0, step=step).blocks for step in range(20)]
    assert not {plan.donors for plan in plans} & set(orders)
    seeds = {orders_seed(0, group, index=i) for group in range(5) for i in range(50)}
    assert len(seeds) == 250


@pytest.mark.parametrize(
    ("num", "depth", "count", "replacement"),
    [
        (1, 4, 1, False),
        (5, 12, 1, False),
        (4, 4, 25, False),
        (2, 3, 7, True),
        (4, 4, 0, False),
    ],
)
def test_impossible_counts_are_refused(num, depth, count, replacement):
    with refuses(UsageError):
        sample_plans(num, depth, count=count, seed=0, replacement=replacement)


@pytest.mark.parametrize(
    "plan",
    [
        MergePlan((0, 1, 0)),
        MergePlan((0, 1, 2, 0)),
        MergePlan((0, 1, 1, -1)),
        MergePlan((0, 1, 1, 0), stem=5),
        MergePlan((0, 1, 1, 0), head="mean"),
    ],
)
def test_plans_that_do_not_fit(plan):
    with refuses(UsageError):
        plan.check(2, 4)
