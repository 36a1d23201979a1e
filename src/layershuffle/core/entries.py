"""Proxies that a block stack passes to its host instead of bare blocks: a block with hooks, a
walk that replaces all blocks, or a position at which every sample has its own block.
"""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

from layershuffle.core.hooks import Step
from layershuffle.core.orders import ExecutionOrder
from layershuffle.core.residual import States, added, refuse_other_sums
from layershuffle.core.runs import Run, in_backward, in_checkpoint
from layershuffle.errors import StackError, UsageError

BlockCall = Callable[[int, int, Tensor, "tuple[int, ...] | None"], Tensor]
"""Runs a block at a position on the state of some rows of the batch, or of all (`None`)."""
BlockWalk = Callable[[BlockCall, Tensor], Tensor]


@dataclass(frozen=True)
class Form:
    """The form of a block's output: the state, or a tuple or list with `beside` other values."""

    kind: type | None = None
    beside: int = 0

    def filled(self, state: Tensor, beside: Sequence[Any] | None = None) -> Any:
        """`state` in the form of a block's output; the other values are `beside`, or `None`."""
        if self.kind is None:
            return state
        return self.kind((state, *(beside or [None] * self.beside)))


@dataclass(frozen=True)
class HostBehaviour:
    """What a trial showed about the host of a stack in one kind of call (`core.chain`).

    `chain`: between its blocks the host only passes the state on. `batched`: which of the other
    arguments of a block may have a part per sample. `writes`: blocks change their input in place
    and return it, so that the host's other references to it show the change.
    """

    chain: bool
    form: Form
    batched: tuple[bool, ...]
    writes: bool


# The behaviour in the latest call that was tried. Stored outside of the stack, because a copy of a
# model may be changed before it runs.
HOSTS: WeakKeyDictionary[nn.Module, HostBehaviour] = WeakKeyDictionary()


def has_parts(leaf: Any, batch: int) -> bool:
    """Whether an argument may be a tensor with a part for each of `batch` samples."""
    return isinstance(leaf, Tensor) and leaf.dim() > 0 and len(leaf) == batch


def state_of(out: Any) -> Tensor:
    """The state in a block's output; raises `StackError` if it holds none."""
    # Blocks of older transformers releases return tuples whose first entry is the state.
    state = out[0] if isinstance(out, tuple | list) and out else out
    if not isinstance(state, Tensor):
        raise StackError(
            f"A block returned a {type(out).__name__}; a tensor is needed, or a tuple that begins "
            "with one",
            hint="let the block return its state first; one order for the whole batch "
            "(layershuffle.running) works without a change",
        )
    return state


def form_of(out: Any) -> Form:
    """The form of a block's output."""
    if isinstance(out, tuple | list):
        return Form(tuple if isinstance(out, tuple) else list, len(out) - 1)
    return Form()


def state_first(
    block: nn.Module, *, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Tensor, tuple[Any, ...], dict[str, Any]]:
    """The state, the other positional and the named arguments of a call, as in `block(x=x)`."""
    if args:
        return args[0], args[1:], kwargs
    name = next(iter(inspect.signature(block.forward).parameters), "")
    if name not in kwargs:
        raise StackError(
            f"A {type(block).__name__} was called without its first argument {name!r}, the state",
            hint="pass the state as the first argument, or by that name",
        )
    rest = {key: value for key, value in kwargs.items() if key != name}
    return kwargs[name], (), rest


class Entry(ABC):
    """A proxy for the block `module`: a host may read its attributes and call it as a whole."""

    one_block = True  # `module` is the block that runs, so that its weights may be read

    def __init__(self, module: nn.Module) -> None:
        self._module = module

    @property  # type: ignore[misc]  # that of objects can be set too
    def __class__(self) -> type:
        """The block's class, for `isinstance(block, Block)` and `nn.Sequential(*blocks)`."""
        # torch.compile reads it from objects that have no attributes yet.
        return type(vars(self).get("_module", self))

    @abstractmethod
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the block on the state among the arguments, and return what the block returns."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The same as `__call__`, for hosts that call `block.forward` directly."""
        return self(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._module, name)
        # A call of a part would bypass the hooks around the block, or run the part of a single
        # block on samples that are at different blocks.
        if isinstance(value, nn.Module):
            return Part(value, self)
        if isinstance(value, Tensor) and not self.one_block:
            raise self._in_parts()
        own = getattr(value, "__self__", None) is self._module and not hasattr(nn.Module, name)
        return self._refuse if own else value

    def __iter__(self) -> Iterator[Any]:
        raise self._in_parts()

    def __getitem__(self, index: object) -> Any:
        raise self._in_parts()

    def _refuse(self, *_args: Any, **_kwargs: Any) -> Any:
        raise self._in_parts()

    def _in_parts(self) -> StackError:
        # As in `for attention, mlp in self.layers`: the host adds each part's output to the state.
        return StackError(
            f"The host model takes the parts out of its blocks ({type(self._module).__name__}) and "
            "runs them itself, so hooks around a block and an order per sample are impossible",
            hint="make a module of each group of parts, with their residual sums in its forward; "
            "one order for the whole batch, and evaluate(), work without a change",
        )


class Part(Entry):
    """A submodule of the block of `owner`: its attributes can be read, but it cannot be called."""

    def __init__(self, module: nn.Module, owner: Entry) -> None:
        super().__init__(module)
        self._owner, self.one_block = owner, owner.one_block

    def __call__(self, *_args: Any, **_kwargs: Any) -> Any:
        """Raises `StackError`."""
        raise self._in_parts()

    def _in_parts(self) -> StackError:
        return self._owner._in_parts()


class Placed(Entry):
    """A block at a position with the hooks around it."""

    def __init__(self, module: nn.Module, step: Step, run: Run) -> None:
        super().__init__(module)
        self._step, self._run = step, run

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the block and its hooks on the state among the arguments."""
        state, args, kwargs = state_first(self._module, args=args, kwargs=kwargs)
        if self._run.recompute and torch.is_grad_enabled():
            return checkpoint(self._compute, state, *args, use_reentrant=False, **kwargs)
        return self._compute(state, *args, **kwargs)

    def _compute(self, state: Tensor, *args: Any, **kwargs: Any) -> Any:
        step = replace(self._step, replay=in_backward())
        for hook in self._run.hooks:
            state = hook.before(state, step)
        out = self._module(state, *args, **kwargs)
        for hook in self._run.hooks:
            hook.after(state_of(out), step)
        return out


class Versioned(Placed):
    """A block at a position that reads a version of the state, possibly an older one."""

    def __init__(
        self, module: nn.Module, step: Step, run: Run, *, version: int, states: States
    ) -> None:
        super().__init__(module, step, run)
        self._version, self._states = version, states
        self._ran = False
        self._again: Tensor | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The state after this step; the newest state is among the arguments."""
        state, args, kwargs = state_first(self._module, args=args, kwargs=kwargs)
        position, version = self._step.position, self._version
        refuse_other_sums(self._module, state, args=args, kwargs=kwargs)
        # If the host checkpoints, the same entry runs again in the backward pass, when the states
        # of the forward are gone.
        replay, self._ran = self._ran, True
        if not replay:
            self._states.keep(position, state)
        if version == position:
            return super().__call__(state, *args, **kwargs)
        read = self._reread() if replay else self._states.read(version, position=position)
        # Reentrant checkpointing runs without a graph first, and could not reach `read` later.
        if not (replay or torch.compiler.is_compiling()) and torch.is_grad_enabled():
            self._again = read if in_checkpoint() else None
        return added(state, read=read, out=super().__call__(read, *args, **kwargs))

    def _reread(self) -> Tensor:
        if self._again is None:
            raise StackError(
                "Reentrant gradient checkpointing detaches a block from the older state that it "
                "reads",
                hint="checkpoint with use_reentrant=False, or use layershuffle.recomputing(model)",
            )
        return self._again


def versioned(
    blocks: Sequence[nn.Module], order: ExecutionOrder, *, run: Run
) -> Iterator[Versioned]:
    """The entries of one forward along an order in which steps read older versions."""
    states = States(order)
    for position, (block, version) in enumerate(order.steps):
        step = Step(position, block)
        yield Versioned(blocks[block], step, run, version=version, states=states)


class Walked(Entry):
    """The single entry of a stack whose blocks are all run by a walk."""

    def __init__(
        self,
        stack: nn.Module,
        walk: BlockWalk,
        run: Run,
        host: HostBehaviour | None,
        *,
        older: bool = False,
    ) -> None:
        self._blocks = list(stack._modules.values())
        super().__init__(self._blocks[0])  # type: ignore[arg-type]
        self._walk, self._run, self._host, self._older = walk, run, host, older

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the walk on the state among the arguments; return the output of its last block."""
        state, args, kwargs = state_first(self._module, args=args, kwargs=kwargs)
        if not isinstance(state, Tensor):
            raise StackError(
                f"The host model passes a {type(state).__name__} to its blocks; an order per "
                "sample needs a tensor",
                hint="pass the state to the blocks first and other values after it; one order for "
                "the whole batch (layershuffle.running), and evaluate(), work without a change",
            )
        if self._older:
            for block in self._blocks:
                refuse_other_sums(block, state, args=args, kwargs=kwargs)  # type: ignore[arg-type]
        form = Form() if self._host is None else self._host.form

        def call(block: int, position: int, chunk: Tensor, rows: tuple[int, ...] | None) -> Tensor:
            nonlocal form
            # Only a walk that regroups samples could pair a sample with another one's mask.
            if rows is not None:
                _refuse_batched((args, kwargs), batch=len(state), host=self._host)
            module: Any = self._blocks[block]
            placed = Placed(module, Step(position, block, rows), self._run)
            out = placed(chunk, *args, **kwargs)
            form = form_of(out)
            return state_of(out)

        after = self._walk(call, state)
        # Other outputs belong to some of the samples or to one block, so they are dropped.
        return form.filled(after)


def _refuse_batched(arguments: Any, *, batch: int, host: HostBehaviour | None) -> None:
    """Refuse attention masks and other arguments per sample, which cannot be regrouped here."""
    leaves = tree_leaves(arguments)
    batched = [True] * len(leaves) if host is None else host.batched
    for index, leaf in enumerate(leaves):
        # A tensor [tokens, width] is not a mask [batch, tokens], even if both numbers are equal.
        # The trial had another number of samples, so it shows the difference.
        parts = index >= len(batched) or batched[index]
        if parts and batch > 1 and has_parts(leaf, batch):
            raise UsageError(
                f"The model passes its blocks an argument of shape {tuple(leaf.shape)} with one "
                "part per sample, which an order per sample cannot split",
                hint="use one order for the whole batch, or run the samples one by one",
            )
