# Ran at commit 8550626.
"""Measure what the shipped model does in rounds, and write the tables of docs/rounds.md.

python scripts/rounds_page.py measure  # score the model as well
python scripts/rounds_page.py          # only write the tables again
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from open_questions import DEPTH, IMAGES, keep, rows_of, scored_batches
from performance_page import with_marked

import layershuffle as ls
from layershuffle.files import write_text
from layershuffle.stats import estimate
from layershuffle.text import markdown_table

PAGE = Path(__file__).resolve().parent.parent / "docs" / "rounds.md"
MODEL, CSV = "bundled:digits-swarm", "shipped-rounds.csv"
ORDERS = 8
SIZES = {1: "one after the other", **{n: f"{n} side by side" for n in (2, 3, 4, 6)}}
"""The blocks of a round, and their words on the page."""
ALIVE = {9: (1, 2), 6: (1, 2), 3: (1, 2, 4)}
"""The numbers of blocks alive, and how often each runs."""
PASSES = {1: "once", 2: "twice", 4: "four times"}
UNDER_WAY = (1, 2, 3, 4, 6)


@dataclass(frozen=True, kw_only=True)
class ShippedRow:
    """Top-1 in percent, one value per order, separated by spaces.

    `case`: "rounds", "alive" or "under way"; `count`: the blocks of a round, the blocks alive, or
    the blocks under way; `passes`: how often each block runs.
    """

    case: str
    count: int
    passes: int
    top1: str


def mode_of(case: str, count: int, passes: int) -> str:
    """The mode of a cell of "rounds" or "alive"."""
    if case == "rounds":
        return "arbitrary" if count == 1 else f"arbitrary:parallel={count}"
    return f"kept:{count}:arbitrary" + (f":passes={passes}" if passes > 1 else "")


def measure() -> Iterator[ShippedRow]:
    """Score the model in every cell of the tables."""
    torch.set_num_threads(1)
    model = ls.load(MODEL)
    batches = scored_batches(model)
    cells = [("rounds", size, 1) for size in SIZES]
    cells += [("alive", n, k) for n, passes in ALIVE.items() for k in passes]
    for case, count, passes in cells:
        scores = ls.evaluate(model, batches, modes=mode_of(case, count, passes), num_orders=ORDERS)
        yield ShippedRow(case=case, count=count, passes=passes, top1=joined(scores))
    drawn = [ls.Shuffled().draw(DEPTH, seed=0, step=step) for step in range(ORDERS)]
    for count in UNDER_WAY:
        versions = [max(0, k + 1 - count) for k in range(DEPTH)]
        orders = [ls.ExecutionOrder(order.blocks, DEPTH, versions) for order in drawn]
        scores = ls.evaluate(model, batches, orders=orders)
        yield ShippedRow(case="under way", count=count, passes=1, top1=joined(scores))


def joined(scores: list[ls.Score]) -> str:
    """The scores in one cell of the table."""
    return " ".join(f"{score.top1:.2f}" for score in scores)


def read_cells() -> dict[tuple[str, int, int], str]:
    """The mean of every cell and its 95 % interval over orders."""
    cells = {}
    for row in rows_of(CSV):
        values = [float(value) for value in row["top1"].split()]
        cell = estimate({0: values}, images=IMAGES)
        text = f"{cell.mean:.1f} ({cell.low:.1f} to {cell.high:.1f})"
        cells[row["case"], int(row["count"]), int(row["passes"])] = text
    return cells


def with_tables(page: str) -> str:
    """`page` with new tables between its marks."""
    cells = read_cells()
    rounds = [[words, DEPTH // size, cells["rounds", size, 1]] for size, words in SIZES.items()]
    table = markdown_table(["all 12 blocks", "rounds", "top-1"], rounds, align="lrr")
    page = with_marked(page, "shipped rounds", table)
    alive = [[n, *(cells.get(("alive", n, k), "") for k in PASSES)] for n in ALIVE]
    table = markdown_table(["blocks alive", *PASSES.values()], alive, align="rrrr")
    page = with_marked(page, "shipped alive", table)
    under_way = [[n, cells["under way", n, 1]] for n in UNDER_WAY]
    table = markdown_table(["under way", "top-1"], under_way, align="rr")
    return with_marked(page, "shipped under way", table)


if __name__ == "__main__":
    if sys.argv[1:] == ["measure"]:
        keep(CSV, list(measure()))
    write_text(PAGE, with_tables(PAGE.read_text(encoding="utf-8")))
    print(f"Written: {PAGE}")
