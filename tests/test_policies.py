"""Order policies and modes: their generator, their orders, and their distributions."""

from __future__ import annotations

import hashlib
import json
import math
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from fractions import Fraction
from itertools import permutations, product
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from scipy.stats import binom, binomtest, chisquare

import layershuffle as ls
from common import global_generators_untouched
from layershuffle.core.draws import Stream
from layershuffle.core.policies import Mode, OrderPolicy, parse_modes, policy_to_json, spaced
from layershuffle.ground.errors import UsageError
from refusals import refuses

ALPHA = 1e-4  # seeds are fixed: a test that passes once passes always
DRAWS = 4800

EVERY_POLICY: dict[str, OrderPolicy] = {
    "sequential": ls.Sequential(),
    "shuffled": ls.Shuffled(),
    "shuffled drop": ls.Shuffled(drop=0.3),
    "shuffled kept": ls.Shuffled(kept=(3, None)),
    "shuffled kept range": ls.Shuffled(kept=(2, 5)),
    "layerdrop": ls.LayerDrop(0.2),
    "kept": ls.Kept(5),
    "kept arbitrary": ls.Kept(5, order="arbitrary"),
    "kept spaced": ls.Kept(5, choose="spaced"),
    "kept spaced arbitrary": ls.Kept(5, order="arbitrary", choose="spaced"),
    "kept first": ls.Kept(5, choose="first"),
    "kept last arbitrary": ls.Kept(5, order="arbitrary", choose="last"),
    "sequential rounds": ls.Sequential(parallel=(5, 5)),
    "shuffled rounds": ls.Shuffled(parallel=(1, 4)),
    "shuffled, some sequential": ls.Shuffled(sequential_every=3),
    "shuffled drop rounds": ls.Shuffled(drop=0.3, parallel=(1, 4)),
    "shuffled kept rounds": ls.Shuffled(kept=(3, None), parallel=(1, 4)),
    "sequential kept": ls.Sequential(kept=(3, None)),
    "sequential kept rounds": ls.Sequential(kept=(3, None), parallel=(1, 4)),
    "layerdrop rounds": ls.LayerDrop(0.2, parallel=(1, 4)),
    "layerdrop, some whole": ls.LayerDrop(0.2, sequential_every=3),
    "kept twice": ls.Kept(3, order="arbitrary", passes=2),
    "kept twice rounds": ls.Kept(5, passes=2, parallel=(3, 3)),
    "shuffled ends": ls.Shuffled(fixed=(1, 1)),
    "shuffled drop ends rounds": ls.Shuffled(drop=0.3, fixed=(2, 1), parallel=(1, 4)),
    "layerdrop last": ls.LayerDrop(0.2, fixed=(0, 1)),
    "kept ends twice": ls.Kept(5, order="arbitrary", passes=2, fixed=(1, 1)),
    "kept spaced ends rounds": ls.Kept(6, choose="spaced", parallel=(3, 3), fixed=(1, 2)),
}


def draws(policy: OrderPolicy, depth: int, *, count: int = DRAWS) -> Iterator[ls.ExecutionOrder]:
    """`count` orders of one seed."""
    for step in range(count):
        yield policy.draw(depth, seed=2024, step=step)


def assert_uniform(counts: Counter[Any], outcomes: list[Any]) -> None:
    """Checks that all outcomes are equally frequent, and that there are no others."""
    assert set(counts) <= set(outcomes)
    assert chisquare([counts[o] for o in outcomes]).pvalue > ALPHA


# --- frozen draws ---------------------------------------------------------------------------------

GOLDEN = {
    "sequential": ("0,1,2,3,4,5,6,7,8,9,10,11", "0,1,2,3,4,5,6,7,8,9,10,11"),
    "shuffled": ("3,2,9,6,5,8,7,1,10,11,4,0", "1,9,7,10,8,5,6,4,0,11,3,2"),
    "shuffled drop": ("3,2,9,6,5,8,7,1,11,4,0", "1,9,7,8,0,11,3"),
    "shuffled kept": ("3,2,9,6,5,8", "1,9,7,10,8,5"),
    "shuffled kept range": ("3,2,9,6,5", "1,9,7,10,8"),
    "layerdrop": ("0,1,4,5,6,7,8,9,10,11", "1,3,4,5,6,8,9,10,11"),
    "kept": ("2,3,5,6,9", "1,7,8,9,10"),
    "kept arbitrary": ("3,2,9,6,5", "1,9,7,10,8"),
    "kept spaced": ("0,3,6,8,11", "0,3,6,8,11"),
    "kept spaced arbitrary": ("3,6,8,11,0", "8,6,0,11,3"),
    "kept first": ("0,1,2,3,4", "0,1,2,3,4"),
    "kept last arbitrary": ("9,8,7,10,11", "9,7,10,8,11"),
    "sequential rounds": ("0+1+2+3+4,5+6+7+8+9,10+11", "0+1+2+3+4,5+6+7+8+9,10+11"),
    "shuffled rounds": ("3+2+9+6,5+8+7+1,10,11+4+0", "1+9+7+10,8+5+6+4,0+11,3+2"),
    "shuffled, some sequential": ("0,1,2,3,4,5,6,7,8,9,10,11", "1,9,7,10,8,5,6,4,0,11,3,2"),
    "shuffled drop rounds": ("3+2,9+6+5+8,7,1+11+4,0", "1,9,7+8,0+11+3"),
    "shuffled kept rounds": ("3+2+9+6,5,8", "1+9+7+10,8+5"),
    "sequential kept": ("2,3,5,6,8,9", "1,5,7,8,9,10"),
    "sequential kept rounds": ("2+3+5+6,8,9", "1+5+7+8,9+10"),
    "layerdrop rounds": ("0+1+4+5,6,7+8+9+10,11", "1+3+4+5,6+8,9+10+11"),
    "layerdrop, some whole": ("0,1,2,3,4,5,6,7,8,9,10,11", "1,3,4,5,6,8,9,10,11"),
    "kept twice": ("3,2,9,3,2,9", "1,9,7,1,9,7"),
    "kept twice rounds": ("2+3+5,6+9,2+3+5,6+9", "1+7+8,9+10,1+7+8,9+10"),
    "shuffled ends": ("0,10,3,2,8,6,4,7,1,9,5,11", "0,6,2,9,4,8,10,7,3,5,1,11"),
    "shuffled drop ends rounds": ("0,1,4+10,3+7+9+6,5+2,8,11", "0,1,8+9+6+5,4,2+10,11"),
    "layerdrop last": ("0,1,4,5,6,7,8,9,10,11", "1,3,4,5,6,8,9,10,11"),
    "kept ends twice": ("0,10,3,2,10,3,2,11", "0,6,2,9,6,2,9,11"),
    "kept spaced ends rounds": ("0,1+5+9,10,11", "0,1+5+9,10,11"),
}


@pytest.mark.parametrize("name", EVERY_POLICY)
def test_golden_orders(name: str) -> None:
    """Frozen: the same on every machine and in every version."""
    policy = EVERY_POLICY[name]
    with global_generators_untouched():
        first = policy.draw(12, seed=0, step=0)
        second = policy.draw(12, seed=17, step=345, micro_batch=2, rank=1)
    assert (str(first), str(second)) == GOLDEN[name]


# --- uniform where they say so --------------------------------------------------------------------


@pytest.mark.parametrize("policy", [ls.Shuffled(), ls.Kept(4, order="arbitrary")], ids=str)
def test_all_24_permutations(policy: OrderPolicy) -> None:
    counts = Counter(order.blocks for order in draws(policy, 4, count=7200))
    assert_uniform(counts, list(permutations(range(4))))


def test_kept_at_random_is_a_uniform_ordered_subset() -> None:
    arbitrary = Counter(o.blocks for o in draws(ls.Kept(2, order="arbitrary"), 4))
    assert_uniform(arbitrary, list(permutations(range(4), 2)))
    ascending = Counter(order.blocks for order in draws(ls.Kept(2), 4))
    assert_uniform(ascending, [(a, b) for a in range(4) for b in range(a + 1, 4)])


@pytest.mark.parametrize(
    ("choose", "blocks"), [("spaced", (0, 3, 5)), ("first", (0, 1, 2)), ("last", (3, 4, 5))]
)
def test_chosen_blocks_in_uniform_order(choose: Any, blocks: tuple[int, ...]) -> None:
    assert ls.Kept(3, choose=choose).draw(6, seed=9, step=9).blocks == blocks
    counts = Counter(o.blocks for o in draws(ls.Kept(3, order="arbitrary", choose=choose), 6))
    assert_uniform(counts, list(permutations(blocks)))


@pytest.mark.parametrize(("low", "high"), [(3, None), (3, 12), (2, 5), (4, 4)])
def test_number_kept_is_uniform(low: int, high: int | None) -> None:
    seen = list(draws(ls.Shuffled(kept=(low, high)), 12))
    numbers = list(range(low, (high or 12) + 1))
    if len(numbers) > 1:
        assert_uniform(Counter(map(len, seen)), numbers)
    assert set(map(len, seen)) == set(numbers)
    assert not any(order.has_repeats for order in seen)
    for position in range(low):
        assert_uniform(Counter(order.blocks[position] for order in seen), list(range(12)))


@pytest.mark.parametrize("policy", [ls.Shuffled(drop=0.3), ls.LayerDrop(0.3)], ids=str)
def test_number_left_by_dropping(policy: OrderPolicy) -> None:
    """Binomial, but at least one block stays."""
    depth = 6
    shares = [binom.pmf(k, depth, 0.7) * DRAWS for k in range(depth + 1)]
    wanted = [sum(shares[:3]), *shares[3:]]  # none (one stays), one and two: few, so together
    counts = Counter(max(2, len(order)) for order in draws(policy, depth))
    got = [counts[k] for k in range(2, depth + 1)]
    assert chisquare(got, wanted).pvalue > ALPHA


def test_shuffled_drop_is_uniform_in_order() -> None:
    seen = [order.blocks for order in draws(ls.Shuffled(drop=0.3), 4, count=9600)]
    assert_uniform(Counter(b for b in seen if len(b) == 4), list(permutations(range(4))))
    assert_uniform(Counter(b for b in seen if len(b) == 2), list(permutations(range(4), 2)))


@pytest.mark.parametrize("p", [0.0, 0.2, 0.7])
def test_layerdrop_rate_of_each_block(p: float) -> None:
    depth = 5
    rate = 1 - p + p**depth / depth
    assert ls.LayerDrop() == ls.LayerDrop(0.2), "the rate of the paper's section 4.2"
    seen = list(draws(ls.LayerDrop(p), depth))
    assert all(list(order) == sorted(order) for order in seen)
    for block in range(depth):
        kept = sum(block in order.blocks for order in seen)
        assert kept == DRAWS if p == 0 else binomtest(kept, DRAWS, rate).pvalue > ALPHA


def test_one_block_stays_and_is_uniform() -> None:
    for policy in (ls.LayerDrop(0.999), ls.Shuffled(drop=0.999)):
        counts = Counter(order.blocks for order in draws(policy, 4))
        alone = Counter({blocks: n for blocks, n in counts.items() if len(blocks) == 1})
        assert alone.total() > 0.98 * DRAWS
        assert_uniform(alone, [(block,) for block in range(4)])


# --- ends -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("fixed", [(1, 1), (2, 0), (0, 3)])
def test_ends_keep_their_place_and_the_others_are_uniform(fixed: tuple[int, int]) -> None:
    first, last = fixed
    depth = first + last + 4
    drawn = range(first, first + 4)
    ends = (*range(first), *range(first + 4, depth))
    seen = [order.blocks for order in draws(ls.Shuffled(fixed=fixed), depth)]
    assert {(*order[:first], *order[first + 4 :]) for order in seen} == {ends}
    between = Counter(order[first : first + 4] for order in seen)
    assert_uniform(between, list(permutations(drawn)))
    kept = ls.Kept(first + last + 2, order="arbitrary", fixed=fixed)
    seen = [order.blocks for order in draws(kept, depth)]
    assert {(*order[:first], *order[first + 2 :]) for order in seen} == {ends}
    assert_uniform(
        Counter(order[first : first + 2] for order in seen), list(permutations(drawn, 2))
    )


@pytest.mark.parametrize(
    "policy",
    [
        ls.Shuffled(drop=0.6, fixed=(2, 1), parallel=(1, 4)),
        ls.Shuffled(kept=(3, None), fixed=(2, 1), parallel=(2, 3)),
        ls.Sequential(kept=(3, 6), fixed=(2, 1), parallel=(1, 4)),
        ls.LayerDrop(0.6, fixed=(2, 1), parallel=(1, 4), sequential_every=5),
        ls.Kept(5, order="arbitrary", fixed=(2, 1), parallel=(1, 3)),
        ls.Kept(5, choose="last", passes=3, fixed=(2, 1), parallel=(3, 3)),
    ],
    ids=str,
)
def test_ends_run_in_every_order_alone(policy: OrderPolicy) -> None:
    for order in draws(policy, 8, count=1000):
        assert order.rounds is not None
        assert order.rounds[:2] == ((0,), (1,))
        assert order.rounds[-1] == (7,)
        assert Counter(order.blocks)[0] == Counter(order.blocks)[1] == Counter(order.blocks)[7] == 1


def test_a_number_of_blocks_counts_the_ends() -> None:
    lengths = Counter(map(len, draws(ls.Shuffled(kept=(2, None), fixed=(1, 1)), 6)))
    assert_uniform(lengths, [2, 3, 4, 5, 6])
    assert {order.blocks for order in draws(ls.Kept(2, fixed=(1, 1)), 6, count=9)} == {(0, 5)}
    # Dropped are only those between; one of them stays.
    shares = [binom.pmf(k, 4, 0.7) * DRAWS for k in range(5)]
    counts = Counter(map(len, draws(ls.Shuffled(drop=0.3, fixed=(1, 1)), 6)))
    got = [counts[k + 2] for k in range(1, 5)]
    assert chisquare(got, [shares[0] + shares[1], *shares[2:]]).pvalue > ALPHA


# --- choices --------------------------------------------------------------------------------------


@given(st.integers(1, 30), st.integers(0, 10**6), st.integers(0, 10**6), st.data())
def test_kept_orders_are_prefixes_of_each_other(
    depth: int, seed: int, step: int, data: st.DataObject
) -> None:
    k = data.draw(st.integers(1, depth))
    more = data.draw(st.integers(k, depth))
    few, many = (ls.Kept(n, order="arbitrary").draw(depth, seed=seed, step=step) for n in (k, more))
    assert many.blocks[:k] == few.blocks
    assert ls.Kept(k).draw(depth, seed=seed, step=step).blocks == tuple(sorted(few))


@given(st.integers(1, 60), st.data())
def test_spaced_against_fractions(depth: int, data: st.DataObject) -> None:
    k = data.draw(st.integers(1, depth))
    step = Fraction(depth - 1, k - 1) if k > 1 else Fraction(0)
    wanted = tuple(math.floor(i * step + Fraction(1, 2)) for i in range(k))
    assert spaced(k, depth) == wanted
    assert len(set(wanted)) == k
    assert wanted[0] == 0
    assert wanted[-1] == (depth - 1 if k > 1 else 0)


# --- stored as JSON -------------------------------------------------------------------------------


def test_a_record_has_the_name_and_the_options_that_are_given() -> None:
    assert policy_to_json(ls.Shuffled()) == {"policy": "shuffled"}
    assert policy_to_json(ls.LayerDrop(0.3)) == {"policy": "layerdrop", "p": 0.3}
    ranged = json.dumps(policy_to_json(ls.Shuffled(kept=(3, None), parallel=[1, 4])))
    assert json.loads(ranged) == {"policy": "shuffled", "kept": [3, None], "parallel": [1, 4]}
    ends = policy_to_json(ls.Shuffled(fixed=[1, 1]))  # type: ignore[arg-type]
    assert ends == {"policy": "shuffled", "fixed": (1, 1)}


def test_rounds_hold_the_same_blocks_and_uniform_sizes() -> None:
    """The sizes are drawn after the blocks: the order is the one of the policy without rounds."""
    sizes: Counter[int] = Counter()
    for step in range(DRAWS // 4):
        order = ls.Shuffled(parallel=(1, 4)).draw(24, seed=2024, step=step)
        assert order.blocks == ls.Shuffled().draw(24, seed=2024, step=step).blocks
        assert order.rounds is not None
        # The last round has what is left; four more blocks would have fit into any other.
        sizes.update(map(len, order.rounds[:3]))
    assert_uniform(sizes, [1, 2, 3, 4])


def test_rounds_of_every_pass_are_drawn_one_after_the_other() -> None:
    """Against the stream itself: the shuffle, then the size of each round, and nothing between."""
    policy = ls.Kept(5, order="arbitrary", passes=3, parallel=(1, 3))
    for step in range(20):
        stream = Stream(2024, step)
        blocks = stream.shuffled(range(12))[:5]
        wanted: list[tuple[int, ...]] = []
        for _ in range(3):
            left = blocks
            while left:
                size = 1 + stream.below(3)
                wanted.append(left[:size])
                left = left[size:]
        assert policy.draw(12, seed=2024, step=step).rounds == tuple(wanted)


@pytest.mark.parametrize("groups", [1, 2, 3, 4, 6])
def test_every_nth_order_is_sequential(groups: int) -> None:
    """Counted over steps and groups: 12 steps hold exactly a third, and the rest are as before."""
    mixed, plain = ls.Shuffled(sequential_every=3), ls.Shuffled()
    sequential = ls.ExecutionOrder.sequential(12)
    per_step = []
    for step in range(12):
        orders = [mixed.draw(12, seed=7, step=step, micro_batch=group) for group in range(groups)]
        per_step.append(orders.count(sequential))
        for group, order in enumerate(orders):
            wanted = plain.draw(12, seed=7, step=step, micro_batch=group)
            assert order == (sequential if (step + group) % 3 == 0 else wanted)
    assert sum(per_step) == 12 * groups // 3
    assert max(per_step) - min(per_step) <= (groups % 3 != 0), "as even over steps as can be"


@st.composite
def options(draw: st.DrawFn) -> dict[str, Any]:
    """Options that all policies of training share."""
    low = draw(st.integers(1, 4))
    return {
        "parallel": draw(st.none() | st.just((low, draw(st.integers(low, 6))))),
        "sequential_every": draw(st.none() | st.integers(2, 5)),
    }


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])  # on a busy machine
@given(options(), st.floats(0, 0.9), st.integers(1, 12), st.integers(0, 99), st.integers(0, 9))
def test_options_compose(
    rounds: dict[str, Any], p: float, least: int, step: int, micro_batch: int
) -> None:
    """What an option promises holds beside every other one, and rounds draw after the blocks."""
    name = {"seed": 4, "step": step, "micro_batch": micro_batch}
    every = rounds["sequential_every"]
    whole = every is not None and (step + micro_batch) % every == 0
    pairs: list[tuple[OrderPolicy, OrderPolicy]] = [
        (ls.Sequential(**rounds), ls.Sequential()),
        (ls.Sequential(kept=(least, None), **rounds), ls.Sequential(kept=(least, None))),
        (ls.LayerDrop(p, **rounds), ls.LayerDrop(p)),
        (ls.Shuffled(**rounds), ls.Shuffled()),
        (ls.Shuffled(drop=p, **rounds), ls.Shuffled(drop=p)),
        (ls.Shuffled(kept=(least, None), **rounds), ls.Shuffled(kept=(least, None))),
    ]
    for policy, plain in pairs:
        order, blocks = policy.draw(12, **name), plain.draw(12, **name).blocks
        if whole:
            assert order == ls.ExecutionOrder.sequential(12)
            continue
        assert order.blocks == blocks
        if not isinstance(policy, ls.Shuffled):
            assert blocks == tuple(sorted(blocks))
        if "kept" in str(policy) and "kept=None" not in str(policy):
            assert len(blocks) >= least
        low, high = rounds["parallel"] or (1, 1)
        assert order.rounds is not None
        *sizes, last = map(len, order.rounds)
        assert all(low <= size <= high for size in sizes)
        assert 1 <= last <= high


def test_without_a_step_a_policy_counts_its_draws() -> None:
    policy = ls.Shuffled(drop=0.3)
    drawn = [policy.draw(12, seed=3) for _ in range(5)]
    assert drawn == [ls.Shuffled(drop=0.3).draw(12, seed=3, step=step) for step in range(5)]
    assert policy.drawn == 5
    policy.draw(12, step=99)
    assert policy.drawn == 5, "a draw with a step is pure"
    assert policy == ls.Shuffled(drop=0.3)
    assert hash(policy) == hash(ls.Shuffled(drop=0.3))
    assert replace(policy, drop=0.5).drawn == 0
    assert "drawn" not in policy_to_json(policy)


def test_threads_that_count_together_draw_every_step_once() -> None:
    policy = ls.Shuffled()
    with ThreadPoolExecutor(8) as pool:
        drawn = list(pool.map(lambda _: policy.draw(12), range(400)))
    assert Counter(drawn) == Counter(ls.Shuffled().draw(12, step=step) for step in range(400))


# --- refused --------------------------------------------------------------------------------------


def _draw(policy: OrderPolicy, depth: Any = 12) -> Callable[[], ls.ExecutionOrder]:
    return lambda: policy.draw(depth, seed=0, step=0)


BAD: dict[str, Callable[[], object]] = {
    "drop 1": lambda: ls.Shuffled(drop=1.0),
    "drop negative": lambda: ls.Shuffled(drop=-0.1),
    "drop nan": lambda: ls.Shuffled(drop=math.nan),
    "drop text": lambda: ls.Shuffled(drop="a"),  # type: ignore[arg-type]
    "p 1": lambda: ls.LayerDrop(1),
    "p None": lambda: ls.LayerDrop(None),  # type: ignore[arg-type]
    "drop and kept": lambda: ls.Shuffled(drop=0.1, kept=(1, 2)),
    "kept number": lambda: ls.Shuffled(kept=3),  # type: ignore[arg-type]
    "kept single": lambda: ls.Shuffled(kept=(3,)),  # type: ignore[arg-type]
    "kept text": lambda: ls.Shuffled(kept=("3", 4)),  # type: ignore[arg-type]
    "kept beyond": _draw(ls.Shuffled(kept=(3, 13))),
    "kept from 0": _draw(ls.Shuffled(kept=(0, 3))),
    "kept reversed": _draw(ls.Shuffled(kept=(5, 4))),
    "kept policy beyond": _draw(ls.Kept(13)),
    "kept 0": _draw(ls.Kept(0)),
    "kept policy text": lambda: ls.Kept("3"),  # type: ignore[arg-type]
    "kept order": lambda: ls.Kept(3, order="random"),  # type: ignore[arg-type]
    "kept choice": lambda: ls.Kept(3, choose="best"),  # type: ignore[arg-type]
    "parallel number": lambda: ls.Shuffled(parallel=3),  # type: ignore[arg-type]
    "every order": lambda: ls.Shuffled(sequential_every=1),
    "every half": lambda: ls.Shuffled(sequential_every=2.5),
    "parallel from 0": lambda: ls.Sequential(parallel=(0, 2)),
    "parallel reversed": lambda: ls.Kept(3, parallel=(4, 2)),
    "passes 0": lambda: ls.Kept(3, passes=0),
    "ends number": lambda: ls.Shuffled(fixed=1),  # type: ignore[arg-type]
    "ends negative": lambda: ls.Kept(3, fixed=(1, -1)),
    "ends everywhere": _draw(ls.Shuffled(fixed=(6, 6))),
    "ends but one": _draw(ls.Shuffled(fixed=(6, 5))),
    "fewer than the ends": _draw(ls.Kept(2, fixed=(2, 1))),
    "kept below the ends": _draw(ls.Shuffled(kept=(2, None), fixed=(2, 1))),
    "sequential 0": _draw(ls.Sequential(), 0),
    "seed true": lambda: ls.Shuffled().draw(4, seed=True, step=0),
    "step half": lambda: ls.Shuffled().draw(4, step=0.5),  # type: ignore[arg-type]
    **{
        f"model for {type(policy).__name__}": _draw(policy, torch.nn.Linear(2, 2))
        for policy in (ls.Sequential(), ls.Shuffled(), ls.LayerDrop(), ls.Kept(2))
    },
    "shuffled 0": _draw(ls.Shuffled(), 0),
}


@pytest.mark.parametrize("make", BAD.values(), ids=list(BAD))
def test_refused_with_the_reason(make: Callable[[], object]) -> None:
    with refuses(UsageError):
        make()


# --- modes ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "policy", "drawn"),
    [
        ("sequential", ls.Sequential(), False),
        ("arbitrary", ls.Shuffled(), True),
        ("kept:9", ls.Kept(9), True),
        ("kept:9:arbitrary", ls.Kept(9, order="arbitrary"), True),
        ("kept:6:sequential:spaced", ls.Kept(6, choose="spaced"), False),
        ("kept:6:arbitrary:last", ls.Kept(6, order="arbitrary", choose="last"), True),
        ("arbitrary:parallel=3", ls.Shuffled(parallel=(3, 3)), True),
        ("sequential:parallel=2", ls.Sequential(parallel=(2, 2)), False),
        ("kept:6:arbitrary:passes=2", ls.Kept(6, order="arbitrary", passes=2), True),
        (
            "kept:6:sequential:last:parallel=2:passes=3",
            ls.Kept(6, choose="last", passes=3, parallel=(2, 2)),
            False,
        ),
    ],
)
def test_mode_texts(text: str, policy: OrderPolicy, *, drawn: bool) -> None:
    (mode,) = parse_modes(text)
    assert mode.policy() == policy
    assert mode.is_drawn(12) is drawn
    assert mode.draws(7, depth=12) == (7 if drawn else 1)
    assert parse_modes(str(mode)) == (mode,)


@pytest.mark.parametrize(
    ("fixed", "drawn"), [((0, 0), 1), ((0, 0), 2), ((0, 0), 3), ((1, 1), 2), ((1, 1), 3)]
)
@pytest.mark.parametrize("order", ["sequential", "arbitrary"])
@pytest.mark.parametrize("choose", ["random", "spaced", "first", "last"])
def test_a_mode_has_as_many_scores_as_it_has_orders(
    fixed: tuple[int, int], drawn: int, order: Any, choose: Any
) -> None:
    """Against all that 60 draws give: every kept count, all blocks in their order are one, and
    blocks of a round have no order."""
    depth = drawn + sum(fixed)
    counts = (None, *range(max(1, sum(fixed)), depth + 1))
    for kept, parallel in product(counts, (1, 2, 3)):
        mode = Mode(order=order, kept=kept, choose=choose if kept else "random", parallel=parallel)
        policy = mode.policy(fixed=fixed)
        rounds = set()
        for step in range(60):
            drawn_order = policy.draw(depth, seed=0, step=step)
            assert drawn_order.rounds is not None
            rounds.add(tuple(map(frozenset, drawn_order.rounds)))
        assert mode.is_drawn(depth, fixed=fixed) is (len(rounds) > 1)
        assert mode.draws(7, depth=depth, fixed=fixed) == (7 if len(rounds) > 1 else 1)


@pytest.mark.parametrize(
    ("text", "expanded"),
    [
        ("kept:2-4:arbitrary", "kept:4:arbitrary,kept:3:arbitrary,kept:2:arbitrary"),
        ("kept:2-1,sequential", "kept:2,kept:1,sequential"),
        ("kept:1-2:arbitrary:passes=2", "kept:2:arbitrary:passes=2,kept:1:arbitrary:passes=2"),
        ("kept:9-10:sequential:last", "kept:10:sequential:last,kept:9:sequential:last"),
        ("sequential,kept:1-2,arbitrary", "sequential,kept:2,kept:1,arbitrary"),
    ],
)
def test_a_range_stands_for_each_of_its_counts(text: str, expanded: str) -> None:
    assert parse_modes(text) == parse_modes(expanded)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "shuffled",
        "kept",
        "kept:",
        "kept:-3",
        "kept:9:backwards",
        "kept:9:sequential:best",
        "kept:9:sequential:first:more",
        "kept:2,sequential,sequential",
        "arbitrary,arbitrary:parallel=1",
        "arbitrary:parallel=0",
        "arbitrary:parallel=2:parallel=3",
        "parallel=3",
        "arbitrary:rounds=3",
        "arbitrary:passes=2",
    ],
)
def test_wrong_mode_texts(text: str) -> None:
    with refuses(UsageError):
        parse_modes(text)


# --- the generator: against a slow path that follows its description ------------------------------


def slow_words(seed: int, step: int, micro_batch: int, rank: int, *, count: int) -> list[int]:
    """The first words of a stream: hex digests cut into four pieces of 16 digits."""
    name = ",".join(str(part) for part in (seed, step, micro_batch, rank))
    key = hashlib.sha256(("layershuffle.draws.v1:" + name).encode()).digest()
    digits = ""
    for index in range(count // 4 + 1):
        digits += hashlib.sha256(key + bytes.fromhex(f"{index:016x}")).hexdigest()
    return [int(digits[16 * i : 16 * i + 16], 16) for i in range(count)]


def slow_shuffle(words: list[int], items: list[int]) -> list[int]:
    """Fisher-Yates by removing and inserting, not by swapping in place."""
    out = list(items)
    for place in reversed(range(1, len(out))):
        while (word := words.pop(0)) >= 2**64 // (place + 1) * (place + 1):
            pass
        partner = word % (place + 1)
        kept = dict(enumerate(out)) | {place: out[partner], partner: out[place]}
        out = [kept[i] for i in range(len(out))]
    return out


NAMES = [(0, 0, 0, 0), (7, 3, 0, 0), (7, 3, 2, 0), (7, 3, 0, 5), (-1, 10**12, 0, 0)]


@pytest.mark.parametrize("name", NAMES)
def test_shuffle_equals_the_slow_path(name: tuple[int, int, int, int]) -> None:
    seed, step, micro_batch, rank = name
    stream = Stream(seed, step, micro_batch=micro_batch, rank=rank)
    words = slow_words(*name, count=200)
    for length in (1, 2, 12, 24):
        assert list(stream.shuffled(range(length))) == slow_shuffle(words, list(range(length)))


def test_below_rejects_the_incomplete_run() -> None:
    """Half of all words are rejected for this n, so a plain remainder would differ."""
    n = 2**63 + 1
    words = slow_words(1, 2, 0, 0, count=400)
    wanted = [word for word in words if word < n]
    assert len(wanted) < 0.65 * len(words)
    stream = Stream(1, 2)
    assert [stream.below(n) for _ in wanted] == wanted


def test_chance_compares_with_the_exact_threshold() -> None:
    words = slow_words(4, 5, 0, 0, count=300)
    for p in (0.0, 0.2, 0.5, 1.0 / 3.0, 0.999):
        stream = Stream(4, 5)
        wanted = [word < Fraction(p) * 2**64 // 1 for word in words]
        assert [stream.chance(p) for _ in words] == wanted
