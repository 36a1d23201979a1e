"""The paper's claims, one by one, against this study's numbers.

Every claim has a criterion, written down before the study was scored but with smaller studies
known, and its verdict is computed: `holds`, `holds partly`, `does not hold`, or `not measured`
where the study lacks what it takes. Differences are between means over models; their 95 % intervals
are Welch's (1947).
"""

from __future__ import annotations

from collections.abc import Sequence

from layershuffle.study.claims import accuracy, merges, positions, pruning
from layershuffle.study.claims.base import Claim
from layershuffle.study.evidence import Evidence
from layershuffle.study.facts import Table
from layershuffle.study.pieces import Piece
from layershuffle.study.sections import Section
from layershuffle.study.summary import Summary

CLAIMS = (
    accuracy.works_in_any_order,
    accuracy.price_of_arbitrary_order,
    accuracy.sequential_in_between,
    accuracy.position_helps_slightly,
    accuracy.predicting_costs_a_little,
    accuracy.predict_varies_most,
    positions.position_is_predicted,
    pruning.prunes_like_layerdrop,
    pruning.layerdrop_is_whole,
    pruning.refined_at_nine,
    pruning.refined_at_depth_is_better,
    pruning.alone_in_arbitrary_order,
    pruning.identity_draw,
    positions.outputs_depend_on_position,
    positions.early_positions_lie_apart,
    merges.merges_lose_little,
    merges.merged_baselines_fail,
    merges.merges_vary_more,
    merges.ensemble_is_better,
)


def judge(summary: Summary, pieces: Sequence[Piece]) -> list[Claim]:
    """All claims with their verdicts."""
    evidence = Evidence(summary, tuple(pieces))
    return [make(evidence) for make in CLAIMS]


def claims_section(summary: Summary, pieces: Sequence[Piece]) -> Section | None:
    """The section, or `None` while there is nothing to judge by."""
    claims = judge(summary, pieces)
    if all(claim.verdict == "not measured" for claim in claims):
        return None
    rows = tuple((c.says, c.where, c.verdict, c.evidence, c.criterion) for c in claims)
    head = ("The paper says", "Where", "Here", "Numbers", "Criterion")
    return Section(
        title="Claim by claim",
        sentences=(
            "Top-1 in percent of means over models; intervals of differences are 95 % (Welch). "
            "The data are not the paper's, so a claim that does not hold here may hold there.",
        ),
        tables=(Table(title="", head=head, rows=rows),),
    )
