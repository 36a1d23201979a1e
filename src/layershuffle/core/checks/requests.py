"""What a backbone requested of its stack, and the refusal of a forward that cut its order short."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from layershuffle.ground.errors import StackError


@dataclass
class StackRequests:
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
        raise StackError(
            f"{type(model).__name__} requested {self.furthest} of the {self.length} blocks of its "
            "execution order, so the others did not run",
            hint="iterate over the whole stack (for block in self.blocks) in its forward: range() "
            "and zip() with a fixed length cut longer orders, and `break` ends them early",
        )


def unused_stack(module: nn.Module) -> StackError:
    """The error for a call of `module` in which its stack was never used."""
    return StackError(
        f"{type(module).__name__} ran and never used its block stack, so the execution order and "
        "the hooks around blocks would be ignored",
        hint="iterate over the container itself (for block in self.blocks) in the forward, not "
        "over its children(), its _modules or a list made earlier",
    )
