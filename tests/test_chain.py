"""The trial of a host: made in the mode and for the kind of call that is judged."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import nn

import layershuffle as ls
from common import (
    DEPTH,
    FAMILIES,
    LONGER,
    PERMUTED,
    PRUNED,
    SEQUENTIAL,
    Family,
    assert_close,
    images,
)
from contracts import TOLERANCE, answer
from layershuffle.errors import StackError
from own_models import Asked, Own, Readout, Skipping, TrainedWithPatches, TwoEnds
from test_own_models import EQUAL_LENGTHS, one_by_one


def own(host: type[nn.Module], **arguments: object) -> nn.Module:
    """A wrapped host of one's own."""
    torch.manual_seed(0)
    return ls.wrap(host(**arguments), "blocks")


def test_the_trial_is_made_in_the_mode_of_the_call() -> None:
    """A step that the host takes in training alone comes once per block; statistics stay."""
    model = own(TrainedWithPatches).eval()
    orders = [ls.ExecutionOrder(order, DEPTH) for order in EQUAL_LENGTHS]
    with torch.no_grad(), ls.running(model, orders):
        model(images(3))
        model.train()(images(3))
        assert model.norm_of_patches.training
        assert model.norm_of_patches.num_batches_tracked == 1
        model.norm_of_patches.eval()
        together = model(images(3))
    assert_close(together, one_by_one(model, EQUAL_LENGTHS), tolerance=TOLERANCE)


@pytest.mark.parametrize("family", FAMILIES.values(), ids=list(FAMILIES))
def test_orders_of_several_lengths_in_training(family: Family) -> None:
    """The libraries' loops do nothing between the blocks in training either."""
    model = family.wrapped().train()
    orders = [ls.ExecutionOrder(order, DEPTH) for order in (PERMUTED, PRUNED, SEQUENTIAL)]
    with torch.no_grad(), ls.running(model, orders):
        model(images(3))


def refuses_lengths(model: nn.Module, depth: int = DEPTH) -> bool:
    """Whether a host is judged to do more than hand on the state."""
    orders = [ls.ExecutionOrder(order, depth) for order in ((0, 0), (0,))]
    try:
        with torch.no_grad(), ls.running(model, orders):
            model(images(2))
    except StackError as error:
        return "orders of one length" in str(error)
    return False


def test_random_draws_between_blocks_are_seen() -> None:
    model = own(Skipping)
    assert not refuses_lengths(model.eval())
    assert refuses_lengths(model.train())


@pytest.mark.parametrize("host", [Own, Readout])
def test_a_stack_of_one_block_is_tried_with_two(host: type[nn.Module]) -> None:
    model = host()
    del model.blocks[1:]
    assert refuses_lengths(ls.wrap(model, "blocks"), depth=1) == (host is Readout)


def test_flags_of_a_call_have_a_trial_of_their_own() -> None:
    model = own(Asked).eval()
    orders = [ls.ExecutionOrder(order, DEPTH) for order in EQUAL_LENGTHS]
    for every in (False, True, False):
        with torch.no_grad(), ls.running(model, orders):
            together = model(images(3), every=every)
        for row, order in enumerate(orders):
            with torch.no_grad(), ls.running(model, order):
                alone = model(images(3)[row : row + 1], every=every)
            assert_close(together[row : row + 1], alone, tolerance=TOLERANCE)


def test_an_error_before_the_blocks_is_the_callers() -> None:
    model = own(Own).eval()
    orders = [ls.ExecutionOrder(order, DEPTH) for order in (PERMUTED, PRUNED)]
    with ls.running(model, orders), pytest.raises(RuntimeError, match="to have 3 channels"):
        model(images(2)[:, :2])
    assert not refuses_lengths(model)


def test_a_trial_waits_for_that_of_another_thread() -> None:
    """Two at a time would take each other's modes for those to come back to."""
    model = own(TrainedWithPatches).train()
    threads: list[threading.Thread] = []

    def run() -> None:
        orders = [ls.ExecutionOrder(order, DEPTH) for order in EQUAL_LENGTHS]
        with torch.no_grad(), ls.running(model, orders):
            model(images(3))

    def once(*_: object) -> None:
        if not threads:
            threads.append(threading.Thread(target=run))
            threads[0].start()

    model.patches.register_forward_hook(once)
    run()
    threads[0].join()
    assert all(module.training for module in model.modules())


def test_the_last_block_may_be_asked_for_from_behind() -> None:
    model = own(TwoEnds).eval()
    for order in (PERMUTED, PRUNED, LONGER):
        with ls.running(model, order):
            answer(model)
