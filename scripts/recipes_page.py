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
from open_questions import rows_of
from performance_page import chance_words, medians_of, newest_rows, with_marked
from science_page import judged

from layershuffle.files import write_bytes, write_text
from layershuffle.plotting import INK, RULE, figure_bytes, legend_below, new_figure, style_axes
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
FIRST = (0, 1, 2)  # the seeds of every arm
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
    "ordinary training": "",
    "LayerShuffle": "layershuffle",
    "four orders, 1/4 in order": "layershuffle-mixed, orders per batch 4",
    "exit loss, one order": "layershuffle-exit",
    "exit loss, four orders, 1/4 in order": (
        "layershuffle-mixed, orders per batch 4, exit weight 0.3"
    ),
    "exit loss, three tied blocks, four orders, 1/4 in order": (
        "layershuffle-tied, distinct 3, sequential every 4, orders per batch 4, exit weight 0.3"
    ),
}
"""The names of recipes in `benchmarks/methods.py`; ordinary training is what each is timed with."""
CASES = ("width 64, batch 64", "width 192, batch 32")
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


def gap(scores: RecipeScores, sample: RecipeCell, reference: RecipeCell) -> Difference:
    """The difference in top-1 of two cells in points, paired by the seeds that both have."""
    means = [
        {seed: mean(values) for seed, values in scores[cell].items()}
        for cell in (sample, reference)
    ]
    return compare(*means)


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
            shown = estimate(cell, images=IMAGES) if cell else None
            texts.append(f"{shown.mean:.1f} ({shown.low:.1f}-{shown.high:.1f})" if shown else "")
        rows.append([arm.label, len(cells[0]), *texts])
    return markdown_table(["recipe", "models", *COLUMNS], rows, align="lr" + "r" * len(COLUMNS))


def verdict_table(scores: RecipeScores, goal: Goal) -> str:
    """The table of the difference to the goal's reference and the verdict, by recipe and budget.

    Arms with more seeds than `FIRST` have a second row, which compares with arms of `FIRST` alone.
    """
    first = of_first(scores)
    criterion = partial(reached, within=goal.within)
    rows = []
    for arm in ARMS:
        texts, of_same_seeds = [], []
        for steps in BUDGETS:
            sample, reference = goal.cells(arm.name, steps)
            is_measured = scores.get(sample) and scores.get(reference) and sample != reference
            difference = gap(scores, sample, reference) if is_measured else None
            texts.append(judged(difference, criterion=criterion) if difference else "")
            has_more = difference is not None and difference.seeds > len(FIRST)
            same = gap(first, sample, reference) if has_more else None
            of_same_seeds.append(judged(same, criterion=criterion) if same else "")
        if arm.name == BASELINE:
            continue
        for label, cells in (
            (arm.label, texts),
            (f"{arm.label}; seeds 0 to 2 alone", of_same_seeds),
        ):
            if any(cells):
                rows.append([label, *cells])
    return markdown_table(["recipe", *BUDGET_TEXTS], rows, align="l" + "l" * len(BUDGETS))


def of_first(scores: RecipeScores) -> RecipeScores:
    """The scores of the seeds that every arm has."""
    return {
        cell: {seed: values for seed, values in of_seeds.items() if seed in FIRST}
        for cell, of_seeds in scores.items()
    }


def fresh_scores() -> RecipeScores:
    """Top-1 on the fresh pairs, in the columns of this page."""
    return {
        (arm.removesuffix(f"-{BUDGETS[-1]}"), BUDGETS[-1], COLUMNS[mode]): of_seeds
        for (arm, mode), of_seeds in fresh_pairs.read_scores().items()
        if mode in COLUMNS
    }


def goals_table(scores: RecipeScores) -> str:
    """The table of all goals and of `BEST`, at the largest budget that has the reference.

    All cells are of the seeds `FIRST`, and there is a column of the fresh pairs for each recipe.
    """
    first, fresh, rows = of_first(scores), fresh_scores(), []
    for goal in GOALS:
        steps = max(n for n in BUDGETS if all(map(first.get, goal.cells(BEST[0], n))))
        limit = f"{goal.within:g} below" if goal.within else "not below"
        texts = []
        for arm in BEST:
            cells = goal.cells(arm, steps)
            for pairs in (first, fresh):
                is_measured = all(map(pairs.get, cells))
                criterion = partial(reached, within=goal.within)
                texts.append(judged(gap(pairs, *cells), criterion=criterion) if is_measured else "")
        rows.append([f"{goal.words}: {limit}", f"{steps:,}", *texts])
    head = ["goal", "steps", *(f"{blocks}, {pairs}" for blocks in BLOCKS for pairs in PAIR_WORDS)]
    return markdown_table(head, rows, align="lr" + "l" * (len(head) - 2))


def draw(scores: RecipeScores) -> Figure:
    """Plot accuracy over steps, with all blocks and with six of twelve alive."""
    figure = new_figure(8.6, 4.6)
    handles = {}
    panels = figure.subplots(1, len(DRAWN_COLUMNS), sharey=True)
    for axes, column in zip(panels, DRAWN_COLUMNS, strict=True):
        style_axes(axes, column)
        for arm, (colour, marker) in DRAWN.items():
            of_budgets = {n: scores.get((arm, n, COLUMNS[column])) for n in BUDGETS}
            cells = {n: estimate(x, images=IMAGES) for n, x in of_budgets.items() if x}
            handles[arm] = axes.errorbar(
                list(cells),
                [cell.mean for cell in cells.values()],
                yerr=[
                    [cell.mean - cell.low for cell in cells.values()],
                    [cell.high - cell.mean for cell in cells.values()],
                ],
                color=colour, marker=marker, capsize=2.5,
            )  # fmt: skip
        axes.set_xscale("log")
        axes.set_xticks(BUDGETS, [f"{steps:,}" for steps in BUDGETS])
        axes.minorticks_off()
        axes.set_ylim(0, 102)
        axes.set_xlabel("steps", color=INK)
        axes.grid(axis="y", color=RULE, linewidth=0.8)
    panels[0].set_ylabel("top-1 accuracy (%)", color=INK)
    labels = {arm.name: arm.label for arm in ARMS}
    legend_below(figure, [(handle, labels[arm]) for arm, handle in handles.items()])
    return figure


def pairs_table(
    scores: RecipeScores, pairs: Iterable[tuple[str, str]], *, head: str, columns: Sequence[str]
) -> str:
    """The table of each arm minus its reference, at every budget that both have, paired by seed."""
    labels = {arm.name: arm.label for arm in ARMS}
    rows = []
    for arm, reference in pairs:
        for steps in BUDGETS:
            texts = []
            for column in columns:
                cells = [(name, steps, COLUMNS[column]) for name in (arm, reference)]
                is_measured = all(scores.get(cell) for cell in cells)
                texts.append(judged(gap(scores, *cells)) if is_measured else "")
            if any(texts):
                rows.append([labels[reference], f"{steps:,}", *texts])
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
    rows = []
    for label, name in TIMED.items():
        cells = []
        for case in CASES:
            row = timed[f"step of {name or TIMED['LayerShuffle']}, {case}"]
            seconds = median(pair[0 if name else 1] for pair in row.pairs)
            cells += [f"{1000 * seconds:.0f}", f"{row.median:.2f}" if name else "1"]
        rows.append([label, *cells])
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
    labels = {arm.name: arm.label for arm in ARMS} | OTHER_RATES
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
    for steps in BUDGETS:
        page = with_marked(page, f"accuracy {steps}", accuracy_table(scores, steps))
    for goal in GOALS:
        page = with_marked(page, goal.name, verdict_table(scores, goal))
    head = "three tied blocks less twelve of"
    table = pairs_table(scores, TIED_PAIRS, head=head, columns=tuple(COLUMNS))
    page = with_marked(page, "tied", table)
    once = ("in order", "any order", "9 alive", "6 alive", "3 alive")
    table = pairs_table(scores, WITHOUT_EXIT, head="an exit loss beside", columns=once)
    page = with_marked(page, "exits", table)
    for budget in changed_training.BUDGETS:
        page = with_marked(page, f"changes {budget}", changes_table(budget))
    page = with_marked(page, "rates", rate_table())
    page = with_marked(page, "costs", cost_table())
    page = with_marked(page, "steps", step_table())
    page = with_marked(page, "goals", goals_table(scores))
    labels = {f"{arm.name}-{BUDGETS[-1]}": arm.label for arm in ARMS}
    page = with_marked(page, "fresh", fresh_pairs.accuracy_table(labels))
    page = with_marked(page, "fresh verdicts", fresh_pairs.verdict_table(labels))
    return with_marked(page, "chance", chance_words(page))


if __name__ == "__main__":
    measured = read_scores()
    write_text(PAGE, with_tables(PAGE.read_text(encoding="utf-8"), measured))
    write_bytes(FIGURE, figure_bytes(draw(measured), "png", dpi=110))
    print(f"Written: {PAGE} and {FIGURE}")
