"""Does a host model only hand the state from block to block? A trial without running the blocks.

A walk takes the place of the host's own loop over its blocks: shared beginnings run once, samples
are regrouped. It is right only if the loop does nothing else. So stand-ins for the blocks hand out
NaN until the last one, which hands out a proper state. If the next stand-in gets anything but
what the last one returned, or the result shows a NaN, or another number than one stand-in for all
blocks gives, then the host does more (reads out, injects, gates), even where its weights are zero.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from layershuffle.entries import HOSTS, Entry, Form, Host, form_of, state_first, state_of
from layershuffle.errors import StackError
from layershuffle.runs import in_eval, in_place

IMAGES = 2  # with one image a mask for all samples looks like a mask per sample


def host_of_stack(stack: nn.Module, *, model: nn.Module, forward: Callable[[], Any]) -> Host:
    """What the host does around `stack`: one trial per stack, kept from then on.

    `forward()` calls `model`, which holds the stack, with `IMAGES` images, or one.
    """
    host = HOSTS.get(stack)
    if host is None:
        host = HOSTS[stack] = _tried(stack, model, forward)
    return host


def _tried(stack: nn.Module, model: nn.Module, forward: Callable[[], Any]) -> Host:
    trial = _Trial(stack)
    with _apart(stack, model):
        try:
            with in_place(stack, lambda _: trial.all_blocks()):
                looped = forward()
            with in_place(stack, lambda _: trial.one_block()):
                walked = forward()
        # StackError: the stack was asked for parts of blocks, or for the second of one entry. The
        # other two: the host computes with what blocks return beside the state.
        except (StackError, TypeError, AttributeError):
            return Host(chain=False, form=trial.form, batched=trial.batched)
    whole = trial.calls == [*range(trial.depth), 0]
    chain = trial.pure and whole and _equal(looped, walked)
    return Host(chain=chain, form=trial.form, batched=trial.batched)


@contextmanager
def _apart(stack: nn.Module, model: nn.Module) -> Iterator[None]:
    """What runs here leaves no trace in the model, its modes, or torch's generators."""
    weight = next(stack.parameters(), None)
    on_gpu = weight is not None and weight.is_cuda
    compiled = any(getattr(block, "_compiled_call_impl", None) for block in stack.children())
    # One forward is no reason for a graph of its own.
    eager = torch.compiler.set_stance("force_eager") if compiled else nullcontext()
    devices = [weight.device] if weight is not None and on_gpu else []
    with torch.random.fork_rng(devices=devices), in_eval(model), torch.no_grad(), eager:
        yield


class _Trial:
    """The stand-ins, and what was seen of the host's loop over them."""

    def __init__(self, stack: nn.Module) -> None:
        self.blocks = list(stack.children())
        self.depth = len(self.blocks)
        self.calls: list[int] = []
        self.pure, self.form = True, Form()
        self.batched: tuple[bool, ...] = ()
        self._beside: list[Any] = []
        self._others: list[Any] = []

    def all_blocks(self) -> list[Entry]:
        return [_StandIn(self, position) for position in range(self.depth)]

    def one_block(self) -> list[Entry]:
        return [_StandIn(self, 0, alone=True)]

    def begin(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """The first call: shows the state, the other arguments, and what a block returns."""
        state, args, kwargs = state_first(self.blocks[0], args=args, kwargs=kwargs)
        self._others = tree_leaves((args, kwargs))
        self.batched = tuple(
            isinstance(leaf, Tensor) and leaf.dim() > 0 and len(leaf) == len(state)
            for leaf in self._others
        )
        # A copy, because a block may write into its input.
        out = self.blocks[0](state.clone(), *args, **kwargs)
        self.form, self._state = form_of(out), state_of(out)
        self._beside = [] if out is self._state else tree_map(_poisoned, list(out[1:]))

    def look(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """A later call: is it what the stand-in before returned, with the same arguments?"""
        state, args, kwargs = state_first(self.blocks[0], args=args, kwargs=kwargs)
        untouched = state is self._handed and state._version == self._version
        self.pure &= untouched and _all_same(tree_leaves((args, kwargs)), self._others)

    def hand_out(self, *, last: bool) -> Any:
        """What a stand-in returns."""
        # Tensors of inference mode do not count how often they were written to.
        with torch.inference_mode(False):
            state = self._state.detach()
            self._handed = state.clone() if last else torch.full_like(state, torch.nan)
        self._version = self._handed._version
        return self.form.filled(self._handed, self._beside)


class _StandIn(Entry):
    """Stands for the block at a position; `alone` for all of them."""

    def __init__(self, trial: _Trial, position: int, *, alone: bool = False) -> None:
        super().__init__(trial.blocks[position])
        self._trial, self._position, self._alone = trial, position, alone

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        trial = self._trial
        trial.calls.append(self._position)
        if len(trial.calls) == 1:
            trial.begin(args, kwargs)
        elif not self._alone:
            trial.look(args, kwargs)
        if self._alone:
            return trial.form.filled(trial._state.clone())
        return trial.hand_out(last=self._position == trial.depth - 1)


def _poisoned(leaf: Any) -> Any:
    floating = isinstance(leaf, Tensor) and leaf.is_floating_point()
    return torch.full_like(leaf, torch.nan) if floating else leaf


def _all_same(leaves: list[Any], others: list[Any]) -> bool:
    return len(leaves) == len(others) and all(map(_same, leaves, others))


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
