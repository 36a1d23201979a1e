"""Table 2 and Figure 5: merged models, soups and ensembles beside the models they came from."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import count
from typing import TYPE_CHECKING

from layershuffle.merging.rows import MergingRow, by_model, group_rows, score_of
from layershuffle.plotting import INK, RULE, new_figure, style_axes
from layershuffle.stats import mean
from layershuffle.study.figures import STYLES
from layershuffle.study.paper import MERGES
from layershuffle.study.summary import label
from layershuffle.study.tables import NONE, Picture, Section, Table, interval_text, number_text
from layershuffle.study.tasks import Study

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Group = tuple[str, tuple[str, str, str], list[MergingRow]]
"""Arm, (kind, name, ends), rows: what is one row of Table 2 and one column of Figure 5."""

_KINDS = {"donor": "single models", "merge": "merges", "soup": "soup", "ensemble": "ensemble"}
_HEAD = (
    "Models", "Order", "Stem and head", "Number", "Top-1", "sd", "Lowest", "Highest", "95 %",
    "Top-5", "sd top-5", "Paper: top-1", "Paper: top-5", "Ours - paper",
)  # fmt: skip
_DOT_POINTS = 2.2  # diameter of a dot
_HEIGHT, _RANGE = 4.6, 104.0  # of the axes, in inches and in percentage points
_DOT_HEIGHT = _RANGE * _DOT_POINTS / 72 / _HEIGHT  # of a dot, in percentage points
_ACROSS = 0.9  # of the distance between two columns that dots may fill


def merging_section(study: Study) -> Section | None:
    """The section, or `None` while no merging is done."""
    groups: list[Group] = []
    sentences = []
    for merging in study.mergings:
        if merging.result is None or not merging.result.rows:
            continue
        arm, rows = merging.task.arm, merging.result.rows
        groups += [(arm, key, list(group)) for key, group in group_rows(rows).items()]
        sentences.append(_sentence(arm, rows))
    if not groups:
        return None
    sentences.append(
        "The models of an arm differ in their seed alone. A single model's score is its mean over "
        "the drawn orders, so its spread is over models; a merge has one order, so the spread of "
        "merges is over merges and orders together, as in the paper. The greedy soup is chosen on "
        "held-out data."
    )
    return Section(
        title="Table 2 and Figure 5: merges, soups and ensembles",
        sentences=tuple(sentences),
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


def _row(group: Group) -> tuple[str, ...]:
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


def _sentence(arm: str, rows: Sequence[MergingRow]) -> str:
    groups = group_rows(rows)
    single = score_of(next(group for key, group in groups.items() if key[0] == "donor"))
    merges = [(key, score_of(group)) for key, group in groups.items() if key[0] == "merge"]
    scores = "; ".join(
        f"{score.mean:.1f} % ({f'{name}, ' if name else ''}stem and head: {ends}), "
        f"{score.mean - single.mean:+.1f} points"
        for (_, name, ends), score in merges
    )
    return (
        f"{label(arm)} in {rows[0].mode} order: single models {single.mean:.1f} %, merges {scores}."
    )


def draw_merges(groups: Sequence[Group]) -> Figure:
    """Figure 5: a column of dots per group of models, every model one dot."""
    columns = [[mean(scores) for scores in by_model(rows).values()] for _, _, rows in groups]
    offsets = [beeswarm_offsets(values, height=_DOT_HEIGHT) for values in columns]
    # The fullest column decides for all, so that no dot covers another.
    widest = max(1 + 2 * max(map(abs, shifts)) for shifts in offsets)  # dots side by side
    inches = max(0.8, widest * _DOT_POINTS / 72 / _ACROSS)  # of a column
    figure = new_figure(1.0 + inches * len(columns), _HEIGHT + 1.4)
    axes = figure.subplots()
    style_axes(axes)
    axes.set(ylabel="top-1 accuracy (%)", ylim=(-2, 102), xlim=(-0.6, len(columns) - 0.4))
    axes.grid(axis="y", color=RULE, linewidth=0.8)
    axes.set_axisbelow(True)
    arms = list(dict.fromkeys(arm for arm, _, _ in groups))
    names = []
    step = _DOT_POINTS / 72 / inches
    for place, (arm, (kind, name, ends), _) in enumerate(groups):
        values = columns[place]
        across = [place + step * shift for shift in offsets[place]]
        colour = STYLES[arms.index(arm) % len(STYLES)][0]
        axes.scatter(across, values, s=_DOT_POINTS**2, color=colour, linewidths=0)
        axes.plot([place - 0.4, place + 0.4], [mean(values)] * 2, color=INK, linewidth=1.1)
        names.append(" ".join(word for word in (label(arm), _KINDS[kind], name, ends) if word))
    axes.set_xticks(range(len(columns)), names, rotation=40, ha="right", fontsize=8)
    return figure


def beeswarm_offsets(values: Sequence[float], *, height: float) -> list[float]:
    """How many dots to the side each value stands so that none covers another.

    Values nearer than `height` to each other take different places: 0, 1, -1, 2, -2, ...
    """
    offsets = [0.0] * len(values)
    placed: list[tuple[float, int]] = []
    # From the lowest value up, so that the order of the rows does not change the picture.
    for index in sorted(range(len(values)), key=lambda i: values[i]):
        taken = {place for value, place in placed if abs(value - values[index]) < height}
        place = next(place for place in _outwards() if place not in taken)
        placed.append((values[index], place))
        offsets[index] = float(place)
    return offsets


def _outwards() -> Iterator[int]:
    yield 0
    for distance in count(1):
        yield distance
        yield -distance
