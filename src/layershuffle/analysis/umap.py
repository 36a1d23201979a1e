"""Do a block's outputs show its position? UMAP of outputs, coloured by position (paper, Figure 4).

As in the paper, every image runs in its own uniform order, and the outputs of one block over all
images are reduced to two dimensions. Images are grouped by their next block for speed, which does
not change their outputs. One pass serves all blocks. The paper does not define an output: both the
class token and the mean over all tokens are used. Numbers from the original space accompany the
figure, because UMAP can create clusters that do not exist:

- purity: the share of a point's nearest neighbours whose position differs by at most one; `chance`
  is that share among all other points; `purity_half` is half the 95 % interval, over images.
  Silhouette: scikit-learn's, by position.
- early cut: distances between the centroids of positions k and k + 1. `early_gap` is the larger one
  of k = 0, 1 over the median of the others: above 1, the step away from the first positions is
  longer than a usual step. `early_held` is the share of the neighbours of points before that cut
  that are before it, too. Early outputs are called detached if `early_gap` is at least 2 and
  `early_held` at least 0.95. Both need four positions.
"""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from pandas import DataFrame

from layershuffle.analysis.features import FeatureWatch, Token
from layershuffle.analysis.intervals import Interval, apart, finding_text, interval, with_bounds
from layershuffle.analysis.results import Facts, Measurement
from layershuffle.analysis.subject import Subject
from layershuffle.core.policies import Shuffled
from layershuffle.core.position import has_class_token
from layershuffle.errors import UsageError
from layershuffle.machine import torch_threads
from layershuffle.plotting import INK, new_figure, style_axes

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from layershuffle.analysis.results import Tables
    from layershuffle.stats import ImageGroups

Array = NDArray[Any]
_DETACHED_GAP, _DETACHED_HELD = 2.0, 0.95
# UMAP searches neighbours exactly up to 4,096 points, and takes far longer beyond.
_JOINT_POINTS = 3000
_COLOURS = "viridis_r"  # light is early, dark is late; readable in grey


def measure(subject: Subject) -> Measurement:
    """points.csv (token, block, image, position, x, y), joint.csv (the same) and blocks.csv.

    blocks.csv: token, block, shown (1 for the block shown large), purity, purity_half, chance,
    silhouette, early_gap, early_held. Raises `UsageError` for an unknown block or too few images.
    """
    block, depth = subject.settings.block, subject.depth
    if block is not None and block >= depth:
        raise UsageError(
            f"{block} is not a block of this model", hint=f"its blocks are 0 to {depth - 1}"
        )
    shown = depth // 2 if block is None else block
    features, positions = collect(subject)
    neighbours, seed = subject.settings.neighbours, subject.settings.seed
    if len(positions) <= 2 * neighbours:
        raise UsageError(
            f"{len(positions)} images are too few for {neighbours} neighbours",
            hint="raise --max-images or lower --neighbours",
        )
    # Every image has its own order, so batches are no clusters.
    clusters = subject.clusters(len(positions), by_batch=False)
    points: list[DataFrame] = []
    rows: list[dict[str, Any]] = []
    # Every block of every kind of token, then all blocks together.
    every = len(features) * depth + 1
    for token, vectors in features.items():
        for block in range(depth):
            subject.progress("embeddings", len(rows), every)
            at, outputs = positions[:, block], vectors[:, block]
            images = range(len(at))
            places = embed(outputs, neighbours, seed=seed)
            points.append(_points(places, token=token, block=block, image=images, position=at))
            numbers = describe(outputs, at, neighbours=neighbours, clusters=clusters)
            rows.append({"token": token, "block": block, "shown": int(block == shown), **numbers})
    blocks = DataFrame(rows)
    subject.progress("embeddings", len(rows), every)
    joint, joint_facts = _joint(subject, features, positions)
    return Measurement(
        tables={"points": pd.concat(points, ignore_index=True), "joint": joint, "blocks": blocks},
        facts={
            "images": len(positions),
            "block": shown,
            "blocks": depth,
            "tokens": {token: _token_facts(blocks[blocks.token == token]) for token in features},
            "joint": joint_facts,
        },
    )


def collect(subject: Subject) -> tuple[dict[Token, Array], NDArray[np.int64]]:
    """Outputs `[images, blocks, width]` per kind of token, and positions `[images, blocks]`.

    Image i runs in the order that `Shuffled` draws at step i.
    """
    depth, seed = subject.depth, subject.settings.seed
    tokens: tuple[Token, ...] = ("class", "mean") if has_class_token(subject.model) else ("mean",)
    vectors: dict[Token, list[Array]] = {token: [] for token in tokens}
    places: list[Array] = []
    start = 0
    for batch in subject.batches():
        count = len(batch.images)
        # By the number of the image, so orders do not depend on the batch size.
        orders = [Shuffled().draw(depth, seed=seed, step=start + k) for k in range(count)]
        watch = FeatureWatch(tokens)
        subject.run(batch.images, orders, watch)
        width = watch.turns[0].vectors["mean"].shape[-1]
        for token in tokens:
            outputs = np.empty((count, depth, width), "f4")
            for turn in watch.turns:
                outputs[turn.step.rows, turn.step.block] = turn.vectors[token].numpy()
            vectors[token].append(outputs)
        places += [np.argsort(order.blocks) for order in orders]
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
    vectors: Array, positions: Array, *, neighbours: int, clusters: ImageGroups | None = None
) -> dict[str, float]:
    """The numbers of the module's docstring; NaN if undefined."""
    from sklearn.metrics import silhouette_score

    near = _neighbours(vectors, neighbours)
    # Neighbouring positions count as near, because their states differ by one update.
    close = abs(positions[:, None] - positions[None, :]) <= 1
    # scikit-learn refuses a single cluster, and clusters of one point each.
    silhouette = float("nan")
    if 2 <= len(np.unique(positions)) < len(positions):
        silhouette = float(silhouette_score(vectors, positions))
    gap, early_neighbours = _early(vectors, positions, near)
    shares = close[np.arange(len(positions))[:, None], near].mean(1)
    half = _half_width(shares, clusters)
    return {
        "purity": float(shares.mean()),
        "purity_half": float("nan") if half is None else half,
        "chance": float((close.sum() - len(positions)) / (close.size - len(positions))),
        "silhouette": silhouette,
        "early_gap": gap,
        "early_held": early_neighbours,
    }


def _half_width(shares: Array, clusters: ImageGroups | None) -> float | None:
    """Half the 95 % interval of the mean of a share per image."""
    if clusters is None:
        return None
    return clusters.half_width((shares - shares.mean()) / len(shares))


def _neighbours(vectors: Array, count: int) -> NDArray[np.int64]:
    """Indices `[points, count]` of the nearest other points."""
    from sklearn.neighbors import NearestNeighbors

    # Without data `kneighbors` leaves every point out of its own neighbours.
    indices: NDArray[np.int64] = (
        NearestNeighbors(n_neighbors=count).fit(vectors).kneighbors(return_distance=False)
    )
    return indices


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


def _points(places: Array, **columns: Any) -> DataFrame:
    """A table of `columns`, then the coordinates `places` `[points, 2]`."""
    x, y = places.astype("f8").round(3).T
    return DataFrame({**columns, "x": x, "y": y})


def _joint(
    subject: Subject, features: dict[Token, Array], positions: Array
) -> tuple[DataFrame, Facts]:
    """One embedding of all blocks at all positions, for as many images as UMAP embeds quickly."""
    depth, neighbours = subject.depth, subject.settings.neighbours
    images = min(len(positions), max(1, _JOINT_POINTS // depth))
    token = next(iter(features))
    vectors = features[token][:images].reshape(images * depth, -1)
    places = embed(vectors, neighbours, seed=subject.settings.seed)
    near = _neighbours(vectors, neighbours)
    at, block = positions[:images].ravel(), np.tile(np.arange(depth), images)
    image = np.repeat(np.arange(images), depth)
    clusters = subject.clusters(images, by_batch=False)
    facts: Facts = {"token": token, "images": images, "chance": 1.0 / depth, "intervals": {}}
    for name, labels in (("same_position", at), ("same_block", block)):
        # One value per image, because its points are not independent.
        shares = (labels[near] == labels[:, None]).reshape(images, -1).mean(1)
        facts[name] = float(shares.mean())
        half = _half_width(shares, clusters)
        facts["intervals"][name] = interval(facts[name], half, limits=(0.0, 1.0))
    return _points(places, token=token, block=block, image=image, position=at), facts


def _token_facts(blocks: DataFrame) -> Facts:
    detached = (blocks.early_gap >= _DETACHED_GAP) & (blocks.early_held >= _DETACHED_HELD)
    large = blocks[blocks.shown == 1].iloc[0]
    names = ("purity", "chance", "silhouette", "early_gap", "early_held")
    numbers = {name: float(large[name]) for name in names}
    half = None if np.isnan(large.purity_half) else float(large.purity_half)
    return {
        # JSON has no NaN: an undefined number is null.
        **{name: None if np.isnan(value) else value for name, value in numbers.items()},
        "intervals": {"purity": interval(numbers["purity"], half, limits=(0.0, 1.0))},
        "purities": blocks.purity.tolist(),
        "detached_blocks": int(detached.sum()),
        "detached": bool(detached[blocks.shown == 1].iloc[0]),
    }


def finding(facts: Facts) -> str:
    """The main numbers in two sentences."""
    parts = [
        f"{_against(numbers['purity'], numbers['intervals']['purity'], numbers['chance'])} of a "
        f"point's neighbours were made within one position of it by the {token} token, early "
        f"outputs stand apart in {numbers['detached_blocks']} of {facts['blocks']} blocks"
        for token, numbers in facts["tokens"].items()
    ]
    joint = facts["joint"]
    position, block = (
        _against(joint[name], joint["intervals"][name], joint["chance"])
        for name in ("same_position", "same_block")
    )
    return finding_text(
        f"Block {facts['block']}: {'; '.join(parts)}. With all blocks together {position} of a "
        f"point's neighbours share its position and {block} its block",
        joint["intervals"],
    )


def _against(share: float, bounds: Interval, chance: float) -> str:
    """The share with its interval, and whether it differs from chance."""
    text = with_bounds(share, bounds, form=".0%")
    if bounds is None or apart(bounds, chance):
        return f"{text}, {chance:.0%} by chance,"
    return f"{text}, no more than the {chance:.0%} of chance,"


def figures(tables: Tables) -> dict[str, Figure]:
    """umap.svg: the chosen block; umap-blocks-TOKEN.svg: all blocks; umap-joint.svg."""
    points, blocks, joint = tables["points"], tables["blocks"], tables["joint"]
    shown = blocks[blocks.shown == 1].block.iloc[0]
    by_token = dict(iter(points.groupby("token", sort=False)))
    large = [
        (f"block {shown}, {token} token", rows[rows.block == shown], "position")
        for token, rows in by_token.items()
    ]
    drawn = {"umap": _page(large, columns=len(large), size=12.0, raster=False)}
    for token, rows in by_token.items():
        small = [(f"block {block}", part, "position") for block, part in rows.groupby("block")]
        drawn[f"umap-blocks-{token}"] = _page(small, columns=4, size=3.0)
    both = [
        (f"all blocks at all positions, by {colour}", joint, colour)
        for colour in ("position", "block")
    ]
    drawn["umap-joint"] = _page(both, columns=2, size=3.0)
    return drawn


def _page(
    panels: list[tuple[str, DataFrame, str]], *, columns: int, size: float, raster: bool = True
) -> Figure:
    """A figure of scatter plots (title, points, column of the colour), with a colour bar each."""
    columns = min(columns, len(panels))
    lines = -(-len(panels) // columns)
    side = 4.4 if len(panels) <= 2 else 2.4
    figure = new_figure(side * columns + 0.8, side * lines)
    grid = figure.subplots(lines, columns, squeeze=False).ravel()
    for axes in grid[len(panels) :]:
        axes.set_visible(False)
    last = max(rows.position.max() for _, rows, _ in panels)
    places: dict[str, list[Any]] = {}
    for axes, (title, rows, colour) in zip(grid, panels, strict=False):
        dots = axes.scatter(
            rows.x, rows.y, c=rows[colour], cmap=_COLOURS, vmin=0, vmax=last, s=size, lw=0,
            rasterized=raster,  # thousands of points as vectors weigh megabytes
        )  # fmt: skip
        axes.set(xticks=[], yticks=[])
        style_axes(axes, title)
        axes.spines["bottom"].set_visible(False)
        places.setdefault(colour, []).append(axes)
    for colour, panels_of_colour in places.items():
        bar = figure.colorbar(dots, ax=panels_of_colour, shrink=0.8)
        bar.set_label("position (light: near the input)" if colour == "position" else colour)
        bar.ax.yaxis.label.set_color(INK)
        bar.ax.tick_params(colors=INK, length=0)
        bar.outline.set_visible(False)
    return figure
