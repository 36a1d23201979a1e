"""Test whether a host model only passes the state from block to block, without running the blocks.

A walk replaces the host's own loop over its blocks: shared beginnings run once, and samples are
regrouped. It is correct only if the loop does nothing else. To test this, the host runs with
stand-ins for its blocks, which return a proper state times 1, 0, 10,000 and NaN in turn; the last
one of a loop always returns the proper state. If a stand-in receives anything but the output of the
one before, or torch's generators changed in between, or the result differs from that of a single
stand-in for all blocks, the host does more (reads out, injects, gates, drops), even if its weights
are zero. NaN reveals every sum, the other states reveal branches (`if x.abs().max() > 1`).

The trial misses branches that none of these states takes, and flags that are set on the model after
its first call.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Hashable
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map

from layershuffle.core.entries import (
    HOSTS,
    Entry,
    Form,
    HostBehaviour,
    form_of,
    has_parts,
    state_first,
    state_of,
)
from layershuffle.core.runs import apart, in_place
from layershuffle.errors import StackError

IMAGES = 2  # with one image, a mask for all samples looks like a mask per sample
# The factors of the proper state that the stand-ins return. NaN is last, because a GPU may abort
# the process on it, and most hosts that compute with the state are detected before.
_FACTORS = (1.0, 0.0, 1e4, math.nan)
# A limit, because calls whose arguments never repeat would fill the memory.
_MOST_CALLS = 64
_BY_CALL: WeakKeyDictionary[nn.Module, dict[Hashable, HostBehaviour]] = WeakKeyDictionary()
# Of two trials at a time, each would restore the modes that the other one set. The lock is
# reentrant because a host may contain a model with its own stack.
_LOCK = threading.RLock()


def host_of_stack(
    stack: nn.Module,
    *,
    model: nn.Module,
    arguments: Any,
    batch: int,
    forward: Callable[[Any], Any],
) -> HostBehaviour:
    """The behaviour of the host around `stack` in a call of `model`, which contains it.

    `forward(arguments)` calls `model` for `batch` samples; the trial passes `IMAGES` of them. There
    is one trial for every mode (train, eval) and kind of call: flags, and which arguments are
    tensors. Exceptions that the call raises before it reaches the blocks are passed on.
    """
    key = (model.training, stack.training, id(model), *_kind(arguments, batch))
    with _LOCK:
        hosts = _BY_CALL.setdefault(stack, {})
        if key not in hosts:
            few = tree_map(
                lambda leaf: leaf[:IMAGES] if has_parts(leaf, batch) else leaf, arguments
            )
            host = _tried(stack, model, lambda: forward(few))
            if len(hosts) == _MOST_CALLS:
                hosts.clear()
            hosts[key] = host
        HOSTS[stack] = hosts[key]
        return hosts[key]


def _kind(arguments: Any, batch: int) -> tuple[Hashable, ...]:
    """A key that is equal for two calls if the host branches on its arguments, but not on numbers
    in tensors.
    """
    leaves, structure = tree_flatten(arguments)
    # Values without a hash equal nothing, so that every such call is tried.
    kinds = [
        (leaf.dim(), has_parts(leaf, batch))
        if isinstance(leaf, Tensor)
        else (type(leaf), leaf if isinstance(leaf, Hashable) else object())
        for leaf in leaves
    ]
    return structure, *kinds


def _tried(stack: nn.Module, model: nn.Module, forward: Callable[[], Any]) -> HostBehaviour:
    trial = _Trial(stack)

    def run(entries: list[Entry]) -> Any:
        trial.calls.clear()
        with apart(trial.devices, model), in_place(stack, lambda _: entries):
            return forward()

    try:
        walked = run(trial.one_block())
        # If blocks write into a tensor that the host may use, only its own loop shows the change.
        chain = (
            not trial.writes
            and trial.calls == [0]
            and all(
                _equal(run(trial.all_blocks(factor)), walked) and trial.is_pure()
                for factor in _FACTORS
            )
        )
    # With states like these, a host's own checks and index arithmetic may raise any exception.
    except Exception:
        if not trial.reached:
            raise
        chain = False
    finally:
        trial.over = True
    return HostBehaviour(chain=chain, form=trial.form, batched=trial.batched, writes=trial.writes)


class _Trial:
    """The stand-ins, and what they observed of the host's loop."""

    def __init__(self, stack: nn.Module) -> None:
        self.blocks = list(stack.children())
        # At least two, because what a host does between its blocks shows only between two blocks.
        self.depth = max(2, len(self.blocks))
        weight = next(stack.parameters(), None)
        self.devices = [weight.device] if weight is not None and weight.is_cuda else []
        self.calls: list[int] = []
        self.reached, self.form, self.writes, self.over = False, Form(), False, False
        self.batched: tuple[bool, ...] = ()
        self._pure = True
        self._beside: list[Any] = []
        self._others: list[Any] = []

    def all_blocks(self, factor: float) -> list[Entry]:
        self._factor = factor
        return [_StandIn(self, position) for position in range(self.depth)]

    def one_block(self) -> list[Entry]:
        return [_StandIn(self, 0, alone=True)]

    def is_pure(self) -> bool:
        """Whether the host called every stand-in, each with the output of the one before."""
        return self._pure and self.calls == [*range(self.depth)]

    def begin(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """The very first call: record the state, the other arguments and the form of the output."""
        state, args, kwargs = state_first(self.blocks[0], args=args, kwargs=kwargs)
        self._others = tree_leaves((args, kwargs))
        # A value that is not a tensor here may be one in a call of the same kind.
        self.batched = tuple(
            not isinstance(leaf, Tensor) or has_parts(leaf, len(state)) for leaf in self._others
        )
        # Random draws of the block must not count as draws of the host.
        with torch.random.fork_rng(self.devices):
            # A copy, because a block may write into its input.
            copy = state.clone()
            out = self.blocks[0](copy, *args, **kwargs)
        self.form, self._state = form_of(out), state_of(out)
        # A block that returns its input writes into it, even if its weights change nothing yet.
        self.writes = self._state is copy or not torch.equal(copy, state)
        self._beside = [] if out is self._state else list(out[1:])

    def look(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """A later call: check that it gets the last stand-in's output and the same arguments."""
        state, args, kwargs = state_first(self.blocks[0], args=args, kwargs=kwargs)
        untouched = state is self._handed and state._version == self._version
        # A host that skips blocks at random (stochastic depth) may skip none in the trial.
        drew = not all(map(torch.equal, self._generators(), self._drawn))
        leaves = tree_leaves((args, kwargs))
        same = len(leaves) == len(self._others) and all(map(_same, leaves, self._others))
        self._pure &= untouched and same and not drew

    def hand_out(self, *, last: bool) -> Any:
        """The output of a stand-in."""
        # Tensors of inference mode have no version counter.
        with torch.inference_mode(False):
            self._handed = self._state.detach() * (1.0 if last else self._factor)
            beside = tree_map(self._scaled, self._beside)
        self._version = self._handed._version
        self._drawn = self._generators()
        return self.form.filled(self._handed, beside)

    def _scaled(self, leaf: Any) -> Any:
        floating = isinstance(leaf, Tensor) and leaf.is_floating_point()
        return leaf.detach() * self._factor if floating else leaf

    def _generators(self) -> list[Tensor]:
        return [torch.get_rng_state(), *map(torch.cuda.get_rng_state, self.devices)]


class _StandIn(Entry):
    """A stand-in for the block at a position, or for all blocks (`alone`)."""

    def __init__(self, trial: _Trial, position: int, *, alone: bool = False) -> None:
        super().__init__(trial.blocks[position % len(trial.blocks)])
        self._trial, self._position, self._alone = trial, position, alone

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        trial = self._trial
        if trial.over:
            raise StackError(
                "The host model keeps the blocks that it got in one forward, and calls them in "
                "another",
                hint="let its forward iterate over the container every time (for block in "
                "self.blocks), and build the model again",
            )
        trial.calls.append(self._position)
        if not trial.reached:
            trial.reached = True
            trial.begin(args, kwargs)
        elif not self._alone and len(trial.calls) > 1:
            trial.look(args, kwargs)
        if self._alone:
            return trial.form.filled(trial._state.clone())
        return trial.hand_out(last=self._position == trial.depth - 1)

    def _in_parts(self) -> StackError:
        self._trial.reached = True
        return super()._in_parts()


def _same(leaf: Any, other: Any) -> bool:
    if isinstance(leaf, Tensor) and isinstance(other, Tensor):
        return leaf is other or torch.equal(leaf, other)
    return leaf is other or bool(leaf == other)


def _equal(looped: Any, walked: Any) -> bool:
    """Whether two outputs hold the same tensors, at least one, and no NaN."""
    pairs = [
        [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor)]
        for output in (looped, walked)
    ]
    # NaN is equal to nothing, itself included.
    return bool(pairs[0]) and len(pairs[0]) == len(pairs[1]) and all(map(torch.equal, *pairs))
