"""The report's tables, as Markdown, and the main table for the terminal. Pure: from `Summary`."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from layershuffle.results import (
    CHOICES,
    DRAWS,
    MODES,
    MergingRow,
    ScoreRow,
    by_model,
    group_rows,
    score_of,
)
from layershuffle.stats import Estimate, compare, mean
from layershuffle.study.paper.figures import (
    arms_drawn,
    draw_budget,
    draw_figure,
    draw_merges,
)
from layershuffle.study.paper.markdown import grid, literal, printable, section
from layershuffle.study.paper.numbers import MERGES, REFERENCE, SETTING
from layershuffle.study.paper.summary import ScoreCell, Summary, estimate_of, label
from layershuffle.study.store import Study
from layershuffle.text import counted_as, markdown_table, table

if TYPE_CHECKING:
    from matplotlib.figure import Figure

DrawFigure = Callable[[str, str, "Figure"], str]
"""Writes a figure under a name; with its caption it becomes the Markdown that shows it."""
WIDTH = 100
NONE = "-"
_KINDS = {"donor": "single models", "merge": "merges", "soup": "soup", "ensemble": "ensemble"}
_MERGES_HEAD = (
    "Models", "Order", "Stem and head", "Number", "Top-1", "sd", "Lowest", "Highest", "95 %",
    "Top-5", "sd top-5", "Paper: top-1", "Paper: top-5", "Ours - paper",
)  # fmt: skip
_CURVES = (
    "Means over orders and models with 95 % intervals. Hollow: the paper's numbers on ImageNet; a "
    "bar is a range, and ~ a value that its text only describes."
)
_CHOICES = {
    "random": "drawn at random",
    "spaced": "evenly spaced",
    "first": "the first ones",
    "last": "the last ones",
}
_DRAWN = {"pass": "one order per pass over the test data", "batch": "a new order for every batch"}


def interval_text(score: Estimate) -> str:
    """ "73.4-75.6", or "-" without an interval."""
    return NONE if score.low is None or score.high is None else f"{score.low:.1f}-{score.high:.1f}"


def number_text(value: float | None) -> str:
    """The value with two decimals, or "-" for `None`."""
    return NONE if value is None else f"{value:.2f}"


def unique(texts: Iterable[str]) -> tuple[str, ...]:
    """The texts, each once, in their order."""
    return tuple(dict.fromkeys(texts))


def describe_data(study: Study) -> str:
    """The study's data and model in a few words, from the finished runs or else the recipe."""
    # The data of the runs, because the recipe may have changed since.
    specs = sorted({result.data.spec for _, result in study.runs})
    data = " and ".join(specs) or study.settings.data
    return printable(f"{data.replace('digit-pairs', 'digit pairs', 1)} with {study.settings.model}")


# --- the main table ------------------------------------------------------------------------------


def main_table(summary: Summary) -> str:
    """A row per arm with means and intervals, and below it the paper's numbers in italics."""

    def text(cell: ScoreCell | None) -> str:
        if cell is None:
            return NONE
        sd = cell.top1.sd_orders
        spread = "" if sd is None else f" &plusmn;{sd:.1f}"
        return f"**{cell.top1.mean:.1f}**{spread} ({interval_text(cell.top1)})"

    rows = []
    for arm in summary.arms:
        cells = (summary.cell(arm, mode, kept=kept) for mode, kept in summary.columns)
        rows.append([literal(summary.name(arm)), *map(text, cells)])
        numbers = [summary.paper(arm, mode, kept=kept) for mode, kept in summary.columns]
        if any(numbers):
            shown = ("" if n is None else f"*{n.text}*".replace("+-", "&plusmn;") for n in numbers)
            rows.append(["*the paper*", *shown])
    names = [
        mode if kept == summary.depth else f"{mode}, {kept} kept" for mode, kept in summary.columns
    ]
    return markdown_table(["", *names], rows, align="l" + "r" * len(names))


def table_notes(summary: Summary) -> str:
    """How to read the main table: its orders, intervals and the paper's numbers."""
    arms = {draw: unique(label(c.arm) for c in summary.cells if c.draw == draw) for draw in DRAWS}
    draws = [draw for draw in DRAWS if arms[draw]] or ["pass"]
    drawn = "; ".join(
        _DRAWN[draw] + f" ({', '.join(arms[draw])})" * (len(draws) > 1) for draw in draws
    )
    kept = f" Blocks that are kept: {_CHOICES[summary.choose]}." if summary.choose else ""
    images = counted_as(c.top1.effective for c in summary.cells if c.top1.kind == "images")
    return (
        f"Orders: {drawn}; +- is the standard deviation over the orders of a model. Intervals are "
        "95 %: t over the means of the models; with one model, t over its orders; with one order, "
        f"Wilson over the images, {images}.{kept} The paper's numbers ({REFERENCE}) are {SETTING}; "
        f"ours are {describe_data(summary.study)}: compare the pattern, and not the level. "
        '"~" marks what its text only describes.'
    )


def table_text(summary: Summary) -> str:
    """Means and intervals with all blocks, for a terminal, beside the paper's numbers."""
    head, rows = ["top-1 in percent"], [[summary.name(arm)] for arm in summary.arms]
    for mode, kept in summary.columns:
        if kept == summary.depth:
            head += [mode, "95 %", "the paper"]
            for row, arm in zip(rows, summary.arms, strict=True):
                cell, number = summary.cell(arm, mode), summary.paper(arm, mode, kept=kept)
                top1 = cell and (f"{cell.top1.mean:.1f}", interval_text(cell.top1))
                row += [*(top1 or ("", "")), "" if number is None else number.text.split(" +-")[0]]
    return table(head, rows, width=WIDTH)


# --- Table 1, Figures 1b and 1c ------------------------------------------------------------------


def table_1(summary: Summary) -> str:
    """The section of Table 1: every method in both order modes against the baseline."""
    head = (
        "Method", "Order", "Models", "Orders", "sd models", "To sequential baseline", "The paper's",
    )  # fmt: skip
    paper_base = summary.paper("baseline", "sequential")
    rows = []
    for arm in summary.arms:
        for mode in MODES:
            cell, number = summary.cell(arm, mode), summary.paper(arm, mode)
            if cell is None:
                continue
            gap = NONE
            if number is not None and paper_base is not None and number is not paper_base:
                gap = f"{number.value - paper_base.value:+.2f}"
            rows.append(
                (
                    label(arm), cell.mode, str(cell.top1.models), str(cell.top1.orders),
                    number_text(cell.top1.sd_models), _to_baseline(summary, cell), gap,
                )
            )  # fmt: skip
    if not rows:
        return ""
    return section(
        "Table 1: what arbitrary order costs",
        "Points of top-1. Differences to the baseline run in sequential order are what "
        "compares across data sets; they are paired over the seeds that both have. The spread "
        "over models (seeds) is given here, that over the orders of a model with the means "
        "above: the paper prints one +- without saying which.",
        grid(head, rows),
    )


def _to_baseline(summary: Summary, cell: ScoreCell) -> str:
    """Difference to the sequential baseline refined from the same model, with its interval."""
    # Arms may start from different models (CIFAR-100 refines two), each with its own baseline.
    models = {
        task.row: (task.settings.model, task.settings.method)
        for task, _ in summary.study.runs
        if task.part == "main"
    }
    model = models.get(cell.arm, (None, ""))[0]
    baseline = next((arm for arm, pair in models.items() if pair == (model, "baseline")), "")
    base = summary.cell(baseline, "sequential")
    # The baseline is not compared with itself.
    if base is None or base is cell:
        return NONE
    gap = compare(cell.model_means, base.model_means)
    interval = f" ({gap.low:+.1f} to {gap.high:+.1f})" if math.isfinite(gap.low) else ""
    return f"{gap.points:+.2f}{interval}"


def curves_section(summary: Summary, draw: DrawFigure) -> str:
    """The section of Figures 1b and 1c, for every choice of the blocks that are kept."""
    title, arms = "Figures 1b and 1c: accuracy against blocks kept", arms_drawn(summary)
    choices = [choose for choose in CHOICES if choose in {cell.choose for cell in summary.cells}]
    choices = sorted(filter(None, choices), key=lambda choose: choose != summary.choose) or [""]
    levels = sorted({cell.kept for cell in summary.cells})
    pictures, rows = [], []
    for choose in choices if arms else ():
        shown, which = replace(summary, choose=choose), _CHOICES.get(choose, "all of them")
        name = "figure1" if choose == summary.choose else f"figure1-{choose}"
        pictures.append(draw(name, f"{_CURVES} Blocks kept: {which}.", draw_figure(shown)))
        for arm in arms:
            for mode in MODES:
                curve = shown.curve(arm, mode)
                cells = {cell.kept: cell.top1 for cell in curve}
                texts = (
                    f"{cells[kept].mean:.1f} ({interval_text(cells[kept])})"
                    if kept in cells
                    else NONE
                    for kept in levels
                )
                # What no choice was made for stands once, beside the first choice.
                if cells and (choose in (summary.choose, *(cell.choose for cell in curve))):
                    rows.append((label(arm), mode, which, *texts))
    head = ("Arm", "Order", "Blocks kept", *(f"{kept} kept" for kept in levels))
    return section(
        title,
        *pictures,
        "Top-1 in percent with its 95 % interval. The paper does not say which blocks its pruned "
        "models keep." * bool(rows),
        grid(head, rows),
    )


# --- the budget, and merges ----------------------------------------------------------------------


def budget_curves(study: Study) -> dict[tuple[str, str], dict[int, Estimate]]:
    """Top-1 by number of steps for every (arm, mode) of the curves, those of the main part too."""
    arms = dict.fromkeys(run.curve for run in study.plan.runs if run.part == "budget")
    rows: dict[tuple[str, str], dict[int, list[ScoreRow]]] = {
        (arm, mode): {} for arm in arms for mode in MODES
    }
    for task, result in study.runs:
        for row in result.rows:
            # Scores of pruned models are not part of the curve.
            if (
                row.choose == ""
                and row.parallel == row.passes == 1
                and (task.curve, row.mode) in rows
            ):
                rows[task.curve, row.mode].setdefault(result.steps, []).append(row)
    return {
        key: {steps: estimate_of(group) for steps, group in sorted(lengths.items())}
        for key, lengths in rows.items()
        if lengths
    }


def budget_section(summary: Summary, draw: DrawFigure) -> str:
    """The section of the curve; "" if the study has scores of fewer than two lengths."""
    curves = budget_curves(summary.study)
    lengths = sorted({steps for curve in curves.values() for steps in curve})
    if len(lengths) < 2:
        return ""

    def cell(score: Estimate | None) -> str:
        return (
            NONE if score is None else f"{score.mean:.1f} ({interval_text(score)}; {score.models})"
        )

    steps = [f"{count:,} steps" for count in lengths]
    rows = [
        (label(arm), mode, *(cell(curve.get(n)) for n in lengths))
        for (arm, mode), curve in curves.items()
    ]
    named = _positions(summary, lengths)
    return section(
        "Budget: how much of the gap is training",
        draw(
            "budget",
            "Top-1 accuracy against optimiser steps (logarithmic), 95 % intervals over models.",
            draw_budget(curves, summary),
        ),
        grid(("Arm", "Order", *steps), rows),
        "Top-1 in percent, 95 % interval, number of models.",
        grid(("Arm", "Named by", *steps), named),
        "The position of a block, named right in percent of (image, block, position)."
        * bool(named),
    )


def _positions(summary: Summary, lengths: Sequence[int]) -> list[tuple[str, ...]]:
    """How often the position is predicted correctly at each length, if analysed."""
    by_model = (
        result.facts.get("sources", {})
        for task, result in summary.study.analyses
        if task.kind == "position"
    )
    rows = []
    sources = unique(source for each in by_model for source in each)
    for arm in unique(run.curve for run in summary.study.plan.runs):
        labels = summary.lengths(arm)
        for source in sources:
            path = ("sources", source, "accuracy")
            shares = [summary.fact("position", labels.get(n, ""), path=path) for n in lengths]
            # A single length is no curve; its number is in the analysis itself.
            if sum(share is not None for share in shares) > 1:
                rows.append((label(arm), source, *map(number_text, shares)))
    return rows


def merging_section(summary: Summary, draw: DrawFigure) -> str:
    """Table 2 and Figure 5; "" if no merging is done."""
    rows, dots = [], []
    for task, result in summary.study.mergings:
        arm = task.arm
        for group in group_rows(result.rows).values():
            first = group[0]
            words = (_KINDS[first.kind], "" if first.kind == "donor" else first.name)
            name = f"{label(arm)}: {', '.join(filter(None, words))}"
            rows.append((name, *_merging_cells(arm, group)))
            values = [mean(scores) for scores in by_model(group).values()]
            dots.append((arm, f"{name}{first.ends and f', ends: {first.ends}'}", values))
    if not rows:
        return ""
    return section(
        "Table 2 and Figure 5: merges, soups and ensembles",
        "The models of an arm differ in their seed alone. A single model's score is its mean over "
        "the drawn orders, so its spread is over models; a merge has one order, so the spread of "
        "merges is over merges and orders together, as in the paper. The greedy soup is chosen on "
        "held-out data.",
        draw(
            "figure5",
            "Every merge is one dot, none is left out; beside them the models that the blocks came "
            "from, the soups and the ensembles. Lines: means.",
            draw_merges(dots, summary),
        ),
        grid(_MERGES_HEAD, rows),
    )


def _merging_cells(arm: str, rows: Sequence[MergingRow]) -> tuple[str, ...]:
    first, top1, top5 = rows[0], score_of(rows), score_of(rows, "top5")
    # The paper reports one variant of each kind, so only our main variant has a counterpart.
    paper = next((p for p in MERGES if (p.kind, p.arm) == (first.kind, arm) and first.main), None)
    numbers: tuple[str, ...] = (NONE, NONE, NONE)
    if paper is not None:
        pairs = ((paper.top1, paper.top1_sd), (paper.top5, paper.top5_sd))
        texts = [f"{top:.2f}" + ("" if sd is None else f" +-{sd:.2f}") for top, sd in pairs]
        numbers = (*texts, f"{top1.mean - paper.top1:+.2f}")
    # A soup or an ensemble is one model: only its orders spread.
    sd1, sd5 = (number_text(s.sd_models if s.models > 1 else s.sd_orders) for s in (top1, top5))
    return (
        first.mode, first.ends or NONE, str(top1.models), f"{top1.mean:.2f}", sd1,
        f"{top1.least:.2f}", f"{top1.most:.2f}", interval_text(top1), f"{top5.mean:.2f}", sd5,
        *numbers,
    )  # fmt: skip


# --- settings ------------------------------------------------------------------------------------


def settings_table(study: Study) -> str:
    """The settings of the recipe: those of all arms, then those of each."""
    recipe = study.settings

    def words(fit: Mapping[str, Any]) -> str:
        return ", ".join(f"{name} {json.dumps(value)}" for name, value in fit.items()) or NONE

    own = ((arm.label, arm.method, words(arm.fit)) for arm in recipe.arms)
    return grid(("Arm", "Method", "Settings"), [("all", NONE, words(recipe.fit)), *own])
