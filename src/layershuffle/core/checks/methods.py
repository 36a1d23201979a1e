"""Options of a method that are wrong or exclude each other."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from layershuffle.core.checks.orders import is_integer
from layershuffle.core.draws import whole_number
from layershuffle.ground.errors import UsageError
from layershuffle.ground.text import did_you_mean

_COUNTS = ("orders_per_batch", "min_kept", "max_parallel", "distinct", "kept")


def check_name(name: str, presets: Collection[str]) -> None:
    """Raises `UsageError` for a name that no preset has, with the nearest one."""
    if name not in presets:
        hint = did_you_mean(name, presets, otherwise=f"one of {', '.join(presets)}")
        raise UsageError(f"There is no method {name!r}", hint=hint)


def check_options(
    name: str,
    options: Mapping[str, Any],
    *,
    seed: object,
    parts: Sequence[str],
    shuffles: bool,
    is_sequential: bool,
) -> None:
    """Raises `UsageError` for options of the method `name` that are wrong or exclude each other.

    `parts`: the words that `position` may be. `shuffles`: the method draws orders.
    `is_sequential`: every order of the method has all blocks, one after the other in sequence, if
    nothing else makes it differ.
    """
    for option in _COUNTS:
        number = options[option]
        if number is not None and (not is_integer(number) or number < 1):
            raise UsageError(f"{option} must be a whole number from 1, got {number!r}")
    whole_number("seed", seed)
    position = options["position"]
    if position not in parts:
        raise UsageError(f"position must be one of {', '.join(parts)}, got {position!r}")
    block_drop = options["block_drop"]
    min_kept = options["min_kept"]
    if block_drop is not None and min_kept is not None:
        raise UsageError(
            f"block_drop={block_drop} and min_kept={min_kept} both say how many blocks run",
            hint="give one of them; layershuffle and baseline have neither of their own",
        )
    kept = options["kept"]
    if name == "truncated" and kept is None:
        raise UsageError(
            "truncated needs the number of blocks that the model is made of", hint="--kept 6"
        )
    if kept is None and options["choose"] is not None:
        raise UsageError(
            f"choose={options['choose']} says which blocks are kept, but not how many of them",
            hint="give kept, too: --kept 6",
        )
    _check_counts(options)
    every = options["sequential_every"]
    if is_sequential and every is not None:
        raise UsageError(
            f"Every order of {name} is the sequential one already, not only every {every}th",
            hint="leave sequential_every out, or take the method layershuffle",
        )
    branch_scale = options["branch_scale"]
    if not 0 < branch_scale < math.inf:
        raise UsageError(f"branch_scale must be a number above 0, got {branch_scale}")
    if branch_scale != 1 and not shuffles:
        raise UsageError(
            f"branch_scale={branch_scale} is a start for drawn orders, and {name} has none",
            hint="leave it out, or take a method that draws orders, such as layershuffle",
        )
    for option in ("exit_weight", "self_distillation"):
        weight = options[option]
        if weight is not None and not weight > 0:
            raise UsageError(
                f"{option} must be above 0, got {weight}",
                hint="leave it out for no exit; anyorder without one is layershuffle with "
                "orders_per_batch=4, sequential_every=4, branch_scale=0.1 and fixed=(1, 1)",
            )


def _check_counts(options: Mapping[str, Any]) -> None:
    """Raises `UsageError` if the numbers of blocks do not fit each other."""
    kept = options["kept"]
    fixed = options["fixed"]
    ends = sum(fixed)
    for option, own in (("min_kept", 0), ("distinct", ends)):
        number = options[option]
        if number is not None and kept is not None and number > kept - own:
            raise UsageError(
                f"{option}={number} is more than the {kept} blocks that the model keeps"
                + (f", of which {own} keep their place" if own else ""),
                hint=f"give at most {kept - own}",
            )
    for option, fewest in (("min_kept", ends), ("kept", ends + 2 if ends else 1)):
        number = options[option]
        if number is not None and number < fewest:
            raise UsageError(
                f"{option}={number} is too few with fixed={fixed}, by which {ends} blocks keep "
                "their place",
                hint=f"give at least {fewest}",
            )


def other_depth(depth: int, kept: int | None, *, chosen: object) -> UsageError:
    """The error for a model of `depth` blocks where a method keeps `kept`: the blocks `chosen`."""
    return UsageError(
        f"The model has {depth} blocks, and this method trains one of {kept}",
        hint=f'first shorten it: layershuffle.models.truncate(model, "{chosen}")',
    )
