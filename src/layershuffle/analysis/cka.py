"""Does a block compute the same at every position? Linear CKA across positions, per block.

Centred kernel alignment (Kornblith et al. 2019, arXiv 1905.00414) of a block's outputs (mean over
tokens) on the same images at two positions: 1 for representations that differ by a rotation and a
scale, near 0 for unrelated ones. The two positions come from two orders, in which other blocks ran
before, even if the position is the same. So every pair of positions is compared between two
independent Latin squares of orders: the diagonal shows the similarity at one position under two
orders, which is the reference for all other pairs.
CKA of few images is biased upwards; `floor` is its value if the images of one side are shuffled.
Intervals are over images, for these two squares of orders.
"""

from __future__ import annotations

import numpy as np
import torch
from matplotlib.figure import Figure
from pandas import DataFrame
from torch import Tensor

from layershuffle.analysis.features import FeatureWatch
from layershuffle.analysis.position_table import Floats, Map, draw_maps, grid, interval
from layershuffle.analysis.results import Facts, Measurement, Tables
from layershuffle.analysis.subject import Subject, balanced_orders
from layershuffle.core.stack import fixed_of
from layershuffle.stats import ImageGroups

_TINY = 1e-300  # below any square that is not 0


def cka_matrix(first: Tensor, second: Tensor) -> tuple[Floats, Floats]:
    """CKA `[positions, positions]` between features `[positions, images, width]`, and influences.

    CKA with a linear kernel is |Y'X|^2 / (|X'X| |Y'Y|) for centred X and Y, Frobenius norms; 0 if
    one of them is constant.

    Influences `[positions, positions, images]`: the derivative of each CKA by the weight of each
    image: CKA (2 x'(X'Y)y / |X'Y|^2 - x'(X'X)x / |X'X|^2 - y'(Y'Y)y / |Y'Y|^2).
    """
    x, y = (z.double() - z.double().mean(1, keepdim=True) for z in (first, second))
    own = [z.transpose(1, 2) @ z for z in (x, y)]
    squares = [kernel.square().sum((1, 2)) for kernel in own]
    shares = [
        ((z @ kernel) * z).sum(2) / square.clamp_min(_TINY)[:, None]
        for z, kernel, square in zip((x, y), own, squares, strict=True)
    ]
    values, influences = [], []
    # All positions of `second` at a time, but not all pairs, each of which is width x width.
    for left, square, share in zip(x, squares[0], shares[0], strict=True):
        cross = y.transpose(1, 2) @ left
        above, below = cross.square().sum((1, 2)), (square * squares[1]).sqrt()
        cka = torch.where(below > 0, above / below.clamp_min(_TINY), 0.0)
        common = 2 * ((y @ cross) * left).sum(2) / above.clamp_min(_TINY)[:, None]
        values.append(cka)
        influences.append(cka[:, None] * (common - share - shares[1]))
    return torch.stack(values).numpy(), torch.stack(influences).numpy()


def measure(subject: Subject) -> Measurement:
    """cka.csv: block, position, other (position), cka, mean of both directions."""
    first, second = _features(subject)  # each [blocks, positions, images, width]
    rows, floors, depth, begin = [], [], len(subject.drawn), subject.drawn.start
    influence = np.zeros((depth, depth, first.shape[2]))
    shuffle = np.random.default_rng(subject.settings.seed).permutation(first.shape[2])
    for block, (ours, others) in enumerate(zip(first, second, strict=True)):
        subject.progress("blocks", block, depth)
        matrix, moved = cka_matrix(ours, others)
        influence += moved / depth
        # Neither of the two squares of orders has precedence, so both directions are averaged.
        matrix = (matrix + matrix.T) / 2
        rows += [
            (begin + block, begin + p, begin + q, float(value))
            for (p, q), value in np.ndenumerate(matrix)
        ]
        floors.append(cka_matrix(ours[-1:], others[-1:, shuffle])[0].item())
    table = DataFrame(rows, columns=["block", "position", "other", "cka"])
    images, floor = first.shape[2], float(np.mean(floors))
    # All images share the two squares, so batches are no clusters.
    clusters = subject.clusters(by_batch=False)
    facts = {"images": images, **_facts(table, floor, influence, clusters)}
    return Measurement(tables={"cka": table}, facts=facts)


def _features(subject: Subject) -> tuple[Tensor, Tensor]:
    """Outputs `[blocks, positions, images, width]` under two Latin squares of orders each, of the
    drawn blocks."""
    drawn, seed, fixed = subject.drawn, subject.settings.seed, fixed_of(subject.model)
    depth = len(drawn)
    # Each square has its own relabelling, so their orders are independent.
    orders = balanced_orders(subject.depth, first=0, count=2 * depth, seed=seed, fixed=fixed)
    chunks: tuple[list[Tensor], list[Tensor]] = ([], [])
    for batch in subject.batches():
        for square in (0, 1):
            table: list[list[Tensor]] = [[torch.empty(0)] * depth for _ in range(depth)]
            for order in orders[square * depth : (square + 1) * depth]:
                watch = FeatureWatch()
                subject.run(batch.images, order, watch)
                for turn in watch.turns:
                    if turn.step.block in drawn:
                        row = table[turn.step.block - drawn.start]
                        row[turn.step.position - drawn.start] = turn.vectors["mean"]
            chunks[square].append(torch.stack([torch.stack(row) for row in table]))
    return torch.cat(chunks[0], dim=2), torch.cat(chunks[1], dim=2)


def _facts(
    table: DataFrame, floor: float, influence: Floats, clusters: ImageGroups | None
) -> Facts:
    mean = _matrix(table)
    depth = len(mean)
    # Distance 0 is the reference for all others: the same position, under two orders.
    apart_by = abs(np.subtract.outer(np.arange(depth), np.arange(depth)))
    by_distance = [float(mean[apart_by == d].mean()) for d in range(depth)]
    # As in the matrix, every distance averages over both directions.
    moved = [influence[apart_by == d].mean(0) for d in range(depth)]
    numbers = {
        "same_position": (by_distance[0], moved[0]),
        "first_and_last": (by_distance[-1], moved[-1]),
        "neighbours_less_same": (by_distance[1] - by_distance[0], moved[1] - moved[0]),
    }
    return {
        **{name: value for name, (value, _) in numbers.items()},
        "floor": floor,
        "intervals": {
            name: interval(value, None if clusters is None else clusters.half_width(part))
            for name, (value, part) in numbers.items()
        },
    }


def _matrix(table: DataFrame) -> Floats:
    """The mean over the blocks of the table."""
    means = table.groupby(["position", "other"], as_index=False).cka.mean()
    return grid(means, "cka", row="position", column="other")


def figures(tables: Tables) -> dict[str, Figure]:
    """cka.svg: mean over blocks; cka-blocks.svg: every block."""
    table = tables["cka"]

    def drawn(title: str, values: Floats) -> Map:
        begin = int(table.block.min())
        return Map(title=title, meaning="linear CKA", values=values, limits=(0.0, 1.0), first=begin)

    mean = [drawn("CKA across positions, mean over blocks", _matrix(table))]
    pages = [drawn(f"block {block}", _matrix(rows)) for block, rows in table.groupby("block")]
    other = "position under another order"
    return {
        "cka": draw_maps(mean, y=other, x="position"),
        "cka-blocks": draw_maps(pages, y=other, x="position", columns=3),
    }
