"""Balanced orders fill every cell; tables of cells have the right values and intervals."""

from collections import Counter
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch
from pandas import DataFrame
from subjects import subject_of

from common import FAMILIES
from layershuffle.analysis import attribution
from layershuffle.analysis.position_table import (
    Map,
    PositionMeans,
    at_position,
    draw_maps,
    evenly,
    grid,
    home_effect,
    home_less_elsewhere,
    position_table,
)
from layershuffle.analysis.results import table_from, table_text
from layershuffle.analysis.subject import balanced_order, balanced_orders
from layershuffle.errors import DataError, UsageError
from layershuffle.plotting import INK
from layershuffle.stats import ImageGroups, t_interval
from refusals import refuses


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
    """All 24 orders of 4 blocks are first rows equally often, within four standard deviations."""
    counts = Counter(balanced_order(4, 4 * square, seed=0).blocks for square in range(2400))
    assert len(counts) == 24
    assert all(abs(count - 100) < 4 * 10 for count in counts.values())


@pytest.mark.parametrize(
    ("orders", "share", "expected"), [(None, 1.0, 4), (None, 0.25, 2), (3, 1.0, 3)]
)
def test_batches_carry_orders_of_their_own(orders, share, expected):
    batches = list(
        subject_of(FAMILIES["timm-vit"].wrapped(), num_orders=orders).batches(share=share)
    )
    drawn = [order for batch in batches for order in batch.orders]
    assert drawn == balanced_orders(4, first=0, count=2 * expected, seed=0)
    assert [len(batch.images) for batch in batches] == [4, 4]


def test_no_more_images_than_asked_for():
    subject = subject_of(FAMILIES["timm-vit"].wrapped(), max_images=6)
    assert [len(batch.labels) for batch in subject.batches()] == [4, 2]


def test_other_classes_are_refused():
    with refuses(DataError):
        subject_of(FAMILIES["timm-vit"].wrapped(), classes=7).require_classes()


def test_cells():
    cells = PositionMeans(2)
    for block in range(2):
        cells.add(block, 0, values=torch.tensor([block, 2.0 * block]), first=0)
        cells.add(block, 0, values=torch.tensor([0.5, 0.5]), first=0)
    with refuses(UsageError):
        cells.mean()
    cells.add(0, 1, values=torch.tensor([1.0]), first=0)
    cells.add(1, 1, values=torch.tensor([2.0]), first=1)
    assert cells.mean().tolist() == [[0.25, 1.0], [1.0, 2.0]]


def test_home_effect_sees_only_what_block_and_position_do_not_explain():
    rng = np.random.default_rng(0)
    plain = rng.normal(size=(6, 1)) + rng.normal(size=(1, 6))
    none = home_effect(plain)
    assert (none.correlation, round(none.excess, 12)) == (0.0, 0.0)
    some = home_effect(plain + 2.0 * np.eye(6))
    # The means of blocks and positions remove 2/6 everywhere, and the difference stays.
    assert some.excess == pytest.approx(2.0)
    assert some.correlation < -0.25
    assert some.home - none.home == pytest.approx(2.0)
    assert some.elsewhere == pytest.approx(none.elsewhere)


def test_tables_round_trip_through_text():
    values = np.arange(9.0).reshape(3, 3) / 7
    table = position_table({"a": values, "b": -values}, kind="x")
    again = table_from(table_text(table))
    assert tuple(again.columns) == ("kind", "block", "position", "a", "b")
    assert np.allclose(grid(again[again.kind == "x"], "a"), values, rtol=1e-5)
    assert table_text(again) == table_text(table)
    odd = DataFrame({"n": [float("nan"), -0.0, 1e7, 1 / 3], "word": ["a", "b,c", "d", "e"]})
    text = 'n,word\nnan,a\n0,"b,c"\n1e+07,d\n0.333333,e\n'
    assert table_text(odd) == table_text(table_from(text)) == text


# --- intervals ------------------------------------------------------------------------------------


def _cells_of(values, *, batch=4):
    """Cells from values `[images, block, position]`, given batch by batch as the analyses do."""
    cells = PositionMeans(values.shape[1])
    for first in range(0, len(values), batch):
        for block, position in np.ndindex(values.shape[1:]):
            part = torch.from_numpy(values[first : first + batch, block, position])
            cells.add(block, position, values=part, first=first)
    return cells


def test_intervals_of_cells_and_contrasts_are_those_of_the_images_means():
    """Where every image has every cell, a contrast is a mean over images: a t-interval."""
    values = np.random.default_rng(0).normal(3.0, 1.0, (40, 3, 3))
    cells, alone = _cells_of(values), ImageGroups(np.arange(40)[:, None])
    weights = home_less_elsewhere(3)
    low, high = t_interval((values * weights).sum((1, 2)).tolist())
    assert 2 * cells.half_width(alone, weights) == pytest.approx(high - low, rel=1e-5)
    halves = cells.columns("a", alone)["a_half"]
    for cell in np.ndindex(3, 3):
        low, high = t_interval(values[:, *cell].tolist())
        assert 2 * halves[cell] == pytest.approx(high - low, rel=1e-5)


def test_the_weights_give_the_numbers_that_they_name():
    values = np.random.default_rng(1).normal(size=(5, 5))
    assert (values * home_less_elsewhere(5)).sum() == pytest.approx(home_effect(values).excess)
    assert (values * evenly(5)).sum() == pytest.approx(values.mean())
    assert (values * at_position(5, 4)).sum() == pytest.approx(values[:, 4].mean())


@pytest.mark.parametrize(("images", "few"), [(40, False), (36, True)])
def test_images_of_a_batch_are_one_cluster_and_nine_are_too_few(images, few):
    subject = subject_of(FAMILIES["timm-vit"].wrapped(), count=images)
    clusters = subject.clusters(images, by_batch=True)
    assert (clusters is None) == few
    cells = _cells_of(np.random.default_rng(2).normal(size=(images, 2, 2)))
    assert np.isnan(cells.half_widths(clusters)).all() == few
    if clusters is not None:
        # Equal images of a batch count as one image per batch: 9 degrees of freedom.
        batches = np.repeat(np.random.default_rng(3).normal(size=10), 4)
        low, high = t_interval(batches[::4].tolist())
        influence = (batches - batches.mean()) / 40
        assert 2 * clusters.half_width(influence) == pytest.approx(high - low)


def test_groups_of_the_data_join_the_batches():
    subject = subject_of(FAMILIES["timm-vit"].wrapped(), count=48)
    split = replace(subject.data.splits["test"], groups=torch.arange(48)[:, None] % 12)
    grouped = replace(subject, data=replace(subject.data, splits={"test": split}))
    alike = (np.arange(48) % 12 - 5.5) / 48
    by_batch, both = (s.clusters(48, by_batch=True) for s in (subject, grouped))
    # A group with images in four batches joins them, so the interval is wider.
    assert both.half_width(alike) > 1.2 * by_batch.half_width(alike)
    few = replace(split, groups=torch.arange(48)[:, None] % 9)
    nine = replace(subject, data=replace(subject.data, splits={"test": few}))
    assert nine.clusters(48, by_batch=False) is None
    with refuses(DataError):
        grouped.clusters(49, by_batch=False)


# --- maps and findings ----------------------------------------------------------------------------


def _map(values, half=None, **words):
    values = np.asarray(values, dtype=float)
    halves = None if half is None else np.full(values.shape, half)
    return Map(title="", meaning="", values=values, halves=halves, **words)


def test_colours_are_not_stretched_over_noise():
    noise = np.random.default_rng(0).normal(2.0, 0.5, (12, 12))  # 144 times the same value
    low, high = _map(noise, half=1.96 * 0.5).colour_range()
    assert high - low == pytest.approx(8 * 1.96 * 0.5)
    assert np.ptp(noise) < 0.4 * (high - low)
    effect = noise + 40 * np.eye(12)
    assert _map(effect, half=0.98).colour_range() == pytest.approx((effect.min(), effect.max()))


def test_signed_maps_part_at_zero():
    assert _map([[1.0, 4.0], [0.5, 3.0]], half=0.1, signed=True).colour_range() == (-4.0, 4.0)
    assert _map([[0.1, -0.2], [0.0, 0.1]], half=1.0, signed=True).colour_range() == (-4.0, 4.0)
    assert _map(np.zeros((2, 2)), signed=True).colour_range() == (-1.0, 1.0)
    (axes, bar) = draw_maps([_map([[1.0, 4.0], [0.5, 3.0]], half=0.1, signed=True)]).axes
    mesh = axes.collections[0]
    assert mesh.norm(0.0) == 0.5
    assert min(mesh.cmap(0.5)[:3]) > 0.9
    assert "too few" not in bar.get_ylabel()


def test_a_map_without_intervals_has_only_numbers_and_the_reason():
    few = _map([[1.01, 1.02], [1.03, 1.04]], half=float("nan"), signed=True)
    (axes,) = draw_maps([few]).axes
    assert axes.get_title(loc="left").endswith(": too few images")
    assert [text.get_text() for text in axes.texts] == ["1.01", "1.02", "1.03", "1.04"]
    assert {text.get_color() for text in axes.texts} == {INK}
    mesh = axes.collections[0]
    assert np.unique(mesh.cmap(mesh.norm(mesh.get_array())).reshape(-1, 4), axis=0).shape == (1, 4)
    # The range of accuracy is fixed.
    assert _map([[97.0, 98.0], [99.0, 98.0]], limits=(0.0, 100.0)).colour_range() == (0.0, 100.0)


@pytest.mark.parametrize(
    ("bounds", "words"),
    [
        ({"low": 0.01, "high": 0.03}, "a block adds more at its home position"),
        ({"low": -0.05, "high": -0.01}, "a block adds less at its home position"),
        ({"low": -0.01, "high": 0.05}, "cannot be told apart: +0.02 (-0.01 to +0.05)."),
        (None, "; too few images for intervals: raise --max-images or lower --batch-size."),
    ],
)
def test_findings_name_only_differences_beyond_the_interval(bounds, words):
    excess = 0.02 if bounds is None or bounds["high"] > 0 else -0.03
    intervals = {"blocks": bounds and {"low": 1.0, "high": 2.0}, "excess": bounds}
    facts = {"logit": 1.6, "blocks": 1.5, "excess": excess, "intervals": intervals}
    sentence = attribution.finding(facts)
    assert words in sentence
    assert ("home" in sentence) == (bounds is not None)
