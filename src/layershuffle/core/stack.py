"""The block stack: run a host model's blocks along an explicit execution order.

`wrap(model)` swaps the class of the model's block container for `BlockStack`, an `nn.ModuleList`
whose `forward`, `__iter__`, `__len__` and `__getitem__` follow the order set by `running`. Keys and
parameter order of the model's `state_dict` do not change, and without an order the model computes
exactly what it did before. Each of the other designs that were tried gives wrong results without an
error in some case: docs/decisions/001-block-stack.md.

Drop-path rates belong to a block and travel with it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from layershuffle.core.discovery import find_blocks
from layershuffle.core.entries import HOSTS, BlockWalk, Placed, Walked, versioned
from layershuffle.core.hooks import BlockHook, Step, Tap
from layershuffle.core.orders import ExecutionOrder, order_of, refuse_non_orders
from layershuffle.core.per_sample import (
    SampleOrders,
    calls_seen,
    hidden_states_refused,
    holders,
    is_per_sample,
)
from layershuffle.core.runs import (
    PLAIN,
    Asked,
    Run,
    changed,
    changed_stacks,
    in_backward,
    in_checkpoint,
    in_place,
    is_compiled,
    run_of,
)
from layershuffle.errors import StackError, UsageError

_log = logging.getLogger("layershuffle")
ModelT = TypeVar("ModelT", bound=nn.Module)


@dataclass
class _Forwards:
    """Facts about the forwards of a stack since its last replay, used to check the next replay.

    `replayable` are the orders of the forwards that gradient checkpointing will rerun as a whole.
    """

    ordered: bool = False
    replayed: bool = False
    replayable: set[tuple[object, ...]] = field(default_factory=set)


# Stored outside of the stack, because a copy of a model has not run anything.
_FORWARDS: WeakKeyDictionary[nn.Module, _Forwards] = WeakKeyDictionary()
_BATCH_NORM_SAID: WeakKeyDictionary[nn.Module, bool] = WeakKeyDictionary()


class BlockStack(nn.ModuleList):
    """The block container of a wrapped model. Made by `wrap`, undone by `unwrap`."""

    host_class: type[nn.Module]
    # Until the host has iterated over the stack, hooks on the blocks catch one that runs anyway.
    _unasked = False

    def _run(self) -> Run:
        """The `Run` that is in force now; every access to the stack goes through here."""
        run = run_of(self)
        if torch.compiler.is_compiling():
            return run
        self._refuse_lost_order(run)
        if run is PLAIN:
            self._refuse_replica()
        if self._unasked:
            self._unasked = False
            _remove_watches(self)
        return run

    def _entries(self, run: Run) -> list[Callable[..., Any]]:
        """The callables for the host model, in execution order."""
        blocks = list(self._modules.values())
        # `is` is faster than `==`, and this check runs before every forward; most have no order.
        if run is PLAIN:
            return [*blocks]
        if run.entries is not None:
            return [*run.entries(run)]
        order = range(len(blocks)) if run.order is None else run.order
        if run.order is not None and run.order.versions is not None:
            return [*versioned(blocks, run.order, run=run)]
        # Return the bare blocks, so that torch.compile and torch's hooks see no wrapper.
        if not run.hooks and not run.recompute:
            return [blocks[block] for block in order]
        return [
            Placed(blocks[block], Step(position, block), run)
            for position, block in enumerate(order)
        ]

    def _part(self, index: slice) -> BlockStack:
        part = BlockStack()
        part.host_class = self.host_class
        for place, (name, block) in enumerate(list(self._modules.items())[index]):
            # As in the host class: a Sequential keeps the names, a ModuleList renumbers them.
            key = name if issubclass(self.host_class, nn.Sequential) else str(place)
            part.add_module(key, block)
        return part

    def _refuse_replica(self) -> None:
        # DataParallel runs copies in threads where no order is set, so it would be ignored.
        if getattr(self, "_is_replica", False):
            raise StackError(
                "nn.DataParallel copies the model into threads where no execution order is set",
                hint="use DistributedDataParallel (torchrun), or one GPU",
            )

    def _refuse_lost_order(self, run: Run) -> None:
        # If the whole stack is checkpointed, the backward pass needs the order again, where it may
        # not be set: after `running`, or always on GPUs (autograd has its own threads). The blocks
        # have equal shapes, so torch's own check of the replay would not notice.
        forwards = _FORWARDS.setdefault(self, _Forwards())
        if not in_backward():
            if forwards.replayed:
                forwards.replayed, forwards.replayable = False, set()
            # Two orders are enough for the error; all orders of a long training would fill the
            # memory. The placeholders for blocks in a trial of the host have no backward pass.
            tried = run.entries is not None and run.samples is None
            if not tried and in_checkpoint() and len(forwards.replayable) < 2:
                forwards.replayable.add(run.way)
            forwards.ordered = run is not PLAIN
            return
        forwards.replayed = True
        if run is PLAIN and (forwards.ordered or forwards.replayable - {PLAIN.way}):
            raise StackError(
                "Gradient checkpointing reruns the whole stack in the backward pass, where its "
                "execution order is not set",
                hint="checkpoint the blocks one by one; on a CPU, calling backward() inside "
                "`with running(...)` is enough",
            )
        if forwards.replayable - {run.way}:
            raise StackError(
                "Gradient checkpointing reruns the whole stack in the backward pass, and its "
                "forwards had several execution orders, of which only one is set now",
                hint="checkpoint the blocks one by one, or call backward() after each forward, "
                "inside its `with running(...)`, and put other forwards under torch.no_grad()",
            )

    def block(self, index: int) -> nn.Module:
        """The block with id `index`, independent of the current order."""
        return list(self._modules.values())[index]

    @property
    def depth(self) -> int:
        """The number of blocks, independent of the current order."""
        return len(self._modules)

    def forward(self, state: Any, *args: Any, **kwargs: Any) -> Any:
        """Run the blocks along the current order; arguments after the first go to every block."""
        for entry in self:
            state = entry(state, *args, **kwargs)
        return state

    def __iter__(self) -> Iterator[Any]:
        run = self._run()
        entries = self._entries(run)
        if run.asked is None or torch.compiler.is_compiling():
            return iter(entries)
        return run.asked.handed_out(entries)

    def __len__(self) -> int:
        return len(self._entries(run_of(self)))

    def __getitem__(self, index: int | slice) -> Any:
        """The entry at a *position*; without an order, a slice returns a stack."""
        run = self._run()
        entries = self._entries(run)
        if isinstance(index, slice):
            if run is PLAIN:
                return self._part(index)
            # Hosts write `blocks[:depth]` for all blocks, but an order with repeats may be longer.
            if index == slice(None, self.depth):
                index = slice(None)
            if run.asked is not None:
                run.asked.note_slice(index, len(entries))
        elif run is not PLAIN:
            if not -len(entries) <= index < len(entries):
                raise StackError(
                    f"The host model requests position {index} of {len(entries)}: it uses its own "
                    "number of blocks",
                    hint="iterate over the stack (for block in self.blocks) in its forward, or up "
                    "to len(self.blocks)",
                )
            if run.asked is not None:
                run.asked.note_index(index, len(entries))
        return entries[index]


def _watched_parts(stack: nn.Module) -> Iterator[nn.Module]:
    """The callable modules of the blocks: each block, or its parts if it is only a list of them."""
    for block in stack._modules.values():
        if block is not None:
            runs = type(block).forward is not nn.Module.forward
            yield from (block,) if runs else block.children()


def _refuse_order(module: nn.Module, _args: object) -> None:
    """A hook on the blocks of unused stacks: it detects a host that gets its blocks elsewhere."""
    if torch.compiler.is_compiling():
        return
    for stack in changed_stacks():
        if any(module is part for part in _watched_parts(stack)):
            raise _never_asked(f"A block ({type(module).__name__}) runs, but the host model")


def _never_asked(subject: str) -> StackError:
    return StackError(
        f"{subject} never used its block stack, so the execution order and the hooks around blocks "
        "would be ignored",
        hint="iterate over the container itself (for block in self.blocks) in the forward, not "
        "over its children(), its _modules or a list made earlier",
    )


def _refuse_call(module: nn.Module, *_: object) -> None:
    """A hook on models with an order or hooks: it refuses a call that used no block of the stack.

    It takes the module as an argument and is no closure, because a copy of a model keeps its hooks.
    """
    if torch.compiler.is_compiling():
        return
    for stack in changed_stacks():
        asked = run_of(stack).asked
        if asked is not None and not asked.length:
            around = holders(module, stack)
            # A compiled model uses its stack only while it is being compiled.
            if around and not any(map(is_compiled, around)):
                raise _never_asked(f"{type(module).__name__} ran and")


@contextmanager
def _calls_watched(model: nn.Module) -> Iterator[None]:
    # A hook would be compiled into the model.
    if is_compiled(model):
        yield
        return
    handle = model.register_forward_hook(_refuse_call)
    try:
        yield
    finally:
        handle.remove()


def _remove_watches(stack: nn.Module) -> None:
    for part in _watched_parts(stack):
        hooks = part._forward_pre_hooks
        for key in [key for key, hook in hooks.items() if hook is _refuse_order]:
            del hooks[key]


def wrap(model: ModelT, blocks: str | None = None, *, may_differ: Collection[str] = ()) -> ModelT:
    """Prepare the blocks of `model` to run in any order, and return `model` itself.

    A wrapped model is returned unchanged. `blocks`: path of the block container, found
    automatically for vision transformers of timm, transformers and torchvision. `may_differ`:
    attributes in which blocks may differ because a block's output does not depend on them (such as
    `index`). Raises `StackError` with the reason if the blocks are not interchangeable.
    """
    stacks = _stacks(model)
    if stacks:
        if blocks is not None and dict(model.named_modules()).get(blocks) not in stacks:
            raise StackError(
                f"{type(model).__name__} is already wrapped, but not at {blocks!r}",
                hint="call layershuffle.unwrap(model) first",
            )
        return model
    _, container = find_blocks(model, blocks, may_differ=may_differ)
    host_class = type(container)
    # The class is swapped and the object stays, so that references to the container (in the host's
    # own attributes, hooks or an optimiser) refer to the wrapped one too.
    container.__class__ = BlockStack
    vars(container).update(host_class=host_class, _unasked=True)
    for part in _watched_parts(container):
        part.register_forward_pre_hook(_refuse_order)
    return model


def unwrap(model: ModelT) -> ModelT:
    """Undo `wrap`, and return `model` itself with its original block container."""
    for stack in _stacks(model):
        _remove_watches(stack)
        vars(stack).pop("_unasked", None)
        host_class = vars(stack).pop("host_class")
        object.__setattr__(stack, "__class__", host_class)
    return model


def stack_of(model: nn.Module) -> BlockStack:
    """The block stack of a wrapped model. Raises `StackError` if there is none."""
    stacks = _stacks(model)
    if len(stacks) != 1:
        raise StackError(
            f"{type(model).__name__} has {len(stacks)} block stacks, but exactly one is needed",
            hint="call layershuffle.wrap(model) first",
        )
    return stacks[0]


def blocks_of(model: nn.Module) -> tuple[nn.Module, ...]:
    """The blocks in the order of their ids, independent of the current order."""
    stack = stack_of(model)
    return tuple(stack.block(index) for index in range(stack.depth))


def depth_of(model: nn.Module) -> int:
    """The number of blocks, whatever the current order."""
    return stack_of(model).depth


@contextmanager
def running(
    model: nn.Module,
    order: ExecutionOrder | str | Sequence[int] | Sequence[ExecutionOrder],
    *,
    exit_after: int | None = None,
) -> Iterator[ExecutionOrder | tuple[ExecutionOrder, ...]]:
    """Run `model` along `order` inside the `with` block, in this thread only.

    `order` is one order for the whole batch, or a sequence of one per sample (they are regrouped by
    their next block at every position). If you checkpoint the stack, call `backward` inside too.

    `exit_after`, for an order per sample: the state after this number of steps also goes to the
    head. The output then has twice as many rows: first those of the whole orders, then those of the
    orders cut at the exit. Blocks run once for both.

    Raises `UsageError` for orders of another depth, and `StackError` if the host ran only a part of
    the order, or if no state can leave between its blocks.
    """
    refuse_non_orders(order)
    stack, asked = stack_of(model), Asked(depth_of(model))
    with ExitStack() as contexts:
        if is_per_sample(order):
            orders = tuple(order_of(sample, stack.depth) for sample in order)  # type: ignore[arg-type]
            samples = SampleOrders(stack, orders, exit_after=exit_after)
            run = {"samples": samples.orders, "exit_after": exit_after, "entries": samples.entries}
            contexts.enter_context(changed(stack, **run, order=None, asked=asked))
            contexts.enter_context(calls_seen(model, stack, samples=samples))
            contexts.enter_context(_calls_watched(model))
            _say_batch_norm(stack, "an order per sample splits the batch for their statistics")
            yield orders
        elif exit_after is not None:
            raise UsageError("An exit needs an order per sample", hint="[order] * len(images)")
        else:
            shared = order_of(order, stack.depth)  # type: ignore[arg-type]
            contexts.enter_context(
                changed(stack, order=shared, samples=None, entries=None, asked=asked)
            )
            contexts.enter_context(_calls_watched(model))
            if shared.versions is not None:
                contexts.enter_context(hidden_states_refused(model, stack, order=shared))
            yield shared
    asked.refuse_cut(model)


def _say_batch_norm(stack: BlockStack, consequence: str) -> None:
    """Log once that BatchNorm layers of blocks in training mode see other batches than usual."""
    if stack in _BATCH_NORM_SAID:
        return
    norms = [module for module in stack.modules() if isinstance(module, _BatchNorm)]
    if not norms or any(norm.training for norm in norms):
        _BATCH_NORM_SAID[stack] = bool(norms)
    if _BATCH_NORM_SAID.get(stack):
        _log.warning("The blocks hold BatchNorm layers in training mode: %s", consequence)


@contextmanager
def walking(model: nn.Module, walk: BlockWalk, *, older: bool = False) -> Iterator[None]:
    """Run `walk(call, state) -> state` in place of the whole stack, in this thread.

    `call(block, position, chunk, rows)` runs one block, including its hooks, with the other
    arguments that the host model passed; `rows` are the samples in `chunk`, `None` for all.
    `older`: whether a step reads an older version of the state than the newest.
    """
    stack = stack_of(model)
    with in_place(stack, lambda run: [Walked(stack, walk, run, HOSTS.get(stack), older=older)]):
        yield


@contextmanager
def recomputing(model: nn.Module) -> Iterator[None]:
    """Keep no activations inside blocks; the backward pass computes every block again.

    This is gradient checkpointing block by block. It works for every host model and under any order
    or walk.
    """
    stack = stack_of(model)
    _say_batch_norm(stack, "each batch counts twice in their running statistics")
    with changed(stack, recompute=True):
        yield


@contextmanager
def with_hooks(model: nn.Module, *hooks: BlockHook) -> Iterator[None]:
    """Add `hooks` around every block inside the `with` block, after those already there."""
    stack = stack_of(model)
    asked = run_of(stack).asked or Asked(stack.depth)
    with changed(stack, *hooks, asked=asked), _calls_watched(model):
        yield


@contextmanager
def tap(model: nn.Module) -> Iterator[Tap]:
    """Record (position, block, tensor) of every block run in the `with` block.

    `tap.records` holds the last forward. The records keep their graph and memory alive.
    Without a tap, nothing is recorded and there is no cost.
    """
    recorder = Tap()
    with with_hooks(model, recorder):
        yield recorder


def _stacks(model: object) -> list[BlockStack]:
    if not isinstance(model, nn.Module):  # new users may not check types
        spec = isinstance(model, str)
        raise StackError(
            f"A model is needed, got {model!r}" if spec else f"{type(model)} is not an nn.Module",
            hint=f"layershuffle.load({model!r}) builds the model of a spec, wrapped"
            if spec
            else "pass the torch.nn.Module itself",
        )
    # `model.modules()` would be slow: most modules are inside blocks, and this runs every forward.
    reached = {model: None}  # a dict keeps the order
    waiting = [model]
    while waiting:
        module = waiting.pop()
        if not isinstance(module, BlockStack):
            new = [c for c in module._modules.values() if c is not None and c not in reached]
            reached.update(dict.fromkeys(new))
            waiting += new
    return [module for module in reached if isinstance(module, BlockStack)]
