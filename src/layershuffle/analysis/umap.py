"""Do a block's outputs show its position? UMAP of outputs, coloured by position (paper, Figure 4).

As in the paper, every image runs in its own uniform order, and the outputs of one block over all
images are reduced to two dimensions. Images are grouped by their next block for speed, which does
not change their outputs. One pass serves all blocks. The paper does not define an output: both the
class token and the mean over all tokens are used. Numbers from the original space accompany the
figure, because UMAP can create clusters that do not exist:

- purity: the share of a point's nearest neighbours whose position differs by at most one; `chance`
  is that share among all other points; `purity_half` is half the 95 % interval, over images.
- early cut: distances between the centroids of positions k and k + 1. `early_gap` is the larger one
  of k = 0, 1 over the median of the others: above 1, the step away from the first positions is
  longer than a usual step. `early_held` is the share of the neighbours of points before that cut
  that are before it, too. Early outputs are called detached if `early_gap` is at least 2 and
  `early_held` at least 0.95. Both need four positions.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from numpy.typing import NDArray
from pandas import DataFrame

from layershuffle.analysis.features import FeatureWatch, Token
from layershuffle.analysis.position_table import interval
from layershuffle.analysis.results import Facts, Measurement, Tables, with_interval
from layershuffle.analysis.subject import Subject
from layershuffle.core.policies import Shuffled
from layershuffle.core.position import has_class_token
from layershuffle.core.stack import fixed_of
from layershuffle.ground.errors import UsageError
from layershuffle.ground.machine import torch_threads
from layershuffle.ground.plotting import INK, new_figure, style_axes
from layershuffle.ground.stats import half_width

Array = NDArray[Any]
_DETACHED_GAP = 2.0
_DETACHED_HELD = 0.95


def measure(subject: Subject) -> Measurement:
    """points.csv (token, block, image, position, x, y) and blocks.csv.

    blocks.csv: token, block, shown (1 for the block shown large), purity, purity_half, chance,
    early_gap, early_held. Raises `UsageError` for an unknown block or too few images.
    """
    block = subject.settings.block
    drawn = subject.drawn
    if block is not None and block not in drawn:
        which = "block" if len(drawn) == subject.depth else "drawn block"
        raise UsageError(
            f"{block} is not a {which} of this model",
            hint=f"its {which}s are {drawn.start} to {drawn.stop - 1}",
        )
    shown = drawn[len(drawn) // 2] if block is None else block
    features, positions = collect(subject)
    neighbours = subject.settings.neighbours
    seed = subject.settings.seed
    if len(positions) <= 2 * neighbours:
        raise UsageError(
            f"{len(positions)} images are too few for {neighbours} neighbours",
            hint="raise --max-images or lower --neighbours",
        )
    # Every image has its own order, so batches are no clusters.
    clusters = subject.clusters(by_batch=False)
    points: list[DataFrame] = []
    rows: list[dict[str, Any]] = []
    every = len(features) * len(drawn)
    for token, vectors in features.items():
        for block in drawn:
            subject.progress("embeddings", len(rows), every)
            places = positions[:, block]
            outputs = vectors[:, block]
            x, y = embed(outputs, neighbours, seed=seed).astype("f8").round(3).T
            columns = {"token": token, "block": block, "image": range(len(places))}
            points.append(DataFrame({**columns, "position": places, "x": x, "y": y}))
            places = places - drawn.start
            numbers = describe(outputs, places, neighbours=neighbours, clusters=clusters)
            rows.append({"token": token, "block": block, "shown": int(block == shown), **numbers})
    blocks = DataFrame(rows)
    return Measurement(
        tables={"points": pd.concat(points, ignore_index=True), "blocks": blocks},
        facts={
            "images": len(positions),
            "block": shown,
            "drawn_blocks": len(drawn),
            "tokens": {token: _token_facts(blocks[blocks.token == token]) for token in features},
        },
    )


def collect(subject: Subject) -> tuple[dict[Token, Array], NDArray[np.int64]]:
    """Outputs `[images, blocks, width]` per kind of token, and positions `[images, blocks]`.

    Image i runs in the order that `Shuffled`, with the ends of the model, draws at step i.
    """
    depth = subject.depth
    seed = subject.settings.seed
    policy = Shuffled(fixed=fixed_of(subject.model))
    tokens: tuple[Token, ...] = ("class", "mean") if has_class_token(subject.model) else ("mean",)
    vectors: dict[Token, list[Array]] = {token: [] for token in tokens}
    places: list[Array] = []
    start = 0
    for batch in subject.batches():
        count = len(batch.images)
        # By the number of the image, so orders do not depend on the batch size.
        orders = [policy.draw(depth, seed=seed, step=start + k) for k in range(count)]
        watch = FeatureWatch(tokens)
        subject.run(batch.images, orders, watch)
        width = watch.turns[0].vectors["mean"].shape[-1]
        for token in tokens:
            outputs = np.empty((count, depth, width), "f4")
            for turn in watch.turns:
                outputs[turn.step.rows, turn.step.block] = turn.vectors[token].numpy()
            vectors[token].append(outputs)
        for order in orders:
            places.append(np.argsort(order.blocks))
        start += count
    return {token: np.concatenate(all_) for token, all_ in vectors.items()}, np.stack(places)


def embed(vectors: Array, neighbours: int, *, seed: int) -> Array:
    """UMAP coordinates `[points, 2]` of `[points, width]`; the same for the same seed."""
    with warnings.catch_warnings():
        # umap warns at its import that Tensorflow is missing, which is not used.
        warnings.filterwarnings(
            "ignore", message="Tensorflow not installed", category=ImportWarning
        )
        from umap import UMAP
    # One job, because with several UMAP ignores its random state.
    model = UMAP(n_neighbors=neighbours, random_state=seed, n_jobs=1)
    with torch_threads(None):
        coordinates: Array = model.fit_transform(vectors)
    return coordinates


def describe(
    vectors: Array,
    positions: Array,
    *,
    neighbours: int,
    clusters: NDArray[np.int64] | None = None,
) -> dict[str, float]:
    """The numbers of the module's docstring; NaN if undefined."""
    from sklearn.neighbors import NearestNeighbors

    # Without data `kneighbors` leaves every point out of its own neighbours.
    near = NearestNeighbors(n_neighbors=neighbours).fit(vectors).kneighbors(return_distance=False)
    # Neighbouring positions count as near, because their states differ by one update.
    close = abs(positions[:, None] - positions[None, :]) <= 1
    gap, early_neighbours = _early(vectors, positions, near)
    shares = close[np.arange(len(positions))[:, None], near].mean(1)
    influence = (shares - shares.mean()) / len(shares)
    return {
        "purity": float(shares.mean()),
        "purity_half": math.nan if clusters is None else float(half_width(influence, clusters)),
        "chance": float((close.sum() - len(positions)) / (close.size - len(positions))),
        "early_gap": gap,
        "early_held": early_neighbours,
    }


def _early(vectors: Array, positions: Array, near: Array) -> tuple[float, float]:
    depth = int(positions.max()) + 1
    if depth < 4 or len(np.unique(positions)) < depth:
        return float("nan"), float("nan")
    # Centroids in float64, because the gap between two of them may be small against their norms.
    centres = np.stack([vectors[positions == k].mean(0, dtype="f8") for k in range(depth)])
    gaps = np.linalg.norm(np.diff(centres, axis=0), axis=1)
    cut = int(gaps[:2].argmax())
    early = positions <= cut
    return float(gaps[cut] / np.median(gaps[2:])), float(early[near[early]].mean())


def _token_facts(blocks: DataFrame) -> Facts:
    detached = (blocks.early_gap >= _DETACHED_GAP) & (blocks.early_held >= _DETACHED_HELD)
    large = blocks[blocks.shown == 1].iloc[0]
    names = ("purity", "chance", "early_gap", "early_held")
    numbers = {}
    facts: Facts = {}
    for name in names:
        numbers[name] = float(large[name])
        # JSON has no NaN: an undefined number is null.
        facts[name] = None if np.isnan(numbers[name]) else numbers[name]
    half = None if np.isnan(large.purity_half) else float(large.purity_half)
    return {
        **facts,
        "intervals": {"purity": interval(numbers["purity"], half, limits=(0.0, 1.0))},
        "detached_blocks": int(detached.sum()),
    }


MEANINGS = {
    "token": "whose output: the class token, or the mean over all tokens",
    "block": "the block; among the numbers, the one of the large figure",
    "shown": "1 for the block of the large figure",
    "x": "place of a point in the figure",
    "y": "place of a point in the figure",
    "purity": "share of a point's neighbours that ran within one position of it",
    "chance": "that share among all other points",
    "early gap": "step behind the first positions, as a multiple of a usual step",
    "early held": "share of neighbours of points before that step that are before it, too",
    "detached blocks": "blocks whose early outputs stand apart by these two numbers",
}


def answer(measured: Measurement) -> str:
    """The answer in a sentence: the share of near neighbours beside chance, for each token."""
    facts = measured.facts
    parts = []
    better = False
    for token, numbers in facts["tokens"].items():
        share = with_interval(numbers, "purity", form=".0f", scale=100.0)
        label = "the class token" if token == "class" else "the mean of the tokens"
        parts.append(f"{share} % by {label}")
        bounds = numbers["intervals"]["purity"]
        better = better or bool(bounds and bounds["low"] > numbers["chance"])
    chance = 100 * next(iter(facts["tokens"].values()))["chance"]
    verdict = "Yes" if better else "Not that these images show"
    return (
        f"{verdict}: of the neighbours of a point of block {facts['block']}, {' and '.join(parts)} "
        f"ran within one position of it, by chance {chance:.0f} %."
    )


def figures(tables: Tables) -> dict[str, Figure]:
    """umap.svg: the chosen block; umap-blocks-TOKEN.svg: all blocks."""
    points = tables["points"]
    blocks = tables["blocks"]
    shown = blocks[blocks.shown == 1].block.iloc[0]
    by_token = dict(iter(points.groupby("token", sort=False)))
    large = {}
    for token, rows in by_token.items():
        large[f"block {shown}, {token} token"] = rows[rows.block == shown]
    drawn = {"umap": _scatter_plots(large, columns=len(large), side=4.4, dot=12.0)}
    for token, rows in by_token.items():
        small = {}
        for block, part in rows.groupby("block"):
            small[f"block {block}"] = part
        drawn[f"umap-blocks-{token}"] = _scatter_plots(small, columns=4, side=2.4, dot=3.0)
    return drawn


def _scatter_plots(
    panels: Mapping[str, DataFrame], *, columns: int, side: float, dot: float
) -> Figure:
    """A figure of points by title, coloured by position, with a colour bar."""
    columns = min(columns, len(panels))
    lines = -(-len(panels) // columns)
    figure = new_figure(side * columns + 0.8, side * lines)
    grid = figure.subplots(lines, columns, squeeze=False).ravel()
    for axes in grid[len(panels) :]:
        axes.set_visible(False)
    last = max(rows.position.max() for rows in panels.values())
    for axes, (title, rows) in zip(grid, panels.items(), strict=False):
        dots = axes.scatter(
            rows.x, rows.y, c=rows.position, cmap="viridis_r", vmin=0, vmax=last, s=dot, lw=0,
            rasterized=len(panels) > 2,  # thousands of points as vectors weigh megabytes
        )  # fmt: skip
        axes.set(xticks=[], yticks=[])
        style_axes(axes, title)
        axes.spines["bottom"].set_visible(False)
    bar = figure.colorbar(dots, ax=grid, shrink=0.8)
    bar.set_label("position (light: near the input)", color=INK)
    bar.ax.tick_params(colors=INK, length=0)
    bar.outline.set_visible(False)
    return figure
