"""Balanced orders fill every cell, and the tables of cells say what they hold."""

from collections import Counter
from itertools import pairwise

import numpy as np
import pytest
from pandas import DataFrame
from subjects import subject_of

from common import FAMILIES
from layershuffle.analysis.latin_squares import balanced_order, balanced_orders
from layershuffle.analysis.position_table import PositionMeans, grid, home_effect, position_table
from layershuffle.analysis.results import table_from, table_text
from layershuffle.errors import DataError, UsageError


@pytest.mark.parametrize("depth", [2, 3, 4, 7, 12])
@pytest.mark.parametrize("square", [0, 5])
def test_depth_orders_in_a_row_are_a_latin_square(depth, square):
    orders = balanced_orders(depth, first=square * depth, count=depth, seed=3)
    cells = Counter((block, at) for order in orders for at, block in enumerate(order))
    assert cells == dict.fromkeys(((b, p) for b in range(depth) for p in range(depth)), 1)
    if depth % 2 == 0:
        pairs = Counter(pair for order in orders for pair in pairwise(order))
        assert set(pairs.values()) == {1}
        assert len(pairs) == depth * (depth - 1)


def test_single_orders_are_uniform():
    """All 24 orders of 4 blocks come up as first rows, within four deviations."""
    found = Counter(balanced_order(4, 4 * square, seed=0).blocks for square in range(2400))
    assert len(found) == 24
    assert all(abs(count - 100) < 4 * 10 for count in found.values())


@pytest.mark.parametrize(
    ("orders", "share", "expected"), [(None, 1.0, 4), (None, 0.25, 2), (3, 1.0, 3)]
)
def test_batches_carry_orders_of_their_own(orders, share, expected):
    batches = list(subject_of(FAMILIES["timm-vit"].wrapped(), orders=orders).batches(share=share))
    drawn = [order for batch in batches for order in batch.orders]
    assert drawn == balanced_orders(4, first=0, count=2 * expected, seed=0)
    assert [len(batch.images) for batch in batches] == [4, 4]


def test_no_more_images_than_asked_for():
    subject = subject_of(FAMILIES["timm-vit"].wrapped(), images=6)
    assert [len(batch.labels) for batch in subject.batches()] == [4, 2]


def test_other_classes_are_refused():
    with pytest.raises(DataError, match="5 outputs, the data has 7 classes"):
        subject_of(FAMILIES["timm-vit"].wrapped(), classes=7).require_classes()


def test_cells():
    cells = PositionMeans(2)
    for block in range(2):
        cells.add(block, 0, total=3.0 * block, count=2)
        cells.add(block, 0, total=1.0, count=2)
    with pytest.raises(UsageError, match="2 of 4 pairs of block and position were never run"):
        cells.mean()
    cells.add(0, 1, total=1.0, count=1)
    cells.add(1, 1, total=2.0, count=1)
    assert cells.mean().tolist() == [[0.25, 1.0], [1.0, 2.0]]


def test_home_effect_sees_only_what_block_and_position_do_not_explain():
    rng = np.random.default_rng(0)
    plain = rng.normal(size=(6, 1)) + rng.normal(size=(1, 6))
    none = home_effect(plain)
    assert (none.correlation, round(none.excess, 12)) == (0.0, 0.0)
    some = home_effect(plain + 2.0 * np.eye(6))
    # The mean of blocks and positions takes 2/6 out everywhere and leaves the difference whole.
    assert some.excess == pytest.approx(2.0)
    assert some.correlation < -0.25
    assert some.home - none.home == pytest.approx(2.0)
    assert some.elsewhere == pytest.approx(none.elsewhere)


def test_tables_come_back_from_text():
    values = np.arange(9.0).reshape(3, 3) / 7
    table = position_table({"a": values, "b": -values}, kind="x")
    again = table_from(table_text(table))
    assert tuple(again.columns) == ("kind", "block", "position", "a", "b")
    assert np.allclose(grid(again[again.kind == "x"], "a"), values, rtol=1e-5)
    assert table_text(again) == table_text(table)
    odd = DataFrame({"n": [float("nan"), -0.0, 1e7, 1 / 3], "word": ["a", "b,c", "d", "e"]})
    text = 'n,word\nnan,a\n0,"b,c"\n1e+07,d\n0.333333,e\n'
    assert table_text(odd) == table_text(table_from(text)) == text
