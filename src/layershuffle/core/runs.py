"""How a block stack runs in the current context: its entries, and the hooks around its blocks.

The settings live in a context variable, not in the model, so two threads that run one model in two
orders do not interfere. Every `with` block adds its own change and removes exactly that change, so
that `with` blocks which exit out of turn (an `ExitStack`, a generator) leave no order behind.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from layershuffle.core.hooks import BlockHook
from layershuffle.core.torch_private import queue_callback
from layershuffle.ground.errors import StackError

# Makes what the backbone calls in place of its blocks, for one forward.
Entries = Callable[["Run"], Sequence[Callable[..., Any]]]


@dataclass
class Asked:
    """Which entries a backbone has requested in the latest forward of a stack of `depth` blocks."""

    depth: int
    whole: bool = False
    furthest: int = 0
    length: int = 0
    sliced: bool = False
    entries: Sequence[Callable[..., Any]] = ()

    def note(self, count: int, length: int) -> None:
        """The backbone has received `count` of `length` entries so far."""
        self.furthest, self.length = max(self.furthest, count), length

    def note_index(self, index: int, length: int) -> None:
        """The backbone requested the entry at a position."""
        # A negative index counts only after all others, as in blocks[:-1] followed by blocks[-1].
        others_ran = (self.furthest, self.length) == (length - 1, length)
        self.whole |= index == length - 1 or (index == -1 and others_ran)
        self.note(index % length + 1, length)

    def note_slice(self, index: slice, length: int) -> None:
        """The backbone requested a slice."""
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
        """Raises `StackError` if the backbone ran some blocks of the order, but never all."""
        # A backbone may read attributes of the first block alone. A short slice is an intended
        # stop, as with timm's `stop_early`.
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
    """How one stack runs: the entries for the backbone (`None`: its blocks), and what is around.

    `way` is equal for two forwards that run the same blocks on the same states.
    """

    entries: Entries | None = None
    way: object = None
    hooks: tuple[BlockHook, ...] = ()
    recompute: bool = False
    asked: Asked | None = None


PLAIN = Run()


@dataclass(eq=False)
class _Change:
    """What one `with` block changes between its entry and its exit."""

    stack: nn.Module
    hooks: tuple[BlockHook, ...]
    settings: Mapping[str, Any]
    over: bool = False

    def __enter__(self) -> None:
        # A new tuple each time, so that threads and tasks that copied the context keep their
        # orders.
        _CHANGES.set((*_in_force(), self))

    def __exit__(self, *_: object) -> None:
        # A generator may be closed in another thread or task than the one it began in. The context
        # there cannot be reached, so the change itself is marked as over.
        self.over = self not in _CHANGES.get()
        _CHANGES.set(tuple([other for other in _in_force() if other is not self]))


_CHANGES: ContextVar[tuple[_Change, ...]] = ContextVar("layershuffle_changes", default=())


def run_of(stack: nn.Module) -> Run:
    """The `Run` of `stack` in this context; the object `PLAIN` if nothing is set."""
    changes = [change for change in _in_force() if change.stack is stack]
    if not changes:
        return PLAIN
    hooks = tuple(hook for change in changes for hook in change.hooks)
    return Run(hooks=hooks, **{k: v for change in changes for k, v in change.settings.items()})


def changed_stacks() -> set[nn.Module]:
    """The stacks with settings in this context."""
    return {change.stack for change in _in_force()}


def changed(stack: nn.Module, *hooks: BlockHook, **settings: Any) -> _Change:
    """Run `stack` with these fields of `Run` in a `with` block; `hooks` are appended."""
    return _Change(stack, hooks, settings)


def _in_force() -> tuple[_Change, ...]:
    """The changes in this context, without those that are over (they would keep models alive)."""
    return tuple([change for change in _CHANGES.get() if not change.over])


def holders(module: nn.Module, stack: nn.Module) -> list[nn.Module]:
    """`module` and the modules in it that contain `stack`, whose calls run it."""
    children = [child for _, child in module.named_children()]
    inner = [h for child in children if child is not stack for h in holders(child, stack)]
    return [module, *inner] if inner or stack in children else []


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


def never_asked(module: nn.Module) -> StackError:
    """The error for a call of `module` in which its stack was never used."""
    return StackError(
        f"{type(module).__name__} ran and never used its block stack, so the execution order and "
        "the hooks around blocks would be ignored",
        hint="iterate over the container itself (for block in self.blocks) in the forward, not "
        "over its children(), its _modules or a list made earlier",
    )


def is_compiled(module: nn.Module) -> bool:
    """Whether a call of `module` runs a graph made by torch.compile."""
    # Not `hasattr`: nn.Module makes the text of an error for every attribute that it lacks.
    return module._compiled_call_impl is not None or "_orig_mod" in module._modules


def in_backward() -> bool:
    """Whether this code runs inside a backward pass, so as a replay by gradient checkpointing."""
    if torch.compiler.is_compiling():
        return False
    try:
        queue_callback(lambda: None)  # only a backward pass takes callbacks
    except RuntimeError:
        return False
    return True
