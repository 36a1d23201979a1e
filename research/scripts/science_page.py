# Ran at commit 8550626.
"""Write the tables and the figure of docs/science.md from digits-tied and two studies of rounds.

python scripts/science_page.py
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from typing import Any, TypeVar

from matplotlib.axes import Axes
from matplotlib.container import ErrorbarContainer
from matplotlib.figure import Figure
from performance_page import with_marked

from layershuffle.files import write_bytes, write_text
from layershuffle.plotting import INK, RULE, figure_bytes, legend_below, new_figure, style_axes
from layershuffle.results import read_rows
from layershuffle.stats import Difference, Estimate, compare, estimate, mean
from layershuffle.study.figures import error_bars
from layershuffle.study.tables import interval_text
from layershuffle.text import markdown_table

ROOT = Path(__file__).resolve().parent.parent
KEPT = ROOT / "docs" / "results"
RESULTS = KEPT / "digits-tied" / "results.csv"
ROUND_STUDIES = ("digits-rounds", "digits-tied-rounds")
PAGE, FIGURE = ROOT / "docs" / "science.md", ROOT / "docs" / "science.png"
PLACES, IMAGES = 12, 2000

Cell = TypeVar("Cell", bound=Hashable)
ScienceCell = tuple[str, str, int, int]  # arm, order, places alive, passes
Scores = dict[ScienceCell, dict[int, list[float]]]  # of each seed, one top-1 per drawn order
RoundScores = dict[
    tuple[str, int], dict[int, list[float]]
]  # arm, places side by side; of each seed


@dataclass(frozen=True, kw_only=True)
class ScienceArm:
    """An arm of the study. `different`: how many of its twelve blocks differ."""

    name: str
    label: str
    different: int


ARMS = (
    ScienceArm(name="baseline", label="ordinary training", different=12),
    ScienceArm(name="layershuffle", label="LayerShuffle", different=12),
    ScienceArm(name="layershuffle-depth", label="LayerShuffle-depth", different=12),
    ScienceArm(name="layershuffle-tied-6", label="tied, six blocks", different=6),
    ScienceArm(name="layershuffle-tied-4", label="tied, four blocks", different=4),
    ScienceArm(name="layershuffle-tied-3", label="tied, three blocks", different=3),
    ScienceArm(name="layershuffle-tied-2", label="tied, two blocks", different=2),
    ScienceArm(name="layershuffle-tied", label="tied, one block", different=1),
)
COLUMNS = {
    "in order": ("sequential", 12, 1),
    "any order": ("arbitrary", 12, 1),
    "6 alive, once": ("arbitrary", 6, 1),
    "6 alive, twice": ("arbitrary", 6, 2),
    "3 alive, once": ("arbitrary", 3, 1),
    "3 alive, twice": ("arbitrary", 3, 2),
    "3 alive, 4 times": ("arbitrary", 3, 4),
}
ANY, ORDERED = COLUMNS["any order"], COLUMNS["in order"]
QUESTIONS = (
    ("any order, all places", "layershuffle-tied", ANY, "layershuffle", ANY),
    ("any order, all places", "layershuffle-tied-2", ANY, "layershuffle", ANY),
    ("any order, all places", "layershuffle-tied-3", ANY, "layershuffle", ANY),
    ("any order, all places", "layershuffle-tied-4", ANY, "layershuffle", ANY),
    ("any order, all places", "layershuffle-tied-6", ANY, "layershuffle", ANY),
    ("in order", "layershuffle-tied-3", ORDERED, "layershuffle", ORDERED),
    (
        "6 of 12 alive, once",
        *("layershuffle-tied-3", COLUMNS["6 alive, once"]),
        *("layershuffle-depth", COLUMNS["6 alive, once"]),
    ),
    (
        "3 of 12 alive, once",
        *("layershuffle-tied-3", COLUMNS["3 alive, once"]),
        *("layershuffle-depth", COLUMNS["3 alive, once"]),
    ),
    (
        "6 of 12 alive, each at its best",
        *("layershuffle-tied", COLUMNS["6 alive, twice"]),
        *("layershuffle-depth", COLUMNS["6 alive, twice"]),
    ),
    (
        "3 of 12 alive, each at its best",
        *("layershuffle-tied", COLUMNS["3 alive, 4 times"]),
        *("layershuffle-depth", COLUMNS["3 alive, twice"]),
    ),
    (
        "3 of 12 alive, each at its best, [in the drawn sets](#which-three-are-alive)",
        *("layershuffle-tied-3", COLUMNS["3 alive, 4 times"]),
        *("layershuffle-depth", COLUMNS["3 alive, twice"]),
    ),
)

ROUND_ARMS = {
    "layershuffle": "LayerShuffle",
    "layershuffle-parallel": "LayerShuffle-parallel",
    "layershuffle-tied-3": "tied, three blocks",
    "layershuffle-tied": "tied, one block",
}
ROUND_SIZES = {"one by one": 1, **{f"in rounds of {size}": size for size in (2, 3, 4, 6)}}
THREE_BLOCKS = (
    ("digits-tied", "layershuffle-tied-3", "digit pairs, 2,000 steps"),
    ("digits-recipes", "layershuffle-tied-3-mixed", "the same with four orders, 1/4 in order"),
    ("digits-recipes", "layershuffle-tied-3-mixed-8000", "the same, 8,000 steps"),
    ("digits-recipes", "layershuffle-tied-3-mixed-exit", "four orders, exit loss, 2,000 steps"),
    ("digits-recipes", "layershuffle-tied-3-mixed-exit-8000", "the same, 8,000 steps"),
    ("formula-cpu", "layershuffle-tied-3-mixed", "300 classes of formulas, four orders"),
    ("formula-cpu", "layershuffle-tied-3-mixed-exit", "the same with an exit loss"),
)
"""Study, arm and label of models with places 0 to 3, 4 to 7 and 8 to 11 tied."""
SETS = {3: 64, 2: 144, 1: 12}
"""The number of the 220 sets of three places by their number of different blocks."""


def read_scores(path: Path = RESULTS) -> Scores:
    """The top-1 of every arm and mode, in percent."""
    scores: Scores = defaultdict(lambda: defaultdict(list))
    for row in read_rows(path):
        scores[row.method, row.mode, row.kept, row.passes][row.seed].append(row.top1)
    return scores


def verdict(difference: Difference) -> str:
    """ "better" or "worse" if the 95 % interval excludes 0, else "not told apart"."""
    if difference.low > 0:
        return "better"
    return "worse" if difference.high < 0 else "not told apart"


def interval(difference: Difference) -> str:
    """ "+1.2 (+0.3 to +2.1)", and never "-0.0"."""
    points = round(difference.points, 1) + 0.0
    if not isfinite(difference.low):
        return f"{points:+.1f} (no interval)"
    return f"{points:+.1f} ({difference.low:+.1f} to {difference.high:+.1f})"


def judged(difference: Difference, *, criterion: Callable[[Difference], str] = verdict) -> str:
    """The difference and its verdict by `criterion`, which needs an interval."""
    text = interval(difference)
    return f"{text} **{criterion(difference)}**" if isfinite(difference.low) else text


def chance_words(text: str) -> str:
    """How many differences the tables in `text` judge, and how many of them chance would tell.

    Goals are not counted, because they are judged against other limits than zero.
    """
    tables = "\n".join(line for line in text.splitlines() if line.startswith("|"))
    count = len(re.findall(r"\*\*(?:better|worse|not told apart)\*\*", tables))
    return (
        f"These tables ask of {count} differences whether a 95 % interval excludes zero.\n"
        f"If nothing differed anywhere, about {count / 20:.0f} would be told apart by chance."
    )


def gap(
    scores: Mapping[Cell, Mapping[int, Sequence[float]]],
    sample: Cell,
    reference: Cell,
    *,
    seeds: Sequence[int] | None = None,
) -> Difference:
    """The difference in top-1 of two cells in points, paired by the seeds that both have.

    `seeds` leaves out all other seeds.
    """
    means = [
        {seed: mean(values) for seed, values in scores[cell].items() if not seeds or seed in seeds}
        for cell in (sample, reference)
    ]
    return compare(*means)


def estimate_text(cell: Estimate) -> str:
    """ "92.9 (92.3-93.5)": a mean in percent and its 95 % interval."""
    return f"{cell.mean:.1f} ({interval_text(cell)})"


def accuracy_table(scores: Scores) -> str:
    """The table of mean top-1 over models and its 95 % interval."""
    rows = []
    for arm in ARMS:
        cells = [estimate(scores[arm.name, *column], images=IMAGES) for column in COLUMNS.values()]
        rows.append([arm.label, arm.different, *map(estimate_text, cells)])
    head = ["arm", "different blocks", *COLUMNS]
    return markdown_table(head, rows, align="lr" + "r" * len(COLUMNS))


def verdict_table(scores: Scores) -> str:
    """The table of questions and the differences that decide them."""
    labels = {arm.name: arm.label for arm in ARMS}
    rows = []
    for where, sample, of_sample, reference, of_reference in QUESTIONS:
        difference = gap(scores, (sample, *of_sample), (reference, *of_reference))
        cells = [interval(difference), f"**{verdict(difference)}**"]
        rows.append([where, labels[sample], labels[reference], *cells])
    head = ("where", "is this arm", "better than", "by points of top-1", "verdict")
    return markdown_table(head, rows, align="lllrl")


def alive_table() -> str:
    """The table of top-1 with three alive places run four times, by their different blocks."""
    sets = [f"{blocks} of 3 blocks alive ({SETS[blocks]} of 220 sets)" for blocks in SETS]
    rows = []
    for study, arm, label in THREE_BLOCKS:
        values = by_blocks(KEPT / study / "results.csv", arm)
        cells = [
            f"{mean(values[blocks]):.1f} ({len(values[blocks])} drawn)" if values[blocks] else ""
            for blocks in SETS
        ]
        cells.append(f"{over_sets(values):.1f}" if all(values[blocks] for blocks in SETS) else "")
        rows.append([label, *cells])
    head = ["three tied blocks", *sets, "mean over all sets"]
    return markdown_table(head, rows, align="l" + "r" * (len(sets) + 1))


def by_blocks(path: Path, arm: str) -> dict[int, list[float]]:
    """Top-1 of every drawn set of three places run four times, by its different blocks."""
    values: dict[int, list[float]] = defaultdict(list)
    for row in read_rows(path):
        if (row.method, row.mode, row.kept, row.passes) == (arm, "arbitrary", 3, 4):
            places = map(int, row.order.split(","))
            values[len({place // 4 for place in places})].append(row.top1)
    return values


def over_sets(values: Mapping[int, Sequence[float]]) -> float:
    """The mean over all sets of three places, from the means of each kind of set."""
    weighted = [count * mean(values[blocks]) for blocks, count in SETS.items()]
    return sum(weighted) / sum(SETS.values())


def read_rounds() -> RoundScores:
    """Top-1 of all twelve places in any order, one by one and in rounds."""
    scores: RoundScores = defaultdict(lambda: defaultdict(list))
    for study in ROUND_STUDIES:
        for row in read_rows(KEPT / study / "results.csv"):
            if (row.mode, row.kept, row.passes) == ("arbitrary", PLACES, 1):
                scores[row.method, row.parallel][row.seed].append(row.top1)
    return scores


def rounds_table(scores: RoundScores) -> str:
    """The table of tied places in rounds and their difference to LayerShuffle, paired by seed."""
    rows = []
    for arm, label in ROUND_ARMS.items():
        cells = []
        for size in ROUND_SIZES.values():
            shown = scores.get((arm, size), {})
            text = f"{mean([mean(values) for values in shown.values()]):.1f}" if shown else ""
            if shown and arm != "layershuffle":
                text += f", {judged(gap(scores, (arm, size), ('layershuffle', size)))}"
            cells.append(text)
        if any(cells):
            rows.append([label, *cells])
    return markdown_table(["arm", *ROUND_SIZES], rows, align="l" + "l" * len(ROUND_SIZES))


def style_percent(axes: Axes, title: str, *, across: str) -> None:
    """Style a panel of accuracies in percent over `across`."""
    style_axes(axes, title)
    axes.set_ylim(0, 102)
    axes.set_xlabel(across, color=INK)
    axes.grid(axis="y", color=RULE, linewidth=0.8)


def plot_estimates(
    axes: Axes, places: Sequence[float], cells: Sequence[Estimate], **style: Any
) -> ErrorbarContainer:
    """Plot means and their intervals."""
    means = [cell.mean for cell in cells]
    return axes.errorbar(places, means, yerr=error_bars(cells), capsize=2.5, **style)


def draw(scores: Scores) -> Figure:
    """Plot accuracy over the number of different blocks; each device holds one of the twelve."""
    figure = new_figure(6.6, 4.4)
    axes = figure.subplots()
    style_percent(axes, "Twelve devices of one block each", across="different blocks among them")
    shuffled = [arm for arm in ARMS if arm.name not in ("baseline", "layershuffle-depth")]
    depth = [arm for arm in ARMS if arm.name == "layershuffle-depth"]
    lines = (
        ("all alive, any order", ANY, "#1b6ca8", "o"),
        ("3 alive, each runs 4 times", COLUMNS["3 alive, 4 times"], "#b3541e", "s"),
    )
    entries = []
    for name, column, colour, marker in lines:
        for arms, face, style in ((shuffled, colour, "-"), (depth, "none", "")):
            cells = [estimate(scores[arm.name, *column], images=IMAGES) for arm in arms]
            handle = plot_estimates(
                axes, [arm.different for arm in arms], cells,
                color=colour, marker=marker, markerfacecolor=face, linestyle=style,
            )  # fmt: skip
            entries.append((handle, name if arms is shuffled else f"{name}: LayerShuffle-depth"))
    axes.set_xticks([arm.different for arm in shuffled])
    axes.set_ylabel("top-1 accuracy (%)", color=INK)
    legend_below(figure, entries)
    return figure


def with_tables(page: str, scores: Scores) -> str:
    """`page` with new tables between its marks."""
    page = with_marked(page, "accuracy", accuracy_table(scores))
    judging = {"verdicts": verdict_table(scores), "side by side": rounds_table(read_rounds())}
    for name, table in judging.items():
        page = with_marked(page, name, table)
    page = with_marked(page, "alive", alive_table())
    return with_marked(page, "chance", chance_words("\n".join(judging.values())))


if __name__ == "__main__":
    measured = read_scores()
    write_text(PAGE, with_tables(PAGE.read_text(encoding="utf-8"), measured))
    write_bytes(FIGURE, figure_bytes(draw(measured), "png", dpi=110))
    print(f"Written: {PAGE} and {FIGURE}")
