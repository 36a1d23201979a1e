"""Does a block compute the same at every position? Linear CKA across positions, per block.

Centred kernel alignment (Kornblith et al. 2019, arXiv 1905.00414) of a block's outputs (mean over
tokens) on the same images at two positions: 1 for representations that differ by a rotation and a
scale, near 0 for unrelated ones. The two positions come from two orders, and what ran before the
block differs between them even if the position does not. So every pair of positions is compared
between two independent Latin squares of orders: the diagonal then says how alike a block's
outputs are at one position under two orders, and what is off the diagonal is to be held against it.
CKA of few images is biased upwards; `floor` is its value when the images of one side are shuffled.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch
from pandas import DataFrame
from torch import Tensor

from layershuffle.analysis.features import FeatureWatch
from layershuffle.analysis.latin_squares import balanced_orders
from layershuffle.analysis.position_table import Floats, draw_maps, grid
from layershuffle.analysis.results import Facts, Measurement
from layershuffle.analysis.subject import Subject

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from layershuffle.analysis.results import Tables


def linear_cka(first: Tensor, second: Tensor) -> float:
    """CKA with a linear kernel of features `[images, width]` and `[images, other width]`.

    |Y'X|^2 / (|X'X| |Y'Y|) for centred X and Y, Frobenius norms; 0 if one of them is constant.
    """
    x, y = (features.double() - features.double().mean(0) for features in (first, second))
    below = float(torch.linalg.matrix_norm(x.T @ x) * torch.linalg.matrix_norm(y.T @ y))
    return float((y.T @ x).square().sum()) / below if below else 0.0


def cka_matrix(first: Tensor, second: Tensor) -> Floats:
    """CKA `[positions, positions]` between features `[positions, images, width]`."""
    x, y = (z.double() - z.double().mean(1, keepdim=True) for z in (first, second))
    sizes = [torch.linalg.matrix_norm(z.transpose(1, 2) @ z) for z in (x, y)]
    # All positions of `second` at a time, not all pairs: a pair is a matrix of width x width.
    cross = torch.stack([(y.transpose(1, 2) @ left).square().sum((1, 2)) for left in x])
    below = sizes[0][:, None] * sizes[1][None, :]
    values: Floats = torch.where(below > 0, cross / below.clamp_min(1e-300), 0.0).numpy()
    return values


def measure(subject: Subject) -> Measurement:
    """cka.csv: block, position, other (position), cka, mean of both directions."""
    first, second = _features(subject)  # each [blocks, positions, images, width]
    rows, floors = [], []
    shuffle = np.random.default_rng(subject.settings.seed).permutation(first.shape[2])
    for block, (ours, others) in enumerate(zip(first, second, strict=True)):
        subject.progress(f"comparing positions, block {block + 1} of {subject.depth}")
        matrix = cka_matrix(ours, others)
        # The two squares of orders are equals, so neither direction is the right one.
        matrix = (matrix + matrix.T) / 2
        rows += [(block, p, q, float(value)) for (p, q), value in np.ndenumerate(matrix)]
        floors.append(linear_cka(ours[-1], others[-1][torch.from_numpy(shuffle)]))
    table = DataFrame(rows, columns=["block", "position", "other", "cka"])
    images, floor = first.shape[2], float(np.mean(floors))
    return Measurement(tables={"cka": table}, facts={"images": images, **_facts(table, floor)})


def _features(subject: Subject) -> tuple[Tensor, Tensor]:
    """Outputs under two Latin squares of orders, the same for all images."""
    depth, seed = subject.depth, subject.settings.seed
    # Two squares of their own relabelling, so that their orders are independent.
    orders = balanced_orders(depth, first=0, count=2 * depth, seed=seed)
    chunks: tuple[list[Tensor], list[Tensor]] = ([], [])
    for batch in subject.batches():
        for square in (0, 1):
            table: list[list[Tensor]] = [[torch.empty(0)] * depth for _ in range(depth)]
            for order in orders[square * depth : (square + 1) * depth]:
                watch = FeatureWatch()
                subject.run(batch.images, order, watch)
                for seen in watch.seen:
                    table[seen.step.block][seen.step.position] = seen.vectors["mean"]
            chunks[square].append(torch.stack([torch.stack(row) for row in table]))
    return torch.cat(chunks[0], dim=2), torch.cat(chunks[1], dim=2)


def _facts(table: DataFrame, floor: float) -> Facts:
    mean = _mean_matrix(table)
    # Distance 0 is the baseline of all others: the same position, under two orders.
    apart = abs(np.subtract.outer(np.arange(len(mean)), np.arange(len(mean))))
    by_distance = [float(mean[apart == d].mean()) for d in range(len(mean))]
    blocks = [float(_matrix(table, b)[apart > 0].mean()) for b in range(len(mean))]
    return {
        "same_position": by_distance[0],
        "by_distance": by_distance,
        "first_and_last": float(mean[0, -1]),
        "first_and_second": float(mean[0, 1]),
        "least_alike_block": int(np.argmin(blocks)),
        "least_alike": min(blocks),
        "most_alike_block": int(np.argmax(blocks)),
        "most_alike": max(blocks),
        "floor": floor,
    }


def _matrix(table: DataFrame, block: int) -> Floats:
    return grid(table[table.block == block], "cka", row="position", column="other")


def _mean_matrix(table: DataFrame) -> Floats:
    matrices = [_matrix(table, block) for block in sorted(set(table.block))]
    mean: Floats = np.mean(matrices, axis=0)
    return mean


def finding(facts: Facts) -> str:
    """The main numbers in a sentence."""
    return (
        f"A block's outputs have a linear CKA of {facts['same_position']:.2f} at one position "
        f"under two orders, {facts['by_distance'][1]:.2f} at neighbouring positions and "
        f"{facts['by_distance'][-1]:.2f} at the first and the last ({facts['floor']:.2f} if they "
        "were unrelated)."
    )


def figures(tables: Tables) -> dict[str, Figure]:
    """cka.svg: mean over blocks; cka-blocks.svg: every block."""
    table = tables["cka"]
    blocks = sorted(set(table.block))
    names = {"x": "position", "y": "position under another order", "limits": (0.0, 1.0)}
    mean = [("CKA across positions, mean over blocks", "linear CKA", _mean_matrix(table))]
    pages = [(f"block {block}", "linear CKA", _matrix(table, block)) for block in blocks]
    return {
        "cka": draw_maps(mean, **names),  # type: ignore[arg-type]
        "cka-blocks": draw_maps(pages, columns=3, **names),  # type: ignore[arg-type]
    }
