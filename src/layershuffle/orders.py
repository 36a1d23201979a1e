"""Execution orders: which block runs at which position.

An `ExecutionOrder` is a frozen value. Block ids are 0-based indices into the model's block stack;
position 0 runs first. It may be a permutation, a subset (some blocks missing) or hold repeats.
"""

from __future__ import annotations

import json
import operator
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import combinations
from typing import Any

from layershuffle.errors import UsageError


@dataclass(frozen=True, slots=True)
class ExecutionOrder:
    """The sequence of block ids to run in a model of `depth` blocks.

    Raises `UsageError` for an empty sequence, ids outside [0, depth) or a depth below 1.
    """

    blocks: tuple[int, ...]
    depth: int

    def __post_init__(self) -> None:
        # Frozen and with slots: the one way to normalise a field.
        object.__setattr__(self, "blocks", tuple(map(_plain_integer, self.blocks)))
        _check_depth(self.depth)
        if not self.blocks:
            raise UsageError(
                "An execution order needs at least one block, this one is empty",
                hint=f'give block ids between 0 and {self.depth - 1}, for example "2,0,1"',
            )
        for block in self.blocks:
            _check_block(block, self.depth)

    @classmethod
    def sequential(cls, depth: int) -> ExecutionOrder:
        """The order 0, 1, ..., depth-1."""
        _check_depth(depth)
        return cls(tuple(range(depth)), depth)

    @classmethod
    def parse(cls, text: str, *, depth: int, permutation: bool = False) -> ExecutionOrder:
        """The order written as `"3,0,2"`; `permutation=True` also refuses missing and repeated ids.

        Raises `UsageError` for empty text, words that are not integers, and unknown ids.
        """
        if not text.strip():
            raise UsageError(
                "The execution order is empty text", hint='write block ids, for example "3,0,2"'
            )
        order = cls(tuple(_parse_id(word, text) for word in text.split(",")), depth)
        return order.require_permutation() if permutation else order

    @classmethod
    def from_json(cls, data: str | Mapping[str, Any]) -> ExecutionOrder:
        """The order that `to_json` wrote, from its text or from the decoded mapping."""
        try:
            fields = json.loads(data) if isinstance(data, str) else dict(data)
            blocks, depth = fields["blocks"], fields["depth"]
        except (ValueError, KeyError, TypeError) as error:
            raise UsageError(
                f"This is not an execution order in JSON ({error.__class__.__name__}: {error})",
                hint='the form is {"blocks": [3, 0, 2], "depth": 12}',
            ) from error
        # A string is iterable too, and "210" would become three block ids.
        if not isinstance(blocks, (list, tuple)):
            raise UsageError(f'"blocks" must be a list of integers, not {blocks!r}')
        return cls(tuple(blocks), depth)

    def to_json(self) -> str:
        """`{"blocks": [3, 0, 2], "depth": 12}`."""
        return json.dumps({"blocks": list(self.blocks), "depth": self.depth})

    @property
    def is_permutation(self) -> bool:
        """Whether every block of the model runs exactly once."""
        return len(self.blocks) == self.depth and not self.has_repeats

    @property
    def is_sequential(self) -> bool:
        """Whether this is the full stack in its original order."""
        return self.blocks == tuple(range(self.depth))

    @property
    def has_repeats(self) -> bool:
        """Whether some block runs more than once."""
        return len(set(self.blocks)) < len(self.blocks)

    @property
    def missing(self) -> tuple[int, ...]:
        """Ids of the blocks that do not run, ascending."""
        return tuple(sorted(set(range(self.depth)) - set(self.blocks)))

    def require_permutation(self) -> ExecutionOrder:
        """This order itself; raises `UsageError` unless every block runs exactly once."""
        if not self.is_permutation:
            repeated = sorted({b for b in self.blocks if self.blocks.count(b) > 1})
            raise UsageError(
                f"A permutation of {self.depth} blocks is required, but {self} repeats "
                f"{repeated or 'none'} and leaves out {list(self.missing) or 'none'}",
                hint=f"name each of 0..{self.depth - 1} once",
            )
        return self

    def kendall_distance(self) -> int:
        """Pairs of blocks that run in the opposite of their sequential order (0 when ascending).

        Raises `UsageError` for orders with repeats, where the distance is not defined.
        """
        if self.has_repeats:
            raise UsageError(f"Kendall's distance is not defined with repeats, as in {self}")
        return sum(a > b for a, b in combinations(self.blocks, 2))

    def kendall_tau(self) -> float:
        """Kendall's tau against the sequential order: 1.0 ascending, -1.0 reversed.

        For a subset, only the blocks that run are compared; a single block gives 1.0. Raises
        `UsageError` for orders with repeats.
        """
        pairs = len(self.blocks) * (len(self.blocks) - 1) // 2
        # Kendall's tau counts concordant less discordant pairs; there are no ties in an order.
        return 1.0 - 2.0 * self.kendall_distance() / pairs if pairs else 1.0

    def __str__(self) -> str:
        return ",".join(map(str, self.blocks))

    def __repr__(self) -> str:
        # What is unusual about an order stands in its repr: logs then show it without a question.
        marks = [f"{len(self.missing)} missing"] * bool(self.missing)
        marks += ["repeats"] * self.has_repeats
        return f"ExecutionOrder({str(self)!r} of {', '.join([str(self.depth), *marks])})"

    def __len__(self) -> int:
        return len(self.blocks)

    def __iter__(self) -> Iterator[int]:
        return iter(self.blocks)


def order_of(blocks: ExecutionOrder | str | Iterable[int], depth: int) -> ExecutionOrder:
    """`blocks`, also as "3,0,2", as an order of a model with `depth` blocks.

    Raises `UsageError` for an order of another depth, and as `ExecutionOrder` does.
    """
    if isinstance(blocks, str):
        return ExecutionOrder.parse(blocks, depth=depth)
    if not isinstance(blocks, ExecutionOrder):
        return ExecutionOrder(tuple(blocks), depth)
    # Ids of a shallower model would all be valid here, and mean other blocks.
    if blocks.depth != depth:
        raise UsageError(
            f"The order {blocks} was made for {blocks.depth} blocks, the model has {depth}",
            hint=f"draw or parse it with depth={depth}",
        )
    return blocks


def _check_depth(depth: int) -> None:
    if not _is_int(depth) or depth < 1:
        raise UsageError(f"The depth of a model is a number of blocks of at least 1, not {depth!r}")


def _check_block(block: int, depth: int) -> None:
    if not _is_int(block) or not 0 <= block < depth:
        raise UsageError(
            f"{block!r} is not a block of this model", hint=f"its blocks are 0 to {depth - 1}"
        )


def _parse_id(word: str, text: str) -> int:
    # Not int() alone, which also takes "1_0"; and no id has more than nine digits.
    if not re.fullmatch(r"[+-]?[0-9]{1,9}", word.strip()):
        raise UsageError(
            f"{word.strip()!r} in the execution order {text!r} is not a block id",
            hint='write integers with commas between them, for example "3,0,2"',
        )
    return int(word)


def _plain_integer(value: Any) -> Any:
    """Integers of numpy or torch as Python's, for JSON and messages; the rest as it is."""
    if isinstance(value, bool):
        return value
    try:
        return operator.index(value)
    except TypeError:
        return value


def _is_int(value: object) -> bool:
    # True and False are integers in Python, and no block ids.
    return isinstance(value, int) and not isinstance(value, bool)
