"""The report and its figures: the numbers of the CSV, in one self-contained page."""

from __future__ import annotations

import csv
import re
import statistics
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from xml.etree.ElementTree import Element, fromstring

import pytest
from fixture import (
    CONDITIONS,
    LEVELS,
    merging_rows,
    tell,
    write_merging,
    write_study,
)
from matplotlib.axes import Axes
from matplotlib.container import ErrorbarContainer
from matplotlib.figure import Figure

from layershuffle.ground.stats import compare, estimate
from layershuffle.study.paper.figures import (
    STYLES,
    arm_style,
    draw_bars,
    draw_figure_1,
)
from layershuffle.study.paper.numbers import NUMBERS
from layershuffle.study.paper.report import main_difference, report_text, write_report
from layershuffle.study.paper.summary import Summary, label, summarise
from layershuffle.study.paper.tables import merging_section, table_notes
from layershuffle.study.store import read_study

MODES = ("sequential", "arbitrary")


def page_of(out: Path) -> Element:
    """The page as a tree; refuses tags that do not nest."""
    text = (out / "report.html").read_text()
    return fromstring(re.sub("<(meta|br|img|hr)([^>]*?)/?>", r"<\1\2/>", text))


def text_of(html: Element) -> str:
    return " ".join(" ".join(html.itertext()).split())


@pytest.fixture(scope="module", params=[(0,), (0, 1, 2)], ids=["one seed", "three seeds"])
def out(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = write_study(tmp_path_factory.mktemp("report"), seeds=request.param)
    write_report(out)
    return out


@pytest.fixture(scope="module")
def html(out: Path) -> Element:
    return page_of(out)


def markdown_of(out: Path) -> str:
    return (out / "report.md").read_text()


def from_csv(out: Path) -> dict[tuple[str, str, int], dict[int, list[float]]]:
    scores: dict[tuple[str, str, int], dict[int, list[float]]] = {}
    with (out / "results.csv").open() as file:
        for row in csv.DictReader(file):
            key = (row["method"], row["mode"], int(row["kept"]))
            scores.setdefault(key, {}).setdefault(int(row["seed"]), []).append(float(row["top1"]))
    return scores


def slow_mean(scores: dict[int, list[float]]) -> float:
    return statistics.fmean(statistics.fmean(values) for values in scores.values())


def summary_of(out: Path) -> Summary:
    return summarise(read_study(out))


def test_all_files_are_written_and_nothing_else(out: Path):
    files = {"plan.json", "tasks.jsonl", "results.csv", "report.md", "report.html", ".lock"}
    assert {path.name for path in out.iterdir()} == {*files, "figures"}
    assert {path.name for path in (out / "figures").iterdir()} == {"bars.svg", "figure1.svg"}


def test_numbers_of_the_tables_equal_the_csv(out: Path):
    """Of the report and of the terminal."""
    lines, scores = markdown_of(out).splitlines(), from_csv(out)
    printed = report_text(summary_of(out)).splitlines()
    assert max(map(len, printed)) <= 100
    for arm in LEVELS:
        line = next(line for line in lines if line.startswith(f"| {label(arm)} | **"))
        shown = next(line.split() for line in printed if line.split(" ")[0] == label(arm))
        for cell, condition in zip(line.split("|")[2:-1], CONDITIONS, strict=True):
            values = scores[arm, *condition]
            score = estimate(values, images=5000)
            mean = re.search(r"\*\*([\d.]+)\*\*", cell)
            assert mean
            assert abs(float(mean[1]) - slow_mean(values)) <= 0.05 + 1e-9
            interval = f"{score.low:.1f}-{score.high:.1f}"
            assert f"({interval})" in cell
            if condition[1] == 12:
                assert shown[shown.index(mean[1]) + 1] == interval


def test_the_headline_says_what_the_study_shows(out: Path, html: Element):
    scores = from_csv(out)
    means = {arm: slow_mean(scores[arm, "arbitrary", 12]) for arm in LEVELS}
    ordered = {arm: slow_mean(scores[arm, "sequential", 12]) for arm in LEVELS}
    sentence = (
        f"Shuffled, the ordinary model is right on {means['baseline']:.1f} of 100 images, "
        f"LayerShuffle on {means['layershuffle']:.0f}, "
        f"LayerShuffle-depth on {means['layershuffle-depth']:.0f}; in order on "
        f"{ordered['baseline']:.1f}, {ordered['layershuffle']:.1f} and "
        f"{ordered['layershuffle-depth']:.1f}"
    )
    assert sentence in text_of(html)
    assert markdown_of(out).startswith(f"# {sentence}\n\n![")
    assert " ".join(report_text(summary_of(out)).split()).startswith(sentence)


def test_a_difference_is_given_with_its_interval(tmp_path: Path):
    first = summary_of(write_study(tmp_path / "one", orders=2))
    assert main_difference(first).endswith(" points (one model or equal differences, no interval).")
    three = summary_of(write_study(tmp_path / "three", seeds=(0, 1, 2), orders=2))
    gap = compare(*(three.means(arm, "arbitrary") for arm in ("layershuffle", "baseline")))
    points = f"{gap.points:.1f} points ({gap.low:.1f} to {gap.high:.1f})"
    assert (
        main_difference(three)
        == f"LayerShuffle and the ordinary model, shuffled, differ by {points}."
    )
    arms = {"baseline": "baseline", "layershuffle": "layerdrop"}
    alike = write_study(tmp_path / "alike", seeds=(0, 1, 2), orders=2, arms=arms)
    assert main_difference(summary_of(alike)).endswith(": that may be chance.")


def test_the_page_is_the_markdown(out: Path, html: Element):
    """Every heading, cell and figure."""
    text = markdown_of(out)
    lines = re.findall(r"^\|.*[^-:|\n].*$", text, re.MULTILINE)
    cells = [cell for line in lines for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
    assert len([*html.iter("td"), *html.iter("th")]) == len(cells)
    assert len([*html.iter("h2")]) == len(re.findall("^## ", text, re.MULTILINE))
    targets = [str(a.get("href")).removeprefix("#") for a in html.iter("a")]
    assert targets == [h.get("id") for h in html.iter("h2")]
    assert len([*html.iter("img")]) == text.count("\n![") == 2
    for words in (
        "82.61",
        "~70-80",
        "ImageNet2012",
        "digit pairs with bundled:digits",
        "batch_size 64",
    ):
        assert words in text_of(html)


def test_the_page_is_self_contained_and_accessible(out: Path, html: Element):
    text = (out / "report.html").read_text()
    assert not re.search(r"https?://|url\((?!#)|@import|javascript:", text)
    tags = {element.tag for element in html.iter()}
    assert not {"script", "link", "iframe", "object", "embed", "base", "form"} & tags
    for image in html.iter("img"):
        assert str(image.get("src")).startswith("data:image/svg+xml;base64,")
        assert image.get("alt")
    assert (html.tag, html.attrib) == ("html", {"lang": "en"})
    headings = [int(e.tag[1]) for e in html.iter() if re.fullmatch("h[1-6]", e.tag)]
    assert (headings[0], headings.count(1)) == (1, 1)
    assert all(deep <= before + 1 for before, deep in pairwise(headings))


def test_an_unfinished_study_says_what_is_missing(tmp_path: Path):
    failed = {"layerdrop-seed1": "The loss became NaN at step 812. Next: lower the rate."}
    undone = ["layershuffle-seed2", *(f"baseline-seed{seed}" for seed in (0, 1, 2))]
    out = write_study(tmp_path, orders=3, seeds=(0, 1, 2), failed=failed, undone=undone)
    write_report(out)
    text = markdown_of(out)
    assert "7 of 12 tasks are finished" in text
    assert "- layerdrop-seed1 failed: The loss became NaN at step 812." in text
    assert "- layershuffle-seed2 not done yet\n\n## Table 1" in text
    assert "layershuffle-seed2 not done yet" in report_text(summary_of(out))
    line = next(line for line in text.splitlines() if line.startswith("| baseline |"))
    assert line.count("| - ") == 8
    assert text.startswith("# Shuffled, LayerShuffle is right on 7")


def test_a_study_before_its_first_run(tmp_path: Path):
    out = write_study(tmp_path, undone=[f"{arm}-seed0" for arm in LEVELS])
    write_report(out)
    assert markdown_of(out).startswith("# No score in arbitrary order yet\n\nStudy")
    assert "![" not in markdown_of(out)
    assert "baseline-seed0 not done yet" in report_text(summary_of(out))


def test_hostile_text_stays_text(tmp_path: Path):
    bad = "<script>alert(1)</script>`|*x*\x1b[31m\n# no [e](f) & $h$ \\ ~i~"
    names = ("<img src=x onerror=alert(1)>", "$\\frac$&", "_hidden")
    arms = dict.fromkeys(names, "baseline") | {"layershuffle": "layershuffle"}
    failed = {"layershuffle-seed0": bad}
    out = write_study(tmp_path, orders=2, arms=arms, failed=failed, hostile=f"{bad}\udce9")
    write_report(out)
    html = page_of(out)
    assert not [*html.iter("script")]
    assert {str(image.get("src"))[:5] for image in html.iter("img")} == {"data:"}
    assert "<script>alert(1)</script>`|*x*\\x1b[31m # no [e](f) & $h$ \\ ~i~" in text_of(html)
    assert "\x1b" not in report_text(summary_of(out)) + markdown_of(out)
    assert [heading for heading in html.iter("h2") if "id" not in heading.attrib] == []


def test_an_arm_whose_name_is_a_pattern_has_its_figures(tmp_path: Path):
    analyses = [{"name": "norms", "arm": "drop [0.5]"}]
    out = write_study(tmp_path, orders=2, arms={"drop [0.5]": "layerdrop"}, analyses=analyses)
    tell(out, "norms-drop [0.5]-seed0", title="Norms", facts={})
    (out / "figures").mkdir()
    (out / "figures" / "norms-drop [0.5]-seed0-ratio.png").touch()
    write_report(out)
    assert "(figures/norms-drop%20%5B0.5%5D-seed0-ratio.png)" in markdown_of(out)


def test_numbers_of_an_analysis_have_their_intervals(tmp_path: Path):
    analyses = [{"name": "norms", "arm": "layerdrop"}]
    out = write_study(tmp_path, orders=2, arms={"layerdrop": "layerdrop"}, analyses=analyses)
    numbers = {"images": 2000, "ratio": 0.98765, "intervals": {"ratio": {"low": 0.9, "high": 1.1}}}
    tell(out, "norms-layerdrop-seed0", title="Norms", facts=numbers)
    write_report(out)
    assert "| images | 2000 |" in markdown_of(out)
    assert "| ratio | 0.988 (0.9 to 1.1) |" in markdown_of(out)


# --- figures --------------------------------------------------------------------------------------


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


@pytest.mark.parametrize(
    ("per_batch", "drawn"),
    [
        ([], "one order per pass over the test data; +-"),
        (LEVELS, "a new order for every batch; +-"),
        (
            ["layerdrop", "layershuffle-depth"],
            "one order per pass over the test data (baseline, LayerShuffle); a new order for "
            "every batch (LayerDrop, LayerShuffle-depth); +-",
        ),
    ],
)
def test_the_note_names_the_arms_of_each_draw(summary: Summary, per_batch: list[str], drawn: str):
    cells = (replace(c, draw="batch" if c.arm in per_batch else "pass") for c in summary.cells)
    notes = table_notes(replace(summary, cells=tuple(cells)))
    assert notes.startswith(f"Orders: {drawn}")


def test_lines_and_intervals_equal_the_summary(summary: Summary):
    for axes, mode in zip(draw_figure_1(summary).axes, MODES, strict=True):
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
    for axes, mode in zip(draw_figure_1(summary).axes, MODES, strict=True):
        drawn = {
            (name.removeprefix("paper "), round(box.lines[0].get_ydata()[0], 9))
            for name, boxes in lines_of(axes).items()
            for box in boxes
            if name.startswith("paper ")
        }
        measured = {(n.method, n.value) for n in NUMBERS if n.mode == mode}
        assert drawn == {(arm, value) for arm, value in measured if arm in summary.arms}
        approximate = [n for n in NUMBERS if n.mode == mode and n.text.startswith("~")]
        assert [text.get_text() for text in axes.texts] == ["~"] * len(approximate)


def test_bars_are_the_means(summary: Summary):
    (axes,) = draw_bars(summary).axes
    widths = [box.get_width() for box in axes.patches]
    cells = [summary.cell(arm, mode) for arm in summary.arms for mode in MODES]
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
    figures = (draw_figure_1(crowd), draw_bars(crowd))
    assert [outside(figure) for figure in figures] == [[], []]
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
