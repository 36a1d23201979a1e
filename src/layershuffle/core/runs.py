"""How a block stack runs in the current context: the order, the hooks around its blocks, and which
blocks the host model has requested so far.

The settings live in a context variable, not in the model, so two threads that run one model in two
orders do not interfere. Every `with` block adds its own change and removes exactly that change, so
that `with` blocks which exit out of turn (an `ExitStack`, a generator) leave no order behind.
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

from layershuffle.core.hooks import BlockHook
from layershuffle.core.orders import ExecutionOrder
from layershuffle.errors import StackError

# Makes the callables that replace the blocks in one run of the stack.
Entries = Callable[["Run"], Sequence[Callable[..., Any]]]


@dataclass
class Asked:
    """How many blocks of an order a host has requested from a stack of `depth` blocks."""

    depth: int
    whole: bool = False
    furthest: int = 0
    length: int = 0
    sliced: bool = False

    def note(self, count: int, length: int) -> None:
        """The host has received `count` of `length` entries so far."""
        self.furthest, self.length = max(self.furthest, count), length

    def note_index(self, index: int, length: int) -> None:
        """The host requested the entry at a position."""
        # A negative index counts only after all others, as in blocks[:-1] followed by blocks[-1].
        others_ran = (self.furthest, self.length) == (length - 1, length)
        self.whole |= index == length - 1 or (index == -1 and others_ran)
        self.note(index % length + 1, length)

    def note_slice(self, index: slice, length: int) -> None:
        """The host requested a slice."""
        stop = index.indices(length)[1]
        self.note(stop, length)
        self.sliced, self.whole = True, self.whole or stop == length

    def handed_out(self, entries: Sequence[Any]) -> Iterator[Any]:
        """Yield `entries` one by one and count them."""
        length = len(entries)
        for count, entry in enumerate(entries, start=1):
            self.note(count, length)
            # zip(blocks, others) takes one entry more than there are others, and there are as many
            # others as blocks. So the last entry proves something only up to that length.
            self.whole |= count == length <= self.depth
            yield entry
        self.whole = True

    def refuse_cut(self, model: nn.Module) -> None:
        """Raises `StackError` if the host ran some blocks of the order, but never all of them."""
        # A host may read attributes of the first block alone. A short slice is an intended stop, as
        # with timm's `stop_early`.
        looked_at = self.furthest <= min(1, self.depth - 1)
        stopped = self.sliced and self.furthest < min(self.depth, self.length)
        if self.whole or looked_at or stopped:
            return
        raise StackError(
            f"{type(model).__name__} requested {self.furthest} of the {self.length} blocks of its "
            "execution order, so the others did not run",
            hint="iterate over the whole stack (for block in self.blocks) in its forward: range() "
            "and zip() with a fixed length cut longer orders, and `break` ends them early",
        )


@dataclass(frozen=True)
class Run:
    """How one stack runs: an order, the hooks around its blocks, or replacements for the blocks.

    `samples` are the orders of the samples in a batch, and `exit_after` is the number of steps
    before their exit. `entries` makes callables that replace the blocks.
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
        """A key that is equal for two forwards that run the same blocks on the same states."""
        return self.order, self.samples, self.exit_after


PLAIN = Run()


@dataclass(eq=False)
class _Change:
    """What one `with` block changes between its entry and its exit."""

    settings: Mapping[str, Any]
    hooks: tuple[BlockHook, ...]
    over: bool = field(default=False)


_CHANGES: ContextVar[Mapping[nn.Module, tuple[_Change, ...]]] = ContextVar(
    "layershuffle_changes",
    default=MappingProxyType({}),
)


def run_of(stack: nn.Module) -> Run:
    """The `Run` of `stack` in this context; the object `PLAIN` if nothing is set."""
    run = PLAIN
    for change in _CHANGES.get().get(stack, ()):
        if not change.over:
            run = replace(run, hooks=(*run.hooks, *change.hooks), **change.settings)
    return run


def changed_stacks() -> tuple[nn.Module, ...]:
    """The stacks with settings in this context."""
    return tuple(stack for stack in _CHANGES.get() if run_of(stack) is not PLAIN)


@contextmanager
def changed(stack: nn.Module, *hooks: BlockHook, **settings: Any) -> Iterator[None]:
    """Run `stack` with these fields of `Run` in the `with` block; `hooks` are appended."""
    change = _Change(settings, hooks)
    changes = _in_force()
    # A new mapping each time, so that threads and tasks that copied the context keep their orders.
    _CHANGES.set({**changes, stack: (*changes.get(stack, ()), change)})
    try:
        yield
    finally:
        changes = _in_force()
        rest = tuple(other for other in changes.pop(stack, ()) if other is not change)
        # A generator may be closed in another thread or task than the one it began in. The context
        # there cannot be reached, so the change itself is marked as over.
        change.over = change not in _CHANGES.get().get(stack, ())
        _CHANGES.set({**changes, stack: rest} if rest else changes)


def _in_force() -> dict[nn.Module, tuple[_Change, ...]]:
    """The changes in this context, without those that are over (they would keep models alive)."""
    left = {
        stack: tuple(change for change in changes if not change.over)
        for stack, changes in _CHANGES.get().items()
    }
    return {stack: changes for stack, changes in left.items() if changes}


def in_place(stack: nn.Module, entries: Entries) -> AbstractContextManager[None]:
    """Replace the blocks by `entries` in the `with` block, and ignore any order that is set."""
    fields = {"order": None, "samples": None, "exit_after": None, "asked": None}
    return changed(stack, **fields, entries=entries)


@contextmanager
def in_eval(*models: nn.Module) -> Iterator[None]:
    """Set all modules to eval mode; afterwards restore the mode of each, including frozen parts."""
    before = [(module, module.training) for model in models for module in model.modules()]
    for model in models:
        model.eval()
    try:
        yield
    finally:
        for module, training in before:
            module.training = training


def is_compiled(module: nn.Module) -> bool:
    """Whether a call of `module` runs a graph made by torch.compile."""
    return module._compiled_call_impl is not None or hasattr(module, "_orig_mod")


@contextmanager
def apart(devices: list[torch.device], model: nn.Module) -> Iterator[None]:
    """Run without gradients, in eager mode; running statistics and generators do not change."""
    norms = [module for module in model.modules() if isinstance(module, _BatchNorm)]
    compiled = any(map(is_compiled, model.modules()))
    # One forward does not justify a graph.
    eager = torch.compiler.set_stance("force_eager") if compiled else nullcontext()
    with torch.random.fork_rng(devices), in_eval(*norms), torch.no_grad(), eager:
        yield


def in_backward() -> bool:
    """Whether this call is a replay by gradient checkpointing, tested as torch's own code does."""
    return not torch.compiler.is_compiling() and torch._C._current_graph_task_id() != -1


def in_checkpoint() -> bool:
    """Whether this call is inside a region that gradient checkpointing will replay as a whole."""
    if torch.is_grad_enabled():
        # Non-reentrant checkpointing hooks what autograd saves.
        return torch._C._autograd._top_saved_tensors_default_hooks(False) is not None
    # Reentrant checkpointing can only be detected by its frame among the callers.
    frame = sys._getframe()
    while frame.f_back is not None:
        frame = frame.f_back
        if frame.f_code is CheckpointFunction.forward.__code__:
            return True
    return False
