"""How a block stack runs in the current context: its entries, and the hooks around its blocks.

A run also knows what the backbone has requested of it (`StackRequests`), and an entry whether it
runs in the forward or in a replay (`Replays`).

The settings live in a context variable, not in the model, so two threads that run one model in two
orders do not interfere. Every `with` block adds its own change and removes exactly that change, so
that `with` blocks which exit out of turn (an `ExitStack`, a generator) leave no order behind.
"""

from __future__ import annotations

import operator
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from itertools import chain
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn

from layershuffle.core.checks.blocks import cut_gradients, cut_order
from layershuffle.core.hooks import BlockHook
from layershuffle.core.torch_private import queue_callback

# Makes what the backbone calls in place of its blocks, for one forward.
Entries = Callable[["Run"], Sequence[Callable[..., Any]]]


@dataclass
class StackRequests:
    """Which entries a backbone has requested in the latest forward of a stack of `depth` blocks.

    `entries` are those of this forward, and `conditions` what they were made with: whether blocks
    are recomputed, and the hooks around them. The backbone has taken `furthest` of `length`
    entries. `whole`: it has taken the last one; `sliced`: it has asked for a slice of them.
    """

    depth: int
    whole: bool = False
    furthest: int = 0
    length: int = 0
    sliced: bool = False
    entries: Sequence[Callable[..., Any]] = ()
    conditions: tuple[object, ...] = ()

    def has_entries(self, conditions: tuple[object, ...]) -> bool:
        """Whether this forward has entries that were made under the very same conditions."""
        if not self.entries or len(conditions) != len(self.conditions):
            return False
        return all(map(operator.is_, conditions, self.conditions))

    def note(self, count: int, length: int) -> None:
        """The backbone has received `count` of `length` entries so far."""
        self.furthest = max(self.furthest, count)
        self.length = length

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
        self.sliced = True
        self.whole = self.whole or stop == length

    def counted(self, entries: Sequence[Any]) -> Iterator[Any]:
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
        raise cut_order(model, self.furthest, length=self.length)


@dataclass(frozen=True)
class Run:
    """How one stack runs: the entries for the backbone (`None`: its blocks), and what is around.

    `order`: what runs, equal for two forwards that run the same blocks on the same states. `hooks`
    are called before and after each block, and with `recompute` a backward pass runs it again.
    `requests`: what the backbone asks of the entries, where that is checked.
    """

    entries: Entries | None = None
    order: object = None
    hooks: tuple[BlockHook, ...] = ()
    recompute: bool = False
    requests: StackRequests | None = None


PLAIN = Run()


class RunChange:
    """Run `stack` with these fields of `Run` in a `with` block; `hooks` are appended."""

    def __init__(self, stack: nn.Module, *hooks: BlockHook, **settings: Any) -> None:
        self.stack = stack
        self.hooks = hooks
        self.settings = settings
        self.ended = False

    def __enter__(self) -> None:
        # A new tuple each time, so that threads and tasks that copied the context keep their
        # orders.
        _CHANGES.set((*_current_changes(), self))

    def __exit__(self, *_: object) -> None:
        # A generator may be closed in another thread or task than the one it began in. The context
        # there cannot be reached, so the change itself is marked as ended.
        self.ended = self not in _CHANGES.get()
        others = list(_current_changes())
        if not self.ended:
            others.remove(self)
        _CHANGES.set(tuple(others))


_CHANGES: ContextVar[tuple[RunChange, ...]] = ContextVar("layershuffle_changes", default=())


def run_of(stack: nn.Module) -> Run:
    """The `Run` of `stack` in this context; the object `PLAIN` if nothing is set."""
    hooks: list[BlockHook] = []
    settings: dict[str, Any] = {}
    is_changed = False
    for change in _current_changes():
        if change.stack is stack:
            hooks += change.hooks
            settings |= change.settings
            is_changed = True
    return Run(hooks=tuple(hooks), **settings) if is_changed else PLAIN


def changed_stacks() -> set[nn.Module]:
    """The stacks with settings in this context."""
    return {change.stack for change in _current_changes()}


def _current_changes() -> tuple[RunChange, ...]:
    """The changes in this context, without those that have ended (they would keep models alive)."""
    return tuple([change for change in _CHANGES.get() if not change.ended])


def holders(module: nn.Module, stack: nn.Module) -> list[nn.Module]:
    """`module` and the modules in it that contain `stack`, whose calls run it."""
    inner: list[nn.Module] = []
    holds = False
    for _, child in module.named_children():
        if child is stack:
            holds = True
        else:
            inner += holders(child, stack)
    return [module, *inner] if inner or holds else []


@dataclass
class _ModeBefore:
    """The mode of a module before it was set to eval mode, and how many need it there now."""

    training: bool
    users: int = 0


_MODES: WeakKeyDictionary[nn.Module, _ModeBefore] = WeakKeyDictionary()
_SETTING_MODES = threading.Lock()


@contextmanager
def in_eval(*models: nn.Module) -> Iterator[None]:
    """Set all modules to eval mode; afterwards restore the mode of each, including frozen parts.

    Where several threads do so at a time, the last one to leave restores the modes that the first
    one found.
    """
    # Each once, although models may share parts.
    modules = list(dict.fromkeys(chain.from_iterable(model.modules() for model in models)))
    with _SETTING_MODES:
        for module in modules:
            mode = _MODES.setdefault(module, _ModeBefore(module.training))
            mode.users += 1
            module.training = False
    try:
        yield
    finally:
        with _SETTING_MODES:
            for module in modules:
                mode = _MODES[module]
                mode.users -= 1
                if not mode.users:
                    module.training = mode.training
                    del _MODES[module]


def in_backward() -> bool:
    """Whether this code runs inside a backward pass, so as a replay by gradient checkpointing."""
    if torch.compiler.is_compiling():
        return False
    try:
        queue_callback(lambda: None)  # only a backward pass takes callbacks
    except RuntimeError:
        return False
    return True


class Replays:
    """Tells the forward of an entry from its replay by gradient checkpointing."""

    def __init__(self) -> None:
        self._had_graph: bool | None = None

    @property
    def begun(self) -> bool:
        """Whether the entry has run before."""
        return self._had_graph is not None

    def refuse_reentrant(self, what: str, *, cut: bool) -> None:
        """Note a run, and raise `StackError` if it is a replay in which gradients would be wrong.

        Reentrant checkpointing runs the forward without a graph, so that what an entry takes from
        others (`cut`: whether it does, `what`: a word for it) has none in the replay either.
        """
        graph = torch.is_grad_enabled()
        if self._had_graph is None:
            self._had_graph = graph
        elif cut and graph and not self._had_graph:
            raise cut_gradients(what)
