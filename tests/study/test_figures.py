"""The figures: their artists show the summary's numbers, and their axes are labelled."""

from __future__ import annotations

from pathlib import Path

import pytest
from fixture import merging_rows, write_merging, write_study
from matplotlib.axes import Axes
from matplotlib.container import ErrorbarContainer
from matplotlib.figure import Figure

from layershuffle.study.paper.figures import (
    STYLES,
    arm_style,
    draw_bars,
    draw_budget,
    draw_figure,
)
from layershuffle.study.paper.numbers import NUMBERS
from layershuffle.study.paper.summary import Column, Summary, summarise
from layershuffle.study.paper.tables import merging_section
from layershuffle.study.store import read_study

MODES = ("sequential", "arbitrary")


@pytest.fixture(scope="module")
def summary(tmp_path_factory: pytest.TempPathFactory) -> Summary:
    out = write_study(tmp_path_factory.mktemp("figure"), seeds=(0, 1, 2), orders=3)
    return summarise(read_study(out))


@pytest.fixture(scope="module")
def crowd(tmp_path_factory: pytest.TempPathFactory) -> Summary:
    """Thirteen arms with names of any length, LayerShuffle among them for the paper's points."""
    names = [f"layershuffle-with-a-long-name-and-option-{i}" for i in range(6)]
    names += [f"arm{i}" for i in range(5)]
    arms = {"baseline": "baseline", "layershuffle": "layershuffle"}
    arms |= dict.fromkeys(names, "layerdrop")
    return summarise(read_study(write_study(tmp_path_factory.mktemp("crowd"), orders=2, arms=arms)))


def lines_of(axes: Axes) -> dict[str, list[ErrorbarContainer]]:
    bars: dict[str, list[ErrorbarContainer]] = {}
    for container in axes.containers:
        bars.setdefault(str(container.get_label()), []).append(container)
    return bars


def test_lines_and_intervals_equal_the_summary(summary: Summary):
    for axes, mode in zip(draw_figure(summary).axes, MODES, strict=True):
        for arm in summary.arms:
            (container,) = lines_of(axes)[arm]
            cells = summary.curve(arm, mode)
            x, y = container.lines[0].get_data()
            assert [round(value) for value in x] == [cell.kept for cell in cells] == [3, 6, 9, 12]
            assert max(abs(value - round(value)) for value in x) <= 0.2
            assert list(y) == [cell.top1.mean for cell in cells]
            (bars,) = container.lines[2]
            for segment, cell in zip(bars.get_segments(), cells, strict=True):
                bounds = (cell.top1.low, cell.top1.high)
                assert segment[:, 1] == pytest.approx(bounds, abs=1e-9)


def test_every_number_of_the_paper_is_drawn_hollow(summary: Summary):
    for axes, mode in zip(draw_figure(summary).axes, MODES, strict=True):
        drawn = {
            (name.removeprefix("paper "), round(box.lines[0].get_ydata()[0], 9))
            for name, boxes in lines_of(axes).items()
            for box in boxes
            if name.startswith("paper ")
        }
        measured = {(n.method, n.value) for n in NUMBERS if n.mode == mode}
        assert drawn == {(arm, value) for arm, value in measured if arm in summary.arms}
        approximate = [n for n in NUMBERS if n.mode == mode and n.approximate]
        assert [text.get_text() for text in axes.texts] == ["~"] * len(approximate)


def test_bars_are_the_means(summary: Summary):
    (axes,) = draw_bars(summary).axes
    widths = [box.get_width() for box in axes.patches]
    cells = [summary.cell(arm, Column(mode, 12)) for arm in summary.arms for mode in MODES]
    assert widths == pytest.approx([cell.top1.mean for cell in cells if cell], rel=1e-12)
    names = [text.get_text() for text in axes.get_yticklabels()]
    assert names == ["baseline", "LayerShuffle", "LayerDrop", "LayerShuffle-depth"]
    assert [text.get_text().split()[0] for text in axes.texts] == [f"{w:.1f}" for w in widths]


def test_a_method_has_one_look_in_every_study(summary: Summary, crowd: Summary):
    for arm in ("baseline", "layershuffle"):
        assert arm_style(summary, arm) == arm_style(crowd, arm)
    styles = [arm_style(crowd, arm)[:2] for arm in crowd.arms]
    assert len(set(styles)) == len(crowd.arms) == 13
    assert len({colour for colour, _, _ in STYLES}) == len({m for _, m, _ in STYLES}) == len(STYLES)


def outside(figure: Figure) -> list[object]:
    """Artists beyond the edge of the canvas, measured by matplotlib's renderer."""
    figure.canvas.draw()
    legends = [legend for part in (figure, *figure.subfigs) for legend in part.legends]
    boxes = [*(a.get_tightbbox() for a in figure.axes), *(x.get_window_extent() for x in legends)]
    right, top = figure.bbox.width + 0.5, figure.bbox.height + 0.5
    return [box for box in boxes if min(box.p0) < -0.5 or box.x1 > right or box.y1 > top]


def test_legends_and_labels_lie_inside_the_canvas(crowd: Summary):
    curve = {500: crowd.cells[0].top1, 4000: crowd.cells[1].top1}
    figures = (draw_figure(crowd), draw_bars(crowd))
    budget = draw_budget({("layershuffle", mode): curve for mode in MODES}, crowd)
    assert [outside(figure) for figure in (*figures, budget)] == [[], [], []]
    for part in figures[0].subfigs:
        below = part.legends[0].get_window_extent().y1
        assert all(below <= axes.get_window_extent().y0 for axes in part.axes), "on the panel"


def test_no_dot_of_figure_5_is_lost(tmp_path: Path):
    arms = {"layershuffle": "layershuffle"}
    out = write_study(tmp_path, orders=2, arms=arms, merging=[{"arms": ["layershuffle"]}])
    merges = [60.0 + 0.01 * i for i in range(100)]
    write_merging(out, "layershuffle", merging_rows([70.0, 74.0], merges))
    figures: list[Figure] = []
    merging_section(summarise(read_study(out)), lambda name, caption, f: figures.append(f) or "")
    (axes,) = figures[0].axes
    assert [text.get_text() for text in axes.get_yticklabels()] == [
        "LayerShuffle: single models", "LayerShuffle: merges, ends: average",
        "LayerShuffle: soup, uniform", "LayerShuffle: ensemble, logits-independent",
        "LayerShuffle: ensemble, logits-same",
    ]  # fmt: skip
    dots = [collection.get_offsets() for collection in axes.collections]
    assert [len(places) for places in dots] == [2, 100, 1, 1, 1]
    assert sorted(x for x, _ in dots[1]) == merges
    assert all(abs(y - 1) <= 0.4 for _, y in dots[1])
    assert outside(figures[0]) == []
