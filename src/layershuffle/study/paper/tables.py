"""The report's tables, as Markdown, and the main table for the terminal; all from a `Summary`."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from layershuffle.ground.rows import (
    CHOICES,
    DRAWS,
    MODES,
    MergingRow,
    by_model,
    group_rows,
    score_of,
)
from layershuffle.ground.stats import Estimate, compare, mean
from layershuffle.ground.text import markdown_table, printable, table
from layershuffle.study.paper.figures import (
    arms_drawn,
    draw_figure_1,
    draw_figure_5,
)
from layershuffle.study.paper.markdown import grid, literal, section
from layershuffle.study.paper.numbers import MERGES, REFERENCE, SETTING
from layershuffle.study.paper.summary import ScoreCell, Summary, label
from layershuffle.study.store import Study

if TYPE_CHECKING:
    from matplotlib.figure import Figure

DrawFigure = Callable[[str, str, "Figure"], str]
"""Writes a figure under a name; with its caption it becomes the Markdown that shows it."""
WIDTH = 100
NONE = "-"
_KINDS = {"donor": "single models", "merge": "merges", "soup": "soup", "ensemble": "ensemble"}
_MERGES_HEAD = (
    "Models",
    "Order",
    "Stem and head",
    "Number",
    "Top-1",
    "sd",
    "Lowest",
    "Highest",
    "95 %",
    "Top-5",
    "sd top-5",
    "Paper: top-1",
    "Paper: top-5",
    "Ours - paper",
)
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
    """The ends of the 95 % interval, as in 73.4-75.6; "-" without an interval."""
    if score.low is None or score.high is None:
        return NONE
    return f"{score.low:.1f}-{score.high:.1f}"


def number_text(value: float | None) -> str:
    """The value with two decimals, or "-" for `None`."""
    return NONE if value is None else f"{value:.2f}"


def unique(texts: Iterable[str]) -> tuple[str, ...]:
    """The texts, each once, in their order."""
    return tuple(dict.fromkeys(texts))


def describe_data(study: Study) -> str:
    """The study's data and model in a few words."""
    data = study.settings.data.replace("digit-pairs", "digit pairs", 1)
    return printable(f"{data} with {study.settings.model}")


# --- the table beside the paper's -----------------------------------------------------------------


def main_table(summary: Summary) -> str:
    """A row per arm with means and intervals, and below it the paper's numbers in italics."""
    names = [""]
    for mode, kept in summary.columns:
        names.append(mode if kept == summary.depth else f"{mode}, {kept} kept")
    rows = []
    for arm in summary.arms:
        ours = [literal(summary.name(arm))]
        papers = ["*the paper*"]
        has_paper = False
        for mode, kept in summary.columns:
            ours.append(_cell_text(summary.cell(arm, mode, kept=kept)))
            number = summary.paper(arm, mode, kept=kept)
            if number is None:
                papers.append("")
            else:
                papers.append(f"*{number.text}*".replace("+-", "&plusmn;"))
                has_paper = True
        rows.append(ours)
        if has_paper:
            rows.append(papers)
    return markdown_table(names, rows, align="l" + "r" * len(summary.columns))


def _cell_text(cell: ScoreCell | None) -> str:
    """Mean, spread over the orders of a model, and interval; "-" for what was not measured."""
    if cell is None:
        return NONE
    sd = cell.top1.sd_orders
    spread = "" if sd is None else f" &plusmn;{sd:.1f}"
    return f"**{cell.top1.mean:.1f}**{spread} ({interval_text(cell.top1)})"


def table_notes(summary: Summary) -> str:
    """How to read the main table: its orders, intervals and the paper's numbers."""
    arms: dict[str, list[str]] = {}
    for cell in summary.cells:
        arms.setdefault(cell.draw, []).append(label(cell.arm))
    draws = [draw for draw in DRAWS if draw in arms] or ["pass"]
    if len(draws) == 1:
        drawn = _DRAWN[draws[0]]
    else:
        parts = []
        for draw in draws:
            parts.append(f"{_DRAWN[draw]} ({', '.join(unique(arms[draw]))})")
        drawn = "; ".join(parts)
    kept = f" Blocks that are kept: {_CHOICES[summary.choose]}." if summary.choose else ""
    return (
        f"Orders: {drawn}; +- is the standard deviation over the orders of a model. Intervals are "
        "95 %: t over the means of the models; with one model, t over its orders; with one order, "
        f"Wilson over the images, of which those that are wrong together count as fewer.{kept} "
        f"The paper's numbers ({REFERENCE}) are {SETTING}; ours are "
        f"{describe_data(summary.study)}: compare the pattern, and not the level. "
        '"~" marks what its text only describes.'
    )


def table_text(summary: Summary) -> str:
    """Means and intervals with all blocks, for a terminal, beside the paper's numbers."""
    modes = []
    for mode, kept in summary.columns:
        if kept == summary.depth:
            modes.append(mode)
    head = ["top-1 in percent"]
    for mode in modes:
        head += [mode, "95 %", "the paper"]
    rows = []
    for arm in summary.arms:
        row = [summary.name(arm)]
        for mode in modes:
            cell = summary.cell(arm, mode)
            if cell is None:
                row += ["", ""]
            else:
                row += [f"{cell.top1.mean:.1f}", interval_text(cell.top1)]
            number = summary.paper(arm, mode)
            row.append("" if number is None else number.text.partition(" +-")[0])
        rows.append(row)
    return table(head, rows, width=WIDTH)


# --- Table 1, Figures 1b and 1c ------------------------------------------------------------------


def table_1(summary: Summary) -> str:
    """The section of Table 1: every method in both order modes against the baseline."""
    paper_base = summary.paper("baseline", "sequential")
    rows = []
    for arm in summary.arms:
        base = _baseline(summary, arm)
        for mode in MODES:
            cell = summary.cell(arm, mode)
            if cell is None:
                continue
            number = summary.paper(arm, mode)
            papers_gap = NONE
            if number is not None and paper_base is not None and number is not paper_base:
                papers_gap = f"{number.value - paper_base.value:+.2f}"
            row = (
                summary.name(arm),
                mode,
                str(cell.top1.models),
                str(cell.top1.orders),
                number_text(cell.top1.sd_models),
                _difference_text(cell, base),
                papers_gap,
            )
            rows.append(row)
    if not rows:
        return ""
    head = (
        "Method",
        "Order",
        "Models",
        "Orders",
        "sd models",
        "To sequential baseline",
        "The paper's",
    )
    return section(
        "Table 1: what arbitrary order costs",
        "Points of top-1. Differences to the baseline run in sequential order are what "
        "compares across data sets; they are paired over the seeds that both have. An arm is "
        "compared with the baseline of as many steps, or with the only one that there is. The "
        "spread over models (seeds) is given here, that over the orders of a model with the means "
        "above: the paper prints one +- without saying which.",
        grid(head, rows),
    )


def _baseline(summary: Summary, arm: str) -> ScoreCell | None:
    """The baseline in sequential order that an arm is compared with; `None` if none is its own.

    It started from the same model as the arm (CIFAR-100 refines two), and was trained for as many
    steps, or is the only one. It follows from the recipe, so that a difference does not change
    while a study runs.
    """
    settings = {}
    for task in summary.study.plan.runs:
        settings[task.row] = task.settings
    own = settings[arm]
    baselines = []
    as_long = []
    for other, candidate in settings.items():
        if candidate.method == "baseline" and candidate.model == own.model:
            baselines.append(other)
            if (candidate.steps, candidate.epochs) == (own.steps, own.epochs):
                as_long.append(other)
    fitting = as_long or baselines
    return summary.cell(fitting[0], "sequential") if len(fitting) == 1 else None


def _difference_text(cell: ScoreCell, base: ScoreCell | None) -> str:
    """The difference of two cells with its 95 % interval; a baseline has none to itself."""
    if base is None or base is cell:
        return NONE
    gap = compare(cell.model_means, base.model_means)
    interval = f" ({gap.low:+.1f} to {gap.high:+.1f})" if math.isfinite(gap.low) else ""
    return f"{gap.points:+.2f}{interval}"


def curves_section(summary: Summary, draw: DrawFigure) -> str:
    """The section of Figures 1b and 1c, for every choice of the blocks that are kept."""
    arms = arms_drawn(summary)
    if not arms:
        return ""
    measured = set()
    kept_blocks = set()
    for cell in summary.cells:
        measured.add(cell.choose)
        kept_blocks.add(cell.kept)
    choices = [summary.choose]
    for choose in CHOICES:
        if choose in measured and choose not in ("", summary.choose):
            choices.append(choose)
    levels = sorted(kept_blocks)
    pictures = []
    rows = []
    for choose in choices:
        shown = replace(summary, choose=choose)
        which = _CHOICES.get(choose, "all of them")
        name = "figure1" if choose == summary.choose else f"figure1-{choose}"
        pictures.append(draw(name, f"{_CURVES} Blocks kept: {which}.", draw_figure_1(shown)))
        for arm in arms:
            for mode in MODES:
                curve = shown.curve(arm, mode)
                # What no choice was made for stands once, beside the first choice.
                is_chosen = any(cell.choose == choose for cell in curve)
                if curve and (is_chosen or choose == summary.choose):
                    rows.append((summary.name(arm), mode, which, *_curve_texts(curve, levels)))
    head = ("Arm", "Order", "Blocks kept", *(f"{kept} kept" for kept in levels))
    return section(
        "Figures 1b and 1c: accuracy against blocks kept",
        *pictures,
        "Top-1 in percent with its 95 % interval. The paper does not say which blocks its pruned "
        "models keep.",
        grid(head, rows),
    )


def _curve_texts(curve: Sequence[ScoreCell], levels: Sequence[int]) -> list[str]:
    """Mean and interval for every number of blocks; "-" where the line has no point."""
    cells = {cell.kept: cell.top1 for cell in curve}
    texts = []
    for kept in levels:
        if kept in cells:
            texts.append(f"{cells[kept].mean:.1f} ({interval_text(cells[kept])})")
        else:
            texts.append(NONE)
    return texts


# --- Table 2 and Figure 5 -------------------------------------------------------------------------


def merging_section(summary: Summary, draw: DrawFigure) -> str:
    """The section of Table 2 and Figure 5; "" if no merging is done."""
    rows = []
    dots = []
    for task, result in summary.study.mergings:
        for group in group_rows(result.rows).values():
            first = group[0]
            name = f"{summary.name(task.arm)}: {_KINDS[first.kind]}"
            # The name of a single model is its directory.
            if first.kind != "donor" and first.name:
                name += f", {first.name}"
            rows.append((name, *_merging_cells(task.arm, group)))
            top1 = list(map(mean, by_model(group).values()))
            ends = f", ends: {first.ends}" if first.ends else ""
            dots.append((task.arm, f"{name}{ends}", top1))
    if not rows:
        return ""
    return section(
        "Table 2 and Figure 5: merges, soups and ensembles",
        "The models of an arm differ in their seed alone. In a row of several models, sd, lowest, "
        "highest and 95 % are over the models, each the mean over its orders; in a row of one they "
        "are over its orders, and with one order 95 % is over images. A merge has one order, so "
        "the spread of merges is over merges and orders together, as in the paper; their 95 % is "
        "that of more merges of these donors. The greedy soup is chosen on held-out data.",
        draw(
            "figure5",
            "Every merge is one dot, none is left out; beside them the models that the blocks came "
            "from, the soups and the ensembles. Lines: means.",
            draw_figure_5(dots, summary),
        ),
        grid(_MERGES_HEAD, rows),
    )


def _merging_cells(arm: str, rows: Sequence[MergingRow]) -> tuple[str, ...]:
    """The cells of a group of models: its scores and the paper's, as in `_MERGES_HEAD`."""
    first = rows[0]
    top1 = score_of(rows)
    top5 = score_of(rows, "top5")
    values = list(map(mean, by_model(rows).values()))
    if len(values) == 1:
        values = [row.top1 for row in rows]
    paper_top1 = paper_top5 = gap = NONE
    for number in MERGES:
        # The paper reports one variant of each kind, so only our main variant has a counterpart.
        if first.main and (number.kind, number.arm) == (first.kind, arm):
            paper_top1 = _paper_text(number.top1, number.top1_sd)
            paper_top5 = _paper_text(number.top5, number.top5_sd)
            gap = f"{top1.mean - number.top1:+.2f}"
    return (
        first.mode,
        first.ends or NONE,
        str(top1.models),
        f"{top1.mean:.2f}",
        _spread_text(top1),
        f"{min(values):.2f}",
        f"{max(values):.2f}",
        interval_text(top1),
        f"{top5.mean:.2f}",
        _spread_text(top5),
        paper_top1,
        paper_top5,
        gap,
    )


def _paper_text(mean: float, sd: float | None) -> str:
    """A number of the paper with its standard deviation, if the paper gives one."""
    return f"{mean:.2f}" if sd is None else f"{mean:.2f} +-{sd:.2f}"


def _spread_text(score: Estimate) -> str:
    """The standard deviation over models, or over orders where there is one model.

    A soup or an ensemble is one model.
    """
    return number_text(score.sd_models if score.models > 1 else score.sd_orders)


# --- settings ------------------------------------------------------------------------------------


def settings_table(study: Study) -> str:
    """The settings of the recipe: those of all arms, then those of each."""
    rows = [("all", NONE, _settings_text(study.settings.fit))]
    for arm in study.settings.arms:
        rows.append((arm.label, arm.method, _settings_text(arm.fit)))
    return grid(("Arm", "Method", "Settings"), rows)


def _settings_text(settings: Mapping[str, Any]) -> str:
    """Names and values, as in steps 2000, schedule "cosine"; "-" for none."""
    return ", ".join(f"{name} {json.dumps(value)}" for name, value in settings.items()) or NONE
