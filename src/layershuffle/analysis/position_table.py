"""Means per (block, position): tables, intervals, the effect of home positions, heat maps.

The home position of block i is position i, its position in pretraining.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from numpy.typing import NDArray
from pandas import DataFrame
from torch import Tensor

from layershuffle.analysis.results import Facts
from layershuffle.ground.errors import UsageError
from layershuffle.ground.plotting import INK, new_figure, style_axes
from layershuffle.ground.stats import half_width

Floats = NDArray[np.float64]
Clusters = NDArray[np.int64] | None
"""Groups `[images, k]` of images that may be wrong together, or `None` for too few images."""
Interval = dict[str, float] | None
"""Bounds `low` and `high` of a number, or `None` for too few images."""
# Up to these numbers of blocks, and of maps in a figure, every cell shows its number.
_WRITTEN = 12
_WRITTEN_MAPS = 4
_CELL = 0.5  # side of a cell in inches
_DIGITS = 9.0  # size of its number in points
# Least range of the colours of a map, in half intervals. 144 values that differ only by chance span
# 2.7 half intervals (5.3 standard deviations), which is then a third of the colours.
_SPAN = 8.0
_LIGHT = 0.45  # luma above which a cell has dark text


def refuse_gaps(pairs: int, *, depth: int) -> None:
    """Raises `UsageError` if so few pairs of block and position were run that some are missing."""
    if pairs < depth**2:
        raise UsageError(
            f"{depth**2 - pairs} of {depth**2} pairs of block and position were never run",
            hint="raise --num-orders or --max-images, or lower --batch-size",
        )


class PositionMeans:
    """A mean per (block, position), and the influence of every image on each of them.

    The blocks, and the positions, are those in `drawn`: others keep their place, and their values
    are left out. Row 0 and column 0 of the results are the first of `drawn`.
    """

    def __init__(self, drawn: range) -> None:
        self._drawn = drawn
        self._sums: Floats = np.zeros((len(drawn), len(drawn)))
        self._counts: Floats = np.zeros((len(drawn), len(drawn)))
        # In float32, because they are only used for spreads; the means are summed in float64.
        self._parts: list[tuple[int, int, int, NDArray[np.float32]]] = []

    def add(self, block: int, position: int, *, values: Tensor, first: int) -> None:
        """Add the values `[n]` of the images `first`, `first + 1`, ..."""
        if block not in self._drawn:
            return
        block, position = self._drawn.index(block), self._drawn.index(position)
        numbers = values.detach().cpu().double().numpy()
        self._sums[block, position] += numbers.sum()
        self._counts[block, position] += len(numbers)
        self._parts.append((block, position, first, numbers.astype(np.float32)))

    def mean(self) -> Floats:
        """Means `[block, position]`. Raises `UsageError` if a cell has no value."""
        refuse_gaps(int((self._counts > 0).sum()), depth=len(self._counts))
        return self._sums / self._counts

    def half_width(self, clusters: Clusters, weights: Floats) -> float | None:
        """Half the 95 % interval of the mean weighted by `weights` `[block, position]`; `None` for
        too few images."""
        if clusters is None:
            return None
        influence = np.tensordot(self._influence(len(clusters)), weights, 2)
        return float(half_width(influence, clusters))

    def columns(self, name: str, clusters: Clusters) -> dict[str, Floats]:
        """The means under `name`, and half their intervals under `name`_half, NaN for too few."""
        halves: Floats = np.full(self._sums.shape, np.nan)
        if clusters is not None:
            halves = half_width(self._influence(len(clusters)), clusters)
        return {name: self.mean(), f"{name}_half": halves}

    def _influence(self, images: int) -> Floats:
        """The influence `[image, block, position]` of every image on every mean."""
        means = self.mean()
        influence = np.zeros((images, *self._sums.shape))
        for block, position, first, values in self._parts:
            part = influence[first : first + len(values), block, position]
            part += (values - means[block, position]) / self._counts[block, position]
        return influence


def interval(
    value: float, half: float | None, *, limits: tuple[float, float] = (-math.inf, math.inf)
) -> Interval:
    """The interval `value` +- `half`, clipped to the limits; `None` without `half`.

    It covers the choice of images and, where the images of a batch share their orders, that of
    orders: it is computed from the influence of each image on the number (`stats.half_width`).
    """
    if half is None:
        return None
    return {"low": max(limits[0], value - half), "high": min(limits[1], value + half)}


def evenly(depth: int) -> Floats:
    """Weights `[depth, depth]` of the mean over all cells."""
    return np.full((depth, depth), 1.0 / depth**2)


def at_position(depth: int, position: int) -> Floats:
    """Weights `[depth, depth]` of the mean over blocks at one position."""
    weights = np.zeros((depth, depth))
    weights[:, position] = 1.0 / depth
    return weights


def home_less_elsewhere(depth: int) -> Floats:
    """Weights `[depth, depth]` of the home cells' mean minus that of the others.

    Subtracting the mean of every block and of every position does not change it, because each block
    and each position has one home cell. So it is no difference between blocks or positions.
    """
    home = np.eye(depth)
    return home / depth - (1.0 - home) / max(1, depth**2 - depth)


def weighted_means(
    numbers: Mapping[str, tuple[PositionMeans, Floats]], clusters: Clusters
) -> Facts:
    """Facts: the means by their weights `[block, position]`, with their intervals."""
    values = {}
    intervals = {}
    for name, (means, weights) in numbers.items():
        values[name] = float((means.mean() * weights).sum())
        intervals[name] = interval(values[name], means.half_width(clusters, weights))
    return {**values, "intervals": intervals}


def position_table(columns: Mapping[str, Floats], *, drawn: range, **labels: str) -> DataFrame:
    """A table with a row per (block, position) in `drawn`; `labels` are constant first columns."""
    block, position = np.indices((len(drawn), len(drawn))) + drawn.start
    table = DataFrame({"block": block.ravel(), "position": position.ravel()})
    for place, (name, label) in enumerate(labels.items()):
        table.insert(place, name, label)
    for name, values in columns.items():
        table[name] = values.ravel()
    return table


def grid(table: DataFrame, name: str) -> Floats:
    """The values `[block, position]` of one column of a table."""
    cells = table.pivot(index="block", columns="position", values=name)
    values: Floats = cells.to_numpy(dtype=float)
    return values


@dataclass(frozen=True, kw_only=True)
class Map:
    """A heat map of `values` `[y, x]`; `meaning` is the label of its colours.

    `halves` `[y, x]`: half the 95 % interval of every value, NaN for too few images, `None` if the
    values have no intervals. `signed`: the colours diverge at 0. `limits`: those of the quantity,
    as 0 and 100 %. `first`: the number of the first row and column.
    """

    title: str
    meaning: str
    values: Floats
    halves: Floats | None = None
    signed: bool = False
    limits: tuple[float, float] | None = None
    first: int = 0

    @property
    def colourless(self) -> bool:
        """Whether there were too few images to show differences by colours."""
        unknown = self.halves is not None and bool(np.isnan(self.halves).all())
        return unknown and self.limits is None

    def colour_range(self) -> tuple[float, float]:
        """The values at the ends of the colours, at least `_SPAN` half intervals apart."""
        if self.limits is not None:
            return self.limits
        values = self.values
        width = 0.0
        if self.halves is not None:
            # Colours that end at the extremes would show noise as clearly as an effect.
            width = _SPAN * float(np.nanmedian(self.halves))
        low = float(values.min())
        high = float(values.max())
        if self.signed:
            # If all values are 0, any range will do.
            reach = max(-low, high, width / 2) or 1.0
            return -reach, reach
        middle = (low + high) / 2
        width = max(high - low, width)
        return middle - width / 2, middle + width / 2


def read_map(table: DataFrame, name: str, **words: Any) -> Map:
    """The map of a column with its half intervals; `words` as in `Map`."""
    first = int(table.block.min())
    return Map(values=grid(table, name), halves=grid(table, f"{name}_half"), first=first, **words)


def draw_maps(maps: Sequence[Map], *, columns: int = 2) -> Figure:
    """A figure of heat maps in `columns` columns, block against position.

    Cells at which a block runs at its home position are framed.
    """
    columns = min(columns, len(maps))
    lines = -(-len(maps) // columns)
    depth = len(maps[0].values)
    # Numbers are legible only in few, large cells.
    written = depth <= _WRITTEN and len(maps) <= _WRITTEN_MAPS
    side = max(3.6, _CELL * depth if written else 0.0)
    figure = new_figure((side + 1.4) * columns, (side + 0.7) * lines)
    panels = figure.subplots(lines, columns, squeeze=False).ravel()
    for axes, each in zip(panels, maps, strict=False):
        _draw_map(axes, each, written=written)
        style_axes(axes, f"{each.title}{': too few images' if each.colourless else ''}")
        axes.set(xlabel="position", ylabel="block")
        axes.spines["bottom"].set_visible(False)
    # Five maps in two columns leave a sixth panel empty.
    for axes in panels[len(maps) :]:
        axes.set_visible(False)
    return figure


def _draw_map(axes: Axes, each: Map, *, written: bool) -> None:
    from matplotlib.patches import Rectangle

    values = each.values
    depth = len(each.values)
    # Without intervals, only numbers are shown, no colours.
    shades = np.zeros_like(values) if each.colourless else values
    low, high = (0.0, 1.0) if each.colourless else each.colour_range()
    mesh = axes.pcolormesh(
        shades,
        cmap="Greys" if each.colourless else "RdBu_r" if each.signed else "cividis",
        vmin=low,
        vmax=high,
        # With hundreds of cells, vectors in an SVG would take megabytes.
        rasterized=not written,
    )
    axes.set_aspect("equal")
    axes.invert_yaxis()
    ticks = range(0, depth, 1 if depth <= _WRITTEN else -(-depth // _WRITTEN))
    names = [str(tick + each.first) for tick in ticks]
    middles = [tick + 0.5 for tick in ticks]
    axes.set_xticks(middles, names)
    axes.set_yticks(middles, names)
    if not each.colourless:
        bar = axes.figure.colorbar(mesh, ax=axes, shrink=0.85)
        bar.set_label(each.meaning, color=INK)
        bar.ax.tick_params(colors=INK, length=0)
        bar.outline.set_visible(False)
    # By the luma of the cell, because signed maps are dark at both ends.
    colours = np.asarray(mesh.cmap(mesh.norm(shades)))[..., :3]
    light = colours @ np.array([0.299, 0.587, 0.114]) > _LIGHT
    largest = float(np.abs(values).max())
    # At most three digits, for values of any size.
    form = ".0f" if largest >= 100 else ".1f" if largest >= 10 else ".2f"
    style: dict[str, Any] = {"ha": "center", "va": "center", "fontsize": _DIGITS}
    for (row, column), value in np.ndenumerate(values) if written else ():
        colour = "black" if light[row, column] else "white"
        axes.text(column + 0.5, row + 0.5, format(value + 0.0, form), color=colour, **style)
    for home in range(depth):
        box = Rectangle((home + 0.05, home + 0.05), 0.9, 0.9, fill=False, lw=0.8)
        box.set_edgecolor("black" if light[home, home] else "white")
        axes.add_patch(box)
