"""Execution orders: which block runs at which position, and which state it reads.

An `ExecutionOrder` is a frozen value. Block ids are 0-based indices into the model's block stack;
position 0 runs first. It may be a permutation, a subset (some blocks missing) or hold repeats.

Version k of the state is the state after k steps. The step at position k reads version v <= k:

    state[k + 1] = block(state[k])                          where v = k
    state[k + 1] = state[k] + (block(state[v]) - state[v])  where v < k

An order is written as "3,0,2" if every step reads the newest version, as "3+7+0,5+1" in rounds
(steps that read the same version run side by side), and as "3,7@0,0@1" in general.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Iterable, Iterator, Sequence, Set
from dataclasses import dataclass
from typing import Any, TypeGuard, cast

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
        given: object = self.blocks
        if isinstance(given, Set):
            raise UsageError(
                f"{given!r} is a set, which has no order", hint="give a list of block ids"
            )
        # The class is frozen and has slots, so this is the only way to normalise a field.
        object.__setattr__(self, "blocks", tuple(map(_plain_integer, self.blocks)))
        check_depth(self.depth)
        if not self.blocks:
            raise UsageError(
                "An execution order needs at least one block, but this one is empty",
                hint=f'give block ids between 0 and {self.depth - 1}, for example "2,0,1"',
            )
        for block in self.blocks:
            _check_block(block, self.depth)
        if self.versions is not None:
            versions = _checked_versions(self.blocks, self.versions)
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
        steps: list[tuple[int, int]] = []
        for blocks in rounds:
            start = len(steps)
            steps += [(block, start) for block in blocks]
        return cls(tuple(block for block, _ in steps), depth, tuple(v for _, v in steps))

    @classmethod
    def parse(cls, text: str, *, depth: int) -> ExecutionOrder:
        """The order written as `"3,0,2"`, `"3+7+0,5+1"` or `"3,7@0,0@1"`.

        Raises `UsageError` for empty
        text, words that are not integers, unknown ids and versions that do not exist yet.
        """
        if not text.strip():
            raise UsageError(
                "The text of the execution order is empty", hint='write block ids, such as "3,0,2"'
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

    def last_readers(self) -> dict[int, int]:
        """For each version that is read after a newer one exists, the last step that reads it."""
        return {
            version: position
            for position, (_, version) in enumerate(self.steps)
            if version < position
        }

    def common_beginning(self, other: ExecutionOrder) -> int:
        """The number of first steps, with the version that each reads, shared with `other`."""
        pairs = enumerate(zip(self.steps, other.steps, strict=False))
        shorter = min(len(self), len(other))
        return next((count for count, (step, same) in pairs if step != same), shorter)

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
        begin, end = range(first), range(self.depth - last, self.depth)
        ends = sorted({*begin, *end}.intersection(self.blocks))
        if ends:
            raise UsageError(
                f"The order {self} has block {ends[0]}, which keeps its place at an end of the "
                "model and always runs there",
                hint=f"name blocks from {first} to {self.depth - last - 1}",
            )
        blocks = (*begin, *self.blocks, *end)
        if self.versions is None:
            return ExecutionOrder(blocks, self.depth)
        between = (first + version for version in self.versions)
        after = first + len(self)
        return ExecutionOrder(blocks, self.depth, (*begin, *between, *range(after, after + last)))

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
        alone = all(
            version == position or first <= version < position < begin
            for position, (_, version) in enumerate(self.steps)
        )
        return alone and set(ends).isdisjoint(self.blocks[first:begin])

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
        return ",".join(
            str(block) if version == position else f"{block}@{version}"
            for position, (block, version) in enumerate(self.steps)
        )

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
    """`blocks`, given as an order, as text ("3,0,2") or as ids, as an order of `depth` blocks.

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
            first, last = fixed
            places = [f"begin with {','.join(map(str, range(first)))}"] * bool(first)
            ends = map(str, range(order.depth - last, order.depth))
            places += [f"end with {','.join(ends)}"] * bool(last)
            raise UsageError(
                f"The order {order} does not keep the ends of the model, fixed=({first}, {last}): "
                f"it has to {' and to '.join(places)}, each once and alone",
                hint=hint
                or f"draw orders with Shuffled(fixed=({first}, {last})), or run any order all "
                "the same: fixed=(0, 0), --fixed 0,0",
            )


def checked_fixed(fixed: Sequence[int]) -> tuple[int, int]:
    """`fixed` as a pair. Raises `UsageError` unless it is two numbers of blocks."""
    # A list is accepted because JSON and YAML have no tuples.
    parts = tuple(fixed) if isinstance(fixed, tuple | list) else ()
    if len(parts) == 2 and all(is_integer(part) and part >= 0 for part in parts):
        return parts[0], parts[1]
    raise UsageError(
        f"fixed must be (first, last), two numbers of blocks from 0, got {fixed!r}",
        hint="fixed=(1, 1) keeps the first and the last block in their place",
    )


def check_depth(depth: object) -> None:
    """Raises `UsageError` unless `depth` is a number of blocks; a model is a usual mistake."""
    if not is_integer(depth) or depth < 1:
        raise UsageError(
            f"depth must be an integer of at least 1, got {repr(depth).partition('(')[0]}",
            hint="layershuffle.depth_of(model) is that of a model",
        )


def _check_block(block: int, depth: int) -> None:
    if not is_integer(block) or not 0 <= block < depth:
        raise UsageError(
            f"{block!r} is not a block of this model", hint=f"its blocks are 0 to {depth - 1}"
        )


def _checked_versions(blocks: tuple[int, ...], versions: Iterable[Any]) -> tuple[int, ...]:
    versions = tuple(map(_plain_integer, versions))
    if len(versions) != len(blocks):
        raise UsageError(f"{len(versions)} versions were given for {len(blocks)} steps of an order")
    ran: set[tuple[int, int]] = set()
    for position, step in enumerate(zip(blocks, versions, strict=True)):
        block, version = step
        if not is_integer(version) or not 0 <= version <= position:
            raise UsageError(
                f"Block {block} at position {position} reads version {version!r} of the state, "
                "which does not exist yet",
                hint=f"version k is the state after k steps: give 0 to {position}",
            )
        # Its residual would be added twice without a second computation.
        if step in ran:
            raise UsageError(
                f"Block {block} runs twice on version {version} of the state",
                hint="let it run again on a later version, in another round",
            )
        ran.add(step)
    return versions


def _parse_steps(word: str, text: str, *, position: int) -> list[tuple[int, int]]:
    """The steps (block, version) that a word such as "3", "3+7+0" or "3@0" denotes."""
    if "+" in word:
        return [(_parse_id(part, text), position) for part in word.split("+")]
    block, at, version = word.partition("@")
    return [(_parse_id(block, text), _parse_id(version, text) if at else position)]


def _parse_id(word: str, text: str) -> int:
    # int() alone would also accept "1_0"; no id has more than nine digits.
    if not re.fullmatch(r"-?[0-9]{1,9}", word.strip()):
        raise UsageError(
            f"{word.strip()!r} in the execution order {text!r} is not a block id",
            hint='write integers with commas between them, for example "3,0,2", or with "+" '
            "between blocks side by side",
        )
    return int(word)


def _plain_integer(value: Any) -> Any:
    """Convert integers of numpy or torch to Python's, for JSON and messages; keep other values."""
    if isinstance(value, bool):
        return value
    try:
        return operator.index(value)
    except TypeError:
        return value


def is_integer(value: object) -> TypeGuard[int]:
    """Whether `value` is an integer but not a bool, because True and False are not block ids."""
    return isinstance(value, int) and not isinstance(value, bool)


def _are_ids_as_text(order: Sequence[object]) -> bool:
    """Whether all entries are the text of a single block id, as in ["2", "0", "1"]."""
    return bool(order) and all(isinstance(own, str) and own.strip().isdigit() for own in order)


def orders_of(order: object, depth: int) -> ExecutionOrder | tuple[ExecutionOrder, ...]:
    """`order` as an order of `depth` blocks, or as several if it is a sequence of one per sample.

    Raises `UsageError` for values that beginners may pass instead, and in the cases of `order_of`.
    """
    if isinstance(order, ExecutionOrder | str):  # first, as it is quick and usual
        return order_of(order, depth)
    if hasattr(order, "draw"):
        raise UsageError(
            f"{order!r} is an order policy, which draws orders but is not an order itself",
            hint="pass an order that it draws to running(model, order): "
            "policy.draw(layershuffle.depth_of(model), seed=0, step=0)",
        )
    if not isinstance(order, Iterable):
        raise UsageError(
            f"{order!r} is not an execution order",
            hint="pass block ids (running(model, '3,0,2')), or omit running: then the blocks run "
            "in sequential order",
        )
    if isinstance(order, Sequence) and _are_ids_as_text(order):
        listed = ",".join(order)
        alone = ", ".join(f"[{block}]" for block in order)
        raise UsageError(
            f"{order!r} may be an order of block ids, or one order of a single block per sample",
            hint=f'write "{listed}" for the first and [{alone}] for the second',
        )
    per_sample = isinstance(order, Sequence) and isinstance(
        next(iter(order), 0), ExecutionOrder | Sequence
    )
    return tuple(order_of(own, depth) for own in order) if per_sample else order_of(order, depth)
