"""The named forms of position encoding and prediction, as plain data without torch.

The encoding follows the paper's text (section 3.3), the prediction the authors' code, which differs
from the text of section 3.4: the sum of the text costs most of the model's accuracy
on digit pairs. Each difference between the two has a name here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from layershuffle.ground.errors import UsageError

_CHOICES = {
    "table": ("per-block", "shared"),
    "table_init": ("normal", "zero"),
    "projection_init": ("default", "zero", "normal"),
    "pooling": ("class", "mean"),
    "loss": ("sum", "mean"),
    "init": ("default", "normal"),
}


@dataclass(frozen=True, kw_only=True)
class EncodingForm:
    """How the position is added to a block's input (paper, section 3.3)."""

    # pydantic reads this when it checks settings; otherwise it ignores unknown fields.
    __pydantic_config__: ClassVar[dict[str, Any]] = {"extra": "forbid"}

    table: Literal["per-block", "shared"] = "per-block"
    """One embedding table per block (paper), or one for all blocks (authors' code)."""
    table_init: Literal["normal", "zero"] = "normal"
    """normal: deviation 1, as torch embeddings start; zero: authors' code."""
    projection_init: Literal["default", "zero", "normal"] = "default"
    """torch's default; zero, so that the first step computes the unchanged model; or normal with
    deviation 0.02 and a bias of zero (authors' code)."""
    features: int = 32
    """Width of a position's embedding, F in the paper."""
    dropout: float = 0.0
    """Dropout of the embedding (the paper names no rate; the authors' code uses 0)."""

    def __post_init__(self) -> None:
        _check_choices(self)
        if self.features < 1 or not 0.0 <= self.dropout < 1.0:
            raise UsageError(
                f"A position encoding needs at least one feature and a dropout in [0, 1), got "
                f"features={self.features} and dropout={self.dropout}"
            )


@dataclass(frozen=True, kw_only=True)
class PredictionForm:
    """How the position is predicted from a block's output (paper, section 3.4)."""

    __pydantic_config__: ClassVar[dict[str, Any]] = {"extra": "forbid"}

    pooling: Literal["class", "mean"] = "mean"
    """The class token (paper's text), or the mean over all tokens (authors' code); models without
    a class token need mean."""
    loss: Literal["sum", "mean"] = "mean"
    """Sum over the blocks (paper's text), or mean (authors' code)."""
    weight: float = 1.0
    """Factor of the position loss."""
    init: Literal["default", "normal"] = "normal"
    """Start of the classifiers: torch's default, or normal with deviation 0.02 and a bias of zero
    (authors' code)."""

    def __post_init__(self) -> None:
        _check_choices(self)


def _check_choices(form: EncodingForm | PredictionForm) -> None:
    for name, allowed in _CHOICES.items():
        # The two forms share one table of choices; a field that a form lacks passes.
        value = getattr(form, name, allowed[0])
        if value not in allowed:
            raise UsageError(
                f"{type(form).__name__} has no {name}={value!r}",
                hint=f"one of {', '.join(allowed)}",
            )


AUTHORS_ENCODING = EncodingForm(table="shared", table_init="zero", projection_init="normal")
