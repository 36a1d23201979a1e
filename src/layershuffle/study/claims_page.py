"""The paper's claims as a page of Markdown."""

from __future__ import annotations

from collections.abc import Sequence

from layershuffle.study.claims import judge
from layershuffle.study.claims.base import Claim
from layershuffle.study.paper import SETTING
from layershuffle.study.pieces import Piece
from layershuffle.study.summary import Summary
from layershuffle.study.tables import escape_markdown, study_words

_VERDICTS = ("holds", "holds partly", "does not hold", "not measured")


def claims_markdown(summary: Summary, pieces: Sequence[Piece]) -> str:
    """Every claim with its verdict, numbers and criterion."""
    claims = judge(summary, pieces)
    counts = ", ".join(
        f"{sum(claim.verdict == verdict for claim in claims)} {verdict}" for verdict in _VERDICTS
    )
    ours = escape_markdown(study_words(summary.study))
    lines = [
        f"# The paper, claim by claim: {escape_markdown(summary.study.name)}",
        "",
        f"Measured on {ours}; the paper's numbers are {SETTING}. A claim that does not hold on "
        f"other data may hold on the paper's. {counts}. Criteria and verdicts are code "
        "(`study/claims/`); differences are "
        "between means over models, with 95 % intervals (Welch).",
        "",
    ]
    for number, claim in enumerate(claims, start=1):
        lines += _one(number, claim)
    return "\n".join(lines).rstrip() + "\n"


def _one(number: int, claim: Claim) -> list[str]:
    return [
        f"## {number}. {escape_markdown(claim.says)}",
        "",
        f"*{escape_markdown(claim.where)}.* **{claim.verdict.capitalize()}.** "
        f"{escape_markdown(claim.evidence)}.",
        "",
        f"Criterion: {escape_markdown(claim.criterion)}.",
        "",
    ]
