"""The first sentences of a report. An arm is called better only if an interval shows it."""

from __future__ import annotations

import math

from layershuffle.stats import Difference, compare
from layershuffle.study.summary import Column, ScoreCell, Summary, label

_ARMS_SHOWN = 4


def headline(summary: Summary) -> str:
    """The main result in a sentence: the baseline and our method in arbitrary order.

    It names the better of two arms only if the 95 % interval of their difference excludes 0.
    """
    # The paper's comparison, if the study has these arms.
    paper_arms = [arm for arm in summary.arms if arm in ("baseline", "layershuffle")]
    column = Column("arbitrary", summary.depth)
    cells = _cells(summary, column, arms=paper_arms or list(summary.arms[:_ARMS_SHOWN]))
    if not cells:
        return "No score in arbitrary order yet"
    scores = ", ".join(f"{label(cell.arm)} {cell.top1.mean:.1f} %" for cell in cells)
    sentence = f"Blocks in arbitrary order: {scores}"
    if len(cells) != 2:
        return sentence
    worse, better = sorted(cells, key=lambda cell: cell.top1.mean)
    gap = compare(better.model_means, worse.model_means)
    if gap.low > 0:
        return f"{sentence}: {label(better.arm)} is better by {_points(gap)}"
    if math.isfinite(gap.low):
        return f"{sentence}, which may be chance: they differ by {_points(gap)}"
    return f"{sentence} (no interval: too few models, or equal differences)"


def key_facts(summary: Summary) -> list[str]:
    """A sentence on the arm that is best with half of the blocks missing, if there are scores."""
    pruned = [c for c in summary.columns if c.mode == "arbitrary" and c.kept < summary.depth]
    if not pruned:
        return []
    column = min(pruned, key=lambda c: abs(c.kept - summary.depth / 2))
    cells = _cells(summary, column, arms=list(summary.arms))
    cells.sort(key=lambda cell: -cell.top1.mean)
    if len(cells) < 2:
        return []
    best, *others = cells
    gaps = {other.arm: compare(best.model_means, other.model_means) for other in others}
    rivals = [arm for arm, gap in gaps.items() if not gap.low > 0]
    where = f"With {column.kept} of {summary.depth} blocks in arbitrary order"
    if not rivals:
        # Over all arms, because a wide interval of a lower arm may reach further up.
        nearest = min(gaps, key=lambda arm: gaps[arm].low)
        return [
            f"{where}, {label(best.arm)} is best: {_points(gaps[nearest])} above {label(nearest)}."
        ]
    # The rival with the highest mean.
    gap = gaps[rivals[0]]
    numbers = "there is no interval" if math.isinf(gap.low) else f"they differ by {_points(gap)}"
    return [
        f"{where}, no arm can be called best: {label(best.arm)} has the highest mean, but cannot "
        f"be told from {', '.join(map(label, rivals))}: {numbers}."
    ]


def _cells(summary: Summary, column: Column, *, arms: list[str]) -> list[ScoreCell]:
    return [cell for arm in arms if (cell := summary.cell(arm, column))]


def _points(gap: Difference) -> str:
    return f"{gap.points:.1f} points ({gap.low:.1f} to {gap.high:.1f})"
