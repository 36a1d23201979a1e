"""What is no execution order: values, ids, versions and ends that are refused."""

from __future__ import annotations

import operator
import re
from collections.abc import Iterable, Sequence, Set
from typing import Any, TypeGuard

from layershuffle.ground.errors import UsageError


def is_integer(value: object) -> TypeGuard[int]:
    """Whether `value` is an integer but not a bool, because True and False are not block ids."""
    return isinstance(value, int) and not isinstance(value, bool)


def plain_integer(value: Any) -> Any:
    """Convert integers of numpy or torch to Python's, for JSON and messages; keep other values."""
    if isinstance(value, bool):
        return value
    try:
        return operator.index(value)
    except TypeError:
        return value


def check_depth(depth: object) -> None:
    """Raises `UsageError` unless `depth` is a number of blocks; a model is a usual mistake."""
    if not is_integer(depth) or depth < 1:
        raise UsageError(
            f"depth must be an integer of at least 1, got {repr(depth).partition('(')[0]}",
            hint="layershuffle.depth_of(model) is that of a model",
        )


def checked_blocks(blocks: Iterable[Any], depth: int) -> tuple[int, ...]:
    """`blocks` as integers of Python.

    Raises `UsageError` for a set, for no block, and for ids outside [0, depth).
    """
    if isinstance(blocks, Set):
        raise UsageError(
            f"{blocks!r} is a set, which has no order", hint="give a list of block ids"
        )
    checked = tuple(map(plain_integer, blocks))
    if not checked:
        raise UsageError(
            "An execution order needs at least one block, but this one is empty",
            hint=f'give block ids between 0 and {depth - 1}, for example "2,0,1"',
        )
    for block in checked:
        if not is_integer(block) or not 0 <= block < depth:
            raise UsageError(
                f"{block!r} is not a block of this model", hint=f"its blocks are 0 to {depth - 1}"
            )
    return checked


def checked_versions(blocks: tuple[int, ...], versions: Iterable[Any]) -> tuple[int, ...]:
    """`versions` as integers of Python, one for each step.

    Raises `UsageError` for another number of them, for a version that does not exist yet, and for a
    block that runs twice on one version.
    """
    checked = tuple(map(plain_integer, versions))
    if len(checked) != len(blocks):
        raise UsageError(f"{len(checked)} versions were given for {len(blocks)} steps of an order")
    ran: set[tuple[int, int]] = set()
    for position, step in enumerate(zip(blocks, checked, strict=True)):
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
    return checked


def checked_id(word: str, text: str) -> int:
    """The block id or version that `word` names in `text`. Raises `UsageError` if it is none."""
    # int() alone would also accept "1_0"; no id has more than nine digits.
    if not re.fullmatch(r"-?[0-9]{1,9}", word.strip()):
        raise UsageError(
            f"{word.strip()!r} in the execution order {text!r} is not a block id",
            hint='write integers with commas between them, for example "0,3,2,11", or with "+" '
            "between blocks side by side",
        )
    return int(word)


def refuse_what_is_no_order(order: object) -> None:
    """Raises `UsageError` for values that beginners may pass in place of an order."""
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
    # Each of them is an order of one block as well.
    if isinstance(order, Sequence) and order and all(map(_is_id_as_text, order)):
        listed = ",".join(order)
        alone = ", ".join(f"[{block}]" for block in order)
        raise UsageError(
            f"{order!r} may be an order of block ids, or one order of a single block per sample",
            hint=f'write "{listed}" for the first and [{alone}] for the second',
        )


def _is_id_as_text(value: object) -> bool:
    return isinstance(value, str) and value.strip().isdigit()


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


def moved_ends(
    order: object, depth: int, *, fixed: tuple[int, int], hint: str | None
) -> UsageError:
    """The error for an order that moves the ends `fixed` of a model, or leaves one out.

    `hint`: what to do then, where it is not to run the order all the same.
    """
    first, last = fixed
    places: list[str] = []
    if first:
        places.append(f"begin with {','.join(map(str, range(first)))}")
    if last:
        places.append(f"end with {','.join(map(str, range(depth - last, depth)))}")
    return UsageError(
        f"The order {order} does not keep the ends of the model, fixed=({first}, {last}): "
        f"it has to {' and to '.join(places)}, each once and none side by side with another block",
        hint=hint or "name them there, or run any order all the same: fixed=(0, 0), --fixed 0,0",
    )


def named_end(order: object, block: int, *, inner: range) -> UsageError:
    """The error for an order of the `inner` blocks, those between the ends, which names an end."""
    return UsageError(
        f"The order {order} has block {block}, which keeps its place at an end of the model and "
        "always runs there",
        hint=f"name blocks from {inner.start} to {inner.stop - 1}",
    )
