"""The block stack: run a host model's blocks along an explicit execution order.

`wrap(model)` swaps the class of the model's block container for `BlockStack`, an `nn.ModuleList`
whose `forward`, `__iter__`, `__len__` and `__getitem__` follow the order set by `running`. Nothing
is added to the model: keys and parameter order of its `state_dict` stay as they are, and with no
order set it computes exactly what it did before. Other designs were tried; each gives wrong
results without an error in some case: docs/decisions/001-block-stack.md.

The order lives in a context variable, not in the model, so two threads that run one model in two
orders never mix. Drop-path rates belong to a block and travel with it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from layershuffle.discovery import find_blocks
from layershuffle.errors import StackError, UsageError
from layershuffle.grouped import run_grouped
from layershuffle.hooks import BlockHook, Step, Tap
from layershuffle.orders import ExecutionOrder, order_of

BlockCall = Callable[[int, int, Tensor, "tuple[int, ...] | None"], Tensor]
Walk = Callable[[BlockCall, Tensor], Tensor]


@dataclass(frozen=True)
class Run:
    """How one stack is to run: an order, the hooks around its blocks, or a walk of its own."""

    order: tuple[int, ...] | None = None
    hooks: tuple[BlockHook, ...] = ()
    walk: Walk | None = None
    recompute: bool = False


_PLAIN = Run()
_RUNS: ContextVar[Mapping[int, Run]] = ContextVar(
    "layershuffle_runs",
    default=MappingProxyType({}),
)


# Stacks whose last forward followed an order, so that a replay without one is known to be wrong.
_ORDERED: WeakSet[BlockStack] = WeakSet()


class BlockStack(nn.ModuleList):
    """The block container of a wrapped model. Made by `wrap`, undone by `unwrap`."""

    host_class: type[nn.Module]

    def _entries(self) -> list[Callable[..., Any]]:
        """What the host model is to call, in execution order."""
        run = _RUNS.get().get(id(self), _PLAIN)
        blocks = list(self._modules.values())
        self._refuse_lost_order(run)
        # `is`, not `==`: most forwards have no order, and this check runs before every one of them.
        if run is _PLAIN:
            self._refuse_replica()
            return [*blocks]
        if run.walk is not None:
            return [_Walked(self, run.walk, run)]
        order = range(len(blocks)) if run.order is None else run.order
        # The bare blocks, so that torch.compile and hooks of torch see no wrapper.
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
            # As the host class does it: a Sequential keeps the names, a ModuleList counts anew.
            key = name if issubclass(self.host_class, nn.Sequential) else str(place)
            part.add_module(key, block)
        return part

    def _refuse_replica(self) -> None:
        # DataParallel runs copies in threads that do not know the order: it would be ignored.
        if getattr(self, "_is_replica", False):
            raise StackError(
                "nn.DataParallel copies the model into threads where no execution order is set",
                hint="use DistributedDataParallel (torchrun), or one GPU",
            )

    def _refuse_lost_order(self, run: Run) -> None:
        # Checkpointing the whole stack makes the backward pass ask for the order again, where it
        # may not be set: after `running`, or on GPUs always (autograd has threads of its own). The
        # blocks have equal shapes, so torch's own check of the replay would not notice.
        if torch.compiler.is_compiling():
            return
        if not _in_backward():
            (_ORDERED.discard if run is _PLAIN else _ORDERED.add)(self)
        elif run is _PLAIN and self in _ORDERED:
            raise StackError(
                "Gradient checkpointing runs the whole stack again in the backward pass, where its "
                "execution order is not set",
                hint="checkpoint the blocks one by one; on a CPU, calling backward() inside "
                "`with running(...)` is enough",
            )

    def block(self, index: int) -> nn.Module:
        """Block `index` by id, whatever the current order."""
        return list(self._modules.values())[index]

    @property
    def depth(self) -> int:
        """Number of blocks, whatever the current order."""
        return len(self._modules)

    def forward(self, state: Any, *args: Any, **kwargs: Any) -> Any:
        """Run the blocks along the current order; arguments after the first go to every block."""
        for entry in self._entries():
            state = entry(state, *args, **kwargs)
        return state

    def __iter__(self) -> Iterator[Any]:
        return iter(self._entries())

    def __len__(self) -> int:
        return len(self._entries())

    def __getitem__(self, index: int | slice) -> Any:
        """The entry at a *position*; a slice is a stack again when no order is set."""
        entries = self._entries()
        if not isinstance(index, slice):
            return entries[index]
        if id(self) not in _RUNS.get():
            return self._part(index)
        # Hosts write `blocks[:depth]` for "all": an order with repeats may be longer than that.
        return entries if index == slice(None, self.depth) else entries[index]


class Placed:
    """A block at a position with the hooks around it; everything else is the block's own."""

    def __init__(self, module: nn.Module, step: Step, run: Run) -> None:
        self._module, self._step, self._run = module, step, run

    def __call__(self, state: Tensor, *args: Any, **kwargs: Any) -> Any:
        """The block's output for the input `state`, hooks included."""
        if self._run.recompute and torch.is_grad_enabled():
            return checkpoint(self._compute, state, *args, use_reentrant=False, **kwargs)
        return self._compute(state, *args, **kwargs)

    def _compute(self, state: Tensor, *args: Any, **kwargs: Any) -> Any:
        step = replace(self._step, replay=_in_backward())
        for hook in self._run.hooks:
            state = hook.before(state, step)
        out = self._module(state, *args, **kwargs)
        for hook in self._run.hooks:
            hook.after(_state_of(out), step)
        return out

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


class _Walked:
    """The one entry of a stack that a walk runs as a whole."""

    def __init__(self, stack: BlockStack, walk: Walk, run: Run) -> None:
        self._stack, self._walk, self._run = stack, walk, run

    def __call__(self, state: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        def call(block: int, position: int, chunk: Tensor, rows: tuple[int, ...] | None) -> Tensor:
            # Only a walk that regroups samples can pair a sample with another one's mask.
            if rows is not None:
                _refuse_batched((*args, *kwargs.values()), batch=len(state))
            step = Step(position, block, rows)
            placed = Placed(self._stack.block(block), step, self._run)
            return _state_of(placed(chunk, *args, **kwargs))

        return self._walk(call, state)


def _refuse_batched(arguments: tuple[Any, ...], *, batch: int) -> None:
    """Attention masks and the like that differ between samples cannot be regrouped here."""
    for argument in arguments:
        if isinstance(argument, Tensor) and argument.dim() > 2 and len(argument) == batch > 1:
            raise UsageError(
                f"The model hands its blocks a tensor of shape {tuple(argument.shape)} beside "
                "their input, one part per sample; an order per sample cannot split it",
                hint="use one order for the whole batch, or run the samples one by one",
            )


def wrap(
    model: nn.Module, blocks: str | None = None, *, may_differ: Collection[str] = ()
) -> nn.Module:
    """`model` itself, its blocks ready to run in any order. Already wrapped models pass through.

    `blocks`: path of the block container, found by itself for timm, transformers and torchvision
    vision transformers. `may_differ`: attributes in which blocks may differ, because what a block
    computes does not depend on them (`index`, say). Raises `StackError` with the reason if the
    blocks are not interchangeable.
    """
    stacks = _stacks(model)
    if stacks:
        if blocks is not None and dict(model.named_modules()).get(blocks) not in stacks:
            raise StackError(
                f"{type(model).__name__} is wrapped already, and not at {blocks!r}",
                hint="call layershuffle.unwrap(model) first",
            )
        return model
    _, container = find_blocks(model, blocks, may_differ=may_differ)
    host_class = type(container)
    # The class is swapped and the object stays, so that references to the container (in the host's
    # own attributes, hooks or an optimiser) refer to the wrapped one too.
    container.__class__ = BlockStack
    vars(container)["host_class"] = host_class
    return model


def unwrap(model: nn.Module) -> nn.Module:
    """`model` itself with its block container as it was before `wrap`."""
    for stack in _stacks(model):
        host_class = vars(stack).pop("host_class")
        object.__setattr__(stack, "__class__", host_class)
    return model


def stack_of(model: nn.Module) -> BlockStack:
    """The block stack of a wrapped model. Raises `StackError` if there is none."""
    stacks = _stacks(model)
    if len(stacks) != 1:
        raise StackError(
            f"{type(model).__name__} holds {len(stacks)} block stacks, one is needed",
            hint="call layershuffle.wrap(model) first",
        )
    return stacks[0]


def blocks_of(model: nn.Module) -> tuple[nn.Module, ...]:
    """The blocks by id, whatever the current order."""
    stack = stack_of(model)
    return tuple(stack.block(index) for index in range(stack.depth))


def depth_of(model: nn.Module) -> int:
    """The number of blocks, whatever the current order."""
    return stack_of(model).depth


@contextmanager
def running(
    model: nn.Module, order: ExecutionOrder | str | Sequence[int] | Sequence[ExecutionOrder]
) -> Iterator[ExecutionOrder | tuple[ExecutionOrder, ...]]:
    """Run `model` along `order` inside the `with` block, in this thread only.

    `order` is one order for the whole batch, or a sequence of orders, one per sample of the batch
    (samples are regrouped by their next block at every position). Keep `backward` inside the block
    too if you checkpoint the whole stack. Raises `UsageError` for orders of another depth.
    """
    stack = stack_of(model)
    if _is_per_sample(order):
        orders = tuple(order_of(sample, stack.depth) for sample in order)  # type: ignore[arg-type]
        ids = [sample_order.blocks for sample_order in orders]
        with _set(stack, order=None, walk=lambda call, state: run_grouped(state, ids, call=call)):
            yield orders
    else:
        shared = order_of(order, stack.depth)  # type: ignore[arg-type]
        with _set(stack, order=shared.blocks, walk=None):
            yield shared


@contextmanager
def walking(model: nn.Module, walk: Walk) -> Iterator[None]:
    """Run `walk(call, state) -> state` in place of the whole stack, in this thread.

    `call(block, position, chunk, rows)` runs one block, hooks included, with the other arguments
    that the host model gave; `rows` names the samples in `chunk`, `None` meaning all.
    """
    with _set(stack_of(model), order=None, walk=walk):
        yield


@contextmanager
def recomputing(model: nn.Module) -> Iterator[None]:
    """Keep no activations inside blocks; the backward pass computes every block again.

    Gradient checkpointing block by block, for host models that have none of their own too, and
    under any order or walk.
    """
    with _set(stack_of(model), recompute=True):
        yield


@contextmanager
def with_hooks(model: nn.Module, *hooks: BlockHook) -> Iterator[None]:
    """Add `hooks` around every block inside the `with` block, after those already there."""
    stack = stack_of(model)
    with _set(stack, hooks=(*_RUNS.get().get(id(stack), _PLAIN).hooks, *hooks)):
        yield


@contextmanager
def tap(model: nn.Module) -> Iterator[Tap]:
    """Record (position, block, tensor) of every forward in the `with` block; free when off.

    `tap.records` holds the last forward. Records keep their graph and their memory alive.
    """
    recorder = Tap()
    with with_hooks(model, recorder):
        yield recorder


@contextmanager
def _set(stack: BlockStack, **changes: Any) -> Iterator[None]:
    # A new mapping each time: a thread or task that copied the context keeps the orders it had.
    runs = _RUNS.get()
    run = replace(runs.get(id(stack), _PLAIN), **changes)
    token = _RUNS.set({**runs, id(stack): run})
    try:
        yield
    finally:
        _RUNS.reset(token)


def _is_per_sample(order: object) -> bool:
    return (
        isinstance(order, Sequence)
        and not isinstance(order, str)
        and bool(order)
        and isinstance(order[0], ExecutionOrder | Sequence)
    )


def _state_of(out: Any) -> Tensor:
    # Blocks of older transformers releases return tuples whose first entry is the state.
    state: Tensor = out[0] if isinstance(out, tuple) else out
    return state


def _stacks(model: nn.Module) -> list[BlockStack]:
    # Not `model.modules()`: most modules are inside blocks, and this runs for every forward.
    seen = {model: None}  # a dict keeps the order
    waiting = [model]
    while waiting:
        module = waiting.pop()
        if not isinstance(module, BlockStack):
            new = [c for c in module._modules.values() if c is not None and c not in seen]
            seen.update(dict.fromkeys(new))
            waiting += new
    return [module for module in seen if isinstance(module, BlockStack)]


def _in_backward() -> bool:
    """Is this call a replay by gradient checkpointing? torch's own checkpointing asks this way."""
    return not torch.compiler.is_compiling() and torch._C._current_graph_task_id() != -1
