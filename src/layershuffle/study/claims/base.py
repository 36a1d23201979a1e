"""How a claim of the paper is judged: criterion, verdict, and the numbers behind it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from layershuffle.stats import mean, welch_interval
from layershuffle.study.evidence import Evidence

Verdict = Literal["holds", "holds partly", "does not hold", "not measured"]
Judgement = tuple[Verdict, str] | None
SLIGHT = 2.0  # points that count as a slight difference
PAR = 5.0  # points that still count as on a par


@dataclass(frozen=True, kw_only=True)
class Claim:
    """One claim: what the paper says and where, our criterion, verdict, and numbers."""

    says: str
    where: str
    criterion: str
    verdict: Verdict
    evidence: str


Decide = Callable[[Evidence], Judgement]
Make = Callable[[Evidence], Claim]


def claim(*, says: str, where: str, criterion: str) -> Callable[[Decide], Make]:
    """Turn a function that judges (`None`: the study lacks what it takes) into one that claims."""

    def decorate(decide: Decide) -> Make:
        def make(evidence: Evidence) -> Claim:
            verdict, words = decide(evidence) or ("not measured", "-")
            return Claim(
                says=says, where=where, criterion=criterion, verdict=verdict, evidence=words
            )

        return make

    return decorate


def difference(one: Sequence[float], two: Sequence[float]) -> tuple[float, str]:
    """Mean of `one` minus mean of `two`, and the same in words with its 95 % interval."""
    by = mean(one) - mean(two)
    if min(len(one), len(two)) < 2:
        return by, f"{by:+.2f} points (one model, no interval)"
    low, high = welch_interval(one, two)
    return by, f"{by:+.2f} points ({low:+.2f} to {high:+.2f})"


def within(one: Sequence[float], two: Sequence[float], *, low: float, high: float) -> Judgement:
    """Whether the difference of the means lies between the bounds, and its interval too."""
    if min(len(one), len(two)) < 2:
        return None
    by, words = difference(one, two)
    least, most = welch_interval(one, two)
    if low < least and most < high:
        return "holds", words
    return ("holds partly" if low < by < high else "does not hold"), words


def graded(parts: Sequence[bool]) -> Verdict:
    """All parts, some, or none."""
    if all(parts):
        return "holds"
    return "holds partly" if any(parts) else "does not hold"
