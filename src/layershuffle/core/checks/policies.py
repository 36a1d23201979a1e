"""What a policy or a mode cannot draw: probabilities, ranges, counts and words that are refused."""

from __future__ import annotations

from collections.abc import Sequence

from layershuffle.core.checks.orders import is_integer
from layershuffle.ground.errors import UsageError
from layershuffle.ground.text import did_you_mean

_MODES = (
    "sequential, arbitrary, kept:9, kept:9:arbitrary, kept:9:sequential:spaced, "
    "kept:1-11:arbitrary, arbitrary:parallel=3, kept:6:arbitrary:passes=2"
)


def checked_range(limits: Sequence[int | None] | None) -> tuple[int, int | None] | None:
    """`limits` as a pair (low, high). Raises `UsageError` unless it is one, or `None`."""
    if limits is None:
        return None
    # A list is accepted because JSON and YAML have no tuples.
    parts = tuple(limits) if isinstance(limits, tuple | list) else ()
    if len(parts) == 2 and is_integer(parts[0]) and (parts[1] is None or is_integer(parts[1])):
        return parts[0], parts[1]
    raise UsageError(f"kept must be (low, high), got {limits!r}", hint="kept=(3, None) is 3 to all")


def checked_parallel(limits: Sequence[int] | None) -> tuple[int, int] | None:
    """`limits` of the blocks in a round as a pair. Raises `UsageError` unless 1 <= low <= high."""
    if limits is None:
        return None
    # A list is accepted because JSON and YAML have no tuples.
    parts = tuple(limits) if isinstance(limits, tuple | list) else ()
    if len(parts) == 2 and all(map(is_integer, parts)) and 1 <= parts[0] <= parts[1]:
        return parts[0], parts[1]
    raise UsageError(
        f"parallel must be (low, high) with 1 <= low <= high, got {limits!r}",
        hint="parallel=(1, 4) is one to four blocks side by side",
    )


def check_sequential_every(every: int | None) -> None:
    """Raises `UsageError` unless `every` is `None` or an integer of at least 2."""
    if every is not None and (not is_integer(every) or every < 2):
        raise UsageError(
            f"sequential_every must be an integer of at least 2, got {every!r}",
            hint="sequential_every=4; Sequential() draws only the sequential order",
        )


def check_probability(p: float) -> None:
    """Raises `UsageError` unless `p` is a number in [0, 1)."""
    is_number = isinstance(p, int | float) and not isinstance(p, bool)
    if not is_number or not 0.0 <= p < 1.0:
        raise UsageError(f"A drop probability must be in [0, 1), got {p}", hint="0.2 is usual")


def check_kept(k: object, *, order: str, choose: str, passes: object) -> None:
    """Raises `UsageError` for options that `Kept` cannot have, whatever the depth."""
    if not is_integer(k):
        raise UsageError(f"k must be an integer, got {k!r}", hint="Kept(9)")
    _check_word("order", order, ("sequential", "arbitrary"))
    _check_word("choose", choose, ("random", "spaced", "first", "last"))
    if not is_integer(passes) or passes < 1:
        raise UsageError(f"passes must be an integer of at least 1, got {passes!r}")


def _check_word(field: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise UsageError(
            f"{field}={value!r} is not an option of Kept", hint=f"one of {', '.join(allowed)}"
        )


def check_kept_count(k: int, depth: int, *, fixed: tuple[int, int]) -> None:
    """Raises `UsageError` unless a model with `depth` blocks can keep `k` of them."""
    ends = sum(fixed)
    fewest = max(1, ends)
    if fewest <= k <= depth:
        return
    if not ends:
        raise UsageError(
            f"Cannot keep {k} blocks of a model with {depth}",
            hint=f"choose a number between {fewest} and {depth}",
        )
    raise UsageError(
        f"Cannot keep {k} blocks of a model with {depth}, of which {ends} keep their place",
        hint=f"choose a number between {fewest} and {depth}, or draw all blocks: fixed=(0, 0), "
        "--fixed 0,0",
    )


def check_random_count(low: int, high: int, *, depth: int, ends: int) -> None:
    """Raises `UsageError` unless `low` to `high` blocks, the `ends` among them, can be kept."""
    fewest = max(1, ends)
    if fewest <= low <= high <= depth:
        return
    which = f"a model with {depth}"
    if ends:
        which += f" of which {ends} keep their place"
    raise UsageError(
        f"A random number of blocks between {low} and {high} does not fit {which}",
        hint=f"choose {fewest} <= low <= high <= {depth}, or leave high out for all blocks",
    )


def too_many_ends(fixed: tuple[int, int], depth: int) -> UsageError:
    """The error for ends which leave a model fewer than two blocks to draw."""
    first, last = fixed
    most = depth - 2
    return UsageError(
        f"fixed=({first}, {last}) leaves fewer than two blocks to draw of a model with {depth}, so "
        "it has one order",
        hint=f"let at most {most} of them keep their place" if most > 0 else "fixed=(0, 0)",
    )


def passes_without_count(text: str) -> UsageError:
    """The error for a mode with passes that does not say how many blocks run again."""
    return UsageError(
        f"{text!r} does not say how many blocks run again",
        hint="kept:K:ORDER:passes=2, where K may be the number of all blocks",
    )


def unknown_mode(text: str, words: Sequence[str]) -> UsageError:
    """The error for a text that is no mode, with the nearest one; `words` are without options."""
    if words == ["shuffled"]:
        hint = "did you mean 'arbitrary'?"
    else:
        kept = ":".join(["kept", *(words[1:] or ["9"])])
        choices = ("sequential", "arbitrary", kept)
        hint = did_you_mean(":".join(words), choices, otherwise=f"modes are {_MODES}")
    return UsageError(f"{text!r} is not an evaluation mode", hint=hint)
