"""Token summaries of the inputs and outputs of blocks, per image, block and position."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from torch import Tensor

from layershuffle.core.hooks import Step

Token = Literal["class", "mean"]


def pooled(state: Tensor, token: Token) -> Tensor:
    """One vector per image, `[batch, width]`: the first token, or the mean over all tokens."""
    # To the CPU at once, because the vectors of all images are kept until the last batch.
    return (state[:, 0] if token == "class" else state.mean(dim=1)).float().cpu()


@dataclass(frozen=True)
class Turn:
    """One step: `vectors` `[rows, width]` per kind of token, those of the input as "input"."""

    step: Step
    vectors: dict[str, Tensor]


@dataclass
class FeatureWatch:
    """A block hook that records pooled outputs, and with `inputs` also pooled inputs.

    Inputs are recorded before a position encoding is added, if the model has one. Clear `turns`
    between forwards.
    """

    tokens: tuple[Token, ...] = ("mean",)
    inputs: bool = False
    turns: list[Turn] = field(default_factory=list)
    _input: dict[str, Tensor] = field(default_factory=dict)

    def before(self, state: Tensor, step: Step) -> Tensor:
        """Return the input unchanged."""
        del step
        # Hooks run in order, and the encoding's hook comes last, so it is not yet added here.
        self._input = {"input": pooled(state, self.tokens[0])} if self.inputs else {}
        return state

    def after(self, state: Tensor, step: Step) -> None:
        """Record the pooled output."""
        vectors = self._input | {str(token): pooled(state, token) for token in self.tokens}
        self.turns.append(Turn(step, vectors))
