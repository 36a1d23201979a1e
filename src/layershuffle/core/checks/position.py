"""What position parts cannot do: too long orders, unknown widths, guesses that nobody made."""

from __future__ import annotations

from collections.abc import Sequence, Sized

from torch import nn

from layershuffle.core.hooks import Step
from layershuffle.ground.errors import StackError, UsageError


def check_guessed(guesses: Sized) -> None:
    """Raises `UsageError` if no position was predicted."""
    if not guesses:
        raise UsageError(
            "No position was predicted",
            hint="first call the model inside `with model.guessing() as guesses:`",
        )


def check_position(step: Step, depth: int, *, part: str) -> None:
    """Raises `UsageError` at a position that the part of a model with `depth` blocks lacks."""
    if step.position >= depth:
        raise UsageError(
            f"The position {part} has {depth} positions, but the order is longer",
            hint="use an order no longer than the model's depth",
        )


def missing_prediction() -> UsageError:
    """The error for guesses of a model that predicts no positions."""
    return UsageError(
        "This model has no position prediction", hint="add_position(model, prediction=...)"
    )


def missing_class_token(model: nn.Module) -> UsageError:
    """The error for a prediction from the class token of a model without one."""
    return UsageError(
        f"{type(model).__name__} has no class token between its blocks to predict from",
        hint='use pooling="mean" (--prediction.pooling mean)',
    )


def unknown_width(model: nn.Module, names: Sequence[str]) -> StackError:
    """The error for a model that has its width in none of the attributes `names`."""
    return StackError(
        f"The width of {type(model).__name__} is unknown",
        hint=f"set one of the attributes {', '.join(names)}",
    )
