"""Table 2 and Figure 5 of a made-up merging, against numbers worked out by hand."""

import pytest
from fixture import merging_rows, outside, write_merging, write_study

from layershuffle.study.merging_report import (
    _DOT_POINTS,
    _DOT_WIDTH,
    beeswarm_offsets,
    merging_section,
)
from layershuffle.study.store import read_study


@pytest.fixture
def out(tmp_path):
    """One arm whose models are merged."""
    arms = {"layershuffle": "layershuffle"}
    return write_study(tmp_path, orders=2, arms=arms, merging={"arms": ["layershuffle"]})


def test_table_2(out):
    write_merging(out, "layershuffle", merging_rows([70.0, 74.0], [66.0, 68.0, 70.0]))
    section = merging_section(read_study(out))
    table = section.tables[0]
    head = {name: place for place, name in enumerate(table.head)}
    rows = {row[0]: row for row in table.rows}
    merges = rows["LayerShuffle: merges"]
    assert merges[head["Top-1"]] == "68.00"
    assert merges[head["sd"]] == "2.00"
    assert merges[head["Paper: top-1"]] == "59.68 +-1.15"
    assert merges[head["Ours - paper"]] == "+8.32"
    assert (merges[head["Lowest"]], merges[head["Highest"]]) == ("66.00", "70.00")
    assert rows["LayerShuffle: ensemble, logits-independent"][head["Paper: top-1"]] == "69.20"
    assert rows["LayerShuffle: ensemble, logits-same"][head["Paper: top-1"]] == "-"


def test_no_dot_of_figure_5_is_lost(out):
    merges = [60.0 + 0.01 * i for i in range(100)]
    write_merging(out, "layershuffle", merging_rows([70.0, 74.0], merges))
    (picture,) = merging_section(read_study(out)).pictures
    (axes,) = picture.figure.axes
    assert [text.get_text() for text in axes.get_yticklabels()] == [
        "single models", "merges, ends: average", "soup, uniform", "ensemble, logits-independent",
        "ensemble, logits-same",
    ]  # fmt: skip
    dots = [len(collection.get_offsets()) for collection in axes.collections]
    assert dots == [2, 100, 1, 1, 1]  # donors, merges, a soup, two ensembles
    shifts = beeswarm_offsets(merges, height=1.0)
    for i, top1 in enumerate(merges):
        for j in range(i):
            assert abs(top1 - merges[j]) >= 1.0 or abs(shifts[i] - shifts[j]) >= 1, "dots overlap"


def test_figure_5_is_readable_on_1200_pixels(out):
    merges = [70.0 + 0.02 * i for i in range(100)]
    write_merging(out, "layershuffle", merging_rows([70.0, 74.0], merges))
    (picture,) = merging_section(read_study(out)).pictures
    figure = picture.figure
    assert outside(figure) == []
    # As wide as the page: its letters are at least 12 pixels high.
    smallest = min(text.get_fontsize() for axes in figure.axes for text in axes.get_yticklabels())
    assert smallest / 72 * 1200 / figure.get_figwidth() >= 12
    (axes,) = figure.axes
    names = [text.get_window_extent() for text in axes.get_yticklabels()]
    assert all(a.y0 >= b.y1 or b.y0 >= a.y1 for i, a in enumerate(names) for b in names[:i])
    # A dot is as wide as the figure takes it to be, or less.
    points = axes.get_window_extent().width / figure.dpi * 72
    assert _DOT_POINTS / points * 104 <= _DOT_WIDTH
