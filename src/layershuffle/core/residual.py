"""Steps that read an older version of the state add their block's residual to the newest one.

    state[k + 1] = state[k] + (block(state[v]) - state[v])

This defines blocks side by side (`core.orders`) in the host's own loop, in the trie and for
an order per sample. It is defined only for blocks that add to their state.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn

from layershuffle.core.orders import ExecutionOrder
from layershuffle.core.runs import apart
from layershuffle.errors import StackError

# A block with a norm before its branches adds about the same to a state of any size, so that for a
# large state its output is nearly its input. A norm at its end would shrink the state again.
_LARGE = 1e3
_LEAST_SHARE, _MOST_SHARE = 0.5, 1.5
_HINT = "give an order in which every step reads the newest version"
_ADDING: WeakSet[nn.Module] = WeakSet()


def added(newest: Tensor, *, read: Tensor, out: Tensor) -> Tensor:
    """The state after a step: `newest` plus the residual `out - read`, all of one shape."""
    return newest + (out - read)


class States:
    """The versions of the state that later steps of one forward read, kept as long as needed."""

    def __init__(self, order: ExecutionOrder) -> None:
        self._last = order.last_readers()
        self._states: dict[int, Tensor] = {}

    def keep(self, version: int, state: Tensor) -> None:
        """Keep `state`, if a later step reads it."""
        if version in self._last:
            # A copy, because a host may write into the state between its blocks.
            self._states[version] = state.clone()

    def read(self, version: int, *, position: int) -> Tensor:
        """The state that the step at `position` reads; the last reader removes it."""
        if version not in self._states:
            raise StackError(
                f"The step at position {position} reads version {version} of the state, which the "
                "host model has not computed in this run of its blocks: it runs them one at a "
                "time or in parts",
                hint="iterate over the stack (for block in self.blocks) in its forward, or give an "
                "order in which every step reads the newest version",
            )
        if self._last[version] == position:
            return self._states.pop(version)
        return self._states[version]


def refuse_other_sums(
    block: nn.Module, state: Any, *, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    """Raises `StackError` unless `block` adds to the state and returns only the sum, a new tensor.

    Runs each block only once, on the state times 1,000, without side effects.
    """
    if isinstance(state, tuple | list):
        raise StackError(
            f"The host model passes a {type(state).__name__} to its blocks, which cannot be "
            "combined from blocks that read different versions of the state",
            hint=_HINT,
        )
    # While a model is traced there are no numbers; it runs before it is traced, or afterwards.
    if block in _ADDING or torch.compiler.is_compiling() or not isinstance(state, Tensor):
        return
    with apart([state.device] if state.is_cuda else [], block):
        large = state.detach() * _LARGE
        # Hooks gather shards; otherwise hooks must not see this call.
        call: Callable[..., Any] = block if hasattr(block, "unshard") else block.forward
        copy = large.clone()
        out = call(copy, *args, **kwargs)
        if isinstance(out, tuple | list):
            raise StackError(
                f"{type(block).__name__} returns a {type(out).__name__}, which cannot be combined "
                "from blocks that read different versions of the state",
                hint=_HINT,
            )
        # Other blocks still have to read it, and the host may have other references to it.
        if out is copy or not torch.equal(copy, large):
            raise StackError(
                f"{type(block).__name__} writes into its input, which blocks side by side share",
                hint=_HINT,
            )
        # In float64, because sums of squares of this size overflow in fp16.
        large, out = large.double(), out.double()
        share = float((out * large).sum() / large.square().sum()) if out.shape == large.shape else 0
    if not _LEAST_SHARE < share < _MOST_SHARE:
        raise StackError(
            f"{type(block).__name__} does not add to its state (its output contains a large state "
            f"{share:.2f} times), so the outputs of blocks side by side cannot be summed",
            hint=_HINT,
        )
    _ADDING.add(block)
