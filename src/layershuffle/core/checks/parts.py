"""Whether a model has the parts that a method trains."""

from __future__ import annotations

from weakref import WeakKeyDictionary

from torch import nn

from layershuffle.core.losses import positioned_in
from layershuffle.core.policies import drawn_blocks
from layershuffle.core.position import PositionedModel
from layershuffle.core.stack import blocks_of, stack_of
from layershuffle.core.tying import places_tied
from layershuffle.ground.errors import UsageError

# Stacks that were tied when they were asked, and the number of their different blocks.
_TIED: WeakKeyDictionary[nn.Module, int] = WeakKeyDictionary()


def check_parts(
    model: nn.Module,
    *,
    name: str,
    branch_scale: float,
    distinct: int | None,
    position: str,
    fixed: tuple[int, int],
) -> None:
    """Raises `UsageError` if the model was not prepared for the method `name` and its options."""
    hint = "model = method.prepare(model, images), before the optimiser gets its parameters"
    if position != "none":
        positioned = positioned_in(model)
        part = "encoding" if position == "encode" else "prediction"
        if positioned is None or getattr(positioned, part) is None:
            raise UsageError(
                f"The method trains a position {part}, which the model lacks", hint=hint
            )
    stack = stack_of(model)
    if stack.fixed != fixed:
        raise UsageError(
            f"The method trains a model with fixed={fixed}, and this one has fixed={stack.fixed}: "
            "the first and the last blocks, which keep their place",
            hint=hint,
        )
    if branch_scale != 1 and not stack.shuffled:
        raise not_begun(name, branch_scale)
    if distinct is not None and _TIED.get(stack) != distinct:
        blocks = blocks_of(model)
        places = places_tied(blocks) or range(len(blocks))
        different = len({places[block] for block in drawn_blocks(len(blocks), fixed)})
        if different != distinct:
            raise UsageError(
                f"The method trains {distinct} different blocks; the model has {different}",
                hint=hint,
            )
        _TIED[stack] = distinct


def not_begun(name: str, branch_scale: float) -> UsageError:
    """The error for a model whose drawn blocks were not scaled for the method `name`."""
    return UsageError(
        f"{name} begins with drawn blocks that add {branch_scale:g} of what they did, and needs "
        "images to find the weights that it multiplies",
        hint="model = method.prepare(model, images), with a batch of any values; branch_scale=1 "
        "leaves the weights as they are",
    )


def check_position_parts(model: PositionedModel, *, name: str, position: str) -> None:
    """Raises `UsageError` if `model` has other position parts than the method `name` trains."""
    present: list[str] = []
    if model.encoding is not None:
        present.append("encode")
    if model.prediction is not None:
        present.append("predict")
    trained = [] if position == "none" else [position]
    if present != trained:
        raise UsageError(
            f"The model has the position parts {', '.join(present) or 'none'}, and the method "
            f"{name} trains {position}",
            hint="continue with the method that trained the model",
        )
