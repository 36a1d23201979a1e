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
from torch import Tensor

from layershuffle.analysis.cells import Floats, cells_of, draw_maps
from layershuffle.analysis.features import FeatureWatch
from layershuffle.analysis.results import Facts, Measured, Table, Tables
from layershuffle.analysis.squares import balanced_orders
from layershuffle.analysis.subject import Subject

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def linear_cka(one: Tensor, two: Tensor) -> float:
    """CKA with a linear kernel of features `[images, width]` and `[images, other width]`.

    |Y'X|^2 / (|X'X| |Y'Y|) for centred X and Y, Frobenius norms; 0 if one of them is constant.
    """
    x, y = (features.double() - features.double().mean(0) for features in (one, two))
    below = float(torch.linalg.matrix_norm(x.T @ x) * torch.linalg.matrix_norm(y.T @ y))
    return float((y.T @ x).square().sum()) / below if below else 0.0


def cka_matrix(one: Tensor, two: Tensor) -> Floats:
    """CKA `[positions, positions]` between features `[positions, images, width]`."""
    x, y = (features.double() - features.double().mean(1, keepdim=True) for features in (one, two))
    sizes = [torch.linalg.matrix_norm(z.transpose(1, 2) @ z) for z in (x, y)]
    cross = torch.stack([(y.transpose(1, 2) @ left).square().sum((1, 2)) for left in x])
    below = sizes[0][:, None] * sizes[1][None, :]
    values: Floats = torch.where(below > 0, cross / below.clamp_min(1e-300), 0.0).numpy()
    return values


def measure(subject: Subject) -> Measured:
    """cka.csv: block, position, other (position), cka, mean of both directions."""
    first, second = _features(subject)  # each [blocks, positions, images, width]
    rows: list[tuple[int | float, ...]] = []
    floors = []
    shuffle = np.random.default_rng(subject.settings.seed).permutation(first.shape[2])
    for block, (one, two) in enumerate(zip(first, second, strict=True)):
        subject.progress(f"comparing positions, block {block + 1} of {subject.depth}")
        matrix = cka_matrix(one, two)
        matrix = (matrix + matrix.T) / 2
        rows += [(block, p, q, float(value)) for (p, q), value in np.ndenumerate(matrix)]
        floors.append(linear_cka(one[-1], two[-1][torch.from_numpy(shuffle)]))
    table = Table(("block", "position", "other", "cka"), tuple(rows))
    images, floor = first.shape[2], float(np.mean(floors))
    return Measured(tables={"cka": table}, facts={"images": images, **_facts(table, floor)})


def _features(subject: Subject) -> tuple[Tensor, Tensor]:
    """Outputs under two Latin squares of orders, the same for all images."""
    depth, seed = subject.depth, subject.settings.seed
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


def _facts(table: Table, floor: float) -> Facts:
    mean = _mean_matrix(table)
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


def _matrix(table: Table, block: int) -> Floats:
    return cells_of(table.where(block=block), "cka", row="position", column="other")


def _mean_matrix(table: Table) -> Floats:
    matrices = [_matrix(table, block) for block in sorted(set(table.column("block")))]
    mean: Floats = np.mean(matrices, axis=0)
    return mean


def paragraph(facts: Facts) -> str:
    """What the numbers say, in sentences."""
    near, far = facts["by_distance"][1], facts["by_distance"][-1]
    change = facts["same_position"] - near
    verdict = (
        "so the position shapes what a block puts out beyond what the order before it does"
        if change > 0.02
        else "so the next position changes a block's outputs no more than another order does"
    )
    return (
        f"On {facts['images']} images a block's outputs at one position under two orders have a "
        f"linear CKA of {facts['same_position']:.2f}, at neighbouring positions {near:.2f}, and at "
        f"the first and the last position {far:.2f}; unrelated outputs would have "
        f"{facts['floor']:.2f}. The difference between the same and the next position is "
        f"{change:+z.3f}, {verdict}. "
        f"Between the first position and the second it is {facts['first_and_second']:.2f}. "
        f"Block {facts['least_alike_block']} changes most with its position (mean "
        f"{facts['least_alike']:.2f} over pairs of positions), block {facts['most_alike_block']} "
        f"least ({facts['most_alike']:.2f})."
    )


def figures(tables: Tables) -> dict[str, Figure]:
    """cka.svg: mean over blocks; cka-blocks.svg: every block."""
    table = tables["cka"]
    blocks = sorted(set(table.column("block")))
    names = {"x": "position", "y": "position under another order", "limits": (0.0, 1.0)}
    mean = [("CKA across positions, mean over blocks", "linear CKA", _mean_matrix(table))]
    pages = [(f"block {block}", "linear CKA", _matrix(table, block)) for block in blocks]
    return {
        "cka": draw_maps(mean, **names),  # type: ignore[arg-type]
        "cka-blocks": draw_maps(pages, columns=3, **names),  # type: ignore[arg-type]
    }
