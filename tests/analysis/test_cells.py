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
from layershuffle.analysis.position_table import (
    Map,
    PositionMeans,
    at_position,
    draw_maps,
    evenly,
    grid,
    home_less_elsewhere,
    position_table,
)
from layershuffle.analysis.results import numbers_of, table_text
from layershuffle.analysis.subject import balanced_orders
from layershuffle.ground.stats import half_width, t_interval


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


def test_tables_as_text():
    values = np.arange(9.0).reshape(3, 3) / 7
    table = position_table({"a": values, "b": -values}, drawn=range(len(values)), kind="x")
    assert tuple(table.columns) == ("kind", "block", "position", "a", "b")
    assert np.allclose(grid(table[table.kind == "x"], "a"), values)
    odd = DataFrame({"n": [float("nan"), -0.0, 1e7, 1 / 3], "word": ["a", "b,c", "d", "e"]})
    assert table_text(odd) == 'n,word\nnan,a\n0,"b,c"\n1e+07,d\n0.333333,e\n'


def test_numbers_have_their_intervals_beside_them():
    part = {"ratio": 0.5, "intervals": {"ratio": {"low": 0.25, "high": 0.75}}}
    facts = {"images": 3, "branches": {"mlp": part}, "gap": None, "intervals": {"gap": None}}
    rows = [[str(cell) for cell in row.values()] for row in numbers_of(facts)]
    assert rows == [
        ["images", "3.0", "nan", "nan"],
        ["mlp: ratio", "0.5", "0.25", "0.75"],
        ["gap", "nan", "nan", "nan"],
    ]


def test_home_is_compared_beside_what_block_and_position_explain():
    rng = np.random.default_rng(0)
    plain = rng.normal(size=(6, 1)) + rng.normal(size=(1, 6))
    assert (plain * home_less_elsewhere(6)).sum() == pytest.approx(0.0, abs=1e-12)
    assert ((plain + 2.0 * np.eye(6)) * home_less_elsewhere(6)).sum() == pytest.approx(2.0)
    assert (plain * evenly(6)).sum() == pytest.approx(plain.mean())
    assert (plain * at_position(6, 4)).sum() == pytest.approx(plain[:, 4].mean())


# --- intervals ------------------------------------------------------------------------------------


def _cells_of(values, *, batch=4):
    """Cells from values `[images, block, position]`, given batch by batch as the analyses do."""
    cells = PositionMeans(range(values.shape[1]))
    for first in range(0, len(values), batch):
        for block, position in np.ndindex(values.shape[1:]):
            part = torch.from_numpy(values[first : first + batch, block, position])
            cells.add(block, position, values=part, first=first)
    return cells


def test_intervals_of_cells_and_contrasts_are_those_of_the_images_means():
    """Where every image has every cell, a contrast is a mean over images: a t-interval."""
    values = np.random.default_rng(0).normal(3.0, 1.0, (40, 3, 3))
    cells, alone = _cells_of(values), np.arange(40)[:, None]
    weights = home_less_elsewhere(3)
    low, high = t_interval((values * weights).sum((1, 2)).tolist())
    assert 2 * cells.half_width(alone, weights) == pytest.approx(high - low, rel=1e-5)
    halves = cells.columns("a", alone)["a_half"]
    for cell in np.ndindex(3, 3):
        low, high = t_interval(values[:, *cell].tolist())
        assert 2 * halves[cell] == pytest.approx(high - low, rel=1e-5)


@pytest.mark.parametrize(("images", "few"), [(40, False), (36, True)])
def test_images_of_a_batch_are_one_cluster_and_nine_are_too_few(images, few):
    subject = subject_of(FAMILIES["timm-vit"].wrapped(), count=images)
    clusters = subject.clusters(by_batch=True)
    assert (clusters is None) == few
    cells = _cells_of(np.random.default_rng(2).normal(size=(images, 2, 2)))
    assert np.isnan(cells.columns("a", clusters)["a_half"]).all() == few
    if clusters is not None:
        # Equal images of a batch count as one image per batch: 9 degrees of freedom.
        batches = np.repeat(np.random.default_rng(3).normal(size=10), 4)
        low, high = t_interval(batches[::4].tolist())
        influence = (batches - batches.mean()) / 40
        assert 2 * half_width(influence, clusters) == pytest.approx(high - low)


def test_groups_of_the_data_join_the_batches():
    subject = subject_of(FAMILIES["timm-vit"].wrapped(), count=48)
    split = replace(subject.data.splits["test"], groups=torch.arange(48)[:, None] % 12)
    grouped = replace(subject, data=replace(subject.data, splits={"test": split}))
    alike = (np.arange(48) % 12 - 5.5) / 48
    by_batch, both = (s.clusters(by_batch=True) for s in (subject, grouped))
    # A group with images in four batches joins them, so the interval is wider.
    assert half_width(alike, both) > 1.2 * half_width(alike, by_batch)
    few = replace(split, groups=torch.arange(48)[:, None] % 9)
    nine = replace(subject, data=replace(subject.data, splits={"test": few}))
    assert nine.clusters(by_batch=False) is None


# --- maps ----------------------------------------------------------------------------------------


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


def test_a_map_without_intervals_has_only_numbers_and_the_reason():
    few = _map([[1.01, 1.02], [1.03, 1.04]], half=float("nan"), signed=True)
    (axes,) = draw_maps([few]).axes
    assert axes.get_title(loc="left").endswith(": too few images")
    assert [text.get_text() for text in axes.texts] == ["1.01", "1.02", "1.03", "1.04"]
    assert {text.get_color() for text in axes.texts} == {"black"}  # on a light colour
    mesh = axes.collections[0]
    assert np.unique(mesh.cmap(mesh.norm(mesh.get_array())).reshape(-1, 4), axis=0).shape == (1, 4)
    # The range of accuracy is fixed.
    assert _map([[97.0, 98.0], [99.0, 98.0]], limits=(0.0, 100.0)).colour_range() == (0.0, 100.0)
