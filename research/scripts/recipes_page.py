# Ran at commit 8550626.
"""Write the tables and the figure of docs/recipes.md from committed results.

They are those of digits-recipes, digits-paper, changed_training.py and fresh_pairs.py.

python scripts/recipes_page.py
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median

import changed_training
import fresh_pairs
from matplotlib.figure import Figure
from open_questions import CASES, SEEDS, rows_of
from performance_page import ClaimRow, medians_of, newest_rows, with_marked
from science_page import (
    chance_words,
    estimate_text,
    gap,
    judged,
    plot_estimates,
    style_percent,
)

from layershuffle.files import write_bytes, write_text
from layershuffle.plotting import INK, figure_bytes, legend_below, new_figure
from layershuffle.stats import Difference, compare, estimate, mean
from layershuffle.study.store import read_study
from layershuffle.study.summary import base_arm
from layershuffle.text import markdown_table

ROOT = Path(__file__).resolve().parent.parent
PAGE, KEPT = ROOT / "docs" / "recipes.md", ROOT / "docs" / "results"
FIGURE = ROOT / "docs" / "recipes-steps.png"
# digits-paper has ordinary training and LayerShuffle with the same settings and seeds.
STUDIES = ("digits-paper", "digits-recipes")
# Trained at several rates with a different seed; the first has the methods of the paper.
RATE_STUDIES = ("digits-tune", "digits-recipes-tune")
BUDGETS, IMAGES = (500, 2000, 8000), 2000
BUDGET_TEXTS = [f"{steps:,} steps" for steps in BUDGETS]

RecipeColumn = tuple[str, int, int]  # order, blocks alive, passes
RecipeCell = tuple[str, int, RecipeColumn]  # arm, steps, column
RecipeScores = dict[RecipeCell, dict[int, list[float]]]  # of each seed, one top-1 per drawn order
Changes = dict[str, dict[str, dict[int, float]]]  # of each training and column, by seed


@dataclass(frozen=True, kw_only=True)
class RecipeArm:
    """An arm of the study, and its label on the page."""

    name: str
    label: str


BASELINE, PLAIN = "baseline", "layershuffle"
MIXED, TIED = "layershuffle-mixed", "layershuffle-tied-3-mixed"
ARMS = (
    RecipeArm(name=BASELINE, label="ordinary training"),
    RecipeArm(name=PLAIN, label="LayerShuffle"),
    RecipeArm(name="layershuffle-orders-2", label="two orders per batch"),
    RecipeArm(name="layershuffle-orders-4", label="four orders per batch"),
    RecipeArm(name="layershuffle-mixed-in-turn", label="one order, every 4th step in order"),
    RecipeArm(name="layershuffle-mixed-eighth", label="four orders, 1/8 in order"),
    RecipeArm(name=MIXED, label="four orders, 1/4 in order"),
    RecipeArm(name=f"{MIXED}-lr5.6e-3", label="four orders, 1/4 in order, at 5.6e-3"),
    RecipeArm(name="layershuffle-mixed-half", label="four orders, 1/2 in order"),
    RecipeArm(
        name="layershuffle-mixed-half-lr5.6e-3", label="four orders, 1/2 in order, at 5.6e-3"
    ),
    RecipeArm(
        name="layershuffle-depth-mixed", label="LayerShuffle-depth, four orders, 1/4 in order"
    ),
    RecipeArm(name="layershuffle-tied", label="one tied block"),
    RecipeArm(name="layershuffle-tied-2", label="two tied blocks"),
    RecipeArm(name="layershuffle-tied-3", label="three tied blocks"),
    RecipeArm(name="layershuffle-tied-4", label="four tied blocks"),
    RecipeArm(name="layershuffle-tied-6", label="six tied blocks"),
    RecipeArm(name=TIED, label="three tied blocks, four orders, 1/4 in order"),
    RecipeArm(name="layershuffle-exit", label="exit loss, one order"),
    RecipeArm(name="layershuffle-exit-orders-4", label="exit loss, four orders"),
    RecipeArm(name="layershuffle-mixed-exit", label="exit loss, four orders, 1/4 in order"),
    RecipeArm(name=f"{TIED}-exit", label="exit loss, three tied blocks, four orders, 1/4 in order"),
)
OTHER_RATES = {
    "layershuffle-position": "LayerShuffle-position",
    "layershuffle-predict-sum": "LayerShuffle-predict, sum over blocks",
}
"""Labels of what has rates and no other row on this page."""
LABELS = {arm.name: arm.label for arm in ARMS}
WITHOUT_EXIT = (
    ("layershuffle-exit", PLAIN),
    ("layershuffle-exit-orders-4", "layershuffle-orders-4"),
    ("layershuffle-mixed-exit", MIXED),
    (f"{TIED}-exit", TIED),
)
"""Every arm with an exit loss, and the same arm without it."""
TIED_PAIRS = (
    (TIED, MIXED),
    (f"{TIED}-exit", "layershuffle-mixed-exit"),
    (f"{TIED}-exit", "layershuffle-exit-orders-4"),
)
"""Arms of three tied blocks, and their references of twelve different ones."""
BEST = ("layershuffle-mixed-exit", f"{TIED}-exit")
BLOCKS, PAIR_WORDS = ("twelve blocks", "three tied blocks"), ("these pairs", "fresh pairs")
"""The recipes with the most accurate models of twelve blocks and of three, and their words."""
DRAWN = {
    BASELINE: ("#888888", "D"),
    PLAIN: ("#7a4fa3", "^"),
    MIXED: ("#4f8a3d", "v"),
    "layershuffle-mixed-exit": ("#1b6ca8", "o"),
    f"{TIED}-exit": ("#b3541e", "s"),
}
"""The arms of the figure, each with its colour and marker."""
TIMED = {
    PLAIN: "layershuffle",
    MIXED: "layershuffle-mixed, orders per batch 4",
    "layershuffle-exit": "layershuffle-exit",
    "layershuffle-mixed-exit": "layershuffle-mixed, orders per batch 4, exit weight 0.3",
    f"{TIED}-exit": (
        "layershuffle-tied, distinct 3, sequential every 4, orders per batch 4, exit weight 0.3"
    ),
}
"""The arms that `benchmarks/methods.py` times beside ordinary training, and their names there."""
DRAWN_COLUMNS = ("in order", "any order", "6 alive")
COLUMNS: dict[str, RecipeColumn] = {
    "in order": ("sequential", 12, 1),
    "any order": ("arbitrary", 12, 1),
    "9 alive": ("arbitrary", 9, 1),
    "6 alive": ("arbitrary", 6, 1),
    "3 alive": ("arbitrary", 3, 1),
    "6 alive, twice": ("arbitrary", 6, 2),
    "3 alive, 4 times": ("arbitrary", 3, 4),
}
CHANGE_COLUMNS = {
    "in order": "in_order",
    "any order": "any_order",
    "6 alive": "six",
    "6 alive, twice": "six_twice",
    "3 alive, 4 times": "three_four_times",
}
"""The shown columns of changed-training.csv, by their label on the page."""
ORDERED, ANY, SIX = COLUMNS["in order"], COLUMNS["any order"], COLUMNS["6 alive"]


@dataclass(frozen=True, kw_only=True)
class Goal:
    """A goal of a recipe: at most `within` points below a reference.

    `cells`: the judged cell and the reference cell of an arm and a budget.
    """

    name: str
    words: str
    within: float
    cells: Callable[[str, int], tuple[RecipeCell, RecipeCell]]


GOALS = (
    Goal(
        name="twice",
        words="any order, beside LayerShuffle with twice the steps",
        within=0.0,
        cells=lambda arm, steps: ((arm, steps, ANY), (PLAIN, 2 * steps, ANY)),
    ),
    Goal(
        name="ordered",
        words="in order, beside ordinary training",
        within=1.0,
        cells=lambda arm, steps: ((arm, steps, ORDERED), (BASELINE, steps, ORDERED)),
    ),
    Goal(
        name="free",
        words="any order, beside ordinary training in order",
        within=1.0,
        cells=lambda arm, steps: ((arm, steps, ANY), (BASELINE, steps, ORDERED)),
    ),
    Goal(
        name="half",
        words="six alive, beside all twelve",
        within=4.0,
        cells=lambda arm, steps: ((arm, steps, SIX), (arm, steps, ANY)),
    ),
    Goal(
        name="full",
        words="any order, beside LayerShuffle",
        within=1.0,
        cells=lambda arm, steps: ((arm, steps, ANY), (PLAIN, steps, ANY)),
    ),
)


def read_scores() -> RecipeScores:
    """Top-1 in percent of every arm, budget and column."""
    scores: RecipeScores = defaultdict(dict)
    for study in STUDIES:
        for run in read_study(KEPT / study).runs:
            settings = run.task.settings
            for row in run.result.rows if run.result else ():
                column = (row.mode, row.kept, row.passes)
                # Only rows with random alive blocks; digits-paper also has chosen ones.
                if column in COLUMNS.values() and row.choose in ("", "random"):
                    arm = base_arm(run.task).removesuffix(f"-{settings.steps}")
                    cell = scores[arm, settings.steps or 0, column]
                    cell.setdefault(settings.seed, []).append(row.top1)
    return scores


def reached(difference: Difference, *, within: float) -> str:
    """The verdict on "no more than `within` points below", from the whole 95 % interval.

    It is "not decided" if the interval contains the limit.
    """
    if difference.low >= -within:
        return "reached"
    return "missed" if difference.high < -within else "not decided"


def accuracy_table(scores: RecipeScores, steps: int) -> str:
    """The table of mean top-1 over models and its 95 % interval, for arms trained for `steps`."""
    rows = []
    for arm in ARMS:
        cells = [scores.get((arm.name, steps, column)) for column in COLUMNS.values()]
        if cells[0] is None:
            continue
        texts = []
        for cell in cells:
            texts.append(estimate_text(estimate(cell, images=IMAGES)) if cell else "")
        rows.append([arm.label, len(cells[0]), *texts])
    return markdown_table(["recipe", "models", *COLUMNS], rows, align="lr" + "r" * len(COLUMNS))


def verdict_table(scores: RecipeScores, goal: Goal) -> str:
    """The table of the difference to the goal's reference and the verdict, by recipe and budget.

    Arms with more seeds than `SEEDS` have a second row, of pairs of these seeds alone.
    """
    criterion = partial(reached, within=goal.within)
    rows = []
    for arm in ARMS:
        if arm.name == BASELINE:
            continue
        pairs = [goal.cells(arm.name, steps) for steps in BUDGETS]
        gaps = [
            gap(scores, *cells) if all(map(scores.get, cells)) and len(set(cells)) == 2 else None
            for cells in pairs
        ]
        of_seeds = [
            gap(scores, *cells, seeds=SEEDS) if whole and whole.seeds > len(SEEDS) else None
            for cells, whole in zip(pairs, gaps, strict=True)
        ]
        for label, differences in (
            (arm.label, gaps),
            (f"{arm.label}; seeds 0 to 2 alone", of_seeds),
        ):
            if any(differences):
                texts = [judged(x, criterion=criterion) if x else "" for x in differences]
                rows.append([label, *texts])
    return markdown_table(["recipe", *BUDGET_TEXTS], rows, align="l" + "l" * len(BUDGETS))


def goals_table(scores: RecipeScores, fresh: fresh_pairs.FreshScores) -> str:
    """The table of all goals and of `BEST`, at the largest budget that has the reference.

    All cells are of `SEEDS`, and there is a column of the fresh pairs for each recipe.
    """
    in_columns: RecipeScores = {
        (arm.removesuffix(f"-{BUDGETS[-1]}"), BUDGETS[-1], COLUMNS[mode]): of_seeds
        for (arm, mode), of_seeds in fresh.items()
        if mode in COLUMNS
    }
    rows = []
    for goal in GOALS:
        steps = max(n for n in BUDGETS if all(map(scores.get, goal.cells(BEST[0], n))))
        limit = f"{goal.within:g} below" if goal.within else "not below"
        criterion = partial(reached, within=goal.within)
        texts = []
        for arm in BEST:
            cells = goal.cells(arm, steps)
            for top1 in (scores, in_columns):
                is_measured = all(map(top1.get, cells))
                difference = gap(top1, *cells, seeds=SEEDS) if is_measured else None
                texts.append(judged(difference, criterion=criterion) if difference else "")
        rows.append([f"{goal.words}: {limit}", f"{steps:,}", *texts])
    head = ["goal", "steps", *(f"{blocks}, {pairs}" for blocks in BLOCKS for pairs in PAIR_WORDS)]
    return markdown_table(head, rows, align="lr" + "l" * (len(head) - 2))


def draw(scores: RecipeScores) -> Figure:
    """Plot accuracy over steps, with all blocks and with six of twelve alive."""
    figure = new_figure(8.6, 4.6)
    handles = {}
    panels = figure.subplots(1, len(DRAWN_COLUMNS), sharey=True)
    for axes, column in zip(panels, DRAWN_COLUMNS, strict=True):
        style_percent(axes, column, across="steps")
        for arm, (colour, marker) in DRAWN.items():
            of_budgets = {n: scores.get((arm, n, COLUMNS[column])) for n in BUDGETS}
            cells = {n: estimate(x, images=IMAGES) for n, x in of_budgets.items() if x}
            means = list(cells.values())
            handles[arm] = plot_estimates(axes, list(cells), means, color=colour, marker=marker)
        axes.set_xscale("log")
        axes.set_xticks(BUDGETS, [f"{steps:,}" for steps in BUDGETS])
        axes.minorticks_off()
    panels[0].set_ylabel("top-1 accuracy (%)", color=INK)
    legend_below(figure, [(handle, LABELS[arm]) for arm, handle in handles.items()])
    return figure


def pairs_table(
    scores: RecipeScores, pairs: Iterable[tuple[str, str]], *, head: str, columns: Sequence[str]
) -> str:
    """The table of each arm minus its reference, at every budget that both have, paired by seed."""
    rows = []
    for arm, reference in pairs:
        for steps in BUDGETS:
            texts = []
            for column in columns:
                cells = [(name, steps, COLUMNS[column]) for name in (arm, reference)]
                is_measured = all(scores.get(cell) for cell in cells)
                texts.append(judged(gap(scores, *cells)) if is_measured else "")
            if any(texts):
                rows.append([LABELS[reference], f"{steps:,}", *texts])
    return markdown_table([head, "steps", *columns], rows, align="lr" + "l" * len(columns))


def read_changes(budget: int) -> Changes:
    """Top-1 of every changed training of a budget, the mean over orders."""
    scores: Changes = defaultdict(lambda: defaultdict(dict))
    for row in rows_of("changed-training.csv"):
        if int(row["budget"]) == budget:
            for name, column in CHANGE_COLUMNS.items():
                values = [float(value) for value in row[column].split()]
                scores[row["arm"]][name][int(row["seed"])] = mean(values)
    return scores


def changes_table(budget: int) -> str:
    """The table of changed trainings and their difference to their references, paired by seed."""
    scores = read_changes(budget)
    compared = ("in order", "any order", "6 alive")
    head = ["training", "models", *CHANGE_COLUMNS, "compared with", *compared]
    rows = []
    for name in changed_training.BUDGETS[budget]:
        if not (accuracy := scores.get(name)):
            continue
        cells = [name, str(len(accuracy["in order"]))]
        cells += [f"{mean(accuracy[column]):.1f}" for column in CHANGE_COLUMNS]
        reference = changed_training.REFERENCES.get(name, changed_training.PLAIN)
        if name != changed_training.PLAIN:
            cells.append(reference)
            for column in compared:
                cells.append(judged(compare(accuracy[column], scores[reference][column])))
        rows.append(cells + [""] * (len(head) - len(cells)))
    align = "lr" + "r" * len(CHANGE_COLUMNS) + "l" * (1 + len(compared))
    return markdown_table(head, rows, align=align)


def cost_table() -> str:
    """The table of the benchmarked time of a step with several orders per batch."""
    medians = medians_of("orders-per-batch")
    rows = [[name, f"{median:.2f}"] for name, median in medians.items()]
    return markdown_table(["a step with", "takes, of a step with one order"], rows, align="lr")


def step_table() -> str:
    """The table of a step's median processor time, and of its ratio to ordinary training."""
    timed = newest_rows("methods")
    columns = {
        arm: [timed[f"step of {name}, {case}"] for case in CASES] for arm, name in TIMED.items()
    }

    def milliseconds(row: ClaimRow, side: int) -> str:
        return f"{1000 * median(pair[side] for pair in row.pairs):.0f}"

    ordinary = [text for row in columns[PLAIN] for text in (milliseconds(row, 1), "1")]
    rows = [[LABELS[BASELINE], *ordinary]]
    for arm, cases in columns.items():
        texts = [text for row in cases for text in (milliseconds(row, 0), f"{row.median:.2f}")]
        rows.append([LABELS[arm], *texts])
    head = [text for case in CASES for text in (f"ms, {case}", "of ordinary training")]
    return markdown_table(["a step of", *head], rows, align="l" + "r" * len(head))


def read_rates() -> dict[tuple[str, int], dict[float, float]]:
    """Held-out cross-entropy of arms and budgets, by peak learning rate.

    It is in the order that an arm trains for: random, or sequential for ordinary training.
    """
    losses: dict[tuple[str, int], dict[float, float]] = defaultdict(dict)
    for study in RATE_STUDIES:
        for run in read_study(KEPT / study).runs:
            settings = run.task.settings
            steps = settings.steps or 0
            arm = run.task.arm.rpartition("-lr")[0].removesuffix(f"-{steps}")
            if run.result is not None:
                losses[arm, steps][settings.lr] = run.result.selected.value
    return losses


def rate_table() -> str:
    """The table of the loss of recipes at every tried rate, and of the best rate."""
    losses = read_rates()
    labels = LABELS | OTHER_RATES
    rates = sorted({rate for by_rate in losses.values() for rate in by_rate})
    rows = []
    for (arm, steps), by_rate in losses.items():
        best = min(by_rate, key=by_rate.__getitem__)
        cells = [f"{by_rate[rate]:.3f}" if rate in by_rate else "" for rate in rates]
        rows.append([labels[arm], f"{steps:,}", *cells, _rate_text(best)])
    head = ["recipe", "steps", *map(_rate_text, rates), "lowest at"]
    return markdown_table(head, rows, align="lr" + "r" * (len(rates) + 1))


def _rate_text(rate: float) -> str:
    return f"{1000 * rate:g}e-3"


def with_tables(page: str, scores: RecipeScores) -> str:
    """`page` with new tables between its marks."""
    once = ("in order", "any order", "9 alive", "6 alive", "3 alive")
    fresh = fresh_pairs.read_scores()
    labels = {f"{arm}-{BUDGETS[-1]}": label for arm, label in LABELS.items()}
    tables = {
        **{f"accuracy {steps}": accuracy_table(scores, steps) for steps in BUDGETS},
        "fresh": fresh_pairs.accuracy_table(fresh, labels),
        "fresh verdicts": fresh_pairs.verdict_table(fresh, labels),
        "goals": goals_table(scores, fresh),
        **{goal.name: verdict_table(scores, goal) for goal in GOALS},
        "tied": pairs_table(
            scores, TIED_PAIRS, head="three tied blocks less twelve of", columns=tuple(COLUMNS)
        ),
        "exits": pairs_table(scores, WITHOUT_EXIT, head="an exit loss beside", columns=once),
        **{f"changes {budget}": changes_table(budget) for budget in changed_training.BUDGETS},
        "rates": rate_table(),
        "costs": cost_table(),
        "steps": step_table(),
    }
    for name, table in tables.items():
        page = with_marked(page, name, table)
    return with_marked(page, "chance", chance_words("\n".join(tables.values())))


if __name__ == "__main__":
    measured = read_scores()
    write_text(PAGE, with_tables(PAGE.read_text(encoding="utf-8"), measured))
    write_bytes(FIGURE, figure_bytes(draw(measured), "png", dpi=110))
    print(f"Written: {PAGE} and {FIGURE}")
