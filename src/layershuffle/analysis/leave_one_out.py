"""What does the model lose if one block of an order is left out? (paper's second abstract)

Every drawn order is run completely and once without each of its blocks, on the same images; the
change in cross-entropy (nats) and in top-1 (points) is assigned to the block and its position. The
later blocks move forward by one position, as when a host is lost. Ends that keep their place are
never left out. Common beginnings of the orders
of a batch run once.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from matplotlib.figure import Figure
from torch import Tensor

from layershuffle.analysis.position_table import (
    PositionMeans,
    draw_maps,
    evenly,
    home_less_elsewhere,
    position_table,
    read_map,
    weighted_means,
)
from layershuffle.analysis.results import Measurement, Tables, with_interval
from layershuffle.analysis.subject import Batch, Subject
from layershuffle.core.checks.trials import forget
from layershuffle.core.forwards import block_runs, run_many
from layershuffle.core.orders import ExecutionOrder
from layershuffle.core.stack import stack_of
from layershuffle.core.tensors import in_float64

_SHARE = 0.25  # an order costs depth (depth + 1) / 2 block runs here, but `depth` in other analyses


def shortened_order(order: ExecutionOrder, position: int) -> ExecutionOrder:
    """The order without its block at `position`."""
    blocks = order.blocks[:position] + order.blocks[position + 1 :]
    return ExecutionOrder(blocks, order.depth)


def measure(subject: Subject) -> Measurement:
    """leave-one-out.csv: block, position, cross_entropy and top1 (changes: without less with, so a
    positive cross_entropy says that the answer is worse without the block).

    cross_entropy_half and top1_half are half their 95 % intervals.
    """
    subject.require_classes()
    drawn = subject.drawn
    count_drawn = len(drawn)
    loss_changes = PositionMeans(drawn)
    top1_changes = PositionMeans(drawn)
    runs = done = 0
    whole_loss = whole_right = 0.0
    forget(stack_of(subject.model))
    with torch.no_grad():
        for batch in subject.batches(share=_SHARE):
            count = len(batch.images)
            # Common prefixes of an order and its variants are about half of all block runs.
            several = []
            for order in batch.orders:
                several.append(order)
                for position in drawn:
                    several.append(shortened_order(order, position))
            done += block_runs(several)
            scores = _scores(subject, batch, several)
            for number, order in enumerate(batch.orders):
                first = number * (count_drawn + 1)
                loss_whole, right_whole = scores[first]
                for place, position in enumerate(drawn):
                    block = order.blocks[position]
                    less_loss, less_right = scores[first + 1 + place]
                    loss = less_loss - loss_whole
                    right = 100 * (less_right - right_whole)
                    loss_changes.add(block, position, values=loss, first=batch.first)
                    top1_changes.add(block, position, values=right, first=batch.first)
                whole_loss += float(loss_whole.sum())
                whole_right += 100 * float(right_whole.sum())
                runs += count
    clusters = subject.clusters(by_batch=True)
    table = position_table(
        loss_changes.columns("cross_entropy", clusters) | top1_changes.columns("top1", clusters),
        drawn=drawn,
    )
    numbers = {
        "mean_cross_entropy": (loss_changes, evenly(count_drawn)),
        "mean_top1": (top1_changes, evenly(count_drawn)),
        "excess_at_home": (loss_changes, home_less_elsewhere(count_drawn)),
    }
    facts = {
        **subject.counts,
        "block_runs": done,
        "whole_cross_entropy": whole_loss / runs,
        "whole_top1": whole_right / runs,
        **weighted_means(numbers, clusters),
    }
    return Measurement(tables={"leave-one-out": table}, facts=facts)


def _scores(
    subject: Subject, batch: Batch, orders: list[ExecutionOrder]
) -> dict[int, tuple[Tensor, Tensor]]:
    """(cross-entropies, right answers), each `[images]`, of every order by its index."""
    scores = {}
    results = run_many(subject.model, batch.images, orders=orders, forward=subject.logits)
    for index, logits in results:
        # In float64, because a change is a small difference of two large numbers.
        answers = in_float64(logits)
        labels = batch.labels.to(answers.device)
        loss = F.cross_entropy(answers, labels, reduction="none")
        right = in_float64(answers.argmax(1) == labels)
        scores[index] = (loss, right)
    return scores


MEANINGS = {
    "cross entropy": "rise of the cross-entropy (nats) without the block at that position",
    "top1": "change of top-1 (points) without the block at that position",
    "block runs": "runs of single blocks that were computed",
    "whole cross entropy": "cross-entropy of the whole orders",
    "whole top1": "top-1 of the whole orders, in percent",
    "mean cross entropy": "mean rise of the cross-entropy without one block",
    "mean top1": "mean change of top-1 without one block, in points",
    "excess at home": "rise without a block at its own place, minus that elsewhere",
}


def answer(measured: Measurement) -> str:
    """The answer in a sentence: the block and the position without which the loss rises most."""
    facts = measured.facts
    table = measured.tables["leave-one-out"]
    of_block = table.groupby("block").cross_entropy.mean()
    of_position = table.groupby("position").cross_entropy.mean()
    return (
        f"Block {of_block.idxmax()} is missed most (the loss rises by {of_block.max():.3f}), and "
        f"position {of_position.idxmax()} ({of_position.max():.3f}); without any one block it "
        f"changes by {with_interval(facts, 'mean_cross_entropy', form='+.3f')}, and top-1 by "
        f"{with_interval(facts, 'mean_top1', form='+.1f')} points from {facts['whole_top1']:.1f} %."
    )


def figures(tables: Tables) -> dict[str, Figure]:
    """leave-one-out.svg: change in cross-entropy and in top-1."""
    table = tables["leave-one-out"]
    maps = []
    for name, title, unit in (
        ("cross_entropy", "cross-entropy", "nats"),
        ("top1", "top-1", "points"),
    ):
        meaning = f"change ({unit})"
        maps.append(read_map(table, name, title=f"left out: {title}", meaning=meaning, signed=True))
    return {"leave-one-out": draw_maps(maps)}
