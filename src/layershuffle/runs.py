"""How a block stack is to run in the present context: the order, what is around the blocks, and
what the host model asked of the stack so far.

The settings live in a context variable, not in the model, so two threads that run one model in two
orders never mix. Every `with` block adds a change of its own and takes away that very change,
so that blocks which are left out of turn (an `ExitStack`, a generator) leave no order behind.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.checkpoint import CheckpointFunction

from layershuffle.errors import StackError
from layershuffle.hooks import BlockHook
from layershuffle.orders import ExecutionOrder

# What the host calls where its blocks were: made for one run of the stack.
Entries = Callable[["Run"], Sequence[Callable[..., Any]]]


@dataclass
class Asked:
    """How far the host came when it asked a stack of `depth` blocks for the blocks of an order."""

    depth: int
    whole: bool = False
    furthest: int = 0
    length: int = 0
    sliced: bool = False

    def note(self, count: int, length: int) -> None:
        """The host was handed `count` of `length` entries so far."""
        self.furthest, self.length = max(self.furthest, count), length

    def note_index(self, index: int, length: int) -> None:
        """The host asked for the entry at a position."""
        # From behind it shows something after all others alone: blocks[:-1], and then blocks[-1].
        others_ran = (self.furthest, self.length) == (length - 1, length)
        self.whole |= index == length - 1 or (index == -1 and others_ran)
        self.note(index % length + 1, length)

    def note_slice(self, index: slice, length: int) -> None:
        """The host asked for a part."""
        stop = index.indices(length)[1]
        self.note(stop, length)
        self.sliced, self.whole = True, self.whole or stop == length

    def handed_out(self, entries: Sequence[Any]) -> Iterator[Any]:
        """`entries` one by one, counted."""
        length = len(entries)
        for count, entry in enumerate(entries, start=1):
            self.note(count, length)
            # zip(blocks, others) takes an entry more than it has others for. Others are as many as
            # blocks, so that the last entry proves something only for orders up to that length.
            self.whole |= count == length <= self.depth
            yield entry
        self.whole = True

    def refuse_cut(self, model: nn.Module) -> None:
        """Raises `StackError` if the host ran blocks, and never as many as the order has."""
        # A first block alone is asked for its attributes; a short slice is a stop that was asked
        # for, as by timm's `stop_early`.
        looked_at = self.furthest <= min(1, self.depth - 1)
        stopped = self.sliced and self.furthest < min(self.depth, self.length)
        if self.whole or looked_at or stopped:
            return
        raise StackError(
            f"{type(model).__name__} asked for {self.furthest} of the {self.length} blocks of its "
            "execution order, so the others did not run",
            hint="iterate over the whole stack (for block in self.blocks) in its forward: range() "
            "and zip() with a fixed length cut longer orders, and `break` ends them early",
        )


@dataclass(frozen=True)
class Run:
    """How one stack is to run: an order, the hooks around its blocks, or entries of its own.

    `samples` are the orders of every sample in a batch, and `exit_after` how many of their steps
    lie before their exit. `entries` take the place of the blocks.
    """

    order: ExecutionOrder | None = None
    samples: tuple[ExecutionOrder, ...] | None = None
    exit_after: int | None = None
    hooks: tuple[BlockHook, ...] = ()
    entries: Entries | None = None
    recompute: bool = False
    asked: Asked | None = None

    @property
    def way(self) -> tuple[object, ...]:
        """What is equal in two forwards that run the same blocks on the same states."""
        return self.order, self.samples, self.exit_after


PLAIN = Run()


@dataclass(eq=False)
class _Change:
    """What one `with` block changes, from its entry to its exit."""

    settings: Mapping[str, Any]
    hooks: tuple[BlockHook, ...]
    over: bool = field(default=False)


_CHANGES: ContextVar[Mapping[nn.Module, tuple[_Change, ...]]] = ContextVar(
    "layershuffle_changes",
    default=MappingProxyType({}),
)


def run_of(stack: nn.Module) -> Run:
    """How `stack` is to run in this context; `PLAIN` itself where nothing was set."""
    run = PLAIN
    for change in _CHANGES.get().get(stack, ()):
        if not change.over:
            run = replace(run, hooks=(*run.hooks, *change.hooks), **change.settings)
    return run


def changed_stacks() -> tuple[nn.Module, ...]:
    """The stacks for which something is set in this context."""
    return tuple(stack for stack in _CHANGES.get() if run_of(stack) is not PLAIN)


@contextmanager
def changed(stack: nn.Module, *hooks: BlockHook, **settings: Any) -> Iterator[None]:
    """Run `stack` with these fields of `Run` in the `with` block; `hooks` join those before."""
    change = _Change(settings, hooks)
    changes = _in_force()
    # A new mapping each time: a thread or task that copied the context keeps the orders it had.
    _CHANGES.set({**changes, stack: (*changes.get(stack, ()), change)})
    try:
        yield
    finally:
        changes = _in_force()
        rest = tuple(other for other in changes.pop(stack, ()) if other is not change)
        # A generator may be closed in another thread or task than it began in. That context cannot
        # be reached from here, so the change itself is marked.
        change.over = change not in _CHANGES.get().get(stack, ())
        _CHANGES.set({**changes, stack: rest} if rest else changes)


def _in_force() -> dict[nn.Module, tuple[_Change, ...]]:
    """The changes of this context without those that are over, which would keep models alive."""
    left = {
        stack: tuple(change for change in changes if not change.over)
        for stack, changes in _CHANGES.get().items()
    }
    return {stack: changes for stack, changes in left.items() if changes}


def in_place(stack: nn.Module, entries: Entries) -> AbstractContextManager[None]:
    """Let the host call `entries` for its blocks in the `with` block, whatever its order was."""
    fields = {"order": None, "samples": None, "exit_after": None, "asked": None}
    return changed(stack, **fields, entries=entries)


@contextmanager
def in_eval(*models: nn.Module) -> Iterator[None]:
    """All modules in eval mode; afterwards each is in the mode it was in, frozen parts too."""
    before = [(module, module.training) for model in models for module in model.modules()]
    for model in models:
        model.eval()
    try:
        yield
    finally:
        for module, training in before:
            module.training = training


def is_compiled(module: nn.Module) -> bool:
    """Whether a call of `module` runs a graph that torch.compile made of it."""
    return module._compiled_call_impl is not None or hasattr(module, "_orig_mod")


@contextmanager
def apart(devices: list[torch.device], model: nn.Module) -> Iterator[None]:
    """What runs here leaves no trace in running statistics or torch's generators."""
    norms = [module for module in model.modules() if isinstance(module, _BatchNorm)]
    compiled = any(map(is_compiled, model.modules()))
    # One forward is no reason for a graph of its own.
    eager = torch.compiler.set_stance("force_eager") if compiled else nullcontext()
    with torch.random.fork_rng(devices), in_eval(*norms), torch.no_grad(), eager:
        yield


def in_backward() -> bool:
    """Is this call a replay by gradient checkpointing? torch's own checkpointing asks this way."""
    return not torch.compiler.is_compiling() and torch._C._current_graph_task_id() != -1


def in_checkpoint() -> bool:
    """Is this call inside a region that gradient checkpointing will replay as a whole?"""
    if torch.is_grad_enabled():
        # Non-reentrant checkpointing hooks what autograd saves.
        return torch._C._autograd._top_saved_tensors_default_hooks(False) is not None
    # Reentrant checkpointing leaves no other trace than that it is among the callers.
    frame = sys._getframe()
    while frame.f_back is not None:
        frame = frame.f_back
        if frame.f_code is CheckpointFunction.forward.__code__:
            return True
    return False
