"""Do a block's outputs show its position? UMAP of outputs, coloured by position (paper, Figure 4).

As in the paper every image runs alone through a fresh uniform order, and the outputs of one block
over all images are reduced to two dimensions. Images are grouped by their next block to be quick;
a sample of a group comes out as it would alone. One pass serves all blocks. What the paper leaves
open is done both ways: an output is the class token, or the mean over all tokens. Beside the
picture stand numbers from the original space, as UMAP can make clusters that are not there:

- purity: the share of a point's nearest neighbours whose position differs by at most one; `chance`
  is that share among all other points. Silhouette: scikit-learn's, by position.
- early cut: distances between the centroids of positions k and k + 1. `early_gap` is the larger one
  of k = 0, 1 over the median of the others: above 1, the step away from the first positions is
  longer than a usual step. `early_held` is the share of neighbours, of points before that cut,
  that are before it too. Early outputs are called detached from `early_gap` 2 and `early_held`
  0.95 on. Both need four positions.
"""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from layershuffle.analysis.features import FeatureWatch, Token
from layershuffle.analysis.results import Facts, Measured, Table, Tables, Value, spread
from layershuffle.analysis.subject import Subject
from layershuffle.errors import UsageError
from layershuffle.machine import torch_threads
from layershuffle.plotting import INK, new_figure, style_axes
from layershuffle.policies import Shuffled
from layershuffle.position import has_class_token

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Array = NDArray[Any]
_DETACHED_GAP, _DETACHED_HELD = 2.0, 0.95
# UMAP searches neighbours exactly up to 4,096 points, and takes far longer beyond.
_JOINT_POINTS = 3000
_COLOURS = "viridis_r"  # light is early, dark is late; readable in grey


def measure(subject: Subject) -> Measured:
    """points.csv (token, block, image, position, x, y), joint.csv (the same) and blocks.csv.

    blocks.csv: token, block, shown (1 for the block shown large), purity, chance, silhouette,
    early_gap, early_held. Raises `UsageError` for a block that is not there or too few images.
    """
    shown = _shown(subject)
    features, positions = collect(subject)
    neighbours, seed = subject.settings.neighbours, subject.settings.seed
    if len(positions) <= 2 * neighbours:
        raise UsageError(
            f"{len(positions)} images are too few for {neighbours} neighbours",
            hint="raise --images or lower --neighbours",
        )
    points: list[tuple[Value, ...]] = []
    blocks: list[tuple[Value, ...]] = []
    for token, vectors in features.items():
        for block in range(subject.depth):
            subject.progress(f"embedding block {block + 1} of {subject.depth}, {token} token")
            at = positions[:, block]
            points += _rows(token, embed(vectors[:, block], neighbours, seed=seed), block, at)
            numbers = describe(vectors[:, block], at, neighbours=neighbours)
            blocks.append((token, block, int(block == shown), *numbers.values()))
    joint, joint_facts = _joint(subject, features, positions)
    columns = ("token", "block", "image", "position", "x", "y")
    table = Table(("token", "block", "shown", *numbers), tuple(blocks))
    return Measured(
        tables={
            "points": Table(columns, tuple(points)),
            "joint": Table(columns, tuple(joint)),
            "blocks": table,
        },
        facts={
            "images": len(positions),
            "block": shown,
            "blocks": subject.depth,
            "tokens": {token: _token_facts(table, token, shown) for token in features},
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
        orders = [Shuffled().draw(depth, seed=seed, step=start + k) for k in range(count)]
        watch = FeatureWatch(tokens)
        subject.run(batch.images, orders, watch)
        width = watch.seen[0].vectors["mean"].shape[-1]
        for token in tokens:
            held = np.empty((count, depth, width), "f4")
            for seen in watch.seen:
                held[seen.step.rows, seen.step.block] = seen.vectors[token].numpy()
            vectors[token].append(held)
        places += [np.argsort(order.blocks) for order in orders]
        start += count
    return {token: np.concatenate(all_) for token, all_ in vectors.items()}, np.stack(places)


def embed(vectors: Array, neighbours: int, *, seed: int) -> Array:
    """UMAP coordinates `[points, 2]` of `[points, width]`; the same for the same seed."""
    with warnings.catch_warnings():
        # It tells that its neural variant is missing, which nobody asked for.
        warnings.filterwarnings(
            "ignore", message="Tensorflow not installed", category=ImportWarning
        )
        from umap import UMAP
    # One job: with several, UMAP would not keep to its random state.
    model = UMAP(n_neighbors=neighbours, random_state=seed, n_jobs=1)
    with torch_threads(None):
        coordinates: Array = model.fit_transform(vectors)
    return coordinates


def describe(vectors: Array, positions: Array, *, neighbours: int) -> dict[str, float]:
    """The numbers of the module's docstring; NaN where they are not defined."""
    from sklearn.metrics import silhouette_score

    near = _neighbours(vectors, neighbours)
    close = abs(positions[:, None] - positions[None, :]) <= 1
    silhouette = float("nan")
    if 2 <= len(np.unique(positions)) < len(positions):
        silhouette = float(silhouette_score(vectors, positions))
    gap, held = _early(vectors, positions, near)
    return {
        "purity": float(close[np.arange(len(positions))[:, None], near].mean()),
        "chance": float((close.sum() - len(positions)) / (close.size - len(positions))),
        "silhouette": silhouette,
        "early_gap": gap,
        "early_held": held,
    }


def _neighbours(vectors: Array, count: int) -> NDArray[np.int64]:
    """Indices `[points, count]` of the nearest other points."""
    from sklearn.neighbors import NearestNeighbors

    found: NDArray[np.int64] = (
        NearestNeighbors(n_neighbors=count).fit(vectors).kneighbors(return_distance=False)
    )
    return found


def _early(vectors: Array, positions: Array, near: Array) -> tuple[float, float]:
    depth = int(positions.max()) + 1
    if depth < 4 or len(np.unique(positions)) < depth:
        return float("nan"), float("nan")
    centres = np.stack([vectors[positions == k].mean(0, dtype="f8") for k in range(depth)])
    gaps = np.linalg.norm(np.diff(centres, axis=0), axis=1)
    cut = int(gaps[:2].argmax())
    early = positions <= cut
    return float(gaps[cut] / np.median(gaps[2:])), float(early[near[early]].mean())


def _shown(subject: Subject) -> int:
    block, depth = subject.settings.block, subject.depth
    if block is not None and block >= depth:
        raise UsageError(
            f"{block} is not a block of this model", hint=f"its blocks are 0 to {depth - 1}"
        )
    return depth // 2 if block is None else block


def _rows(token: str, places: Array, block: int, positions: Array) -> list[tuple[Value, ...]]:
    return [
        (token, block, image, int(position), round(float(x), 3), round(float(y), 3))
        for image, (position, (x, y)) in enumerate(zip(positions, places, strict=True))
    ]


def _joint(
    subject: Subject, features: dict[Token, Array], positions: Array
) -> tuple[list[tuple[Value, ...]], Facts]:
    """One embedding of all blocks at all positions, of as many images as UMAP takes quickly."""
    images = min(len(positions), max(1, _JOINT_POINTS // subject.depth))
    token = next(iter(features))
    subject.progress("embedding all blocks at all positions")
    vectors = features[token][:images].reshape(images * subject.depth, -1)
    places = embed(vectors, subject.settings.neighbours, seed=subject.settings.seed)
    near = _neighbours(vectors, subject.settings.neighbours)
    at, block = positions[:images].ravel(), np.tile(np.arange(subject.depth), images)
    rows: list[tuple[Value, ...]] = [
        (
            token,
            int(block[k]),
            k // subject.depth,
            int(at[k]),
            round(float(x), 3),
            round(float(y), 3),
        )
        for k, (x, y) in enumerate(places)
    ]
    facts = {
        "token": token,
        "images": images,
        "same_position": float((at[near] == at[:, None]).mean()),
        "same_block": float((block[near] == block[:, None]).mean()),
        "chance": 1.0 / subject.depth,
    }
    return rows, facts


def _token_facts(table: Table, token: str, shown: int) -> Facts:
    rows = table.where(token=token)
    one = rows.where(block=shown)
    names = ("purity", "chance", "silhouette", "early_gap", "early_held")
    numbers = {name: _known(one.column(name)[0]) for name in names}
    return {
        **numbers,
        "purities": rows.column("purity"),
        "detached_blocks": sum(map(_detached, rows.column("early_gap"), rows.column("early_held"))),
        "detached": _detached(one.column("early_gap")[0], one.column("early_held")[0]),
    }


def _known(value: float) -> float | None:
    return None if np.isnan(value) else value


def _detached(gap: float, held: float) -> bool:
    return gap >= _DETACHED_GAP and held >= _DETACHED_HELD


def paragraph(facts: Facts) -> str:
    """What the numbers say, in sentences."""
    sentences = [
        f"Outputs of block {facts['block']} over {facts['images']} images, each alone in an order "
        "of its own."
    ]
    for token, one in facts["tokens"].items():
        sentences.append(
            f"{token.capitalize()} token: {one['purity']:.0%} of a point's nearest neighbours were "
            f"made within one position of it, against {one['chance']:.0%} by chance (over all "
            f"blocks {spread(one['purities'])}). {_early_sentence(one, facts['blocks'])}"
        )
    joint = facts["joint"]
    side = "position" if joint["same_position"] > joint["same_block"] else "block"
    sentences.append(
        f"With all blocks together, {joint['same_position']:.0%} of a point's neighbours share its "
        f"position and {joint['same_block']:.0%} its block (chance {joint['chance']:.0%}): outputs "
        f"gather more by {side}."
    )
    return " ".join(sentences)


def _early_sentence(one: Facts, blocks: int) -> str:
    if one["early_gap"] is None:
        return "There are too few positions to speak of early ones."
    word = "stand apart" if one["detached"] else "do not stand apart"
    return (
        f"Early outputs {word} from the rest here, and do in {one['detached_blocks']} of {blocks} "
        f"blocks (the step away from them is {one['early_gap']:.1f} times the usual one between "
        f"positions, {one['early_held']:.0%} of their neighbours are early too)."
    )


def figures(tables: Tables) -> dict[str, Figure]:
    """umap.svg: the block shown large; umap-blocks-TOKEN.svg: all blocks; umap-joint.svg."""
    points, blocks = tables["points"], tables["blocks"]
    tokens = list(dict.fromkeys(points.column("token")))
    shown = blocks.where(shown=1).column("block")[0]
    large = {f"block {shown}, {t} token": points.where(token=t, block=shown) for t in tokens}
    drawn = {"umap": _page(large, columns=len(tokens), size=12.0, raster=False)}
    for token in tokens:
        pages = {
            f"block {block}": points.where(token=token, block=block)
            for block in sorted(set(points.column("block")))
        }
        drawn[f"umap-blocks-{token}"] = _page(pages, columns=4, size=3.0)
    drawn["umap-joint"] = _joint_page(tables["joint"])
    return drawn


def _page(pages: dict[str, Table], *, columns: int, size: float, raster: bool = True) -> Figure:
    columns = min(columns, len(pages))
    lines = -(-len(pages) // columns)
    side = 4.4 if len(pages) <= 2 else 2.4
    figure = new_figure(side * columns + 0.8, side * lines)
    panels = figure.subplots(lines, columns, squeeze=False).ravel()
    last = max(max(table.column("position")) for table in pages.values())
    for axes, (title, table) in zip(panels, pages.items(), strict=False):
        dots = _scatter(axes, table, "position", size=size, last=last, raster=raster)
        style_axes(axes, title)
    for axes in panels[len(pages) :]:
        axes.set_visible(False)
    bar = figure.colorbar(dots, ax=list(panels), shrink=0.8)
    _style_bar(bar, "position (light: near the input)")
    return figure


def _joint_page(table: Table) -> Figure:
    figure = new_figure(9.6, 4.4)
    last = max(table.column("position"))
    for axes, colour in zip(figure.subplots(1, 2), ("position", "block"), strict=True):
        dots = _scatter(axes, table, colour, size=3.0, last=last, raster=True)
        style_axes(axes, f"all blocks at all positions, by {colour}")
        _style_bar(figure.colorbar(dots, ax=axes, shrink=0.8), colour)
    return figure


def _scatter(axes: Axes, table: Table, colour: str, *, size: float, last: int, raster: bool) -> Any:
    axes.set(xticks=[], yticks=[])
    axes.spines["bottom"].set_visible(False)
    return axes.scatter(
        table.column("x"),
        table.column("y"),
        c=table.column(colour),
        cmap=_COLOURS,
        vmin=0,
        vmax=last,
        s=size,
        lw=0,
        rasterized=raster,
    )


def _style_bar(bar: Any, meaning: str) -> None:
    bar.set_label(meaning, color=INK)
    bar.ax.tick_params(colors=INK, length=0)
    bar.outline.set_visible(False)
