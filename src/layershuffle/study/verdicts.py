"""Claims, their criteria and verdicts.

Verdicts are computed: `holds`, `holds partly`, `does not hold`, `undecided` where the study is too
small to tell, or `not measured` where it lacks the scores. Differences are between means over
models, paired over the seeds that both arms have. If they share none, as merges and single models,
the 95 % interval is Welch's (1947).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from layershuffle.stats import compare
from layershuffle.study.summary import Summary

Verdict = Literal["holds", "holds partly", "does not hold", "undecided", "not measured"]
Judgement = tuple[Verdict, str] | None
"""The verdict and the numbers behind it; `None` if the study lacks the scores."""
CellKey = tuple[str, str, int | None]
"""Arm, mode, blocks kept (`None`: all)."""
GapBounds = tuple[float, float]
SLIGHT = 2.0  # points that count as a slight difference
PAR = 5.0  # points that still count as on a par


def grade(holds: bool, partly: bool = False) -> Verdict:
    """The verdict of a criterion that was measured."""
    if holds:
        return "holds"
    return "holds partly" if partly else "does not hold"


Judge = Callable[[Summary], Judgement]


@dataclass(frozen=True, kw_only=True)
class PaperClaim:
    """A claim of the paper and its place, our criterion, and the function that judges it."""

    says: str
    where: str
    criterion: str
    judge: Judge


# Filled by `claim` in `study/claims.py`, in the order of that file, which the report keeps.
CLAIMS: list[PaperClaim] = []


def claim(*, says: str, where: str, criterion: str) -> Callable[[Judge], None]:
    """Add a claim that the decorated function judges."""

    def add(judge: Judge) -> None:
        CLAIMS.append(PaperClaim(says=says, where=where, criterion=criterion, judge=judge))

    return add


def between(
    ours: CellKey, theirs: CellKey, *, holds: GapBounds, partly: GapBounds, interval: bool = False
) -> Judge:
    """A judge of whether the difference of two cells' means lies between bounds.

    With `interval`, the whole 95 % interval must lie between the bounds `holds`, which are then
    excluded, because a difference of 0 is neither a gain nor a loss.
    """

    def judge(s: Summary) -> Judgement:
        pair = [s.means(arm, mode, kept=kept) for arm, mode, kept in (ours, theirs)]
        if min(map(len, pair)) < (2 if interval else 1):
            return None
        gap = compare(*pair)
        if interval:
            within = holds[0] < gap.low and gap.high < holds[1]
            return grade(within, partly[0] < gap.points < partly[1]), str(gap)
        # Without an interval one model of each arm is enough.
        within = holds[0] <= gap.points <= holds[1]
        return grade(within, partly[0] <= gap.points <= partly[1]), str(gap)

    return judge
