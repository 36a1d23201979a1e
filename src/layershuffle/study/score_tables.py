"""The tables of scores by the choice of kept blocks, and of all scores.

A page shows every number once: those of the main table are not repeated here.
"""

from __future__ import annotations

from dataclasses import replace

from layershuffle.results import CHOICES, MODES
from layershuffle.study.figures import draw_figure, too_many_arms
from layershuffle.study.summary import Column, ScoreCell, Summary, label
from layershuffle.study.tables import (
    NONE,
    Picture,
    Section,
    Table,
    choice_text,
    interval_text,
    number_text,
)


def choices_table(summary: Summary) -> Section | None:
    """A section on the choice of kept blocks: random, spaced, first, last (Figures 1b, 1c)."""
    choices = [choose for choose in CHOICES if choose in {c.choose for c in summary.cells} - {""}]
    if len(choices) < 2:
        return None
    levels = sorted({cell.kept for cell in summary.cells if cell.choose not in ("", "random")})
    cells = [cell for cell in summary.cells if not _in_main_table(summary, cell)]
    scores = {(c.arm, c.mode, c.choose, c.kept): c.top1 for c in cells}
    rows = []
    for arm in summary.arms:
        for mode in MODES:
            for choose in choices:
                at_level = (scores.get((arm, mode, choose, kept)) for kept in levels)
                texts = [
                    NONE if s is None else f"{s.mean:.1f} ({interval_text(s)})" for s in at_level
                ]
                if set(texts) != {NONE}:
                    rows.append((label(arm), mode, choose, *texts))
    return Section(
        title="Figures 1b and 1c: which blocks are kept",
        sentences=(
            "Top-1 in percent with its 95 % interval, beside that of blocks "
            f"{choice_text(summary.choose)} in the main table. The paper does not say which blocks "
            "its pruned models keep.",
        ),
        pictures=tuple(
            Picture(
                file=f"figure1-{choose}",
                caption=f"Accuracy against blocks kept, {choice_text(choose)}.",
                figure=draw_figure(replace(summary, choose=choose)),
            )
            for choose in choices
            # The main figure has those.
            if choose != "random" and not too_many_arms(summary)
        ),
        tables=(
            Table(
                head=("Arm", "Order", "Blocks kept", *(f"{kept} kept" for kept in levels)),
                rows=tuple(rows),
                numbers=True,
            ),
        ),
    )


def scores_table(summary: Summary) -> Table:
    """A table of every cell with all its spreads, without the numbers of the tables above."""
    head = (
        "Arm", "Order", "Kept", "Which blocks", "Drawn per", "Models", "Orders", "Images", "Top-1",
        "sd orders", "sd models", "95 %", "over", "Lowest", "Highest", "Top-5", "Cross-entropy",
    )  # fmt: skip
    levels = {cell.kept for cell in summary.cells if cell.choose not in ("", "random")}
    rows = []
    for cell in (*summary.cells, *summary.others):
        top1, above = cell.top1, _in_main_table(summary, cell)
        choices = cell.is_plain and cell.choose != "" and cell.kept in levels
        mean, interval = (
            (NONE, NONE) if above or choices else (f"{top1.mean:.2f}", interval_text(top1))
        )
        sd_models = NONE if above and cell.kept == summary.depth else number_text(top1.sd_models)
        rows.append(
            (
                label(cell.arm), cell.order, str(cell.kept), choice_text(cell.choose), cell.draw,
                str(top1.models), str(top1.orders), f"{top1.images:,}", mean,
                NONE if above else number_text(top1.sd_orders), sd_models, interval, top1.kind,
                f"{top1.least:.2f}", f"{top1.most:.2f}", f"{cell.top5.mean:.2f}",
                f"{cell.cross_entropy.mean:.4f}",
            )
        )  # fmt: skip
    return Table(
        title="Every condition, with its spreads",
        head=head,
        rows=tuple(rows),
        note='Accuracies in percent, cross-entropy in nats; sd = standard deviation; "-": in a '
        "table above, or one value alone. Lowest and highest: single orders.",
        folded=True,
        numbers=True,
    )


def _in_main_table(summary: Summary, cell: ScoreCell) -> bool:
    column = Column(cell.mode, cell.kept)
    return column in summary.columns and summary.cell(cell.arm, column) is cell
