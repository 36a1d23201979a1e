"""Plans of merges: which donor gives which block. Plain data and seeded draws, no torch.

Block i of a merge is block i of its donor, so there are 12! merges of 12 blocks from 12 models, as
the paper states (section 4.4). With random slots it is any block of its donor, which the paper's
text also allows.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import count as counting
from typing import Literal

from layershuffle.core.draws import Stream
from layershuffle.core.policies import drawn_blocks
from layershuffle.ground.errors import UsageError
from layershuffle.merging.settings import End, Slots

Source = int | Literal["average", "base"]
# Ranks of the random streams that no training process has; otherwise a merge would be the same
# permutation as the order in which it runs.
_BLOCKS = (1 << 20) + 0
_ENDS = (1 << 20) + 1
_SLOTS = (1 << 20) + 2
_ORDERS = 1 << 21


@dataclass(frozen=True)
class MergePlan:
    """A merge: block i comes from donor `donors[i]`, stem and head from a donor, all, or the base.

    Donors are indices into the caller's list. "average" is the mean of all donors in that list.
    `slots` has the block of its donor that each place takes; with `None` place i takes block i.
    """

    donors: tuple[int, ...]
    stem: Source = "average"
    head: Source = "average"
    slots: tuple[int, ...] | None = None

    @property
    def blocks(self) -> tuple[int, ...]:
        """The block of its donor that each place takes."""
        return tuple(range(len(self.donors))) if self.slots is None else self.slots

    def check(self, num_donors: int, depth: int, *, fixed: tuple[int, int] = (0, 0)) -> None:
        """Raises `UsageError` unless the plan fits `num_donors` donors of `depth` blocks.

        The donors' ends `fixed` keep their place.
        """
        if len(self.donors) != depth:
            raise UsageError(
                f"The plan gives {len(self.donors)} blocks a donor, the models have {depth}",
                hint="name a donor for every block",
            )
        if self.slots is not None and sorted(self.slots) != list(range(depth)):
            raise UsageError(
                f"The slots {','.join(map(str, self.slots))} are no permutation of {depth} blocks",
                hint="name each block once",
            )
        drawn = drawn_blocks(depth, fixed)
        for place, block in enumerate(self.blocks):
            if place != block and place not in drawn:
                raise UsageError(
                    f"Place {place} takes block {block}, and the donors were trained with "
                    f"fixed={fixed}, by which block {place} keeps its place",
                    hint="change only the slots between the ends",
                )
        ends = [source for source in (self.stem, self.head) if source not in ("average", "base")]
        for source in (*self.donors, *ends):
            if source not in range(num_donors):
                raise UsageError(
                    f"{source!r} is not a donor",
                    hint=f"there are {num_donors}, numbered from 0; stem and head may be average "
                    "or base",
                )

    def __str__(self) -> str:
        words = list(map(str, self.donors))
        if self.slots is not None:
            for place, slot in enumerate(self.slots):
                words[place] += f":{slot}"
        return ",".join(words)


def sample_plans(
    num_donors: int,
    depth: int,
    *,
    count: int,
    seed: int,
    replacement: bool = False,
    end: End = "average",
    slots: Slots = "own",
    fixed: tuple[int, int] = (0, 0),
) -> list[MergePlan]:
    """`count` distinct plans, drawn uniformly; they begin with those of a smaller `count`.

    Without `replacement` (the paper) no two blocks of a merge come from one donor; with it a donor
    may give several, but never all. The donors of the blocks do not depend on `end` and `slots`, so
    merges can be compared one by one. The ends `fixed` take their own blocks even if the slots are
    random. Raises `UsageError` for impossible counts.
    """
    if num_donors < depth and not replacement:
        raise UsageError(
            f"A merge of {depth} blocks, no two from one model, needs {depth} donors: "
            f"{num_donors} were given",
            hint=f"give {depth - num_donors} more, or let models give several (--replacement)",
        )
    # There are no more distinct plans, so drawing would not end.
    possible = num_donors**depth - num_donors if replacement else math.perm(num_donors, depth)
    if not 1 <= count <= possible:
        raise UsageError(
            f"{count} merges were asked for, {num_donors} donors of {depth} blocks make {possible}",
            hint=f"ask for 1 to {possible}",
        )
    plans: dict[tuple[int, ...], None] = {}
    for attempt in counting():
        stream = Stream(seed, attempt, rank=_BLOCKS)
        if replacement:
            donors = tuple(stream.below(num_donors) for _ in range(depth))
        else:
            donors = stream.shuffled(range(num_donors))[:depth]
        # With replacement, a draw of one donor for all blocks is the donor itself.
        if len(set(donors)) > 1:
            plans.setdefault(donors)
        if len(plans) == count:
            break
    merges = []
    for index, donors in enumerate(plans):
        drawn = donors[Stream(seed, index, rank=_ENDS).below(depth)]
        sources: dict[End, Source] = {
            "first": donors[0],
            "last": donors[-1],
            "donor": drawn,
            "average": "average",
            "base": "base",
        }
        blocks = None
        if slots == "random":
            inner = drawn_blocks(depth, fixed)
            drawn_slots = Stream(seed, index, rank=_SLOTS).shuffled(inner)
            blocks = (*range(inner.start), *drawn_slots, *range(inner.stop, depth))
        merges.append(MergePlan(donors, sources[end], sources[end], blocks))
    return merges


def orders_seed(seed: int, group: int, *, index: int) -> int:
    """The seed of the execution orders of model `index` of a `group` (merges, donors, ...)."""
    return Stream(seed, index, rank=_ORDERS + group).below(1 << 32)
