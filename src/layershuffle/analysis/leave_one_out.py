"""What is lost when one block of an order is left out? (paper's second abstract)

Every drawn order is run whole and once without each of its blocks, on the same images; the change
in cross-entropy (nats) and in top-1 (points) is filed under the block and the position it had. The
blocks behind it move up by one position, as when a host is lost. All of a batch's orders go through
one prefix trie, which runs their common beginnings once.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from layershuffle.analysis.cells import Cells, cell_table, cells_of, draw_maps, home_effect
from layershuffle.analysis.results import Facts, Measured, Table, Tables
from layershuffle.analysis.subject import Batch, Subject
from layershuffle.orders import ExecutionOrder
from layershuffle.trie import block_executions, build_trie, forward_trie

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_SHARE = 0.25  # an order costs depth (depth + 1) / 2 block runs here, against depth elsewhere


def without(order: ExecutionOrder, position: int) -> ExecutionOrder:
    """The order without what it runs at `position`."""
    blocks = order.blocks[:position] + order.blocks[position + 1 :]
    return ExecutionOrder(blocks, order.depth)


@dataclass
class _Sums:
    depth: int
    images: int = 0
    orders: int = 0
    runs: int = 0
    executions: int = 0
    naive: int = 0
    whole_loss: float = 0.0
    whole_right: float = 0.0
    loss: Cells = field(init=False)
    right: Cells = field(init=False)

    def __post_init__(self) -> None:
        self.loss, self.right = Cells(self.depth), Cells(self.depth)

    def add(self, subject: Subject, batch: Batch) -> None:
        """Run one batch's orders, whole and with each block left out."""
        plan = [
            one
            for order in batch.orders
            for one in (order, *(without(order, position) for position in range(len(order))))
        ]
        trie = build_trie(plan)
        scores: list[tuple[float, float]] = [(0.0, 0.0)] * len(plan)
        for ends, logits in forward_trie(
            subject.model, batch.images, trie=trie, forward=subject.logits
        ):
            for end in ends:
                scores[end] = _score(logits, batch.labels)
        self._file(batch, scores)
        self.executions += block_executions(trie)
        self.naive += sum(map(len, plan))

    def _file(self, batch: Batch, scores: list[tuple[float, float]]) -> None:
        count = len(batch.images)
        step = self.depth + 1
        for number, order in enumerate(batch.orders):
            (loss, right), *left_out = scores[number * step : (number + 1) * step]
            for position, (less_loss, less_right) in enumerate(left_out):
                block = order.blocks[position]
                self.loss.add(block, position, total=less_loss - loss, count=count)
                self.right.add(block, position, total=100 * (less_right - right), count=count)
            self.whole_loss += loss
            self.whole_right += 100 * right
            self.runs += count
        self.images += count
        self.orders += len(batch.orders)


def _score(logits: Tensor, labels: Tensor) -> tuple[float, float]:
    """(sum of cross-entropies, number of right answers)."""
    loss = F.cross_entropy(logits.double(), labels, reduction="sum")
    return float(loss), float((logits.argmax(1) == labels).sum())


def measure(subject: Subject) -> Measured:
    """leave-one-out.csv: block, position, cross_entropy and top1 (changes: without less with)."""
    subject.require_classes()
    sums = _Sums(subject.depth)
    with torch.inference_mode():
        for batch in subject.batches(share=_SHARE):
            sums.add(subject, batch)
    table = cell_table({"cross_entropy": sums.loss.mean(), "top1": sums.right.mean()})
    facts = {
        "images": sums.images,
        "orders": sums.orders,
        "block_executions": sums.executions,
        "block_executions_without_trie": sums.naive,
        "whole_cross_entropy": sums.whole_loss / sums.runs,
        "whole_top1": sums.whole_right / sums.runs,
    }
    return Measured(tables={"leave-one-out": table}, facts={**facts, **_facts(table)})


def _facts(table: Table) -> Facts:
    loss, top1 = cells_of(table, "cross_entropy"), cells_of(table, "top1")
    block, position = np.unravel_index(int(loss.argmax()), loss.shape)
    return {
        "mean_cross_entropy": float(loss.mean()),
        "mean_top1": float(top1.mean()),
        "by_position": [float(v) for v in loss.mean(0)],
        "by_block": [float(v) for v in loss.mean(1)],
        "worst": float(loss.max()),
        "worst_block": int(block),
        "worst_position": int(position),
        **asdict(home_effect(loss)),
        "helpful_cells": int((loss < 0).sum()),
        "cells": loss.size,
    }


def paragraph(facts: Facts) -> str:
    """What the numbers say, in sentences."""
    positions, blocks = facts["by_position"], facts["by_block"]
    worst = max(range(len(positions)), key=positions.__getitem__)
    dearest = max(range(len(blocks)), key=blocks.__getitem__)
    saved = facts["block_executions_without_trie"] / facts["block_executions"]
    return (
        f"Over {facts['images']} images and {facts['orders']} orders, leaving one block out of an "
        f"order changes cross-entropy by {facts['mean_cross_entropy']:+z.3f} nats from "
        f"{facts['whole_cross_entropy']:.3f} and top-1 by {facts['mean_top1']:+z.1f} points from "
        f"{facts['whole_top1']:.1f} %, on average. "
        f"The position missed most is {worst} ({positions[worst]:+z.3f} nats), the block missed "
        f"most is {dearest} ({blocks[dearest]:+z.3f}), and the dearest pair is block "
        f"{facts['worst_block']} at position {facts['worst_position']} ({facts['worst']:+z.3f}). "
        f"A block at its home position is worth {facts['home']:+z.3f} nats, elsewhere "
        f"{facts['elsewhere']:+z.3f}; {facts['excess']:+z.3f} is left of the difference when "
        f"blocks and positions are accounted for. "
        f"In {facts['helpful_cells']} of {facts['cells']} pairs the answer is better without the "
        f"block. The prefix trie ran {facts['block_executions']} blocks, {saved:.1f} times fewer "
        f"than running every order by itself."
    )


def figures(tables: Tables) -> dict[str, Figure]:
    """leave-one-out.svg: change in cross-entropy and in top-1."""
    table = tables["leave-one-out"]
    maps = [
        ("left out: cross-entropy", "change (nats)", cells_of(table, "cross_entropy")),
        ("left out: top-1", "change (points)", cells_of(table, "top1")),
    ]
    return {"leave-one-out": draw_maps(maps)}
