"""The settings of merging and ensembling. Plain data, no torch.

If the paper does not specify a choice, it has a name and a default here.
"""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from layershuffle.ground.settings import Positive
from layershuffle.scoring.settings import ScoreSettings

End = Literal["average", "first", "last", "donor", "base"]
Slots = Literal["own", "random"]
EnsembleOrders = Literal["same", "independent"]
Combine = Literal["logits", "probabilities"]


class _Ensemble(ScoreSettings):
    """How an ensemble is scored."""

    num_orders: Positive = 5
    """Orders drawn for each model (a merge gets one)."""
    ensemble_orders: EnsembleOrders = "independent"
    """One order for all members of an ensemble, or each member its own. `merge` reports both; this
    is the main one."""
    ensemble_combine: Combine = "logits"
    """Average logits (the paper) or probabilities. `merge` reports both; this is the main one."""


class MergingOptions(_Ensemble):
    """How random merges of several models are drawn and scored."""

    ends: Annotated[tuple[End, ...], Field(min_length=1)] = ("average",)
    """Source of stem and head (the paper does not say): the average of all donors, the donor of the
    first or last block, one donor drawn per merge, or the base checkpoint. Several values are
    reported side by side."""
    slots: Annotated[tuple[Slots, ...], Field(min_length=1)] = ("own",)
    """own: place i of a merge takes block i of its model; random: block pi(i), for a random
    permutation pi per merge. The second of two is scored with the first of the ends."""
    replacement: bool = False
    """May two blocks of a merge come from one model? (The paper: no.)"""
    draw: Literal["merge", "batch"] = "merge"
    """One execution order per merge (and per pass of the others), or a new one for every batch."""
    soups: bool = True
    """Also score the uniform and the greedy soup."""

    @property
    def variants(self) -> list[tuple[End, Slots]]:
        """The scored variants: the main one, then one change at a time."""
        variants: list[tuple[End, Slots]] = []
        for end in self.ends:
            variants.append((end, self.slots[0]))
        for slots in self.slots[1:]:
            variants.append((self.ends[0], slots))
        return variants

    # The rows of two equal ends could not be distinguished.
    @model_validator(mode="after")
    def _check(self) -> Self:
        for name, values in (("ends", self.ends), ("slots", self.slots)):
            if len(set(values)) < len(values):
                raise ValueError(f"{name} lists a value twice: {', '.join(values)}")
        return self


class MergingSettings(MergingOptions):
    """Random merges of several models, with their soups and ensembles."""

    merges: Positive = 100
    """Number of distinct merges to draw (the paper: 100)."""


class EnsembleSettings(_Ensemble):
    """How one ensemble is scored: the mode of its orders, and how often they are drawn."""

    modes: Literal["sequential", "arbitrary"] = "arbitrary"
    """Order mode that every member runs in."""
    draw: Literal["pass", "batch"] = "pass"
    """One order per pass over the data, or a new one for every batch."""
