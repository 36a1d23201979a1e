"""Write the tables of docs/recipes.md.

They come from the studies digits-recipes and digits-paper and from scripts/changed_training.py.

python scripts/recipes_page.py
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import changed_training
from open_questions import rows_of
from performance_page import medians_of
from science_page import interval, verdict, with_marked

from layershuffle.files import write_text
from layershuffle.stats import Difference, compare, estimate, mean
from layershuffle.study.store import read_study
from layershuffle.study.summary import base_arm
from layershuffle.text import markdown_table

ROOT = Path(__file__).resolve().parent.parent
PAGE, KEPT = ROOT / "docs" / "recipes.md", ROOT / "docs" / "results"
# Ordinary training and plain LayerShuffle have the same settings and seeds in digits-paper.
STUDIES = ("digits-paper", "digits-recipes")
BUDGETS, IMAGES = (500, 2000, 8000), 2000
BUDGET_TEXTS = [f"{steps:,} steps" for steps in BUDGETS]

Column = tuple[str, int, int]  # order, blocks alive, passes
Cell = tuple[str, int, Column]  # arm, steps, column
Scores = dict[Cell, dict[int, list[float]]]  # of each seed, one top-1 per drawn order


@dataclass(frozen=True, kw_only=True)
class Arm:
    """An arm of the study, and what the page calls it."""

    name: str
    label: str


BASELINE, PLAIN = "baseline", "layershuffle"
MIXED, TIED = "layershuffle-mixed", "layershuffle-tied-3-mixed"
ARMS = (
    Arm(name=BASELINE, label="ordinary training"),
    Arm(name=PLAIN, label="LayerShuffle"),
    Arm(name="layershuffle-orders-2", label="two orders per batch"),
    Arm(name="layershuffle-orders-4", label="four orders per batch"),
    Arm(name="layershuffle-mixed-in-turn", label="one order, every 4th step in order"),
    Arm(name="layershuffle-mixed-eighth", label="four orders, 1/8 in order"),
    Arm(name=MIXED, label="four orders, 1/4 in order"),
    Arm(name="layershuffle-mixed-half", label="four orders, 1/2 in order"),
    Arm(name="layershuffle-depth-mixed", label="LayerShuffle-depth, four orders, 1/4 in order"),
    Arm(name=TIED, label="three tied blocks, four orders, 1/4 in order"),
    Arm(name="layershuffle-exit", label="exit loss, one order"),
    Arm(name="layershuffle-exit-orders-4", label="exit loss, four orders"),
    Arm(name="layershuffle-mixed-exit", label="exit loss, four orders, 1/4 in order"),
    Arm(name=f"{TIED}-exit", label="exit loss, three tied blocks, four orders, 1/4 in order"),
)
WITHOUT_EXIT = {
    "layershuffle-exit": PLAIN,
    "layershuffle-exit-orders-4": "layershuffle-orders-4",
    "layershuffle-mixed-exit": MIXED,
    f"{TIED}-exit": TIED,
}
"""Of every arm with an exit loss, the arm that is trained alike without it."""
COLUMNS: dict[str, Column] = {
    "in order": ("sequential", 12, 1),
    "any order": ("arbitrary", 12, 1),
    "9 alive": ("arbitrary", 9, 1),
    "6 alive": ("arbitrary", 6, 1),
    "3 alive": ("arbitrary", 3, 1),
    "6 alive, twice": ("arbitrary", 6, 2),
    "3 alive, 4 times": ("arbitrary", 3, 4),
}
ORDERED, ANY, SIX = COLUMNS["in order"], COLUMNS["any order"], COLUMNS["6 alive"]


@dataclass(frozen=True, kw_only=True)
class Goal:
    """A goal of a recipe: at the most `within` points below what it is measured by.

    `cells`: of an arm and a budget, the cell that is judged and the cell it is measured by.
    """

    name: str
    within: float
    cells: Callable[[str, int], tuple[Cell, Cell]]


GOALS = (
    Goal(
        name="twice",
        within=0.0,
        cells=lambda arm, steps: ((arm, steps, ANY), (PLAIN, 2 * steps, ANY)),
    ),
    Goal(
        name="ordered",
        within=1.0,
        cells=lambda arm, steps: ((arm, steps, ORDERED), (BASELINE, steps, ORDERED)),
    ),
    Goal(
        name="free",
        within=1.0,
        cells=lambda arm, steps: ((arm, steps, ANY), (BASELINE, steps, ORDERED)),
    ),
    Goal(
        name="half",
        within=4.0,
        cells=lambda arm, steps: ((arm, steps, SIX), (arm, steps, ANY)),
    ),
    Goal(
        name="full",
        within=1.0,
        cells=lambda arm, steps: ((arm, steps, ANY), (PLAIN, steps, ANY)),
    ),
)


def read_scores() -> Scores:
    """Top-1 in percent of every arm, budget and column."""
    scores: Scores = defaultdict(dict)
    for study in STUDIES:
        for run in read_study(KEPT / study).runs:
            settings = run.task.settings
            for row in run.result.rows if run.result else ():
                column = (row.mode, row.kept, row.passes)
                # Which blocks are alive is drawn; digits-paper has chosen ones too.
                if column in COLUMNS.values() and row.choose in ("", "random"):
                    arm = base_arm(run.task).removesuffix(f"-{settings.steps}")
                    cell = scores[arm, settings.steps or 0, column]
                    cell.setdefault(settings.seed, []).append(row.top1)
    return scores


def gap(scores: Scores, sample: Cell, reference: Cell) -> Difference:
    """Points of top-1 between two cells, in pairs over the seeds that both have."""
    means = [
        {seed: mean(values) for seed, values in scores[cell].items()}
        for cell in (sample, reference)
    ]
    return compare(*means)


def reached(difference: Difference, *, within: float) -> str:
    """The criterion of "no more than `within` points below": what the whole 95 % interval says.

    "not decided" where the interval has the limit in it.
    """
    if difference.low >= -within:
        return "reached"
    return "missed" if difference.high < -within else "not decided"


def accuracy_table(scores: Scores, steps: int) -> str:
    """Mean top-1 over models with its 95 % interval; arms that were trained for `steps`."""
    rows = []
    for arm in ARMS:
        cells = [scores.get((arm.name, steps, column)) for column in COLUMNS.values()]
        if cells[0] is None:
            continue
        texts = []
        for cell in cells:
            shown = estimate(cell, images=IMAGES) if cell else None
            texts.append(f"{shown.mean:.1f} ({shown.low:.1f}-{shown.high:.1f})" if shown else "")
        rows.append([arm.label, len(cells[0]), *texts])
    return markdown_table(["recipe", "models", *COLUMNS], rows, align="lr" + "r" * len(COLUMNS))


def verdict_table(scores: Scores, goal: Goal) -> str:
    """For every recipe and budget the points to what the goal measures by, and the verdict."""
    rows = []
    for arm in ARMS:
        texts = []
        for steps in BUDGETS:
            sample, reference = goal.cells(arm.name, steps)
            text = ""
            if scores.get(sample) and scores.get(reference) and sample != reference:
                difference = gap(scores, sample, reference)
                text = f"{interval(difference)} **{reached(difference, within=goal.within)}**"
            texts.append(text)
        if any(texts) and arm.name != BASELINE:
            rows.append([arm.label, *texts])
    return markdown_table(["recipe", *BUDGET_TEXTS], rows, align="l" + "l" * len(BUDGETS))


def tied_table(scores: Scores) -> str:
    """Three tied blocks less twelve different ones of the same recipe, in pairs over seeds."""
    rows = []
    for name in ("in order", "any order", "6 alive", "6 alive, twice", "3 alive, 4 times"):
        texts = []
        for steps in BUDGETS:
            cells = [(arm, steps, COLUMNS[name]) for arm in (TIED, MIXED)]
            difference = gap(scores, *cells)
            texts.append(f"{interval(difference)} **{verdict(difference)}**")
        rows.append([name, *texts])
    head = ["three tied blocks are", *BUDGET_TEXTS]
    return markdown_table(head, rows, align="l" + "l" * len(BUDGETS))


def exits_table(scores: Scores) -> str:
    """What an exit loss changes in recipes that are alike otherwise, in pairs over seeds."""
    columns = ("in order", "any order", "9 alive", "6 alive", "3 alive")
    labels = {arm.name: arm.label for arm in ARMS}
    rows = []
    for arm, reference in WITHOUT_EXIT.items():
        for steps in BUDGETS:
            texts = []
            for column in (COLUMNS[name] for name in columns):
                cells = [(name, steps, column) for name in (arm, reference)]
                text = ""
                if all(scores.get(cell) for cell in cells):
                    difference = gap(scores, *cells)
                    text = f"{interval(difference)} **{verdict(difference)}**"
                texts.append(text)
            if any(texts):
                rows.append([labels[reference], f"{steps:,}", *texts])
    head = ["an exit loss beside", "steps", *columns]
    return markdown_table(head, rows, align="lr" + "l" * len(columns))


def changes_table(budget: int) -> str:
    """What changed trainings reach, and what they gain on unchanged ones, in pairs over seeds."""
    columns = {
        "in order": "in_order",
        "any order": "any_order",
        "6 alive": "six",
        "6 alive, twice": "six_twice",
        "3 alive, 4 times": "three_four_times",
    }
    scores: dict[str, dict[str, dict[int, float]]] = defaultdict(lambda: defaultdict(dict))
    for row in rows_of("changed-training.csv"):
        if int(row["budget"]) != budget:
            continue
        for column in columns.values():
            values = [float(value) for value in row[column].split()]
            scores[row["arm"]][column][int(row["seed"])] = mean(values)
    judged = ("in order", "any order", "6 alive")
    head = ["training", "models", *columns, "compared with", *judged]
    rows = []
    for name in changed_training.BUDGETS[budget]:
        accuracy = scores[name]
        cells = [name, str(len(accuracy["in_order"]))]
        cells += [f"{mean(list(accuracy[column].values())):.1f}" for column in columns.values()]
        reference = changed_training.REFERENCES.get(name, changed_training.PLAIN)
        if name != changed_training.PLAIN:
            cells.append(reference)
            for column in (columns[name] for name in judged):
                gain = compare(accuracy[column], scores[reference][column])
                cells.append(f"{interval(gain)} **{verdict(gain)}**")
        rows.append(cells + [""] * (len(head) - len(cells)))
    return markdown_table(head, rows, align="lr" + "r" * len(columns) + "l" * (1 + len(judged)))


def cost_table() -> str:
    """What several orders per batch cost: the time of a step, in pairs (benchmarks)."""
    medians = medians_of("orders-per-batch")
    rows = [[name, f"{median:.2f}"] for name, median in medians.items()]
    return markdown_table(["a step with", "takes, of a step with one order"], rows, align="lr")


def with_tables(page: str, scores: Scores) -> str:
    """`page` with new tables between its marks."""
    for steps in BUDGETS:
        page = with_marked(page, f"accuracy {steps}", accuracy_table(scores, steps))
    for goal in GOALS:
        page = with_marked(page, goal.name, verdict_table(scores, goal))
    page = with_marked(page, "tied", tied_table(scores))
    page = with_marked(page, "exits", exits_table(scores))
    for budget in changed_training.BUDGETS:
        page = with_marked(page, f"changes {budget}", changes_table(budget))
    return with_marked(page, "costs", cost_table())


if __name__ == "__main__":
    write_text(PAGE, with_tables(PAGE.read_text(encoding="utf-8"), read_scores()))
    print(f"Written: {PAGE}")
