"""The budget curve: accuracy against the number of training steps."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from layershuffle.plotting import INK, RULE, figure_bytes, new_figure, style_axes
from layershuffle.stats import Estimate, estimate
from layershuffle.study.facts import Table
from layershuffle.study.figures import STYLES, error_bars
from layershuffle.study.results import Run, Study
from layershuffle.study.sections import Picture, Section
from layershuffle.study.summary import Summary, label
from layershuffle.study.tables import interval_text

_MODES = ("sequential", "arbitrary")


@dataclass(frozen=True, kw_only=True)
class Point:
    """One arm at one length."""

    arm: str
    steps: int
    mode: str
    top1: Estimate


def budget_points(study: Study) -> tuple[Point, ...]:
    """Every (arm, length, mode) of the curve; the arms of the main part join at their length."""
    curve = [run for run in study.runs if run.plan.part == "budget"]
    arms = dict.fromkeys(_base_arm(run) for run in curve)
    groups: dict[tuple[str, int], list[Run]] = {}
    for run in study.runs:
        arm = _base_arm(run)
        if arm in arms and run.facts is not None:
            groups.setdefault((arm, run.facts.steps), []).append(run)
    return tuple(
        Point(arm=arm, steps=steps, mode=mode, top1=top1)
        for arm, steps in sorted(groups, key=lambda key: (list(arms).index(key[0]), key[1]))
        for mode in _MODES
        if (top1 := _top1(groups[arm, steps], mode)) is not None
    )


def _base_arm(run: Run) -> str:
    if run.plan.part != "budget":
        return run.plan.arm
    return re.sub(r"-\d+-steps$", "", run.plan.arm)


def _top1(runs: Sequence[Run], mode: str) -> Estimate | None:
    """Over the runs, of the full stack in that mode."""
    rows = {
        run.plan.seed: [row for row in run.rows if row.mode == mode and row.choose == ""]
        for run in runs
    }
    scores = {seed: [row.top1 for row in found] for seed, found in rows.items() if found}
    if not scores:
        return None
    return estimate(scores, images=min(row.n for found in rows.values() for row in found))


def budget_section(summary: Summary) -> Section | None:
    """The section, or `None` for a study without a curve or nothing of it done."""
    points = budget_points(summary.study)
    if len({point.steps for point in points}) < 2:
        return None
    return Section(
        title="Budget: how much of the gap is training",
        sentences=(_words(points),),
        pictures=(
            Picture(
                file="budget.svg",
                caption="Top-1 accuracy against optimiser steps (logarithmic), 95 % intervals over "
                "models.",
                svg=_draw(points),
            ),
        ),
        tables=(_table(points),),
    )


def _curves(points: Sequence[Point]) -> dict[tuple[str, str], list[Point]]:
    """The points of every (arm, mode), by length."""
    return {
        (arm, mode): [point for point in points if (point.arm, point.mode) == (arm, mode)]
        for arm in dict.fromkeys(point.arm for point in points)
        for mode in _MODES
    }


def _words(points: Sequence[Point]) -> str:
    return " ".join(
        f"{label(arm)} in {mode} order goes from {curve[0].top1.mean:.1f} % after "
        f"{curve[0].steps:,} steps to {curve[-1].top1.mean:.1f} % after {curve[-1].steps:,}."
        for (arm, mode), curve in _curves(points).items()
        if curve
    )


def _table(points: Sequence[Point]) -> Table:
    lengths = sorted({point.steps for point in points})
    rows = []
    for (arm, mode), curve in _curves(points).items():
        found = {point.steps: point.top1 for point in curve}
        rows.append((label(arm), mode, *(_cell(found.get(steps)) for steps in lengths)))
    return Table(
        title="",
        head=("Arm", "Order", *(f"{steps:,} steps" for steps in lengths)),
        rows=tuple(rows),
        numbers=True,
        note="Top-1 in percent, 95 % interval, number of models.",
    )


def _cell(one: Estimate | None) -> str:
    return "-" if one is None else f"{one.mean:.1f} ({interval_text(one)}; {one.models})"


def _draw(points: Sequence[Point]) -> bytes:
    figure = new_figure(6.4, 4.2)
    axes = figure.subplots()
    style_axes(axes)
    axes.set(xlabel="optimiser steps", ylabel="top-1 accuracy (%)")
    axes.grid(axis="y", color=RULE, linewidth=0.8)
    arms = list(dict.fromkeys(point.arm for point in points))
    for (arm, mode), curve in _curves(points).items():
        colour, marker, _ = STYLES[arms.index(arm) % len(STYLES)]
        axes.errorbar(
            [point.steps for point in curve],
            [point.top1.mean for point in curve],
            yerr=error_bars([point.top1 for point in curve]),
            color=colour,
            marker=marker,
            linestyle="-" if mode == "sequential" else "--",
            capsize=2.5,
            label=f"{label(arm)}, {mode}",
        )
    lengths = sorted({point.steps for point in points})
    axes.set_xscale("log")
    axes.set_xticks(lengths, [f"{steps:,}" for steps in lengths], minor=False)
    axes.minorticks_off()
    axes.set_ylim(-2, 102)
    axes.legend(frameon=False, labelcolor=INK, fontsize=8)
    return figure_bytes(figure, "svg")
