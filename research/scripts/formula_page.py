# Ran at commit 8550626.
"""Write the results of the studies formula-cpu and formula-sizes into docs/science.md.

python scripts/formula_page.py
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import hypot
from pathlib import Path

from breaks_page import MeanInterval, interval
from matplotlib.figure import Figure
from performance_page import with_marked
from science_page import (
    ANY,
    COLUMNS,
    ORDERED,
    PAGE,
    ROOT,
    ScienceArm,
    Scores,
    estimate_text,
    judged,
    plot_estimates,
    read_scores,
    style_percent,
    verdict,
)

from layershuffle.files import write_bytes, write_text
from layershuffle.plotting import INK, figure_bytes, legend_below, new_figure
from layershuffle.stats import Difference, compare
from layershuffle.text import markdown_table

RESULTS = ROOT / "docs" / "results" / "formula-cpu" / "results.csv"
SIZES_RESULTS = ROOT / "docs" / "results" / "formula-sizes" / "results.csv"
FIGURE = ROOT / "docs" / "science-widths.png"
IMAGES = 2_000
"""The number of test images in the recipe."""
ARMS = (
    ScienceArm(name="baseline", label="ordinary training", different=12),
    ScienceArm(name="layershuffle", label="LayerShuffle", different=12),
    ScienceArm(name="layershuffle-mixed", label="four orders, 1/4 in order", different=12),
    ScienceArm(
        name="layershuffle-mixed-exit",
        label="four orders, 1/4 in order, exit loss",
        different=12,
    ),
    ScienceArm(name="layershuffle-depth", label="LayerShuffle-depth", different=12),
    ScienceArm(
        name="layershuffle-tied-3-mixed",
        label="tied, three blocks, four orders, 1/4 in order",
        different=3,
    ),
    ScienceArm(
        name="layershuffle-tied-3-mixed-exit",
        label="tied, three blocks, four orders, 1/4 in order, exit loss",
        different=3,
    ),
    ScienceArm(name="layershuffle-tied", label="tied, one block", different=1),
)
REFERENCES = {
    "layershuffle-mixed-exit": "layershuffle-mixed",
    "layershuffle-tied-3-mixed": "layershuffle-mixed",
    "layershuffle-tied-3-mixed-exit": "layershuffle-mixed-exit",
}
"""The reference of each arm that is not compared with LayerShuffle, one change apart."""
SHOWN = ("in order", "any order", "6 alive, once", "6 alive, twice", "3 alive, once")


@dataclass(frozen=True, kw_only=True)
class FormulaSize:
    """Size of data and model, the file of their scores, and the suffix `end` of their arms."""

    classes: int
    width: int
    results: Path = SIZES_RESULTS
    end: str = ""

    def __str__(self) -> str:
        return f"{self.classes:,} classes, width {self.width}"


HUNDRED = FormulaSize(classes=100, width=128, end="-100")
MIDDLE = FormulaSize(classes=300, width=128, results=RESULTS)
NARROW = FormulaSize(classes=300, width=64, end="-width-64")
THOUSAND = FormulaSize(classes=1000, width=128, end="-1000")
NARROW_HUNDRED = FormulaSize(classes=100, width=64, end="-100-width-64")
NARROW_THOUSAND = FormulaSize(classes=1000, width=64, end="-1000-width-64")
SIZES = (HUNDRED, MIDDLE, THOUSAND, NARROW_HUNDRED, NARROW, NARROW_THOUSAND)
WIDTHS = (NARROW, MIDDLE)
TWELVE, THREE = "layershuffle-mixed-exit", "layershuffle-tied-3-mixed-exit"
SIZE_ARMS = ("baseline", "layershuffle", TWELVE, THREE, "layershuffle-tied")
DRAWN = {
    "layershuffle": ("#6b7280", "o"),
    TWELVE: ("#1b6ca8", "s"),
    THREE: ("#b3541e", "D"),
    "layershuffle-tied": ("#4d7c2f", "^"),
}
SIZE_PAIRS = (
    *((str(size), size, size) for size in SIZES),
    ("100 classes, equal weights in all: width 128 against 64", HUNDRED, NARROW_HUNDRED),
    ("300 classes, equal weights in all: width 128 against 64", MIDDLE, NARROW),
    ("1,000 classes, equal weights in all: width 128 against 64", THOUSAND, NARROW_THOUSAND),
)
"""The compared sizes: label, of three tied blocks, of twelve different ones.

A block of width w has 8 w^2 weights in its matrices: three of width 2w hold as many as twelve of w.
"""


ROUNDING = 2.1
"""The most points between two models of which one has a base that differs in rounding alone."""


def of_one_pair(difference: Difference) -> str:
    """The verdict on two single models: also "not told apart" if rounding might tell them apart."""
    return verdict(difference) if abs(difference.points) > ROUNDING else "not told apart"


def values_of(scores: Scores, arm: str, column: tuple[str, int, int]) -> list[float]:
    """Top-1 of the only model of an arm in every drawn order."""
    (values,) = scores[arm, *column].values()
    return values


def interval_of(scores: Scores, arm: str, column: tuple[str, int, int]) -> MeanInterval:
    """The interval of the only model of an arm, as of `breaks_page.interval`."""
    return interval(values_of(scores, arm, column), IMAGES)


def difference(sample: Sequence[float], reference: Sequence[float]) -> Difference:
    """The difference of two models in points, with a 95 % interval that ignores the seeds.

    With several orders, which are the same for both, it is paired by order. With one order it is
    over images, as if each model had its own.
    """
    if len(sample) > 1:
        return compare(dict(enumerate(sample)), dict(enumerate(reference)))
    return between(interval(sample, IMAGES), interval(reference, IMAGES))


def between(a: MeanInterval, b: MeanInterval) -> Difference:
    """a - b of two shares, with its interval from theirs (Newcombe 1998, method 10).

    doi 10.1002/(SICI)1097-0258(19980430)17:8<873::AID-SIM779>3.0.CO;2-I
    """
    points = a.mean - b.mean
    low = points - hypot(a.mean - a.low, b.high - b.mean)
    high = points + hypot(a.high - a.mean, b.mean - b.low)
    return Difference(points=points, low=low, high=high, seeds=0)


def accuracy_table(scores: Scores) -> str:
    """The table of every model's top-1 in percent, and its difference to its reference."""
    labels = {arm.name: arm.label for arm in ARMS}
    head = ["arm", "different blocks", *SHOWN]
    head += ["less the model of", "in order", "in any order"]
    rows = []
    for arm in ARMS:
        shown = [interval_of(scores, arm.name, COLUMNS[name]) for name in SHOWN]
        cells = [arm.label, str(arm.different)]
        cells += map(estimate_text, shown)
        if arm.name != "layershuffle":
            reference = REFERENCES.get(arm.name, "layershuffle")
            cells.append(labels[reference])
            for column in (ORDERED, ANY):
                sides = [values_of(scores, name, column) for name in (arm.name, reference)]
                cells.append(judged(difference(*sides), criterion=of_one_pair))
        rows.append([*cells, *[""] * (len(head) - len(cells))])
    return markdown_table(head, rows, align="lr" + "r" * len(SHOWN) + "lll")


def size_tables() -> tuple[str, str]:
    """Two tables: the arms at each size, and three tied blocks against twelve different ones."""
    labels = {arm.name: arm.label for arm in ARMS}
    scores = {size: read_scores(size.results) for size in SIZES}
    rows, verdicts = [], []
    for size in SIZES:
        for arm in SIZE_ARMS:
            name = f"{arm}{size.end}"
            shown = [interval_of(scores[size], name, COLUMNS[column]) for column in SHOWN]
            texts = map(estimate_text, shown)
            rows.append([str(size), labels[arm], *texts])
    for label, of_three, of_twelve in SIZE_PAIRS:
        cells = [label]
        for column in SHOWN:
            three, twelve = (
                values_of(scores[size], f"{arm}{size.end}", COLUMNS[column])
                for arm, size in ((THREE, of_three), (TWELVE, of_twelve))
            )
            cells.append(judged(difference(three, twelve), criterion=of_one_pair))
        verdicts.append(cells)
    head = ["classes and width", *SHOWN]
    right = "r" * len(SHOWN)
    accuracy = markdown_table([head[0], "arm", *SHOWN], rows, align="ll" + right)
    return accuracy, markdown_table(head, verdicts, align="l" + right)


def draw() -> Figure:
    """Plot accuracy of 300 classes over the weights of a device with one of twelve blocks."""
    figure = new_figure(9.6, 4.6)
    panels = {
        "any order": "any order",
        "6 alive, twice": "6 of 12 alive, twice",
        "3 alive, once": "3 of 12 alive, once",
    }
    handles = {}
    for axes, column in zip(figure.subplots(1, len(panels), sharey=True), panels, strict=True):
        style_percent(axes, panels[column], across="thousand weights per device")
        for arm, (colour, marker) in DRAWN.items():
            points = [
                (size.width, interval_of(scores, arm + size.end, COLUMNS[column]))
                for size in WIDTHS
                if (arm + size.end, *ANY) in (scores := read_scores(size.results))
            ]
            places = [8 * width**2 / 1000 for width, _ in points]
            cells = [cell for _, cell in points]
            handles[arm] = plot_estimates(axes, places, cells, color=colour, marker=marker)
        axes.set_xscale("log")
        axes.set_xticks(
            [8 * size.width**2 / 1000 for size in WIDTHS],
            [f"{8 * size.width**2 / 1000:.0f}\n(width {size.width})" for size in WIDTHS],
        )
        axes.minorticks_off()
        axes.margins(x=0.15)
    figure.axes[0].set_ylabel("top-1 accuracy (%)", color=INK)
    labels = {arm.name: arm.label for arm in ARMS}
    legend_below(figure, [(handle, labels[arm]) for arm, handle in handles.items()])
    return figure


def with_tables(page: str) -> str:
    """`page` with new tables between their marks."""
    accuracy, verdicts = size_tables()
    page = with_marked(page, "formula", accuracy_table(read_scores(RESULTS)))
    return with_marked(with_marked(page, "sizes", accuracy), "size verdicts", verdicts)


if __name__ == "__main__":
    write_text(PAGE, with_tables(PAGE.read_text(encoding="utf-8")))
    write_bytes(FIGURE, figure_bytes(draw(), "png", dpi=110))
    print(f"Written: {PAGE} and {FIGURE}")
