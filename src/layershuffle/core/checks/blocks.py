"""What a backbone may not do with its blocks where something stands around or between them."""

from __future__ import annotations

from collections.abc import Sized

import torch
from torch import Tensor, nn

from layershuffle.ground.errors import StackError, UsageError


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
            raise StackError(
                f"Reentrant gradient checkpointing cuts {what}, so gradients would be wrong",
                hint="checkpoint with use_reentrant=False (timm: TIMM_REENTRANT_CKPT=0)",
            )


def missing_state(module: nn.Module, name: str) -> StackError:
    """The error for a block that was called without its first argument, which has this name."""
    return StackError(
        f"A {module.__class__.__name__} was called without its first argument {name!r}, the state",
        hint="pass the state as the first argument, or by that name",
    )


def refused_part(module: nn.Module) -> StackError:
    """The error for a backbone that runs the parts of a block itself."""
    # As in `for attention, mlp in self.layers`: the backbone adds each part's output itself.
    return StackError(
        f"The backbone takes the parts out of its blocks ({module.__class__.__name__}) and runs "
        "them itself, so hooks around a block, rounds and an order per sample are impossible",
        hint="make a module of each group of parts, with their residual sums in its forward; "
        "one order for the whole batch, and evaluate(), work without a change",
    )


def missing_version(version: int) -> StackError:
    """The error for a step that reads a state before it exists."""
    return StackError(
        f"A step reads version {version} of the state, which the backbone has not computed yet",
        hint="iterate over the stack (for block in self.blocks) in its forward",
    )


def changed_shape(added: Tensor, read: Tensor) -> StackError:
    """The error for a block whose output has another shape than the older state that it read."""
    return StackError(
        f"A block made a state of shape {tuple(added.shape)} from {tuple(read.shape)}, so what it "
        "adds to an older state cannot be added to the newest one",
        hint="give an order in which every step reads the newest version",
    )


def other_count(orders: Sized, samples: int) -> UsageError:
    """The error for another number of orders than of samples."""
    return UsageError(
        f"{len(orders)} orders were given for a batch of {samples} samples",
        hint="give one order per sample, or a single order for the whole batch",
    )


def missing_exit() -> StackError:
    """The error for a state that is to leave before it exists."""
    return StackError(
        "The backbone runs a later entry of its stack before an earlier one, so a state cannot "
        "leave early",
        hint="iterate over the stack (for block in self.blocks) in its forward",
    )


def refused_value(value: object) -> StackError:
    """The error for something beside the state that cannot be put together by sample."""
    return StackError(
        f"The blocks return a {type(value).__name__} beside the state, which cannot be combined "
        "from samples with different orders",
        hint="use one order for the whole batch",
    )
