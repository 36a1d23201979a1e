"""What a backbone may not do with its blocks where something stands around or between them."""

from __future__ import annotations

from collections.abc import Sized

from torch import Tensor, nn

from layershuffle.ground.errors import StackError, UsageError


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


def unused_stack(module: nn.Module) -> StackError:
    """The error for a call of `module` in which its stack was never used."""
    return StackError(
        f"{type(module).__name__} ran and never used its block stack, so the execution order and "
        "the hooks around blocks would be ignored",
        hint="iterate over the container itself (for block in self.blocks) in the forward, not "
        "over its children(), its _modules or a list made earlier",
    )


def cut_order(model: nn.Module, requested: int, *, length: int) -> StackError:
    """The error for a backbone that has `requested` some of `length` blocks, and never the rest."""
    return StackError(
        f"{type(model).__name__} requested {requested} of the {length} blocks of its execution "
        "order, so the others did not run",
        hint="iterate over the whole stack (for block in self.blocks) in its forward: range() and "
        "zip() with a fixed length cut longer orders, and `break` ends them early",
    )


def cut_gradients(what: str) -> StackError:
    """The error for a replay by reentrant checkpointing, which cuts `what` off from its graph."""
    return StackError(
        f"Reentrant gradient checkpointing cuts {what}, so gradients would be wrong",
        hint="checkpoint with use_reentrant=False (timm: TIMM_REENTRANT_CKPT=0)",
    )
