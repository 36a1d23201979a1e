"""The figures of the report: bars of all arms, Figures 1b and 1c, Figure 5.

The paper's own axis of Figure 1 counts removed blocks in its caption and kept blocks in its text;
ours always counts blocks kept. The same summary gives the same bytes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from layershuffle.ground.plotting import (
    GROUND,
    INK,
    METHOD_STYLES,
    RULE,
    STYLES,
    Style,
    draw_legend,
    new_figure,
    style_axes,
)
from layershuffle.ground.stats import Estimate, mean
from layershuffle.study.paper.numbers import PaperNumber
from layershuffle.study.paper.summary import ScoreCell, Summary

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

PANELS = {
    "sequential": "Sequential order (the paper's Figure 1b)",
    "arbitrary": "Arbitrary order (the paper's Figure 1c)",
}
ARMS_PER_PANEL = 5  # more lines cannot be told apart
# Horizontal offsets in blocks, between the outermost arms of a panel and between an arm's point and
# the paper's, which separate intervals of near values.
_DODGE = 0.3
_PAPER_SHIFT = 0.04
_GOLDEN = 0.618  # the share of a row between one dot and the next: neighbours lie far apart


def arm_style(summary: Summary, arm: str) -> Style:
    """Colour, marker and dash of an arm, the same in every figure."""
    if arm in METHOD_STYLES:
        return METHOD_STYLES[arm]
    used = []
    arms = []
    for name in (*summary.arms, arm):
        if name in METHOD_STYLES:
            used.append(METHOD_STYLES[name])
        else:
            arms.append(name)
    others = [style for style in STYLES if style not in used]
    turn, index = divmod(arms.index(arm), len(others))
    # Repeated colours have other markers and dashes.
    _, marker, dash = others[(index + turn) % len(others)]
    return others[index][0], marker, dash


def draw_bars(summary: Summary) -> Figure:
    """Top-1 of every arm with all blocks: in order (pale) and in arbitrary order, as bars."""
    arms = [arm for arm in summary.arms if summary.means(arm, "arbitrary")]
    figure = new_figure(6.4, 0.6 + 0.42 * len(arms))
    axes = figure.subplots()
    style_axes(axes)
    for place, arm in enumerate(arms):
        for mode, shift, alpha, words in (
            ("sequential", -0.2, 0.35, " in order"),
            ("arbitrary", 0.2, 1.0, ""),
        ):
            top1 = summary.means(arm, mode)
            if top1:
                height = place + shift
                width = mean(top1)
                colour = arm_style(summary, arm)[0]
                axes.barh(height, width, height=0.36, color=colour, alpha=alpha)
                axes.text(width + 1, height, f"{width:.1f}{words}", va="center", fontsize=8)
    axes.set_yticks(range(len(arms)), [summary.name(arm) for arm in arms], parse_math=False)
    axes.set(xlim=(0, 116), ylim=(len(arms) - 0.5, -0.5), xticks=range(0, 101, 20))
    axes.set_xlabel("images of 100 right", color=INK)
    return figure


def draw_figure_1(summary: Summary) -> Figure:
    """Figures 1b and 1c: a panel per mode, with a line with 95 % intervals per arm.

    A panel has at most `ARMS_PER_PANEL` arms; further arms get more rows, each with a legend. The
    paper's points are hollow, beside ours; "~" marks those that its text only describes.
    """
    arms = arms_drawn(summary)
    count = max(1, -(-len(arms) // ARMS_PER_PANEL))
    figure = new_figure(9.2, 4.4 * count)
    for row, part in enumerate(figure.subfigures(count, 1, squeeze=False)[:, 0]):
        part.set_facecolor("none")
        shown = arms[len(arms) * row // count : len(arms) * (row + 1) // count]
        # One scale for all panels, because their heights are compared.
        panels = part.subplots(1, len(PANELS), sharey=True, squeeze=False)[0]
        entries: dict[str, Any] = {}
        for axes, mode in zip(panels, PANELS, strict=True):
            entries |= _draw_panel(axes, summary, mode, shown)
        panels[0].set_ylabel("top-1 accuracy (%)", color=INK)
        handles = []
        for name, handle in entries.items():
            handles.append((handle, name))
        draw_legend(part, handles)
    return figure


def arms_drawn(summary: Summary) -> tuple[str, ...]:
    """The arms with a line: those scored with missing blocks, or all if there are none."""
    pruned = []
    scored = []
    for arm in summary.arms:
        cells: list[ScoreCell] = []
        for mode in PANELS:
            cells += summary.curve(arm, mode)
        if cells:
            scored.append(arm)
        if any(cell.kept < summary.depth for cell in cells):
            pruned.append(arm)
    return tuple(pruned or scored)


def _draw_panel(axes: Axes, summary: Summary, mode: str, arms: Sequence[str]) -> dict[str, Any]:
    """Draw a line per arm. Returns what the legend shows, by its names."""
    entries: dict[str, Any] = {}
    for place, arm in enumerate(arms):
        shift = _DODGE * (place / (len(arms) - 1) - 0.5) if len(arms) > 1 else 0.0
        cells = summary.curve(arm, mode)
        style = arm_style(summary, arm)
        if cells:
            line = {cell.kept + shift: cell.top1 for cell in cells}
            entries[summary.name(arm)] = _draw_line(axes, line, style=style, name=arm)
        for cell in cells:
            number = summary.paper(arm, mode, kept=cell.kept)
            if number is not None:
                x = cell.kept + shift + _PAPER_SHIFT
                hollow = _draw_paper(axes, number, x, style=style)
                entries.setdefault("hollow: the paper (~ from its words)", hollow)
    ticks = sorted({cell.kept for cell in summary.cells})
    # More than a dozen labels would overlap.
    axes.set_xticks(ticks[:: (len(ticks) + 11) // 12])
    axes.set(xlim=(min(ticks, default=1) - 0.6, summary.depth + 0.6), ylim=(-2, 102))
    axes.set_xlabel(f"blocks kept (of {summary.depth})", color=INK)
    style_axes(axes, PANELS[mode])
    axes.grid(axis="y", color=RULE, linewidth=0.8)
    axes.set_axisbelow(True)
    return entries


def _draw_line(axes: Axes, line: Mapping[Any, Estimate], *, style: Style, name: str) -> Any:
    """Means with their intervals over places."""
    means = []
    below = []
    above = []
    for score in line.values():
        means.append(score.mean)
        below.append(0.0 if score.low is None else score.mean - score.low)
        above.append(0.0 if score.high is None else score.high - score.mean)
    return axes.errorbar(
        list(line),
        means,
        yerr=[below, above],
        color=style[0],
        marker=style[1],
        linestyle=style[2],
        markersize=4.5,
        linewidth=1.4,
        capsize=2,
        label=name,
    )


def _draw_paper(axes: Axes, number: PaperNumber, x: float, *, style: Style) -> Any:
    """Draw a hollow point, or a bar with its middle for a range."""
    _, high = number.range
    if number.text.startswith("~"):
        place = (x, number.value)
        axes.annotate("~", place, (4, -3), textcoords="offset points", color=style[0])
    return axes.errorbar(
        [x],
        [number.value],
        yerr=[high - number.value] if high > number.value else None,
        color=style[0],
        marker=style[1],
        markerfacecolor=GROUND,
        linestyle="none",
        capsize=2.5,
        label=f"paper {number.method}",
    )


def draw_figure_5(groups: Sequence[tuple[str, str, Sequence[float]]], summary: Summary) -> Figure:
    """Figure 5: a row per group (arm, name, top-1 of its models), a dot per model."""
    figure = new_figure(9.2, 0.8 + 0.3 * len(groups))
    axes = figure.subplots()
    names = []
    for place, (arm, name, values) in enumerate(groups):
        names.append(name)
        colour = arm_style(summary, arm)[0]
        if len(values) == 1:
            # The dot of a single model is larger, because it must be visible alone.
            axes.scatter(values, [place], s=50, color=colour, linewidths=0)
            continue
        heights = []
        for rank in range(len(values)):
            heights.append(place + 0.7 * (rank * _GOLDEN % 1 - 0.5))
        axes.scatter(sorted(values), heights, s=8, color=colour, linewidths=0)
        axes.plot([mean(values)] * 2, [place - 0.4, place + 0.4], color=INK, lw=1.1)
    axes.set_yticks(range(len(groups)), names, fontsize=8.5, parse_math=False)
    axes.set(xlim=(-2, 102), ylim=(len(groups) - 0.5, -0.5))
    axes.set_xlabel("top-1 accuracy (%)", color=INK)
    style_axes(axes)
    axes.grid(axis="x", color=RULE, linewidth=0.8)
    axes.set_axisbelow(True)
    return figure
