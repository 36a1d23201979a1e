"""The block stack: run the blocks of a backbone along an explicit execution order.

`wrap(model)` swaps the class of the model's block container for `BlockStack`, an `nn.ModuleList`
whose `forward`, `__iter__`, `__len__` and `__getitem__` follow the order set by `running`. Keys and
parameter order of the model's `state_dict` do not change, and without an order the model computes
exactly what it did before.

Each of the other designs that were tried gives wrong results without an error in some case. Code
that reads `children()`, as timm's checkpointing does, misses an `__iter__` that is overridden. A
`forward` that is swapped between blocks runs the hooks of the wrong block. `_modules` in another
order makes averages of models copy one block into another. A `torch.fx` graph freezes the order.

Drop-path rates belong to a block and travel with it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any, TypeVar

import torch
from torch import nn

from layershuffle.core.checks.blocks import other_count
from layershuffle.core.checks.calls import (
    check_exit,
    count_samples,
    lost_rows,
    refuse_cache,
    refuse_hidden_states,
    refuse_labels,
    stack_use_check,
    untried_call,
    watched_calls,
)
from layershuffle.core.checks.forwards_noted import note_forward, say_batch_norm, share_notes
from layershuffle.core.checks.orders import checked_fixed
from layershuffle.core.checks.rounds import refuse_rounds
from layershuffle.core.checks.sharing import sample_axes
from layershuffle.core.discovery import find_blocks
from layershuffle.core.entries import Axes, Shared, order_entries, sample_entries
from layershuffle.core.hooks import BlockHook, Tap
from layershuffle.core.orders import ExecutionOrder, check_ends, orders_of
from layershuffle.core.runs import (
    PLAIN,
    Run,
    RunChange,
    StackRequests,
    holders,
    in_backward,
    run_of,
)
from layershuffle.core.tensors import Logits, logits_of
from layershuffle.core.torch_private import is_replica, parts_by_name
from layershuffle.ground.errors import StackError

_log = logging.getLogger("layershuffle")
ModelT = TypeVar("ModelT", bound=nn.Module)


class _Part(list[Any]):
    """Some entries of a run, callable as a slice of an `nn.Sequential` is."""

    def __call__(self, state: Any, *args: Any, **kwargs: Any) -> Any:
        for entry in self:
            state = entry(state, *args, **kwargs)
        return state


class BlockStack(nn.ModuleList):
    """The block container of a wrapped model. Made by `wrap`, undone by `unwrap`.

    `fixed`: how many blocks at the beginning and at the end keep their place, as the model was
    trained. `shuffled`: whether the model was prepared for training along drawn orders. Copies
    of the model have both, too. `container_class`: the class that `unwrap` restores.
    """

    container_class: type[nn.Module]
    fixed: tuple[int, int] = (0, 0)
    shuffled: bool = False

    def _run(self) -> Run:
        """The `Run` that is in force now; every access to the stack goes through here."""
        run = run_of(self)
        if torch.compiler.is_compiling():
            return run
        if run is PLAIN and is_replica(self):
            # DataParallel runs copies in threads where no order is set, so it would be ignored.
            raise StackError(
                "nn.DataParallel copies the model into threads where no execution order is set",
                hint="use DistributedDataParallel (torchrun), or one GPU",
            )
        # Otherwise nothing learns, and no backward pass replays the forward.
        if self.training or torch.is_grad_enabled():
            note_forward(self, run)
        return run

    def _entries(self, run: Run, *, begins: bool = True) -> Sequence[Callable[..., Any]]:
        """The callables for the backbone, in execution order.

        `begins`: the request begins a forward. A backbone that asks for its blocks one by one gets
        all of them from the entries of that forward.
        """
        # `is` is faster than `==`, and this check runs before every forward; most have no order.
        if run is PLAIN:
            return self.blocks
        requests = run.requests
        conditions = (run.recompute, *run.hooks)
        if not begins and requests is not None and requests.has_entries(conditions):
            return requests.entries
        if run.entries is not None:
            entries = run.entries(run)
        else:
            entries = order_entries(self.blocks, ExecutionOrder.sequential(self.depth), run=run)
        if requests is not None:
            requests.entries = entries
            requests.conditions = conditions
        return entries

    def _part(self, index: slice) -> BlockStack:
        part = BlockStack()
        part.container_class = self.container_class
        share_notes(part, self)
        for place, (name, block) in enumerate(list(parts_by_name(self).items())[index]):
            # As in the original class: a Sequential keeps the names, a ModuleList renumbers them.
            key = name if issubclass(self.container_class, nn.Sequential) else str(place)
            part.add_module(key, block)
        return part

    @property
    def blocks(self) -> list[nn.Module]:
        """The blocks in the order of their ids, independent of the current order."""
        return [block for block in parts_by_name(self).values() if block is not None]

    @property
    def depth(self) -> int:
        """The number of blocks, independent of the current order."""
        return len(parts_by_name(self))

    def forward(self, state: Any, *args: Any, **kwargs: Any) -> Any:
        """Run the blocks along the current order; arguments after the first go to every block."""
        for entry in self:
            state = entry(state, *args, **kwargs)
        return state

    def __iter__(self) -> Iterator[Any]:
        run = self._run()
        entries = self._entries(run)
        if run.requests is None or torch.compiler.is_compiling():
            return iter(entries)
        return run.requests.counted(entries)

    def __len__(self) -> int:
        return len(self._entries(run_of(self), begins=False))

    def __getitem__(self, index: int | slice) -> Any:
        """The entry at a *position*; without an order, a slice returns a stack."""
        run = self._run()
        if isinstance(index, slice):
            if run is PLAIN:
                return self._part(index)
            entries = self._entries(run, begins=not index.start)
            # Backbones write `blocks[:depth]` for all blocks, but an order with repeats may be
            # longer.
            if index == slice(None, self.depth):
                index = slice(None)
            if run.requests is not None:
                run.requests.note_slice(index, len(entries))
            return _Part(entries[index])
        entries = self._entries(run, begins=index == 0)
        if run is not PLAIN:
            if not -len(entries) <= index < len(entries):
                raise StackError(
                    f"The backbone requests position {index} of {len(entries)}: it uses its own "
                    "number of blocks",
                    hint="iterate over the stack (for block in self.blocks) in its forward, or up "
                    "to len(self.blocks)",
                )
            if run.requests is not None:
                run.requests.note_index(index, len(entries))
        return entries[index]


def wrap(model: ModelT, blocks: str | None = None, *, may_differ: Collection[str] = ()) -> ModelT:
    """Prepare the blocks of `model` to run in any order, and return `model` itself.

    A wrapped model is returned unchanged. `blocks`: path of the block container, found
    automatically for vision transformers of timm, transformers and torchvision. `may_differ`:
    attributes in which blocks may differ because a block's output does not depend on them (such as
    `index`). Raises `StackError` with the reason if the blocks are not interchangeable.

        model = layershuffle.wrap(timm.create_model("vit_base_patch16_224", pretrained=True))
        with layershuffle.running(model, "3,0,2,1,4,5,6,7,8,9,10,11"):
            logits = model(images)
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
    container_class = type(container)
    # The class is swapped and the object stays, so that references to the container (in the
    # backbone's own attributes, hooks or an optimiser) refer to the wrapped one too.
    container.__class__ = BlockStack
    vars(container).update(container_class=container_class)
    return model


def unwrap(model: ModelT) -> ModelT:
    """Undo `wrap`, and return `model` itself with its original block container."""
    for stack in _stacks(model):
        container_class = vars(stack).pop("container_class")
        vars(stack).pop("fixed", None)
        vars(stack).pop("shuffled", None)
        object.__setattr__(stack, "__class__", container_class)
    return model


def stack_of(model: nn.Module) -> BlockStack:
    """The block stack of a wrapped model. Raises `StackError` if there is none."""
    stacks = _stacks(model)
    if not stacks:
        raise StackError(
            f"{type(model).__name__} is not wrapped",
            hint="call layershuffle.wrap(model) first, or prepare of the method that trains it",
        )
    if len(stacks) > 1:
        raise StackError(
            f"{type(model).__name__} has {len(stacks)} wrapped stacks, but exactly one is needed",
            hint="pass the part of the model that holds the stack you mean",
        )
    return stacks[0]


def blocks_of(model: nn.Module) -> tuple[nn.Module, ...]:
    """The blocks in the order of their ids, independent of the current order."""
    return tuple(stack_of(model).blocks)


def depth_of(model: nn.Module) -> int:
    """The number of blocks, whatever the current order."""
    return stack_of(model).depth


def fixed_of(model: nn.Module) -> tuple[int, int]:
    """How many blocks at the beginning and at the end of the model keep their place."""
    return stack_of(model).fixed


# --- orders ---------------------------------------------------------------------------------------


@contextmanager
def running(
    model: nn.Module,
    order: ExecutionOrder | str | Sequence[int] | Sequence[ExecutionOrder],
    *,
    exit_after: int | None = None,
    fixed: tuple[int, int] | None = None,
    logits: Logits | None = None,
) -> Iterator[ExecutionOrder | tuple[ExecutionOrder, ...]]:
    """Run `model` along `order` inside the `with` block, in this thread only.

    `order` is one order for the whole batch, or a sequence of one per sample (they are regrouped by
    their next block at every position). If you checkpoint the stack, call `backward` inside too.

    With `exit_after=k` a call returns a pair `(logits, early)`, both `[batch, classes]`: those
    after the whole order, and those of the state after k steps. Blocks run once for both. If the
    last blocks of the model keep their place, the state after k steps passes through them first.
    `fixed`: the ends that orders have to keep, in place of those with which the model was trained;
    with `(0, 0)` every order runs.
    `logits` takes the logits out of what the model returns, for `exit_after` with a model whose
    output is neither `[batch, classes]` nor an object with `logits`.

    Raises `UsageError` for orders of another depth or without the ends in their place. Raises
    `StackError` if the backbone ran only a part of the order, or if samples do not get in one batch
    what they get alone.

        with layershuffle.running(model, "3,0,2,1", exit_after=2):
            logits, early = model(images)
    """
    stack = stack_of(model)
    orders = orders_of(order, stack.depth)
    requests = StackRequests(stack.depth)
    ends = stack.fixed if fixed is None else checked_fixed(fixed)
    check_ends([orders] if isinstance(orders, ExecutionOrder) else orders, ends)
    if isinstance(orders, ExecutionOrder) and exit_after is None:
        change = in_order(stack, orders, requests=requests)
        watching = watched_calls(model, stack, blocks=stack.blocks, order=orders, requests=requests)
    else:
        samples = _Samples(stack, orders, exit_after=exit_after, last=ends[1], logits=logits)
        change = RunChange(
            stack, entries=samples.entries, order=(orders, exit_after), requests=requests
        )
        watching = samples.watching(model)
    with change, watching, stack_use_check(model):
        yield orders
    requests.refuse_cut(model)


def in_order(
    stack: BlockStack,
    order: ExecutionOrder,
    *,
    requests: StackRequests,
    shared: Shared | None = None,
) -> AbstractContextManager[None]:
    """Run `stack` along `order`; `shared`: outputs in common with other orders."""

    def entries(run: Run) -> Sequence[Callable[..., Any]]:
        return order_entries(stack.blocks, order, run=run, shared=shared)

    return RunChange(stack, entries=entries, order=order, requests=requests)


class _Samples:
    """An order for every sample, or an exit: what calls of a model need to know and to check."""

    def __init__(
        self,
        stack: BlockStack,
        orders: ExecutionOrder | tuple[ExecutionOrder, ...],
        *,
        exit_after: int | None,
        last: int,
        logits: Logits | None,
    ) -> None:
        self._several = isinstance(orders, tuple)
        each = orders if isinstance(orders, tuple) else (orders,)
        longest = max(map(len, each))
        if exit_after is not None:
            check_exit(exit_after, longest=longest)
        self._stack = stack
        self._orders = each
        self._exit = exit_after
        self._last = last
        self._logits = logits
        self._calls = 0
        self._axes: Axes | None = None
        self._uneven = len(set(map(len, each))) > 1
        if self._several:
            say_batch_norm(stack, "an order per sample splits the batch for their statistics")

    def entries(self, run: Run) -> Sequence[Callable[..., Any]]:
        """The entries for the backbone."""
        # A replay by gradient checkpointing comes after the call, and is as the call was.
        if self._axes is None or not (self._calls or in_backward()):
            raise untried_call()
        return sample_entries(
            self._stack.blocks,
            self._orders,
            run=run,
            axes=self._axes,
            exit_after=self._exit,
            last=self._last,
        )

    def _ours(self) -> bool:
        # The hooks belong to the model, so other threads and the trial call them too.
        return not torch.compiler.is_compiling() and run_of(self._stack).entries == self.entries

    @contextmanager
    def watching(self, model: nn.Module) -> Iterator[None]:
        """Look at every call of `model`: where its samples lie, and which rows come out."""
        with ExitStack() as hooks:
            for module in holders(model, self._stack) or [self._stack]:
                before = module.register_forward_pre_hook(
                    self._before, prepend=True, with_kwargs=True
                )
                hooks.enter_context(before)
                hooks.enter_context(module.register_forward_hook(self._after, always_call=True))
            yield

    def _before(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None
    ) -> None:
        # torch adds a hook first and registers afterwards that it takes keywords. A forward of
        # another thread in between calls it without them, but is never ours.
        if kwargs is None or not self._ours():
            return
        self._calls += 1
        refuse_hidden_states(module, kwargs, what="an order per sample")
        if any(order.has_repeats for order in set(self._orders)):
            refuse_cache(module, kwargs)
        if self._exit is not None:
            refuse_labels(module, kwargs)
        if self._calls > 1:  # only the outermost call is tried; the calls inside follow from it
            return
        samples = count_samples((args, kwargs))
        if not self._several:
            self._orders = self._orders[:1] * samples
        elif samples != len(self._orders):
            raise other_count(self._orders, samples)
        if any(order.versions is not None for order in set(self._orders)):
            refuse_rounds(
                module,
                self._stack,
                blocks=self._stack.blocks,
                arguments=(args, kwargs),
                samples=samples,
                forward=lambda call: module(*call[0], **call[1]),
            )
        self._axes = sample_axes(
            module,
            self._stack,
            blocks=self._stack.blocks,
            arguments=(args, kwargs),
            samples=samples,
            forward=lambda call: module(*call[0], **call[1]),
            uneven=self._uneven,
            exits=self._exit is not None,
            last=self._last,
        )

    def _after(self, module: nn.Module, _args: object, output: Any) -> Any:
        if not self._ours():
            return None
        self._calls -= 1
        if self._exit is None or self._calls or output is None:
            return None
        logits = logits_of(output, module) if self._logits is None else self._logits(output)
        if len(logits) != 2 * len(self._orders):
            raise lost_rows(module, len(logits), states=2 * len(self._orders))
        return logits.chunk(2)


# --- around the blocks ----------------------------------------------------------------------------


@contextmanager
def recomputing(model: nn.Module) -> Iterator[None]:
    """Keep no activations inside blocks; the backward pass computes every block again.

    This is gradient checkpointing block by block. It works for every backbone and under any order.
    """
    stack = stack_of(model)
    say_batch_norm(stack, "each batch counts twice in their running statistics")
    with RunChange(stack, recompute=True):
        yield


@contextmanager
def with_hooks(model: nn.Module, *hooks: BlockHook) -> Iterator[None]:
    """Add `hooks` around every block inside the `with` block, after those already there."""
    stack = stack_of(model)
    requests = run_of(stack).requests or StackRequests(stack.depth)
    with RunChange(stack, *hooks, requests=requests), stack_use_check(model):
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
    reached = [model]
    for module in reached:  # which grows meanwhile
        if not isinstance(module, BlockStack):
            # Most modules are inside blocks or hold no others, and this runs in every forward.
            for part in parts_by_name(module).values():
                if part is not None and parts_by_name(part):
                    reached.append(part)
    return list(dict.fromkeys(part for part in reached if isinstance(part, BlockStack)))
