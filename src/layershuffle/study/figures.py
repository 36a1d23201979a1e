"""Accuracy against blocks kept: the paper's Figures 1b (sequential) and 1c (arbitrary).

The paper's own axis counts removed blocks in its caption and kept blocks in its text; ours always
counts blocks kept. The same summary gives the same bytes.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from html import escape
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Literal

from layershuffle.plotting import (
    GROUND,
    INK,
    RULE,
    figure_bytes,
    legend_below,
    new_figure,
    style_axes,
)
from layershuffle.stats import Estimate
from layershuffle.study.paper import PaperNumber
from layershuffle.study.summary import Column, ScoreCell, Summary, label

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_Dash = Literal["-", "--", "-.", ":"]
# One style per arm, in the order of the plan: colour, marker and dash differ together, so no reader
# depends on colour. Mostly Okabe and Ito's colours, without the pale ones.
STYLES: tuple[tuple[str, str, _Dash], ...] = (
    ("#5d6975", "o", "--"),
    ("#0072b2", "s", "-"),
    ("#d55e00", "^", "-."),
    ("#00875f", "D", "-"),
    ("#a0397e", "v", ":"),
    ("#8a6d00", "P", "--"),
    ("#007f99", "X", "-."),
    ("#6a4fb3", "*", "-"),
    ("#b3400f", "<", ":"),
    ("#3d6b1f", ">", "--"),
)
PANELS = {
    "sequential": "Sequential order (the paper's Figure 1b)",
    "arbitrary": "Arbitrary order (the paper's Figure 1c)",
}
ARMS_PER_PANEL = 5  # more lines cannot be told apart
_MOST_ARMS = 3 * ARMS_PER_PANEL
# Horizontal offsets in blocks, between the outermost arms of a panel and between an arm's point and
# the paper's, which separate intervals of near values. Every point is within 0.2 of its number.
_DODGE, _PAPER_SHIFT = 0.3, 0.04


def draw_figure(summary: Summary, modes: Sequence[str] = tuple(PANELS)) -> Figure:
    """A panel per mode, side by side, with a line with 95 % intervals per arm.

    A panel has at most `ARMS_PER_PANEL` arms; further arms get more rows, each with a legend. The
    paper's points are hollow, beside ours; "~" marks those that its text only describes.
    """
    alone = len(modes) == 1
    rows = panels_of(arms_drawn(summary)) or [()]
    figure = new_figure(4.6 if alone else 9.2, 4.4 * len(rows))
    for part, arms in zip(figure.subfigures(len(rows), 1, squeeze=False)[:, 0], rows, strict=True):
        part.set_facecolor("none")
        # One scale for all panels, because their heights are compared.
        panels = part.subplots(1, len(modes), sharey=True, squeeze=False)[0]
        for axes, mode in zip(panels, modes, strict=True):
            _draw_panel(axes, summary, mode, arms)
        panels[0].set_ylabel("top-1 accuracy (%)", color=INK)
        legend_below(part, _legend_entries(panels, summary, arms))
    return figure


def arms_drawn(summary: Summary) -> tuple[str, ...]:
    """The arms with a line: those scored with missing blocks, or all if there are none."""
    curves = {
        arm: [cell for mode in PANELS for cell in summary.curve(arm, mode)] for arm in summary.arms
    }
    pruned = (a for a, cells in curves.items() if any(c.kept < summary.depth for c in cells))
    return tuple(pruned) or tuple(arm for arm, cells in curves.items() if cells)


def too_many_arms(summary: Summary) -> str:
    """The reason why the study has no figure of its arms; "" if it has one.

    Lines cannot be compared over more than three rows of panels.
    """
    count = len(arms_drawn(summary))
    if count <= _MOST_ARMS:
        return ""
    return (
        f"{count} arms are too many lines for a figure: the table above has their numbers, and "
        "results.csv every score."
    )


def panels_of(arms: Sequence[str]) -> list[tuple[str, ...]]:
    """The arms, split evenly over as few panels as `ARMS_PER_PANEL` allows."""
    count = -(-len(arms) // ARMS_PER_PANEL)
    bounds = [len(arms) * panel // max(1, count) for panel in range(count + 1)]
    return [tuple(arms[first:last]) for first, last in pairwise(bounds)]


def inline_svg(summary: Summary, mode: str) -> str:
    """One panel as an `<svg>` element for an HTML page, described for screen readers.

    Ids contain the mode, so a page may have several. Colours are the page's variables
    `--ink`, `--rule`, `--ground` and `--arm-0`, ... with the printed colours behind them.
    """
    figure = draw_figure(summary, [mode])
    figure.patch.set_alpha(0.0)
    text = figure_bytes(figure, "svg").decode("utf-8")
    text = text[text.index("<svg") :]
    # matplotlib's style rules would apply to every element of the page.
    text = re.sub(r" <defs>\s*<style.*?</style>\s*</defs>\n", "", text, flags=re.DOTALL)
    text = re.sub(r'\bid="', f'id="{mode}-', text)
    text = re.sub(r'xlink:href="#', f'href="#{mode}-', text)
    text = re.sub(r"url\(#", f"url(#{mode}-", text)
    # Only in the opening tag, because shapes have a width and a height as well.
    end = text.index(">") + 1
    text = re.sub(r' (xmlns(:xlink)?|version|width|height)="[^"]*"', "", text[:end]) + text[end:]
    # The page has other values of its variables for a dark theme.
    for colour, name in _variables().items():
        text = text.replace(colour, f"var(--{name}, {colour})")
    words = escape(describe_panel(summary, mode), quote=True)
    return text.replace("<svg", f'<svg role="img" aria-label="{words}"', 1)


def describe_panel(summary: Summary, mode: str) -> str:
    """A description of the panel as text, with the numbers of every line."""
    parts = [
        f"{label(arm)}: " + ", ".join(f"{cell.top1.mean:.1f} % with {cell.kept}" for cell in cells)
        for arm in arms_drawn(summary)
        if (cells := summary.curve(arm, mode))
    ]
    return f"Top-1 accuracy against blocks kept, {mode} order. {'; '.join(parts) or 'No data'}."


def arm_style(summary: Summary, arm: str) -> tuple[str, str, _Dash]:
    """Colour, marker and dash of an arm."""
    turn, index = divmod(summary.arms.index(arm), len(STYLES))
    # Repeated colours have other markers and dashes.
    _, marker, dash = STYLES[(index + turn) % len(STYLES)]
    return STYLES[index][0], marker, dash


def _draw_panel(axes: Axes, summary: Summary, mode: str, arms: Sequence[str]) -> None:
    for place, arm in enumerate(arms):
        cells = summary.curve(arm, mode)
        if cells:
            shift = _DODGE * (place / (len(arms) - 1) - 0.5) if len(arms) > 1 else 0.0
            _draw_arm(axes, summary, cells, shift)
    ticks = sorted({cell.kept for cell in summary.cells})
    # More than a dozen labels would overlap.
    axes.set_xticks(ticks if len(ticks) <= 12 else ticks[:: (len(ticks) + 11) // 12])
    axes.set(xlim=(min(ticks, default=1) - 0.6, summary.depth + 0.6), ylim=(-2, 102))
    axes.set_xlabel(f"blocks kept (of {summary.depth})", color=INK)
    style_axes(axes, PANELS.get(mode, mode))
    axes.grid(axis="y", color=RULE, linewidth=0.8)
    axes.set_axisbelow(True)


def _draw_arm(axes: Axes, summary: Summary, cells: Sequence[ScoreCell], shift: float) -> None:
    arm = cells[0].arm
    colour, marker, dash = arm_style(summary, arm)
    axes.errorbar(
        [cell.kept + shift for cell in cells],
        [cell.top1.mean for cell in cells],
        yerr=error_bars([cell.top1 for cell in cells]),
        color=colour,
        marker=marker,
        linestyle=dash,
        markersize=4.5,
        linewidth=1.4,
        capsize=2,
        label=arm,
    )
    for cell in cells:
        number = summary.paper(arm, Column(cell.mode, cell.kept))
        if number is not None:
            _draw_paper(axes, number, cell.kept + shift + _PAPER_SHIFT, style=(colour, marker))


def _draw_paper(axes: Axes, number: PaperNumber, x: float, *, style: tuple[str, str]) -> None:
    """Draw a hollow point, or a bar with its middle for a range."""
    half = number.high - number.value
    axes.errorbar(
        [x],
        [number.value],
        yerr=[half] if half else None,
        color=style[0],
        marker=style[1],
        markerfacecolor=GROUND,
        markersize=5.5,
        linestyle="none",
        capsize=2.5,
        label=f"paper {number.method}",
    )
    if number.approximate:
        place = (x, number.value)
        axes.annotate("~", place, (4, -3), textcoords="offset points", color=style[0])


def error_bars(scores: Sequence[Estimate]) -> tuple[list[float], list[float]]:
    """The lengths of the intervals below and above the means; 0 without an interval."""
    return (
        [0.0 if score.low is None else score.mean - score.low for score in scores],
        [0.0 if score.high is None else score.high - score.mean for score in scores],
    )


def _legend_entries(
    panels: Sequence[Axes], summary: Summary, arms: Sequence[str]
) -> list[tuple[Any, str]]:
    from matplotlib.lines import Line2D

    # An unfinished study has arms without a line in any panel.
    drawn = {str(box.get_label()) for axes in panels for box in axes.containers}
    entries: list[tuple[Any, str]] = []
    for arm in arms:
        if arm in drawn:
            colour, marker, dash = arm_style(summary, arm)
            line = Line2D([], [], color=colour, marker=marker, linestyle=dash)
            entries.append((line, label(arm)))
    if any(name.startswith("paper ") for name in drawn):
        mark = Line2D([], [], color=INK, marker="o", markerfacecolor=GROUND, linestyle="none")
        entries.append((mark, "hollow: the paper (~ from its words)"))
    return entries


def _variables() -> dict[str, str]:
    arms = {colour: f"arm-{index}" for index, (colour, _, _) in enumerate(STYLES)}
    return {INK: "ink", RULE: "rule", GROUND: "ground", **arms}
