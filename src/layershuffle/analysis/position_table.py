"""Means per (block, position): their table, the effect of a block's home position, their picture.

The home position of block i is position i, the one that it had in pretraining.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from pandas import DataFrame

from layershuffle.errors import UsageError
from layershuffle.plotting import GROUND, INK, new_figure, style_axes

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Floats = NDArray[np.float64]
# Up to so many blocks, and maps on a page, every cell carries its number.
_WRITTEN, _WRITTEN_MAPS = 12, 4


class PositionMeans:
    """A running mean per (block, position)."""

    def __init__(self, depth: int) -> None:
        self._sums: Floats = np.zeros((depth, depth))
        self._counts: Floats = np.zeros((depth, depth))

    def add(self, block: int, position: int, *, total: float, count: int) -> None:
        """Count `count` more values that add up to `total`."""
        self._sums[block, position] += total
        self._counts[block, position] += count

    def mean(self) -> Floats:
        """Means `[block, position]`; raises `UsageError` if a cell was never met."""
        missing = int((self._counts == 0).sum())
        if missing:
            raise UsageError(
                f"{missing} of {self._counts.size} pairs of block and position were never run",
                hint="raise --orders or --images, or lower --batch-size",
            )
        return self._sums / self._counts


@dataclass(frozen=True, kw_only=True)
class HomeEffect:
    """How cells with position == block differ from the others.

    `home` and `elsewhere` are plain means. `excess` is the mean of the home cells less that of the
    others after the mean of each block and of each position is taken out: blocks differ, and so do
    positions, and neither is a block being out of place. `correlation` is Spearman's, between that
    residual and |position - block|.
    """

    home: float
    elsewhere: float
    excess: float
    correlation: float


def home_effect(values: Floats) -> HomeEffect:
    """The numbers of `HomeEffect` for values `[block, position]`."""
    from scipy.stats import spearmanr

    depth = len(values)
    at_home = np.eye(depth, dtype=bool)
    # What a model with an effect per block and one per position (no interaction) leaves over.
    rest = values - values.mean(0, keepdims=True) - values.mean(1, keepdims=True) + values.mean()
    block, position = np.indices(values.shape)
    # Spearman's correlation is not defined where nothing is left to rank but rounding errors.
    flat = np.allclose(rest, 0.0, atol=1e-12 + 1e-9 * float(np.abs(values).max())) or depth < 3
    correlation = 0.0 if flat else spearmanr(rest.ravel(), abs(block - position).ravel()).statistic
    return HomeEffect(
        home=float(values[at_home].mean()),
        elsewhere=float(values[~at_home].mean()),
        excess=float(rest[at_home].mean() - rest[~at_home].mean()),
        correlation=float(correlation),
    )


def position_table(columns: Mapping[str, Floats], **labels: str) -> DataFrame:
    """One row per (block, position); `labels` are constant columns in front."""
    block, position = np.indices(next(iter(columns.values())).shape)
    table = DataFrame({"block": block.ravel(), "position": position.ravel()})
    for place, (name, label) in enumerate(labels.items()):
        table.insert(place, name, label)
    return table.assign(**{name: values.ravel() for name, values in columns.items()})


def grid(table: DataFrame, name: str, *, row: str = "block", column: str = "position") -> Floats:
    """The values `[row, column]` of one column of a table."""
    values: Floats = table.pivot(index=row, columns=column, values=name).to_numpy(dtype=float)
    return values


def draw_maps(
    maps: Sequence[tuple[str, str, Floats]],
    *,
    y: str = "block",
    x: str = "position",
    columns: int = 2,
    limits: tuple[float, float] | None = None,
) -> Figure:
    """Heat maps side by side: (title, what the colours mean, values `[y, x]`) each.

    Cells with x == y are framed: there a block runs at its home position.
    """
    columns = min(columns, len(maps))
    lines = -(-len(maps) // columns)
    figure = new_figure(5.0 * columns, 4.3 * lines)
    panels = figure.subplots(lines, columns, squeeze=False).ravel()
    for axes, (title, meaning, values) in zip(panels, maps, strict=False):
        # Numbers are legible in few and large cells only.
        written = len(values) <= _WRITTEN and len(maps) <= _WRITTEN_MAPS
        _draw_map(axes, values, meaning=meaning, limits=limits, written=written)
        style_axes(axes, title)
        axes.set(xlabel=x, ylabel=y)
        axes.spines["bottom"].set_visible(False)
    # A page of five maps in two columns has a sixth panel.
    for axes in panels[len(maps) :]:
        axes.set_visible(False)
    return figure


def _draw_map(
    axes: Axes,
    values: Floats,
    *,
    meaning: str,
    limits: tuple[float, float] | None,
    written: bool,
) -> None:
    from matplotlib.patches import Rectangle

    low, high = limits or (float(values.min()), float(values.max()))
    # With hundreds of cells an SVG of vectors would weigh megabytes.
    mesh = axes.pcolormesh(values, cmap="cividis", vmin=low, vmax=high, rasterized=not written)
    axes.set_aspect("equal")
    axes.invert_yaxis()
    depth = len(values)
    ticks = range(0, depth, 1 if depth <= _WRITTEN else -(-depth // _WRITTEN))
    axes.set_xticks([tick + 0.5 for tick in ticks], list(map(str, ticks)))
    axes.set_yticks([tick + 0.5 for tick in ticks], list(map(str, ticks)))
    bar = axes.figure.colorbar(mesh, ax=axes, shrink=0.85)
    bar.set_label(meaning, color=INK)
    bar.ax.tick_params(colors=INK, length=0)
    bar.outline.set_visible(False)
    middle = (low + high) / 2
    if written:
        _write_numbers(axes, values, middle)
    for home in range(depth):
        box = Rectangle((home + 0.05, home + 0.05), 0.9, 0.9, fill=False, lw=0.8)
        box.set_edgecolor(INK if values[home, home] > middle else GROUND)
        axes.add_patch(box)


def _write_numbers(axes: Axes, values: Floats, middle: float) -> None:
    largest = float(np.abs(values).max())
    # Three digits at most, whatever the size of the values.
    form = ".0f" if largest >= 100 else ".1f" if largest >= 10 else ".2f"
    for (row, column), value in np.ndenumerate(values):
        style: dict[str, Any] = {"ha": "center", "va": "center", "fontsize": 5.5}
        colour = INK if value > middle else GROUND
        axes.text(column + 0.5, row + 0.5, format(value + 0.0, form), color=colour, **style)
