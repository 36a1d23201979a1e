"""The prefix trie: exact counts, and outputs bit-equal to running the orders one by one."""

from itertools import combinations
from random import Random

import pytest
import torch

import layershuffle as ls
from common import FAMILIES, images, logits_of
from layershuffle.core.orders import ExecutionOrder
from layershuffle.core.stack import running
from layershuffle.core.trie import (
    block_executions,
    build_trie,
    forward_trie,
    images_at_once,
    run_head,
    run_stem,
)
from layershuffle.errors import StackError

DEPTH = 12
VIT = "timm-vit"


def orders(*blocks):
    return [ExecutionOrder(tuple(order), DEPTH) for order in blocks]


def ascending_without(missing):
    kept = [tuple(b for b in range(DEPTH) if b not in gone) for gone in missing]
    return orders(*kept)


@pytest.mark.parametrize(
    ("name", "swept", "runs"),
    [
        ("truncations", [tuple(range(k)) for k in range(1, DEPTH + 1)], 12),
        ("all subsets", [c for k in range(1, 13) for c in combinations(range(12), k)], 4095),
    ],
)
def test_counts_of_sweeps(name, swept, runs):
    assert block_executions(build_trie(orders(*swept))) == runs, name


def test_counts_of_missing_blocks():
    base = orders(range(DEPTH))
    singles = ascending_without([{b} for b in range(DEPTH)])
    pairs = ascending_without([set(pair) for pair in combinations(range(DEPTH), 2)])
    assert block_executions(build_trie(base + singles)) == 78
    assert block_executions(build_trie(pairs)) == 285


def test_count_of_random_orders():
    random = Random(0)
    drawn = orders(*(random.sample(range(DEPTH), DEPTH) for _ in range(64)))
    assert block_executions(build_trie(drawn)) == 705


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_bit_equal_to_one_by_one(family):
    model = FAMILIES[family].wrapped()
    swept = [
        ExecutionOrder(blocks, 4)
        for blocks in [(0, 1, 2, 3), (2, 0, 3, 1), (2, 0), (2, 0, 3), (1,), (2, 0, 0, 3, 3), (2, 0)]
    ]
    batch = images(3)
    logits = {}
    with torch.inference_mode():
        for ends, out in forward_trie(
            model, batch, trie=build_trie(swept), forward=lambda x: logits_of(model(x))
        ):
            logits.update(dict.fromkeys(ends, out))
        assert sorted(logits) == list(range(len(swept)))
        for index, order in enumerate(swept):
            with running(model, order):
                expected = logits_of(model(batch))
            assert torch.equal(logits[index], expected), f"{family}: order {order}"


def test_position_encoding_reaches_the_trie():
    model = ls.add_position(FAMILIES[VIT].plain(), encoding=ls.EncodingForm()).eval()
    swept = [ExecutionOrder(blocks, 4) for blocks in [(2, 0, 3, 1), (2, 0), (0, 1, 2, 3)]]
    batch = images(2)
    with torch.inference_mode():
        for ends, out in forward_trie(
            model, batch, trie=build_trie(swept), forward=lambda x: logits_of(model(x))
        ):
            for index in ends:
                with running(model, swept[index]):
                    assert torch.equal(out, logits_of(model(batch)))


@pytest.mark.parametrize(
    ("kept_bytes", "sizes"),
    [(1 << 20, [10]), (5, [5, 5]), (4.9, [4, 4, 2]), (0.1, [4, 4, 2])],
)
def test_images_at_once_are_those_whose_state_the_cache_holds(kept_bytes, sizes, monkeypatch):
    """`kept_bytes` in states of an image; in even parts, of no fewer than four."""
    model, batch = FAMILIES[VIT].wrapped(), images(10)
    with ls.tap(model) as tapped, torch.inference_mode():
        model(batch[:1])
    of_one = tapped.records[0].tensor.nbytes
    monkeypatch.setattr("layershuffle.core.trie._CACHED_BYTES", int(kept_bytes * of_one))
    with torch.inference_mode():
        size = images_at_once(model, batch, forward=lambda x: logits_of(model(x)))
    assert [*map(len, batch.split(size))] == sizes
    on_meta = batch.to("meta")  # stands for a GPU: nothing is run, all of it at once
    assert images_at_once(model, on_meta, forward=logits_of) == 10


def test_each_block_runs_once_per_node():
    model = FAMILIES[VIT].wrapped()
    runs = []
    for number, block in enumerate(ls.blocks_of(model)):
        block.register_forward_hook(lambda *_, number=number: runs.append(number))
    swept = [ExecutionOrder(b, 4) for b in [(0, 1, 2, 3), (0, 1, 3, 2), (0, 1), (3,)]]
    trie = build_trie(swept)
    with torch.inference_mode():
        for _ in range(2):
            list(forward_trie(model, images(1), trie=trie, forward=lambda x: logits_of(model(x))))
    assert block_executions(trie) == 7
    assert len(runs) == 1 + 7 + 7, "the first time one block more: the trial of the host"


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_stem_blocks_and_head_are_the_forward(family):
    model, batch = FAMILIES[family].wrapped(), images(2)

    def forward(pixels):
        return logits_of(model(pixels))

    with torch.inference_mode():
        state, call = run_stem(model, batch, forward=forward)
        for position, block in enumerate((2, 0, 3)):
            state = call(block, position, state, None)
        logits = run_head(model, batch, state=state, forward=forward)
        with running(model, (2, 0, 3)):
            assert torch.equal(logits, forward(batch))
    with pytest.raises(StackError, match="never called its block stack"):
        run_stem(model, batch, forward=lambda pixels: pixels)
