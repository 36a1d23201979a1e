"""`bench orders`: many orders over one batch, one by one and with shared beginnings run once."""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import combinations

import torch
from torch import Tensor

from layershuffle.bench.choices import Chosen, subject_of
from layershuffle.bench.pairs import Effort, Row, Side, cpu_timed, gpu_timed, paired
from layershuffle.bench.report import Report, throughput
from layershuffle.bench.subjects import Subject, converted
from layershuffle.machine import versions
from layershuffle.models import logits_of
from layershuffle.orders import ExecutionOrder
from layershuffle.stack import depth_of, running
from layershuffle.trie import block_executions, build_trie, forward_trie

Orders = Sequence[ExecutionOrder]
_QUICK = Effort(pairs=5, seconds=0.0, warm_up=1)


def truncations(depth: int) -> Orders:
    """The first 1, 2, ... all blocks."""
    return [ExecutionOrder(tuple(range(kept)), depth) for kept in range(1, depth + 1)]


def left_out(count: int, depth: int) -> Orders:
    """Every choice of `count` blocks left out, the others ascending."""
    return in_order_subsets(depth - count, depth)


def in_order_subsets(kept: int, depth: int) -> Orders:
    """Every choice of `kept` blocks, ascending."""
    return [ExecutionOrder(blocks, depth) for blocks in combinations(range(depth), kept)]


def drawn(count: int, depth: int) -> Orders:
    """Random permutations, the same ones always."""
    generator = random.Random(0)
    return [
        ExecutionOrder(tuple(generator.sample(range(depth), depth)), depth) for _ in range(count)
    ]


def sweeps(depth: int) -> dict[str, Orders]:
    """What evaluations ask for, by name."""
    return {
        "all truncations": truncations(depth),
        "leave-one-out and base": [*left_out(0, depth), *left_out(1, depth)],
        "leave-two-out": left_out(2, depth),
        "64 random orders": drawn(64, depth),
    }


def one_by_one(on: Subject, orders: Orders) -> list[Tensor]:
    """Logits of the images for every order, a forward each."""
    outputs = []
    for order in orders:
        with running(on.model, order):
            outputs.append(logits_of(on.model(on.images)))
    return outputs


def in_one_walk(on: Subject, orders: Orders) -> list[Tensor]:
    """The same from the trie."""
    outputs: list[Tensor] = [on.images] * len(orders)
    walk = forward_trie(
        on.model, on.images, trie=build_trie(orders), forward=lambda x: logits_of(on.model(x))
    )
    for ends, logits in walk:
        for end in ends:
            outputs[end] = logits
    return outputs


def compared(name: str, on: Subject, *, orders: Orders, effort: Effort) -> Row:
    """One by one against the trie: outputs checked to be bit-equal, block runs counted."""
    slow, fast = one_by_one(on, orders), in_one_walk(on, orders)
    assert all(map(torch.equal, slow, fast)), "outputs are bit-equal"
    timed = gpu_timed if on.images.is_cuda else cpu_timed
    sides: list[Side] = [
        timed(lambda: one_by_one(on, orders)),
        timed(lambda: in_one_walk(on, orders)),
    ]
    runs = block_executions(build_trie(orders))
    return paired(
        name,
        "one by one / trie",
        a=sides[0],
        b=sides[1],
        effort=effort,
        settings=on.settings,
        facts={"block runs": [sum(map(len, orders)), runs], "outputs": "bit-equal"},
    )


@torch.inference_mode()
def bench_orders(chosen: Chosen) -> Report:
    """Every sweep. A score is one image under one order: the random orders, in the trie."""
    on = converted(subject_of(chosen), chosen.precision)
    facts, row = {}, None
    for name, orders in sweeps(depth_of(on.model)).items():
        row = compared(name, on, orders=orders, effort=_QUICK)
        naive, runs = row.facts["block runs"]
        facts[name] = (
            f"{row.median:.2f} times as fast ({min(row.values):.2f} to {max(row.values):.2f}), "
            f"{runs:,} block runs for {naive:,}"
        )
    assert row is not None
    seconds = [in_trie for _, in_trie in row.pairs]
    return Report(
        kind="orders",
        conditions=chosen.conditions(),
        rate=throughput(seconds, 64 * chosen.batch, unit="scores"),
        facts=facts,
        versions=versions(),
    )
