"""The budget curve: accuracy against the number of training steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from layershuffle.plotting import RULE, legend_below, new_figure, style_axes
from layershuffle.results import MODES, ScoreRow
from layershuffle.stats import Estimate, estimate
from layershuffle.study.figures import STYLES, error_bars, panels_of
from layershuffle.study.summary import Summary, base_arm, label
from layershuffle.study.tables import NONE, Picture, Section, Table, interval_text
from layershuffle.study.tasks import Study

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.container import ErrorbarContainer
    from matplotlib.figure import Figure


@dataclass(frozen=True, kw_only=True)
class Point:
    """The accuracy of one arm at one length of training."""

    arm: str
    steps: int
    mode: str
    top1: Estimate


def budget_points(study: Study) -> tuple[Point, ...]:
    """A point per (arm, length, mode) of the curve, including the arms of the main part."""
    arms = list(dict.fromkeys(base_arm(r.task) for r in study.runs if r.task.part == "budget"))
    groups: dict[tuple[int, int, str], dict[int, list[ScoreRow]]] = {}
    for run in study.runs:
        arm = base_arm(run.task)
        for row in run.result.rows if run.result and arm in arms else ():
            # Scores of pruned models are not part of the curve.
            if run.result and row.choose == "":
                key = (arms.index(arm), run.result.steps, row.mode)
                groups.setdefault(key, {}).setdefault(row.seed, []).append(row)
    points = [
        Point(
            arm=arms[index],
            steps=steps,
            mode=mode,
            top1=estimate(
                {seed: [row.top1 for row in rows] for seed, rows in by_seed.items()},
                # The fewest images give the widest interval.
                images=min(row.n for rows in by_seed.values() for row in rows),
                effective=next(iter(by_seed.values()))[0].top1_n,
            ),
        )
        for (index, steps, mode), by_seed in groups.items()
    ]
    return tuple(sorted(points, key=lambda p: (arms.index(p.arm), p.steps, MODES.index(p.mode))))


def budget_section(summary: Summary) -> Section | None:
    """The section of the curve; `None` if the study has scores of fewer than two lengths."""
    points = budget_points(summary.study)
    lengths = sorted({point.steps for point in points})
    if len(lengths) < 2:
        return None
    curves: dict[tuple[str, str], dict[int, Estimate]] = {}
    for arm in dict.fromkeys(point.arm for point in points):
        for mode in MODES:
            curve = {p.steps: p.top1 for p in points if (p.arm, p.mode) == (arm, mode)}
            if curve:
                curves[arm, mode] = curve
    rows = []
    for (arm, mode), curve in curves.items():
        scores = (curve.get(steps) for steps in lengths)
        texts = (
            "-" if s is None else f"{s.mean:.1f} ({interval_text(s)}; {s.models})" for s in scores
        )
        rows.append((label(arm), mode, *texts))
    return Section(
        title="Budget: how much of the gap is training",
        pictures=(
            Picture(
                file="budget",
                caption="Top-1 accuracy against optimiser steps (logarithmic), 95 % intervals over "
                "models.",
                figure=_draw(curves, lengths),
            ),
        ),
        tables=(
            Table(
                head=("Arm", "Order", *(f"{steps:,} steps" for steps in lengths)),
                rows=tuple(rows),
                numbers=True,
                note="Top-1 in percent, 95 % interval, number of models.",
            ),
            *_position_tables(summary, lengths),
        ),
    )


def _position_tables(summary: Summary, lengths: Sequence[int]) -> tuple[Table, ...]:
    """A table of how often the position is predicted correctly at each length, if analysed."""
    arms = dict.fromkeys(base_arm(run.task) for run in summary.study.runs)
    answers = (a.result for a in summary.study.analyses if a.task.options.name == "position")
    by_model = (result.facts.get("sources", {}) for result in answers if result is not None)
    sources = dict.fromkeys(source for each in by_model for source in each)
    rows = []
    for arm in arms:
        labels = summary.lengths(arm)
        for source in sources:
            path = ("sources", source, "accuracy")
            shares = [summary.fact("position", labels.get(n, ""), path=path) for n in lengths]
            # A single length is no curve; its number is in the analysis itself.
            if sum(share is not None for share in shares) > 1:
                cells = (NONE if share is None else f"{share:.2f}" for share in shares)
                rows.append((label(arm), source, *cells))
    if not rows:
        return ()
    head = ("Arm", "Named by", *(f"{steps:,} steps" for steps in lengths))
    note = "The position of a block, named right in percent of (image, block, position)."
    return (Table(head=head, rows=tuple(rows), numbers=True, note=note),)


def _draw(curves: dict[tuple[str, str], dict[int, Estimate]], lengths: Sequence[int]) -> Figure:
    arms = list(dict.fromkeys(arm for arm, _ in curves))
    rows = panels_of(arms)
    figure = new_figure(6.4, 4.6 * len(rows))
    for part, shown in zip(figure.subfigures(len(rows), 1, squeeze=False)[:, 0], rows, strict=True):
        part.set_facecolor("none")
        axes = part.subplots()
        style_axes(axes)
        axes.set(xlabel="optimiser steps", ylabel="top-1 accuracy (%)")
        axes.grid(axis="y", color=RULE, linewidth=0.8)
        entries = [
            (
                _draw_curve(axes, curve, mode=mode, style=STYLES[arms.index(arm) % len(STYLES)]),
                f"{label(arm)}, {mode}",
            )
            for (arm, mode), curve in curves.items()
            if arm in shown
        ]
        # Lengths differ by factors; on a linear axis the short ones would overlap.
        axes.set_xscale("log")
        axes.set_xticks(lengths, [f"{steps:,}" for steps in lengths], minor=False)
        axes.minorticks_off()
        # Room for the markers of scores near 0 and 100 %.
        axes.set_ylim(-2, 102)
        # Below the panel, because inside it would cover a line of some study.
        legend_below(part, entries)
    return figure


def _draw_curve(
    axes: Axes, curve: dict[int, Estimate], *, mode: str, style: tuple[str, str, str]
) -> ErrorbarContainer:
    return axes.errorbar(
        list(curve),
        [score.mean for score in curve.values()],
        yerr=error_bars(list(curve.values())),
        color=style[0],
        marker=style[1],
        # Colour and marker show the arm, the line style shows the order mode.
        linestyle="-" if mode == "sequential" else "--",
        capsize=2.5,
    )
