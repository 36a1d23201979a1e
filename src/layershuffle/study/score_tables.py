"""Sections on scores beside the main table: by the choice of kept blocks, in rounds and passes, and
the table of all scores.

Pure: from `Summary` to sections of the report and their figures. A page shows every number once:
those of the main table are not repeated here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from layershuffle.plotting import INK, RULE, new_figure, style_axes
from layershuffle.results import CHOICES, MODES
from layershuffle.study.figures import STYLES, arm_style, draw_figure, error_bars, too_many_arms
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

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_MOST_ARMS = 4  # panels in a row, lines in a panel of rounds; the tables have all arms
_SIZE = 4.4  # inches of a panel


# --- the choice of kept blocks, and all scores ----------------------------------------------------


def choices_table(summary: Summary) -> Section | None:
    """A section on the choice of kept blocks: random, spaced, first, last (Figures 1b, 1c)."""
    choices = [choose for choose in CHOICES if choose in {c.choose for c in summary.cells} - {""}]
    if len(choices) < 2:
        return None
    levels = sorted({cell.kept for cell in summary.cells if cell.choose not in ("", "random")})
    cells = [cell for cell in summary.cells if not _in_main_table(summary, cell)]
    scores = {(c.arm, c.mode, c.choose, c.kept): _text(c) for c in cells}
    rows = []
    for arm in summary.arms:
        for mode in MODES:
            for choose in choices:
                texts = [scores.get((arm, mode, choose, kept), NONE) for kept in levels]
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


# --- rounds and repeated passes, which the paper does not have ------------------------------------


def rounds_section(summary: Summary) -> Section | None:
    """A section on accuracy by the number of rounds, and by blocks alive and passes.

    `None` for a study that scored one block after the other, each once.
    """
    tables = (_rounds_table(summary), _passes_table(summary))
    if not any(table.rows for table in tables):
        return None
    pictures = []
    is_drawn = len(summary.arms) <= _MOST_ARMS
    if is_drawn and tables[0].rows:
        pictures.append(
            Picture(
                file="rounds",
                caption="Accuracy against the number of rounds that all blocks run in.",
                figure=draw_rounds(summary),
            )
        )
    if is_drawn and tables[1].rows:
        pictures.append(
            Picture(
                file="passes",
                caption="Accuracy against blocks alive in arbitrary order, once and again.",
                figure=draw_passes(summary),
            )
        )
    return Section(
        title="Blocks side by side, and blocks that run again",
        sentences=(
            "Top-1 in percent with its 95 % interval. Blocks of a round read the same state, and "
            "what they add to it is added up; a pass runs the blocks that are kept once. The paper "
            "runs one block after the other, each once.",
        ),
        pictures=tuple(pictures),
        tables=tuple(table for table in tables if table.rows),
    )


def in_rounds(summary: Summary, arm: str, *, mode: str) -> tuple[ScoreCell, ...]:
    """The cells of an arm with all blocks in one pass, by number of rounds, descending."""
    cells = [
        cell
        for cell in (*summary.cells, *summary.others)
        if (cell.arm, cell.mode, cell.passes) == (arm, mode, 1)
        and (cell.kept, cell.choose, cell.draw) == (summary.depth, "", "pass")
    ]
    return tuple(sorted(cells, key=lambda cell: -cell.rounds))


def in_passes(summary: Summary, arm: str, *, passes: int) -> tuple[ScoreCell, ...]:
    """The cells of an arm in arbitrary order, one block after the other, by blocks kept."""
    cells = [
        cell
        for cell in (*summary.cells, *summary.others)
        if (cell.arm, cell.mode, cell.passes) == (arm, "arbitrary", passes)
        and (cell.parallel, cell.draw) == (1, "pass")
        and cell.choose in ("", "random")
    ]
    # "kept:DEPTH" and the plain mode have the same orders, so they are one point.
    by_kept = {cell.kept: cell for cell in cells}
    return tuple(by_kept[kept] for kept in sorted(by_kept, reverse=True))


def _all_passes(summary: Summary) -> list[int]:
    """The numbers of passes in the study; empty if no block ran more than once."""
    again = {cell.passes for cell in summary.others if cell.parallel == 1} - {1}
    return [1, *sorted(again)] if again else []


def _rounds_table(summary: Summary) -> Table:
    curves = {
        (arm, mode): cells
        for arm in summary.arms
        for mode in MODES
        if len(cells := in_rounds(summary, arm, mode=mode)) > 1
    }
    counts = sorted({cell.rounds for cells in curves.values() for cell in cells}, reverse=True)
    rows = []
    for (arm, mode), cells in curves.items():
        texts = {cell.rounds: _text(cell) for cell in cells}
        rows.append((label(arm), mode, *(texts.get(count, NONE) for count in counts)))
    return Table(
        title="All blocks, in so many rounds",
        head=("Arm", "Order", *(f"{count} rounds" if count > 1 else "1 round" for count in counts)),
        rows=tuple(rows),
        numbers=True,
    )


def _passes_table(summary: Summary) -> Table:
    passes, rows = _all_passes(summary), []
    for arm in summary.arms:
        by_kept: dict[int, dict[int, str]] = {}
        for count in passes:
            for cell in in_passes(summary, arm, passes=count):
                by_kept.setdefault(cell.kept, {})[count] = _text(cell)
        rows += [
            (label(arm), str(kept), *(texts.get(count, NONE) for count in passes))
            for kept, texts in by_kept.items()
            if len(texts) > 1
        ]
    return Table(
        title="Blocks alive in arbitrary order, run so often",
        head=("Arm", "Blocks", *(_times(count) for count in passes)),
        rows=tuple(rows),
        numbers=True,
    )


def _times(passes: int) -> str:
    return {1: "once", 2: "twice"}.get(passes, f"{passes} times")


def _text(cell: ScoreCell) -> str:
    return f"{cell.top1.mean:.1f} ({interval_text(cell.top1)})"


def draw_rounds(summary: Summary) -> Figure:
    """A line per arm over the number of rounds, which decreases to the right."""
    figure = new_figure(_SIZE * 1.5, _SIZE)
    axes = figure.subplots()
    counts: set[int] = set()
    for arm in summary.arms:
        cells = in_rounds(summary, arm, mode="arbitrary")
        counts |= {cell.rounds for cell in cells}
        _line(
            axes,
            cells,
            [cell.rounds for cell in cells],
            style=arm_style(summary, arm),
            name=label(arm),
        )
    axes.set_xscale("log", base=2)
    axes.set_xticks(sorted(counts), [str(count) for count in sorted(counts)], minor=False)
    axes.minorticks_off()
    axes.invert_xaxis()
    axes.set_xlabel(f"rounds of all {summary.depth} blocks", color=INK)
    _finish(axes, "Arbitrary order, blocks side by side")
    return figure


def draw_passes(summary: Summary) -> Figure:
    """A panel per arm: accuracy against blocks alive, a line per number of passes."""
    arms = summary.arms
    figure = new_figure(_SIZE * max(1, len(arms)) * 0.75, _SIZE)
    panels = figure.subplots(1, len(arms), sharey=True, squeeze=False)[0]
    for axes, arm in zip(panels, arms, strict=True):
        for index, count in enumerate(_all_passes(summary)):
            cells = in_passes(summary, arm, passes=count)
            _line(
                axes, cells, [cell.kept for cell in cells], style=STYLES[index], name=_times(count)
            )
        axes.set_xlabel(f"blocks alive (of {summary.depth})", color=INK)
        _finish(axes, label(arm))
    return figure


def _line(
    axes: Axes,
    cells: Sequence[ScoreCell],
    places: Sequence[int],
    *,
    style: tuple[str, str, str],
    name: str,
) -> None:
    if not cells:
        return
    colour, marker, dash = style
    axes.errorbar(
        places,
        [cell.top1.mean for cell in cells],
        yerr=error_bars([cell.top1 for cell in cells]),
        color=colour,
        marker=marker,
        linestyle=dash,
        markersize=5.5,
        linewidth=1.6,
        capsize=2.5,
        label=name,
    )


def _finish(axes: Axes, title: str) -> None:
    axes.set_ylim(-2, 102)
    style_axes(axes, title)
    axes.set_ylabel("top-1 accuracy (%)", color=INK)
    axes.grid(axis="y", color=RULE, linewidth=0.8)
    axes.set_axisbelow(True)
    legend = axes.legend(frameon=False, loc="lower left", fontsize=8.5)
    for text in legend.get_texts():
        # matplotlib would read a "$" in the name of an arm as mathematics.
        text.set(color=INK, parse_math=False)
