"""The block stack itself: orders and where they hold, slices, walks, and what it refuses."""

from __future__ import annotations

import asyncio
import gc
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import layershuffle as ls
from common import (
    DEPTH,
    FAMILIES,
    LONGER,
    PERMUTED,
    PRUNED,
    SEQUENTIAL,
    WIDTH,
    assert_close,
    gradients,
    images,
    logits_of,
    score,
)
from layershuffle.core.hooks import Step
from layershuffle.core.stack import BlockStack, recomputing, stack_of, with_hooks
from layershuffle.ground.errors import StackError, UsageError
from own_models import CHAINS, LOOPS, Block, Own
from refusals import refuses

VIT, TORCHVISION = FAMILIES["timm-vit"], FAMILIES["torchvision-vit"]


@pytest.fixture
def model() -> nn.Module:
    """A wrapped pico ViT."""
    return VIT.wrapped()


@torch.no_grad()
def along(model: nn.Module, order: Any, batch: Tensor | None = None) -> Tensor:
    """Logits of one order."""
    with ls.running(model, order):
        return logits_of(model(images() if batch is None else batch))


# --- contexts -------------------------------------------------------------------------------------


def test_running_yields_the_order(model: nn.Module) -> None:
    with ls.running(model, [2, 0]) as order:
        assert order == ls.ExecutionOrder((2, 0), DEPTH)
    with ls.running(model, [order, order]) as orders:
        assert orders == (order, order)


@pytest.mark.parametrize(
    "order",
    ["2,0,3,1", list(PERMUTED), np.array(PERMUTED), torch.tensor(PERMUTED), iter(PERMUTED)],
    ids=["text", "list", "numpy", "torch", "iterator"],
)
def test_orders_of_any_kind(model: nn.Module, order: Any) -> None:
    wanted = along(model, ls.ExecutionOrder(PERMUTED, DEPTH))
    assert torch.equal(along(model, order), wanted)


def test_nested_orders_and_the_way_back(model: nn.Module) -> None:
    outer, inner, plain = (along(model, o) for o in (PERMUTED, PRUNED, SEQUENTIAL))
    with torch.no_grad(), ls.running(model, PERMUTED):
        with ls.running(model, PRUNED):
            assert torch.equal(model(images()), inner)
        assert torch.equal(model(images()), outer)
        with pytest.raises(ZeroDivisionError), ls.running(model, PRUNED):
            raise ZeroDivisionError
        assert torch.equal(model(images()), outer)
        each = [ls.ExecutionOrder(PRUNED, DEPTH)] * 3
        with ls.running(model, each):
            assert torch.equal(model(images()), inner)
            with ls.running(model, PERMUTED):
                assert torch.equal(model(images()), outer)
    with torch.no_grad():
        assert torch.equal(model(images()), plain)


def test_models_do_not_share_orders(model: nn.Module) -> None:
    other = TORCHVISION.wrapped()
    wanted = along(model, PERMUTED), along(other, PRUNED)
    with torch.no_grad(), ls.running(model, PERMUTED), ls.running(other, PRUNED):
        assert torch.equal(model(images()), wanted[0])
        assert torch.equal(other(images()), wanted[1])


# --- the container's own interface ----------------------------------------------------------------


def test_iteration_length_and_index_follow_the_order(model: nn.Module) -> None:
    stack, blocks = stack_of(model), ls.blocks_of(model)
    for order in (SEQUENTIAL, PERMUTED, PRUNED, LONGER):
        with ls.running(model, order):
            assert len(stack) == len(order)
            assert list(stack) == [blocks[b] for b in order]
            assert stack[0] is blocks[order[0]]
            assert stack[-1] is blocks[order[-1]]
            assert list(stack[1:3]) == [blocks[b] for b in order[1:3]]
            assert list(stack[:DEPTH]) == [blocks[b] for b in order], "blocks[:depth] means all"
            assert stack.depth == DEPTH
            assert stack.blocks[2] is blocks[2]
            with refuses(StackError):
                stack[len(order)]
    with pytest.raises(IndexError):
        stack[DEPTH]


@pytest.mark.parametrize("index", [slice(None, 2), slice(1, 3), slice(None, None, 2), slice(-2, 9)])
@pytest.mark.parametrize(
    "family", [VIT, TORCHVISION, FAMILIES["hf-vit"]], ids=lambda value: getattr(value, "name", None)
)
def test_slices_without_an_order_are_the_hosts(family: Any, index: slice) -> None:
    """A wrapped container slices like the unwrapped one: same blocks, same keys."""
    wanted = family.container(family.plain())[index]
    model = family.wrapped()
    part = family.container(model)[index]
    assert isinstance(part, BlockStack)
    assert part.blocks == [*ls.blocks_of(model)[index]]
    assert list(part.state_dict()) == list(wanted.state_dict())
    host = ls.unwrap(part)
    assert type(host) is type(wanted)


# --- parts and walks ------------------------------------------------------------------------------


class Recording:
    """A part that adds a constant and remembers its steps."""

    def __init__(self, add: float, calls: list[tuple[str, Step]]) -> None:
        self.add, self.calls = add, calls

    def before(self, state: Tensor, step: Step) -> Tensor:
        """Adds."""
        self.calls.append((f"before {self.add}", step))
        return state + self.add

    def after(self, state: Tensor, step: Step) -> None:
        """Remembers."""
        self.calls.append((f"after {self.add}", step))


def test_parts_run_in_the_order_they_were_added(model: nn.Module) -> None:
    calls: list[tuple[str, Step]] = []
    first, second = Recording(1.0, calls), Recording(2.0, calls)
    with with_hooks(model, first), ls.running(model, PRUNED), with_hooks(model, second):
        model(images())
    names = ["before 1.0", "before 2.0", "after 1.0", "after 2.0"]
    assert [name for name, _ in calls] == names * 2
    assert [step for _, step in calls[::4]] == [Step(0, 3), Step(1, 1)]
    calls.clear()
    model(images())
    assert calls == []


def test_parts_without_an_order(model: nn.Module) -> None:
    with ls.tap(model) as tap:
        out = model(images())
    assert torch.equal(out, VIT.plain()(images()))
    assert [(r.position, r.block) for r in tap.records] == list(enumerate(SEQUENTIAL))


def test_replays_are_marked(model: nn.Module) -> None:
    calls: list[tuple[str, Step]] = []
    model.set_grad_checkpointing(True)
    model.train()
    with with_hooks(model, Recording(0.0, calls)), ls.running(model, PERMUTED):
        out = model(images())
        assert not any(step.replay for _, step in calls)
        forward = len(calls)
        out.sum().backward()
    assert len(calls) > forward
    assert all(step.replay for _, step in calls[forward:])


def test_recomputing_runs_every_block_again_where_something_learns(model: nn.Module) -> None:
    """And keeps nothing for a backward pass that does not come."""
    runs: list[int] = []
    for index, block in enumerate(ls.blocks_of(model)):
        # Inside the block: a replay stops at the last tensor that the backward pass needs.
        block.norm1.register_forward_hook(lambda *_, index=index: runs.append(index))
    with ls.running(model, PERMUTED), recomputing(model):
        with torch.no_grad():
            model(images())
        assert runs == list(PERMUTED)
        runs.clear()
        score(model(images())).backward()
    assert runs == [*PERMUTED, *reversed(PERMUTED)]


def test_groups_share_one_run_of_a_block(model: nn.Module) -> None:
    """Equal orders for every sample cost as many block runs as one shared order."""
    runs: list[int] = []
    along(model, [ls.ExecutionOrder(PERMUTED, DEPTH)] * 3)  # the first call tries the host, once
    for index, block in enumerate(ls.blocks_of(model)):
        block.register_forward_hook(lambda *_, index=index: runs.append(index))
    along(model, [ls.ExecutionOrder(PERMUTED, DEPTH)] * 3)
    assert runs == list(PERMUTED)


# --- refused --------------------------------------------------------------------------------------


def test_another_number_of_orders_than_of_samples_is_refused(model: nn.Module) -> None:
    orders = [ls.ExecutionOrder(PERMUTED, DEPTH)] * 2
    with ls.running(model, orders), refuses(UsageError):
        model(images(3))


def test_functions_need_a_wrapped_model() -> None:
    plain = VIT.plain()
    for call in (ls.blocks_of, ls.depth_of, stack_of):
        with refuses(StackError):
            call(plain)
    for context in (ls.tap(plain), ls.running(plain, PERMUTED)):
        with refuses(StackError), context:
            pass
    for no_model in ("timm:vit_tiny_patch16_224", [1]):
        with refuses(StackError):
            ls.wrap(no_model)  # type: ignore[type-var]


BAD_ORDERS = {
    "unknown": [0, 4],
    "negative": [-1],
    "empty": [],
    "text": "2,x",
    "other depth": ls.ExecutionOrder((0, 1), 5),
    "one of several": [ls.ExecutionOrder((0,), 4), ls.ExecutionOrder((0,), 5)],
    "fractions": torch.tensor([0.0, 1.0]),
    "none": None,
    "number": 3,
    "policy": ls.Shuffled(),
}


@pytest.mark.parametrize("order", BAD_ORDERS.values(), ids=list(BAD_ORDERS))
def test_bad_orders(model: nn.Module, order: Any) -> None:
    with refuses(UsageError), ls.running(model, order):
        pass
    assert torch.equal(along(model, SEQUENTIAL), VIT.plain()(images()))


def test_wrap_at_another_place_is_refused(model: nn.Module) -> None:
    for path in ("nowhere", "head", "blocks.0"):
        with refuses(StackError):
            ls.wrap(model, blocks=path)
    assert ls.wrap(model, blocks="blocks") is model


@pytest.mark.parametrize(
    "family", [VIT, FAMILIES["hf-vit"], TORCHVISION], ids=lambda value: getattr(value, "name", None)
)
def test_data_parallel_replicas_are_refused(family: Any) -> None:
    """`nn.DataParallel` makes copies of every module and runs them in threads without an order."""
    model = family.wrapped()
    container = family.container(model)
    owner, _, name = family.path.rpartition(".")
    replica = container._replicate_for_data_parallel()
    assert replica._is_replica
    model.get_submodule(owner)._modules[name] = replica
    with refuses(StackError):
        model(images())


def test_hooks_and_walks_in_a_model_compiled_whole(model: nn.Module) -> None:
    """What stands for blocks is made and asked for its class while torch.compile traces."""
    compiled = torch.compile(model, backend="eager")
    try:
        with torch.no_grad(), ls.tap(model) as tap, ls.running(model, PERMUTED):
            logits = compiled(images())
        (score,) = ls.evaluate(compiled, [(images(), torch.arange(len(images())))], orders=["3,1"])
    finally:
        torch.compiler.reset()
    assert [record.block for record in tap.records] == list(PERMUTED)
    assert_close(logits, along(model, PERMUTED), tolerance=1e-5)
    wanted = nn.functional.cross_entropy(along(model, (3, 1)), torch.arange(len(images())))
    assert score.cross_entropy == pytest.approx(float(wanted), rel=1e-5)


def test_an_exit_of_one_order_is_that_of_every_sample() -> None:
    model, order = VIT.wrapped(), ls.ExecutionOrder(PERMUTED, DEPTH)
    for count in (3, 2):  # the batch may have another size in every call
        with torch.no_grad(), ls.running(model, order, exit_after=2):
            logits, early = model(images(count))
        assert torch.equal(logits, along(model, PERMUTED, images(count)))
        assert_close(early, along(model, PERMUTED[:2], images(count)), tolerance=1e-5)


def test_an_exit_needs_a_step_of_the_order() -> None:
    model, order = VIT.wrapped(), ls.ExecutionOrder(PERMUTED, DEPTH)
    for steps in (0, DEPTH + 1, 2.5, "2"):
        with refuses(UsageError):
            ls.running(model, [order], exit_after=steps).__enter__()


class CutToImages(Own):
    """A host whose head answers for as many states as there are images."""

    def forward(self, images: Tensor) -> Tensor:
        """Logits."""
        return super().forward(images)[: len(images)]


def test_a_head_that_loses_the_rows_of_an_exit_is_refused() -> None:
    model, order = ls.wrap(CutToImages()), ls.ExecutionOrder(PERMUTED, DEPTH)
    with (
        ls.running(model, [order] * 3, exit_after=1),
        refuses(StackError),
    ):
        model(images(3))


def test_labels_under_an_exit_are_refused_with_what_to_do() -> None:
    """transformers would compare twice as many rows with them, and fail in its loss."""
    model, order = FAMILIES["hf-vit"].wrapped(), ls.ExecutionOrder(PERMUTED, DEPTH)
    labels = torch.zeros(3, dtype=torch.long)
    with ls.running(model, [order] * 3):
        assert model(images(3), labels=labels).loss.isfinite()
    with (
        ls.running(model, [order] * 3, exit_after=1),
        refuses(UsageError),
    ):
        model(images(3), labels=labels)


def test_an_exit_after_the_last_step_is_the_output() -> None:
    model, order = VIT.wrapped(), ls.ExecutionOrder(PERMUTED, DEPTH)
    with torch.no_grad(), ls.running(model, [order] * 3, exit_after=DEPTH):
        output, early = model(images(3))
    assert torch.equal(output, early)


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")  # of the trial
def test_two_exits_in_one_replayed_backward_are_refused() -> None:
    """A replay runs with the exit that is set then, and its states have the same shapes."""
    model, order = ls.wrap(Replayed()), ls.ExecutionOrder(PERMUTED, DEPTH)
    with ls.running(model, [order] * 3, exit_after=1):
        torch.cat(model(images(3))).sum().backward()
        first = torch.cat(model(images(3)))
    with ls.running(model, [order] * 3, exit_after=2):
        second = torch.cat(model(images(3)))
        with refuses(StackError):
            (first.sum() + second.sum()).backward()


class Replayed(Own):
    """A host that checkpoints all of its blocks at once, reentrantly."""

    def run(self, x: Tensor) -> Tensor:
        """The blocks."""
        return checkpoint(super().run, x, use_reentrant=True)


# --- the scope of an order: threads, tasks, generators, replays -----------------------------------


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


def backward_error(loss: Tensor) -> list[Exception]:
    """Run backward in a new thread, as autograd does for GPUs; its error, if there is one."""
    errors: list[Exception] = []

    def work() -> None:
        try:
            loss.backward()
        except StackError as error:
            errors.append(error)

    in_a_thread(work)
    return errors


def test_replay_of_the_stack_without_its_order_is_refused() -> None:
    """Otherwise gradients would silently be those of the sequential order."""
    model = checkpointed_stack()
    with ls.running(model, PERMUTED):
        errors = backward_error(score(model(images())))
        assert "where its execution order is not set" in str(errors[0])
        outside = score(model(images()))
    with refuses(StackError):
        outside.backward()


def test_replay_of_a_plain_stack_is_allowed() -> None:
    """Also after a forward in an order, because only the last forward counts."""
    model = checkpointed_stack()
    with torch.no_grad(), ls.running(model, PERMUTED):
        model(images())
    assert backward_error(score(model(images()))) == []
    wanted = TORCHVISION.plain()
    score(wanted(images())).backward()
    for left, right in zip(model.parameters(), wanted.parameters(), strict=True):
        assert torch.equal(left.grad, right.grad)


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


# --- backbones that look at their blocks, or do something between them --------------------------


def test_a_backbone_may_look_at_its_blocks() -> None:
    """It may read numbers and submodules, and call nn.Module's methods."""
    model = CHAINS["own-own"].wrapped()
    stack = stack_of(model)
    with ls.tap(model):
        assert stack[1].tokens.norm.normalized_shape == (WIDTH,)
        assert stack[1].tokens.norm.weight is ls.blocks_of(model)[1].tokens.norm.weight
        assert len(list(stack[1].parameters())) == 8
        assert isinstance(stack[1], type(ls.blocks_of(model)[1]))


def test_a_backbone_that_runs_from_behind_is_recorded_whole() -> None:
    """Position 0 comes last, and begins no new forward."""
    model = LOOPS["own-backwards"].wrapped()
    with ls.tap(model) as tap, ls.running(model, PERMUTED):
        for _ in range(2):
            model(images())
    assert [record.block for record in tap.records] == [*reversed(PERMUTED)]
    assert [record.position for record in tap.records] == [3, 2, 1, 0]


def test_looking_at_blocks_is_not_running_them() -> None:
    model = CHAINS["own-own"].wrapped()
    stack = stack_of(model)
    with ls.running(model, PERMUTED):
        assert stack[0] is ls.blocks_of(model)[2]
        assert len(stack) == DEPTH
        assert next(iter(stack)) is stack[0]
    with ls.running(model, LONGER):
        assert len(stack[:2]) == 2
    with pytest.raises(ZeroDivisionError), ls.running(model, LONGER):
        assert [stack[0], stack[1]][1 // 0]


def test_slices_can_be_called_under_an_order() -> None:
    """As those of an nn.Sequential."""

    class Registers(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.Sequential(*(Block() for _ in range(DEPTH)))
            self.scale = nn.Parameter(torch.tensor(0.5))

        def forward(self, x: Tensor) -> Tensor:
            return self.blocks[2:](self.blocks[:2](x) * self.scale)  # type: ignore[no-any-return]

    torch.manual_seed(0)
    model = ls.wrap(Registers().eval())
    x = torch.randn(2, 16, WIDTH)
    blocks = ls.blocks_of(model)
    with torch.no_grad(), ls.running(model, "3,2,1,0"):
        wanted = blocks[0](blocks[1](blocks[2](blocks[3](x)) * model.scale))
        assert torch.equal(model(x), wanted)


def test_a_gate_weighs_what_a_block_adds() -> None:
    """The backbone's own step between blocks, on the residual of an older state."""
    x = torch.randn(2, 16, WIDTH, generator=torch.Generator().manual_seed(0))
    model = LOOPS["own-gates"].wrapped()
    blocks, gates = ls.blocks_of(model), model.gates.detach()
    with torch.no_grad():
        first = x + gates[0] * (blocks[2](x) - x)
        second = first + gates[1] * (blocks[0](x) - x)
        with ls.running(model, "2+0"):
            assert_close(model.run(x), second, tolerance=1e-5)


def test_a_backbone_may_write_into_the_state_between_its_blocks() -> None:
    """Writing into a tensor that older versions were read from does not change them."""
    x = torch.randn(2, 16, WIDTH, generator=torch.Generator().manual_seed(0))
    in_place, plain = LOOPS["own-injectioninplace"].wrapped(), LOOPS["own-injection"].wrapped()
    plain.load_state_dict(in_place.state_dict())
    for order in ("2,0+3,1", "2,0,3@1,1@1"):
        with torch.no_grad(), ls.running(in_place, order), ls.running(plain, order):
            assert_close(in_place.run(x.clone()), plain.run(x.clone()), tolerance=1e-5)
