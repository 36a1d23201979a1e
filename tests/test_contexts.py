"""The scope of an order: threads, tasks, generators, exits out of turn, checkpoint replays."""

from __future__ import annotations

import asyncio
import gc
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointError, checkpoint

import layershuffle as ls
from common import FAMILIES, PERMUTED, PRUNED, SEQUENTIAL, assert_close, gradients, images, score
from layershuffle.core.stack import stack_of
from layershuffle.errors import StackError
from refusals import refuses

VIT, TORCHVISION = FAMILIES["timm-vit"], FAMILIES["torchvision-vit"]


@pytest.fixture
def model() -> nn.Module:
    """A wrapped pico ViT."""
    return VIT.wrapped()


def blocks_now(model: nn.Module) -> tuple[int, ...]:
    """The ids of the blocks that a forward in this context would run."""
    blocks = list(ls.blocks_of(model))
    return tuple(blocks.index(block) for block in stack_of(model))


def in_a_thread(work: Callable[[], object]) -> None:
    """Run `work` in a new thread to its end."""
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()


# --- threads and tasks ----------------------------------------------------------------------------


def test_a_new_thread_starts_without_an_order(model: nn.Module) -> None:
    seen: list[tuple[int, ...]] = []
    with ls.running(model, PERMUTED):
        in_a_thread(lambda: seen.append(blocks_now(model)))
        assert blocks_now(model) == PERMUTED
    assert seen == [SEQUENTIAL]


def test_what_copies_the_context_takes_the_order_along(model: nn.Module) -> None:
    """`asyncio.to_thread` and tasks copy the context at the start, and keep it after `running`."""

    async def go() -> list[tuple[int, ...]]:
        left = asyncio.Event()

        async def later() -> tuple[int, ...]:
            await left.wait()
            return blocks_now(model)

        with ls.running(model, PERMUTED):
            inside = await asyncio.to_thread(blocks_now, model)
            task = asyncio.create_task(later())
            await asyncio.sleep(0)
        left.set()
        return [inside, await task, blocks_now(model)]

    assert asyncio.run(go()) == [PERMUTED, PERMUTED, SEQUENTIAL]


# --- exits out of turn ----------------------------------------------------------------------------


def test_contexts_left_out_of_turn_leave_no_order_behind(model: nn.Module) -> None:
    first, second = ExitStack(), ExitStack()
    first.enter_context(ls.running(model, PERMUTED))
    second.enter_context(ls.running(model, PRUNED))
    first.close()
    assert blocks_now(model) == PRUNED
    second.close()
    assert blocks_now(model) == SEQUENTIAL


def suspended(model: nn.Module) -> Iterator[None]:
    """Runs its first half, and then waits inside `running`."""
    with ls.running(model, PRUNED):
        yield


def test_a_generator_closed_after_the_order_around_it(model: nn.Module) -> None:
    with ls.running(model, PERMUTED):
        generator = suspended(model)
        next(generator)
    generator.close()
    assert blocks_now(model) == SEQUENTIAL


def test_a_generator_closed_in_another_thread(model: nn.Module) -> None:
    generator = suspended(model)
    next(generator)
    assert blocks_now(model) == PRUNED
    with ls.running(model, PERMUTED):
        in_a_thread(generator.close)
        assert blocks_now(model) == PERMUTED
    assert blocks_now(model) == SEQUENTIAL


def test_a_change_that_ended_elsewhere_keeps_no_model_alive() -> None:
    model = VIT.wrapped()
    generator = suspended(model)
    next(generator)
    in_a_thread(generator.close)
    gone, other = weakref.ref(model), VIT.wrapped()
    del model, generator
    with ls.running(other, PERMUTED):
        gc.collect()
        assert gone() is None


# --- replays of a whole stack ---------------------------------------------------------------------


def checkpointed_stack() -> nn.Module:
    """A torchvision model whose whole stack is one checkpointed region."""
    model = TORCHVISION.wrapped()
    stack = stack_of(model)
    stack.forward = partial(checkpoint, stack.forward, use_reentrant=False)
    return model


def _backward_error(loss: Tensor) -> list[Exception]:
    """Run backward in a new thread, as autograd does for GPUs. Returns its error or `None`."""
    errors: list[Exception] = []

    def work() -> None:
        try:
            loss.backward()
        except StackError as error:
            errors.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    return errors


def test_replay_of_the_stack_without_its_order_is_refused() -> None:
    """Otherwise gradients would silently be those of the sequential order."""
    model = checkpointed_stack()
    with ls.running(model, PERMUTED):
        errors = _backward_error(score(model(images())))
        assert "where its execution order is not set" in str(errors[0])
        outside = score(model(images()))
    with refuses(StackError):
        outside.backward()


def test_replay_of_a_plain_stack_is_allowed() -> None:
    """Also after a forward in an order, because only the last forward counts."""
    model = checkpointed_stack()
    with torch.no_grad(), ls.running(model, PERMUTED):
        model(images())
    assert _backward_error(score(model(images()))) == []
    wanted = TORCHVISION.plain()
    score(wanted(images())).backward()
    for left, right in zip(model.parameters(), wanted.parameters(), strict=True):
        assert torch.equal(left.grad, right.grad)


def test_replay_of_the_stack_without_its_parts_is_refused_by_torch() -> None:
    """The encoding is gone when a whole stack is replayed: torch notices the missing tensors."""
    model = ls.add_position(checkpointed_stack(), encoding=ls.EncodingForm())
    with ls.running(model, PERMUTED):
        loss = score(model(images()))
        with pytest.raises(CheckpointError, match="different number of tensors"):
            loss.backward()


def whole_model(model: nn.Module, *, reentrant: bool = False) -> Callable[[Tensor], Tensor]:
    """`model`, its whole forward a checkpointed region."""
    return partial(checkpoint, model, use_reentrant=reentrant)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("orders", [(PERMUTED, SEQUENTIAL), (PERMUTED, PRUNED)])
def test_one_backward_through_forwards_in_several_orders_is_refused(
    model: nn.Module, orders: tuple[tuple[int, ...], ...], *, reentrant: bool
) -> None:
    """The replay of the first forward would run in the order of the second."""
    model.train()
    run = whole_model(model, reentrant=reentrant)
    with ls.running(model, orders[0]):
        loss = score(run(images().requires_grad_()))  # reentrant: or nothing would be replayed
    with torch.no_grad(), ls.running(model, SEQUENTIAL):
        model(images())  # as between two steps of a training
    with ls.running(model, orders[1]):
        loss = loss + score(run(images(seed=8).requires_grad_()))
        with refuses(StackError):
            loss.backward()


def test_a_plain_forward_and_one_in_an_order_are_refused(model: nn.Module) -> None:
    run = whole_model(model.train())
    loss = score(run(images()))
    with ls.running(model, PERMUTED):
        loss = loss + score(run(images()))
        with refuses(StackError):
            loss.backward()
    with ls.running(model, PERMUTED):
        loss = score(run(images()))
    with torch.no_grad():
        run(images())
    with refuses(StackError):
        loss.backward()


def test_a_backward_for_each_order_is_right(model: nn.Module) -> None:
    """Also two forwards in one order, and orders per sample."""
    each = [ls.ExecutionOrder(order, 4) for order in (PERMUTED, PRUNED, SEQUENTIAL)]
    plain = VIT.wrapped().train()
    run = whole_model(model.train())
    for order in (PERMUTED, PRUNED, each):
        for forward, wrapped in ((run, model), (plain, plain)):
            with ls.running(wrapped, order):
                (score(forward(images())) + score(forward(images(seed=8)))).backward()
    for name, gradient in gradients(model).items():
        wanted = gradients(plain)[name]
        assert_close(gradient, wanted, tolerance=1e-6 * float(wanted.abs().max() + 1))
