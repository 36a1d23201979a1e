"""Execution orders: which block runs at which position, and which state it reads.

An `ExecutionOrder` is a frozen value. Block ids are 0-based indices into the model's block stack;
position 0 runs first. It may be a permutation, a subset (some blocks missing) or hold repeats.

Version k of the state is the state after k steps. The step at position k reads version v <= k:

    state[k + 1] = block(state[k])                          where v = k
    state[k + 1] = state[k] + (block(state[v]) - state[v])  where v < k

An order is written as "0,3,2,11" if every step reads the newest version, as "3+7+0,5+1" in rounds
(steps that read the same version run side by side), and as "3,7@0,0@1" in general.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import cast

from layershuffle.core.checks.orders import (
    check_depth,
    checked_blocks,
    checked_id,
    checked_versions,
    moved_ends,
    named_end,
    refuse_what_is_no_order,
)
from layershuffle.ground.errors import UsageError


@dataclass(frozen=True, slots=True)
class ExecutionOrder:
    """The sequence of block ids to run in a model of `depth` blocks.

    `versions` holds the version of the state that each step reads; it is `None` if every step reads
    the newest. Raises `UsageError` for an empty sequence, ids outside [0, depth), a depth below 1,
    a version that does not exist yet, and a block that runs twice on one version.
    """

    blocks: tuple[int, ...]
    depth: int
    versions: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        check_depth(self.depth)
        # The class is frozen and has slots, so this is the only way to normalise a field.
        object.__setattr__(self, "blocks", checked_blocks(self.blocks, self.depth))
        if self.versions is not None:
            versions = checked_versions(self.blocks, self.versions)
            # Normalised, so that orders with the same computation compare equal and print alike.
            newest = versions == tuple(range(len(versions)))
            object.__setattr__(self, "versions", None if newest else versions)

    @classmethod
    def sequential(cls, depth: int) -> ExecutionOrder:
        """The order 0, 1, ..., depth-1."""
        check_depth(depth)
        return cls(tuple(range(depth)), depth)

    @classmethod
    def in_rounds(cls, rounds: Iterable[Iterable[int]], depth: int) -> ExecutionOrder:
        """The order in which the blocks of each round run side by side, round after round.

        Raises `UsageError` if a block occurs twice in one round.
        """
        blocks: list[int] = []
        versions: list[int] = []
        for several in rounds:
            start = len(blocks)
            for block in several:
                blocks.append(block)
                versions.append(start)
        return cls(tuple(blocks), depth, tuple(versions))

    @classmethod
    def parse(cls, text: str, *, depth: int) -> ExecutionOrder:
        """The order written as `"0,3,2,11"`, `"3+7+0,5+1"` or `"3,7@0,0@1"`.

        Raises `UsageError` for empty text, words that are not integers, unknown ids and versions
        that do not exist yet.

            >>> ExecutionOrder.parse("1+0,2", depth=3).versions
            (0, 0, 2)
        """
        if not text.strip():
            raise UsageError(
                "The text of the execution order is empty",
                hint='write block ids, such as "0,3,2,11"',
            )
        steps: list[tuple[int, int]] = []
        for word in text.split(","):
            steps += _parse_steps(word, text, position=len(steps))
        blocks, versions = zip(*steps, strict=True)
        return cls(blocks, depth, versions)

    @property
    def steps(self) -> tuple[tuple[int, int], ...]:
        """A pair (block, version that it reads) for every step."""
        versions = range(len(self.blocks)) if self.versions is None else self.versions
        return tuple(zip(self.blocks, versions, strict=True))

    @property
    def rounds(self) -> tuple[tuple[int, ...], ...] | None:
        """The blocks of every round; `None` for an order that is not made of rounds."""
        rounds: list[tuple[int, ...]] = []
        start = 0
        for position, (block, version) in enumerate(self.steps):
            if version == position:
                start = position
                rounds.append((block,))
            elif version == start:
                rounds[-1] += (block,)
            else:
                return None
        return tuple(rounds)

    @property
    def read_later(self) -> frozenset[int]:
        """The versions that a step reads after a newer one exists."""
        return frozenset(
            version for position, (_, version) in enumerate(self.steps) if version < position
        )

    def common_beginning(self, other: ExecutionOrder) -> int:
        """The number of first steps, with the version that each reads, shared with `other`."""
        count = 0
        for step, other_step in zip(self.steps, other.steps, strict=False):
            if step != other_step:
                break
            count += 1
        return count

    def beginning(self, count: int, *, last: int = 0) -> ExecutionOrder:
        """The order of the first `count` steps, and after them of the `last` ones.

        It is the whole order if that leaves no step out. The last ones read the newest version.
        """
        if count + last >= len(self):
            return self
        blocks = (*self.blocks[:count], *self.blocks[len(self) - last :])
        if self.versions is None:
            return ExecutionOrder(blocks, self.depth)
        newest = range(count, count + last)
        return ExecutionOrder(blocks, self.depth, (*self.versions[:count], *newest))

    def within_ends(self, fixed: tuple[int, int]) -> ExecutionOrder:
        """This order of blocks between the ends, with the ends `fixed` before and after it.

        Each of them runs alone. Raises `UsageError` if the order has one of them already.

            >>> str(ExecutionOrder((3, 1), depth=5).within_ends((1, 1)))
            '0,3,1,4'
        """
        first, last = fixed
        inner = range(first, self.depth - last)
        for block in self.blocks:
            if block not in inner:
                raise named_end(self, block, inner=inner)
        blocks = (*range(first), *self.blocks, *range(inner.stop, self.depth))
        if self.versions is None:
            return ExecutionOrder(blocks, self.depth)
        versions = list(range(first))
        for version in self.versions:
            versions.append(first + version)
        versions += range(len(versions), len(blocks))
        return ExecutionOrder(blocks, self.depth, tuple(versions))

    def keeps_ends(self, fixed: tuple[int, int]) -> bool:
        """Whether the first and the last blocks of the model run in their place.

        `fixed=(first, last)` are their numbers. They run once, before and after all others, and
        each in a round of its own.
        """
        first, last = fixed
        ends = (*range(first), *range(self.depth - last, self.depth))
        begin = len(self) - last  # of the last blocks
        if begin < first or self.blocks[:first] + self.blocks[begin:] != ends:
            return False
        for position, (_, version) in enumerate(self.steps):
            alone = version == position
            if not alone and not first <= version < position < begin:
                return False
        return set(ends).isdisjoint(self.blocks[first:begin])

    @property
    def has_repeats(self) -> bool:
        """Whether some block runs more than once."""
        return len(set(self.blocks)) < len(self.blocks)

    @property
    def missing(self) -> tuple[int, ...]:
        """Ids of the blocks that do not run, ascending."""
        return tuple(sorted(set(range(self.depth)) - set(self.blocks)))

    def __str__(self) -> str:
        rounds = self.rounds
        if rounds is not None:
            return ",".join("+".join(map(str, blocks)) for blocks in rounds)
        words: list[str] = []
        for position, (block, version) in enumerate(self.steps):
            words.append(str(block) if version == position else f"{block}@{version}")
        return ",".join(words)

    def __repr__(self) -> str:
        # The repr names what is unusual about the order, so that logs show it.
        marks = [f"{len(self.missing)} missing"] * bool(self.missing)
        marks += ["repeats"] * self.has_repeats
        return f"ExecutionOrder({str(self)!r} of {', '.join([str(self.depth), *marks])})"

    def __len__(self) -> int:
        return len(self.blocks)

    def __iter__(self) -> Iterator[int]:
        return iter(self.blocks)


def order_of(blocks: ExecutionOrder | str | Iterable[int], depth: int) -> ExecutionOrder:
    """`blocks`, given as an order, as text ("0,3,2,11") or as ids, as an order of `depth` blocks.

    Raises `UsageError` for an order of another depth, and in the cases of `ExecutionOrder`.
    """
    if isinstance(blocks, str):
        return ExecutionOrder.parse(blocks, depth=depth)
    if not isinstance(blocks, ExecutionOrder):
        # Not a tuple yet: the class refuses sets.
        return ExecutionOrder(cast(tuple[int, ...], blocks), depth)
    # Ids of a shallower model would all be valid here, and mean other blocks.
    if blocks.depth != depth:
        raise UsageError(
            f"The order {blocks} was made for {blocks.depth} blocks, but the model has {depth}",
            hint=f"draw or parse it with depth={depth}",
        )
    return blocks


def check_ends(
    orders: Iterable[ExecutionOrder], fixed: tuple[int, int], *, hint: str | None = None
) -> None:
    """Raises `UsageError` for an order that moves the ends `fixed`, or leaves one out.

    `hint`: what to do then, where it is not to run the order all the same.
    """
    if not any(fixed):
        return
    for order in orders:
        if not order.keeps_ends(fixed):
            raise moved_ends(order, order.depth, fixed=fixed, hint=hint)


def _parse_steps(word: str, text: str, *, position: int) -> list[tuple[int, int]]:
    """The steps (block, version) that a word such as "3", "3+7+0" or "3@0" denotes."""
    if "+" in word:
        return [(checked_id(part, text), position) for part in word.split("+")]
    block, mark, version = word.partition("@")
    return [(checked_id(block, text), checked_id(version, text) if mark else position)]


def orders_of(order: object, depth: int) -> ExecutionOrder | tuple[ExecutionOrder, ...]:
    """`order` as an order of `depth` blocks, or as several if it is a sequence of one per sample.

    Raises `UsageError` for values that beginners may pass instead, and in the cases of `order_of`.
    """
    if isinstance(order, ExecutionOrder | str):  # first, as it is quick and usual
        return order_of(order, depth)
    refuse_what_is_no_order(order)
    several = cast(Iterable[int], order)
    # An iterator is one order: to look at its first value would take it out.
    if isinstance(order, Sequence) and order and isinstance(order[0], ExecutionOrder | Sequence):
        return tuple(order_of(own, depth) for own in order)
    return order_of(several, depth)
