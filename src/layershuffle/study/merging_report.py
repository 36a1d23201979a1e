"""Table 2 and Figure 5: merged models, soups and ensembles beside their donors."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate, count
from typing import TYPE_CHECKING

from layershuffle.plotting import INK, RULE, new_figure, style_axes
from layershuffle.results import MergingRow, by_model, group_rows, score_of
from layershuffle.stats import mean
from layershuffle.study.figures import STYLES
from layershuffle.study.paper import MERGES
from layershuffle.study.summary import label
from layershuffle.study.tables import NONE, Picture, Section, Table, interval_text, number_text
from layershuffle.study.tasks import Study

if TYPE_CHECKING:
    from matplotlib.figure import Figure

RowGroup = tuple[str, tuple[str, str, str], list[MergingRow]]
"""Arm, (kind, name, ends), rows: a row of Table 2 and a row of dots of Figure 5."""

_KINDS = {"donor": "single models", "merge": "merges", "soup": "soup", "ensemble": "ensemble"}
_HEAD = (
    "Models", "Order", "Stem and head", "Number", "Top-1", "sd", "Lowest", "Highest", "95 %",
    "Top-5", "sd top-5", "Paper: top-1", "Paper: top-5", "Ours - paper",
)  # fmt: skip
_DOT_POINTS = 2.4  # diameter of a dot
_DOT_INCHES = _DOT_POINTS / 72
_WIDTH = 9.2  # inches: at 1,200 pixels the smallest letters are 15 pixels high
_PLOT, _RANGE = (
    5.5,
    104.0,
)  # least width of the panels in inches, their range in percentage points
_DOT_WIDTH = _RANGE * _DOT_INCHES / _PLOT  # of a dot, in percentage points
_ROW, _ACROSS = 0.24, 0.8  # least height of a row in inches, and the share of it that dots may fill


def merging_section(study: Study) -> Section | None:
    """The section; `None` if no merging is done."""
    groups: list[RowGroup] = []
    for merging in study.mergings:
        if merging.result is None or not merging.result.rows:
            continue
        arm, rows = merging.task.arm, merging.result.rows
        groups += [(arm, key, list(group)) for key, group in group_rows(rows).items()]
    if not groups:
        return None
    sentence = (
        "The models of an arm differ in their seed alone. A single model's score is its mean over "
        "the drawn orders, so its spread is over models; a merge has one order, so the spread of "
        "merges is over merges and orders together, as in the paper. The greedy soup is chosen on "
        "held-out data."
    )
    return Section(
        title="Table 2 and Figure 5: merges, soups and ensembles",
        sentences=(sentence,),
        pictures=(
            Picture(
                file="figure5",
                caption="Every merge is one dot, none is left out; beside them the models that the "
                "blocks came from, the soups and the ensembles. Lines: means.",
                figure=draw_merges(groups),
            ),
        ),
        tables=(Table(head=_HEAD, rows=tuple(map(_row, groups)), numbers=True),),
    )


def _row(group: RowGroup) -> tuple[str, ...]:
    arm, (kind, name, ends), rows = group
    top1, top5 = score_of(rows), score_of(rows, "top5")
    # The paper reports one variant of each kind, so only our main variant has a counterpart.
    paper = next((p for p in MERGES if (p.kind, p.arm) == (kind, arm) and rows[0].main), None)
    numbers = (NONE, NONE, NONE)
    if paper is not None:
        numbers = (
            _with_sd(paper.top1, paper.top1_sd),
            _with_sd(paper.top5, paper.top5_sd),
            f"{top1.mean - paper.top1:+.2f}",
        )
    # A soup or an ensemble is one model: only its orders spread.
    spreads = (s.sd_models if s.models > 1 else s.sd_orders for s in (top1, top5))
    sd1, sd5 = map(number_text, spreads)
    return (
        f"{label(arm)}: {_KINDS[kind]}{f', {name}' if name else ''}", rows[0].mode, ends or NONE,
        str(top1.models), f"{top1.mean:.2f}", sd1, f"{top1.least:.2f}", f"{top1.most:.2f}",
        interval_text(top1), f"{top5.mean:.2f}", sd5, *numbers,
    )  # fmt: skip


def _with_sd(value: float, sd: float | None) -> str:
    return f"{value:.2f}" if sd is None else f"{value:.2f} +-{sd:.2f}"


def draw_merges(groups: Sequence[RowGroup]) -> Figure:
    """Figure 5: a panel per arm, with a row of dots per group of models, one dot per model."""
    by_arm: dict[str, list[tuple[str, list[float], list[float]]]] = {}
    for arm, (kind, name, ends), rows in groups:
        words = ", ".join(filter(None, (_KINDS[kind], name, ends and f"ends: {ends}")))
        values = [mean(scores) for scores in by_model(rows).values()]
        shifts = beeswarm_offsets(values, height=_DOT_WIDTH)
        by_arm.setdefault(arm, []).append((words, values, shifts))
    # In inches, so no dot covers another, however many are equal.
    heights = {
        arm: [max(_ROW, _across(shifts) / _ACROSS) for _, _, shifts in clouds]
        for arm, clouds in by_arm.items()
    }
    sizes = [sum(inches) for inches in heights.values()]
    figure = new_figure(_WIDTH, sum(sizes) + 0.45 * len(sizes) + 0.5)
    panels = figure.subplots(
        len(sizes), 1, sharex=True, squeeze=False, gridspec_kw={"height_ratios": sizes}
    )[:, 0]
    for number, (axes, (arm, clouds)) in enumerate(zip(panels, by_arm.items(), strict=True)):
        style_axes(axes, label(arm))
        axes.set(xlim=(-2, 102), ylim=(sizes[number], 0.0))
        axes.grid(axis="x", color=RULE, linewidth=0.8)
        axes.set_axisbelow(True)
        below = accumulate(heights[arm])
        middles = [end - inches / 2 for end, inches in zip(below, heights[arm], strict=True)]
        for (_, values, shifts), middle in zip(clouds, middles, strict=True):
            colour = STYLES[number % len(STYLES)][0]
            # The dot of a single model is larger, because it must be visible alone.
            size = _DOT_POINTS if len(values) > 1 else 3 * _DOT_POINTS
            at = [middle + _DOT_INCHES * shift for shift in shifts]
            axes.scatter(values, at, s=size**2, color=colour, linewidths=0)
            if len(values) > 1:
                reach = max(_ROW, _across(shifts)) / 2
                axes.plot([mean(values)] * 2, [middle - reach, middle + reach], color=INK, lw=1.1)
        axes.set_yticks(middles, [words for words, _, _ in clouds], fontsize=8.5)
    panels[-1].set_xlabel("top-1 accuracy (%)", color=INK)
    return figure


def _across(shifts: Sequence[float]) -> float:
    """The width of the dots in inches."""
    return (1 + 2 * max(map(abs, shifts))) * _DOT_INCHES


def beeswarm_offsets(values: Sequence[float], *, height: float) -> list[float]:
    """The sideways offset of each value, in dots, such that no dot covers another.

    Values nearer than `height` to each other take different places: 0, 1, -1, 2, -2, ...
    """
    offsets = [0.0] * len(values)
    placed: list[tuple[float, int]] = []
    # From the lowest value up, so the order of the rows does not change the picture.
    for index in sorted(range(len(values)), key=lambda i: values[i]):
        used = {place for value, place in placed if abs(value - values[index]) < height}
        place = next(place for place in _outwards() if place not in used)
        placed.append((values[index], place))
        offsets[index] = float(place)
    return offsets


def _outwards() -> Iterator[int]:
    yield 0
    for distance in count(1):
        yield distance
        yield -distance
