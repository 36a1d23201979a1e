"""The figure: its artists show the summary's numbers, and its axes are labelled."""

from __future__ import annotations

from pathlib import Path
from xml.etree import ElementTree

import matplotlib
import pytest
from fixture import write_study
from matplotlib.axes import Axes
from matplotlib.container import ErrorbarContainer

from layershuffle.study.figures import (
    STYLES,
    arm_style,
    arms_drawn,
    describe_panel,
    draw_figure,
    figure_bytes,
    inline_svg,
    panels_of,
    too_many_arms,
)
from layershuffle.study.paper import NUMBERS
from layershuffle.study.report import write_report
from layershuffle.study.store import read_study
from layershuffle.study.summary import Summary, summarise


@pytest.fixture(scope="module")
def summary(tmp_path_factory: pytest.TempPathFactory) -> Summary:
    out = write_study(tmp_path_factory.mktemp("figure"), seeds=(0, 1, 2), orders=3)
    return summarise(read_study(out))


def _lines(axes: Axes) -> dict[str, list[ErrorbarContainer]]:
    bars: dict[str, list[ErrorbarContainer]] = {}
    for container in axes.containers:
        bars.setdefault(str(container.get_label()), []).append(container)
    return bars


def test_axes_count_blocks_kept(summary: Summary):
    figure = draw_figure(summary)
    assert [axes.get_xlabel() for axes in figure.axes] == ["blocks kept (of 12)"] * 2
    assert figure.axes[0].get_ylabel() == "top-1 accuracy (%)"
    assert [list(axes.get_xticks()) for axes in figure.axes] == [[3, 6, 9, 12]] * 2
    titles = [axes.get_title(loc="left") for axes in figure.axes]
    assert "Sequential" in titles[0]
    assert "Figure 1b" in titles[0]
    assert "Arbitrary" in titles[1]
    assert "Figure 1c" in titles[1]


def test_lines_and_intervals_equal_the_summary(summary: Summary):
    for axes, mode in zip(draw_figure(summary).axes, ("sequential", "arbitrary"), strict=True):
        for arm in summary.arms:
            (container,) = _lines(axes)[arm]
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
    for axes, mode in zip(draw_figure(summary).axes, ("sequential", "arbitrary"), strict=True):
        drawn = {
            (name.removeprefix("paper "), round(box.lines[0].get_ydata()[0], 9))
            for name, boxes in _lines(axes).items()
            for box in boxes
            if name.startswith("paper ")
        }
        measured = {(n.method, n.value) for n in NUMBERS if n.mode == mode}
        assert drawn == {(arm, value) for arm, value in measured if arm in summary.arms}
        approximate = [n for n in NUMBERS if n.mode == mode and n.approximate]
        assert [text.get_text() for text in axes.texts] == ["~"] * len(approximate)


def test_arms_differ_in_colour_and_in_marker(summary: Summary):
    assert len({colour for colour, _, _ in STYLES}) == len({m for _, m, _ in STYLES}) == len(STYLES)
    axes = draw_figure(summary).axes[0]
    markers = {_lines(axes)[arm][0].lines[0].get_marker() for arm in summary.arms}
    assert len(markers) == len(summary.arms)


def _contrast(colour: str, ground: str) -> float:
    """WCAG 2 contrast of two #rrggbb colours."""

    def luminance(text: str) -> float:
        parts = [int(text[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
        return sum(w * c for w, c in zip((0.2126, 0.7152, 0.0722), linear, strict=True))

    light, dark = sorted((luminance(colour), luminance(ground)), reverse=True)
    return (light + 0.05) / (dark + 0.05)


def test_lines_stand_out_from_white():
    low = {colour: _contrast(colour, "#ffffff") for colour, _, _ in STYLES}
    assert min(low.values()) >= 3.0, low


def test_same_summary_same_bytes(summary: Summary):
    for kind in ("svg", "png"):
        first, second = (figure_bytes(draw_figure(summary), kind) for _ in range(2))
        assert first == second


def test_svg_has_real_text_and_no_date(summary: Summary):
    svg = figure_bytes(draw_figure(summary), "svg").decode()
    texts = {element.text for element in ElementTree.fromstring(svg).iter() if element.text}
    assert {"blocks kept (of 12)", "LayerShuffle-depth", "baseline"} <= texts
    assert "metadata" not in svg
    assert "<dc:date" not in svg


def test_png_is_a_png_without_metadata(summary: Summary):
    png = figure_bytes(draw_figure(summary), "png")
    assert png.startswith(b"\x89PNG")
    assert b"tEXt" not in png


def test_global_settings_are_left_alone(summary: Summary):
    before = dict(matplotlib.rcParams)
    figure_bytes(draw_figure(summary), "svg")
    assert dict(matplotlib.rcParams) == before


def test_inline_panels_share_no_id_and_fetch_nothing(summary: Summary):
    panels = {mode: inline_svg(summary, mode) for mode in ("sequential", "arbitrary")}
    ids = {}
    for mode, svg in panels.items():
        root = ElementTree.fromstring(svg)
        ids[mode] = {element.get("id") for element in root.iter() if element.get("id")}
        used = {
            value.removeprefix("#")
            for element in root.iter()
            for name, value in element.items()
            if name.endswith("href")
        }
        assert used
        assert used <= ids[mode]
        assert "http" not in svg
        assert "<style" not in svg
        assert root.get("role") == "img"
        assert root.get("aria-label") == describe_panel(summary, mode)
    assert not ids["sequential"] & ids["arbitrary"]


def test_inline_colours_follow_the_page(summary: Summary):
    svg = inline_svg(summary, "arbitrary")
    assert "var(--arm-3, #00875f)" in svg
    assert "var(--ink, #1c2126)" in svg
    assert svg.count("#0072b2") == svg.count("var(--arm-1, #0072b2)") > 0


def test_description_holds_the_numbers(summary: Summary):
    words = describe_panel(summary, "arbitrary")
    for cell in summary.curve("layershuffle", "arbitrary"):
        assert f"{cell.top1.mean:.1f} % with {cell.kept}" in words


def test_hostile_arm_names_are_drawn_as_text(tmp_path: Path):
    names = {"<b>$\\frac$&": "baseline", "_hidden": "layershuffle", "$x$\x01": "layerdrop"}
    out = write_study(tmp_path, orders=2, arms=names)
    summary = summarise(read_study(out))
    root = ElementTree.fromstring(figure_bytes(draw_figure(summary), "svg"))
    texts = {element.text for element in root.iter() if element.text}
    assert {"<b>$\\frac$&", "_hidden", "$x$?"} <= texts


@pytest.fixture(scope="module")
def crowd(tmp_path_factory: pytest.TempPathFactory) -> Summary:
    """Thirteen arms with names of any length, LayerShuffle among them for the paper's points."""
    names = [f"layershuffle-with-a-long-name-and-option-{i}" for i in range(6)]
    names += [f"arm{i}" for i in range(5)]
    arms = {
        "baseline": "baseline",
        "layershuffle": "layershuffle",
        **dict.fromkeys(names, "layerdrop"),
    }
    return summarise(read_study(write_study(tmp_path_factory.mktemp("crowd"), orders=2, arms=arms)))


def test_thirteen_arms_take_three_rows_of_at_most_five(crowd: Summary):
    figure = draw_figure(crowd)
    lines = [
        {name for name in _lines(axes) if not name.startswith("paper ")} for axes in figure.axes
    ]
    assert [len(names) for names in lines] == [4, 4, 4, 4, 5, 5]
    assert set().union(*lines) == set(crowd.arms)
    assert panels_of([]) == []
    assert [len(arms) for arms in panels_of("abcdef")] == [3, 3]
    # Beyond ten arms colours come again, with another marker.
    assert len({arm_style(crowd, arm)[:2] for arm in crowd.arms}) == 13


def test_more_arms_than_three_rows_hold_have_no_figure(crowd: Summary, tmp_path: Path):
    assert too_many_arms(crowd) == ""
    arms = {"layershuffle": "layershuffle", **{f"arm{i}": "layerdrop" for i in range(15)}}
    report = write_report(write_study(tmp_path, orders=1, arms=arms))
    assert not [path.name for path in report.files if path.name.startswith("figure1")]
    page = (tmp_path / "report.md").read_text()
    assert "16 arms are too many lines for a figure: the table above has their numbers" in page
    assert "![" not in page
    assert "16 arms are too many" in report.html.read_text()
    assert 'id="figure"' not in report.html.read_text()


def test_every_point_is_within_a_fifth_of_its_tick(crowd: Summary):
    points = [
        float(x)
        for axes in draw_figure(crowd).axes
        for container in axes.containers
        for x in container.lines[0].get_xdata()
    ]
    assert max(abs(x - round(x)) for x in points) <= 0.2
    assert {round(x) for x in points} == {3, 6, 9, 12}


@pytest.mark.parametrize("modes", [("sequential", "arbitrary"), ("sequential",)])
def test_legends_and_labels_lie_inside_the_canvas(crowd: Summary, modes: tuple[str, ...]):
    """Measured by matplotlib's renderer; artists outside are not in the file."""
    figure = draw_figure(crowd, modes)
    figure.canvas.draw()
    width, height = figure.bbox.width, figure.bbox.height
    legends = [legend for part in figure.subfigs for legend in part.legends]
    assert len(legends) == 3
    boxes = [legend.get_window_extent() for legend in legends]
    boxes += [axes.get_tightbbox() for axes in figure.axes]
    for box in boxes:
        assert min(box.x0, box.y0) >= -0.5, box
        assert box.x1 <= width + 0.5, box
        assert box.y1 <= height + 0.5, box
    for part in figure.subfigs:
        (legend,) = part.legends
        below = legend.get_window_extent().y1
        assert all(below <= axes.get_window_extent().y0 for axes in part.axes), "on the panel"


def test_arms_that_were_scored_whole_alone_have_no_line(tmp_path: Path):
    out = write_study(tmp_path, orders=2)
    path = out / "runs" / "layerdrop-seed0" / "results.csv"
    head, *rows = path.read_text().splitlines(keepends=True)
    path.write_text(head + "".join(row for row in rows if ",12," in row))
    summary = summarise(read_study(out))
    assert arms_drawn(summary) == ("baseline", "layershuffle", "layershuffle-depth")
    assert "LayerDrop" not in describe_panel(summary, "arbitrary")
