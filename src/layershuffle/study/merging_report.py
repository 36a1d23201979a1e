"""Table 2 and Figure 5: merged models, soups and ensembles beside the models they came from."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import count
from typing import TYPE_CHECKING

from layershuffle.merging.rows import MergingRow, by_model, group_rows
from layershuffle.plotting import INK, RULE, figure_bytes, new_figure, style_axes
from layershuffle.stats import Estimate, estimate, mean
from layershuffle.study.facts import Table
from layershuffle.study.figures import STYLES
from layershuffle.study.paper import MERGES
from layershuffle.study.pieces import Piece
from layershuffle.study.sections import Picture, Section
from layershuffle.study.summary import label
from layershuffle.study.tables import interval_text

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_KINDS = {"donor": "single models", "merge": "merges", "soup": "soup", "ensemble": "ensemble"}
_HEAD = (
    "Models", "Order", "Stem and head", "Number", "Top-1", "sd", "Lowest", "Highest", "95 %",
    "Top-5", "sd top-5", "Paper: top-1", "Paper: top-5", "Ours - paper",
)  # fmt: skip
_DOT_POINTS = 2.2  # diameter of a dot
_HEIGHT, _RANGE = 4.6, 104.0  # of the axes, in inches and in percentage points
_ROW = _RANGE * _DOT_POINTS / 72 / _HEIGHT  # percentage points that a dot is high
_ACROSS = 0.9  # of the distance between two columns that dots may fill


def merging_section(pieces: Iterable[Piece]) -> Section | None:
    """The section, or `None` while no merging is done."""
    done = [piece for piece in pieces if piece.kind == "merging" and piece.rows]
    if not done:
        return None
    return Section(
        title="Table 2 and Figure 5: merges, soups and ensembles",
        sentences=(*map(_sentence, done), _HOW),
        pictures=(
            Picture(
                file="figure5.svg",
                caption="Every merge is one dot, none is left out; beside them the models that the "
                "blocks came from, the soups and the ensembles. Lines: means.",
                svg=draw_swarm(done),
            ),
        ),
        tables=(Table(title="", head=_HEAD, rows=tuple(_rows(done)), numbers=True),),
    )


_HOW = (
    "The models of an arm differ in their seed alone. A single model's score is its mean over the "
    "drawn orders, so its spread is over models; a merge has one order, so the spread of merges is "
    "over merges and orders together, as in the paper. The greedy soup is chosen on held-out data."
)


def score_of(rows: Sequence[MergingRow], metric: str = "top1") -> Estimate:
    """Mean over models (donors, merges), each the mean over its orders, and its spreads."""
    return estimate(by_model(rows, metric), images=rows[0].n)


def _rows(pieces: Sequence[Piece]) -> list[tuple[str, ...]]:
    return [
        _row(piece, key, rows) for piece in pieces for key, rows in group_rows(piece.rows).items()
    ]


def _row(piece: Piece, key: tuple[str, str, str], rows: Sequence[MergingRow]) -> tuple[str, ...]:
    kind, name, ends = key
    one, five = score_of(rows), score_of(rows, "top5")
    paper = next((p for p in MERGES if (p.kind, p.arm) == (kind, piece.arm) and rows[0].main), None)
    words = f"{label(piece.arm)}: {_KINDS[kind]}{f', {name}' if name else ''}"
    sd = one.sd_models if one.models > 1 else one.sd_orders
    sd5 = five.sd_models if five.models > 1 else five.sd_orders
    return (
        words, rows[0].mode, ends or "-", str(one.models), f"{one.mean:.2f}", _number(sd),
        f"{one.least:.2f}", f"{one.most:.2f}", interval_text(one), f"{five.mean:.2f}",
        _number(sd5),
        "-" if paper is None else _with_sd(paper.top1, paper.top1_sd),
        "-" if paper is None else _with_sd(paper.top5, paper.top5_sd),
        "-" if paper is None else f"{one.mean - paper.top1:+.2f}",
    )  # fmt: skip


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def _with_sd(value: float, sd: float | None) -> str:
    return f"{value:.2f}" if sd is None else f"{value:.2f} +-{sd:.2f}"


def _sentence(piece: Piece) -> str:
    groups = group_rows(piece.rows)
    single = score_of(next(rows for key, rows in groups.items() if key[0] == "donor"))
    merges = [(key[2], score_of(rows)) for key, rows in groups.items() if key[0] == "merge"]
    said = "; ".join(
        f"{one.mean:.1f} % (stem and head: {ends}), {one.mean - single.mean:+.1f} points"
        for ends, one in merges
    )
    return (
        f"{label(piece.arm)} in {piece.rows[0].mode} order: single models {single.mean:.1f} %, "
        f"merges {said}."
    )


def draw_swarm(pieces: Sequence[Piece]) -> bytes:
    """Figure 5 as an SVG: a column of dots per group of models, every model one dot."""
    columns = [
        (piece, key, [mean(scores) for scores in by_model(rows).values()])
        for piece in pieces
        for key, rows in group_rows(piece.rows).items()
    ]
    widest = max(_widest(values) for _, _, values in columns)
    inches = max(0.8, widest * _DOT_POINTS / 72 / _ACROSS)  # of a column
    figure = new_figure(1.0 + inches * len(columns), _HEIGHT + 1.4)
    axes = figure.subplots()
    style_axes(axes)
    axes.set(ylabel="top-1 accuracy (%)", ylim=(-2, 102), xlim=(-0.6, len(columns) - 0.4))
    axes.grid(axis="y", color=RULE, linewidth=0.8)
    axes.set_axisbelow(True)
    arms = [piece.arm for piece in pieces]
    for place, (piece, _, values) in enumerate(columns):
        colour = STYLES[arms.index(piece.arm)][0]
        _draw_column(axes, place, values, colour=colour, step=_DOT_POINTS / 72 / inches)
    names = [_column_name(piece, key) for piece, key, _ in columns]
    axes.set_xticks(range(len(columns)), names, rotation=40, ha="right", fontsize=8)
    return figure_bytes(figure, "svg")


def _column_name(piece: Piece, key: tuple[str, str, str]) -> str:
    kind, name, ends = key
    return " ".join(word for word in (label(piece.arm), _KINDS[kind], name, ends) if word)


def _draw_column(
    axes: Axes, place: int, values: Sequence[float], *, colour: str, step: float
) -> None:
    across = [place + step * shift for shift in swarm(values, step=_ROW)]
    axes.scatter(across, values, s=_DOT_POINTS**2, color=colour, linewidths=0)
    axes.plot([place - 0.4, place + 0.4], [mean(values)] * 2, color=INK, linewidth=1.1)


def _widest(values: Sequence[float]) -> float:
    """Dots side by side at most."""
    return 1 + 2 * max(map(abs, swarm(values, step=_ROW)), default=0.0)


def swarm(values: Sequence[float], *, step: float) -> list[float]:
    """How many dots to the side each value stands so that none covers another.

    Values nearer than `step` to each other take different places: 0, 1, -1, 2, -2, ...
    """
    shifts = [0.0] * len(values)
    placed: list[tuple[float, int]] = []
    for index in sorted(range(len(values)), key=lambda i: values[i]):
        near = {place for value, place in placed if abs(value - values[index]) < step}
        place = next(place for place in _outwards() if place not in near)
        placed.append((values[index], place))
        shifts[index] = float(place)
    return shifts


def _outwards() -> Iterator[int]:
    yield 0
    for distance in count(1):
        yield distance
        yield -distance
