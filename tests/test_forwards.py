"""Many orders in one go: exact counts, and outputs bit-equal to running the orders one by one."""

import gc
import weakref
from itertools import combinations
from random import Random

import pytest
import torch

import layershuffle as ls
from common import FAMILIES, images, logits_of
from deaf_models import CUTTING
from layershuffle.core.forwards import block_runs, forward_many, images_at_once
from layershuffle.core.orders import ExecutionOrder
from layershuffle.core.stack import running
from layershuffle.core.tensors import state_of
from layershuffle.errors import StackError, UsageError
from layershuffle.models.ends import refuse_more_than_blocks, run_head, run_stem
from own_models import CHAINS, LOOPS
from refusals import refuses

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
    assert block_runs(orders(*swept)) == runs, name


def test_counts_of_missing_blocks():
    base = orders(range(DEPTH))
    singles = ascending_without([{b} for b in range(DEPTH)])
    pairs = ascending_without([set(pair) for pair in combinations(range(DEPTH), 2)])
    assert block_runs(base + singles) == 78
    assert block_runs(pairs) == 285


def test_count_of_random_orders():
    random = Random(0)
    drawn = orders(*(random.sample(range(DEPTH), DEPTH) for _ in range(64)))
    assert block_runs(drawn) == 705


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_bit_equal_to_one_by_one(family):
    model = FAMILIES[family].wrapped()
    swept = [
        ExecutionOrder(blocks, 4)
        for blocks in [(0, 1, 2, 3), (2, 0, 3, 1), (2, 0), (2, 0, 3), (1,), (2, 0, 0, 3, 3), (2, 0)]
    ]
    batch = images(3)
    with torch.no_grad():
        logits = dict(forward_many(model, batch, swept))
        assert sorted(logits) == list(range(len(swept)))
        for index, order in enumerate(swept):
            with running(model, order):
                expected = logits_of(model(batch))
            assert torch.equal(logits[index], expected), f"{family}: order {order}"


def test_position_encoding_is_shared_too():
    model = ls.add_position(FAMILIES[VIT].plain(), encoding=ls.EncodingForm()).eval()
    swept = [ExecutionOrder(blocks, 4) for blocks in [(2, 0, 3, 1), (2, 0), (0, 1, 2, 3)]]
    batch = images(2)
    with torch.no_grad():
        for index, out in forward_many(model, batch, swept):
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
    monkeypatch.setattr("layershuffle.core.forwards._CACHED_BYTES", int(kept_bytes * of_one))
    with torch.inference_mode():
        size = images_at_once(model, batch, forward=lambda x: logits_of(model(x)))
    assert [*map(len, batch.split(size))] == sizes
    on_meta = batch.to("meta")  # stands for a GPU: nothing is run, all of it at once
    assert images_at_once(model, on_meta, forward=logits_of) == 10


def test_blocks_of_a_common_beginning_run_once():
    model = FAMILIES[VIT].wrapped()
    swept = [ExecutionOrder(b, 4) for b in [(0, 1, 2, 3), (0, 1, 3, 2), (0, 1), (3,), (0, 1)]]
    with torch.no_grad():
        runs = []
        for block in ls.blocks_of(model):
            block.register_forward_hook(lambda *_: runs.append(1))
        list(forward_many(model, images(1), swept))
    assert block_runs(swept) == 7
    assert len(runs) == 19 + 7  # those of the trial, and ours


def test_no_more_states_are_kept_than_the_next_order_shares():
    model, alive = FAMILIES[VIT].wrapped(), []
    states = weakref.WeakSet()
    for block in ls.blocks_of(model):
        block.register_forward_hook(lambda *call: states.add(call[-1]))
    swept = [ExecutionOrder(b, 4) for b in [(0, 1, 2, 3), (0, 1, 3, 2), (1, 0, 2, 3)]]
    with torch.no_grad():
        for _ in forward_many(model, images(1), swept):
            gc.collect()
            alive.append(len(states))
    # Two blocks are shared by the first two orders, none by the last; none stays for later.
    assert alive == [2, 0, 0]


def test_orders_that_a_backbone_cuts_are_refused():
    model = CUTTING["own-counting"].wrapped()
    with pytest.raises(StackError), torch.no_grad():
        list(forward_many(model, images(1), ["0,1,2,3,3", "0,1,2,3,2"]))


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_stem_blocks_and_head_are_the_forward(family):
    model, batch = FAMILIES[family].wrapped(), images(2)

    def forward(pixels):
        return logits_of(model(pixels))

    with torch.inference_mode():
        state, (args, kwargs) = run_stem(model, batch, forward=forward)
        for block in (2, 0, 3):
            state = state_of(ls.blocks_of(model)[block](state, *args, **kwargs))
        logits = run_head(model, batch, state=state, forward=forward)
        with running(model, (2, 0, 3)):
            assert torch.equal(logits, forward(batch))
    with refuses(StackError):
        run_stem(model, batch, forward=lambda pixels: pixels)


TWO_ENDS = {
    f"own-{name}" for name in ("own", "named", "byforward", "ofitsclass", "checking", "backwards")
}


@pytest.mark.parametrize("family", [*CHAINS.values(), *LOOPS.values()], ids=lambda f: f.name)
def test_only_a_backbone_that_hands_the_state_on_has_two_ends(family):
    model = family.wrapped()

    def forward(pixels):
        return logits_of(model(pixels))

    if family.name in TWO_ENDS:
        refuse_more_than_blocks(model, images(2), forward=forward)
    else:
        with pytest.raises(StackError):
            refuse_more_than_blocks(model, images(2), forward=forward)


def test_one_order_is_not_taken_for_a_list_of_them() -> None:
    with refuses(UsageError):
        ls.forward_many(FAMILIES["timm-vit"].wrapped(), images(2), "2,0,1")
