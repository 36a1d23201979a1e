"""What is lost when one block of an order is left out? (paper's second abstract)

Every drawn order is run whole and once without each of its blocks, on the same images; the change
in cross-entropy (nats) and in top-1 (points) is filed under the block and the position it had. The
blocks behind it move up by one position, as when a host is lost. All of a batch's orders go through
one prefix trie, which runs their common beginnings once.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.nn.functional as F

from layershuffle.analysis.position_table import (
    PositionMeans,
    draw_maps,
    grid,
    home_effect,
    position_table,
)
from layershuffle.analysis.results import Facts, Measurement
from layershuffle.analysis.subject import Batch, Subject
from layershuffle.orders import ExecutionOrder
from layershuffle.trie import TrieNode, block_executions, build_trie, forward_trie

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from layershuffle.analysis.results import Tables

_SHARE = 0.25  # an order costs depth (depth + 1) / 2 block runs here, against depth elsewhere


def without(order: ExecutionOrder, position: int) -> ExecutionOrder:
    """The order without what it runs at `position`."""
    blocks = order.blocks[:position] + order.blocks[position + 1 :]
    return ExecutionOrder(blocks, order.depth)


def measure(subject: Subject) -> Measurement:
    """leave-one-out.csv: block, position, cross_entropy and top1 (changes: without less with)."""
    subject.require_classes()
    depth = subject.depth
    loss_changes, top1_changes = PositionMeans(depth), PositionMeans(depth)
    images = orders = runs = executions = naive = 0
    whole_loss = whole_right = 0.0
    with torch.inference_mode():
        for batch in subject.batches(share=_SHARE):
            count = len(batch.images)
            images, orders = images + count, orders + len(batch.orders)
            variants = [
                [order, *(without(order, position) for position in range(depth))]
                for order in batch.orders
            ]
            # An order and its variants share their beginnings: about half of all block runs.
            trie = build_trie([order for group in variants for order in group])
            executions += block_executions(trie)
            naive += sum(len(order) for group in variants for order in group)
            scores = _scores(subject, batch, trie)
            for number, order in enumerate(batch.orders):
                first = number * (depth + 1)
                loss_whole, right_whole = scores[first]
                for position, block in enumerate(order):
                    less_loss, less_right = scores[first + 1 + position]
                    loss_changes.add(block, position, total=less_loss - loss_whole, count=count)
                    top1_changes.add(
                        block, position, total=100 * (less_right - right_whole), count=count
                    )
                whole_loss, whole_right = whole_loss + loss_whole, whole_right + 100 * right_whole
                runs += count
    # Positive: the answer is worse without the block.
    loss, top1 = loss_changes.mean(), top1_changes.mean()
    worst_block, worst_position = np.unravel_index(int(loss.argmax()), loss.shape)
    facts = {
        "images": images,
        "orders": orders,
        "block_executions": executions,
        "block_executions_without_trie": naive,
        "whole_cross_entropy": whole_loss / runs,
        "whole_top1": whole_right / runs,
        "mean_cross_entropy": float(loss.mean()),
        "mean_top1": float(top1.mean()),
        "by_position": [float(v) for v in loss.mean(0)],
        "by_block": [float(v) for v in loss.mean(1)],
        "worst": float(loss.max()),
        "worst_block": int(worst_block),
        "worst_position": int(worst_position),
        **asdict(home_effect(loss)),
        "helpful_cells": int((loss < 0).sum()),
        "cells": loss.size,
    }
    table = position_table({"cross_entropy": loss, "top1": top1})
    return Measurement(tables={"leave-one-out": table}, facts=facts)


def _scores(subject: Subject, batch: Batch, trie: TrieNode) -> dict[int, tuple[float, float]]:
    """(sum of cross-entropies, number of right answers) of every order in the trie."""
    scores = {}
    results = forward_trie(subject.model, batch.images, trie=trie, forward=subject.logits)
    for indices, logits in results:
        # In float64, because a change is a small difference of two large sums.
        loss = float(F.cross_entropy(logits.double(), batch.labels, reduction="sum"))
        right = float((logits.argmax(1) == batch.labels).sum())
        scores.update(dict.fromkeys(indices, (loss, right)))
    return scores


def finding(facts: Facts) -> str:
    """The main numbers in a sentence."""
    return (
        f"Leaving one block out changes cross-entropy by {facts['mean_cross_entropy']:+z.3f} nats "
        f"and top-1 by {facts['mean_top1']:+z.1f} points on average; a block is worth "
        f"{facts['home']:+z.3f} nats at its home position and {facts['elsewhere']:+z.3f} elsewhere "
        f"({facts['excess']:+z.3f} of the difference is left when blocks and positions are "
        "accounted for)."
    )


def figures(tables: Tables) -> dict[str, Figure]:
    """leave-one-out.svg: change in cross-entropy and in top-1."""
    table = tables["leave-one-out"]
    maps = [
        ("left out: cross-entropy", "change (nats)", grid(table, "cross_entropy")),
        ("left out: top-1", "change (points)", grid(table, "top1")),
    ]
    return {"leave-one-out": draw_maps(maps)}
