"""The paper's numbers, each with its place (arXiv 2407.04513, sections 4.1 to 4.4).

ImageNet2012 validation accuracy (top-1, percent) of ViT-B/16 with 12 blocks, 5 models per method.
Table 1 gives numbers. Figure 1 gives curves that the text only describes in words: those entries
have a "~", before a value or a range. Scores that the text leaves vague (6 blocks; LayerDrop in
arbitrary order, which "does not perform well") are left out.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

REFERENCE = "arXiv 2407.04513"
SETTING = "ImageNet2012 with ViT-B/16, 5 models per method"
DEPTH = 12


@dataclass(frozen=True)
class PaperNumber:
    """A top-1 accuracy in percent as the report prints it: with its spread, or a range.

    `text` begins with "~" where the paper's text only describes the number.
    """

    method: str
    mode: Literal["sequential", "arbitrary"]
    kept: int
    text: str

    @property
    def range(self) -> tuple[float, float]:
        """The ends of the range, which are equal for a value."""
        low, _, high = self.text.lstrip("~").partition(" ")[0].partition("-")
        return float(low), float(high or low)

    @property
    def value(self) -> float:
        """The number, or the middle of the range."""
        return sum(self.range) / 2


NUMBERS: tuple[PaperNumber, ...] = (
    PaperNumber("baseline", "sequential", 12, "82.61 +-0.08"),
    PaperNumber("baseline", "arbitrary", 12, "0.13 +-0.03"),
    PaperNumber("layershuffle", "sequential", 12, "75.22 +-0.28"),
    PaperNumber("layershuffle", "arbitrary", 12, "62.77 +-0.41"),
    PaperNumber("layershuffle-position", "sequential", 12, "75.28 +-0.18"),
    PaperNumber("layershuffle-position", "arbitrary", 12, "63.61 +-0.23"),
    PaperNumber("layershuffle-predict", "sequential", 12, "74.41 +-0.20"),
    PaperNumber("layershuffle-predict", "arbitrary", 12, "61.18 +-1.06"),
    # The text gives one range for both methods at 9 blocks, and a value for each at 3.
    PaperNumber("layershuffle", "sequential", 9, "~70-80"),
    PaperNumber("layershuffle", "sequential", 3, "~18"),
    PaperNumber("layerdrop", "sequential", 9, "~70-80"),
    PaperNumber("layerdrop", "sequential", 3, "~0"),
)


def paper_number(arm: str, mode: str, *, kept: int, depth: int) -> PaperNumber | None:
    """The paper's number for an arm of a model with `depth` blocks, if it has one.

    Arms with options of their own ("layerdrop-p0.5") have none. For another depth than the
    paper's 12, only the full stack compares.
    """
    if depth not in (kept, DEPTH):
        return None
    # All blocks of any model are compared with all 12 of the paper.
    kept_in_paper = DEPTH if kept == depth else kept
    for number in NUMBERS:
        if (number.method, number.mode, number.kept) == (arm, mode, kept_in_paper):
            return number
    return None


@dataclass(frozen=True)
class PaperMerge:
    """A row of the paper's Table 2; accuracies in percent, `sd` over the merges."""

    kind: Literal["merge", "ensemble"]
    arm: str
    top1: float
    top1_sd: float | None
    top5: float
    top5_sd: float | None


MERGES: tuple[PaperMerge, ...] = (
    PaperMerge("merge", "baseline", 1.87, 6.51, 4.53, 11.82),
    PaperMerge("merge", "layershuffle", 59.68, 1.15, 82.16, 1.03),
    # There is only one ensemble of the 12 models, so there is no spread.
    PaperMerge("ensemble", "layershuffle", 69.20, None, 88.93, None),
)
