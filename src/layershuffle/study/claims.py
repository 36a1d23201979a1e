"""The paper's claims, one by one, against this study's numbers.

Every claim has a criterion that was fixed before looking, and its verdict is computed: `holds`,
`holds partly`, `does not hold`, or `not measured` where the study lacks what it takes. Differences
are between means over models; their 95 % intervals are Welch's (1947).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from layershuffle.study.evidence import Evidence
from layershuffle.study.facts import Table
from layershuffle.study.pieces import Piece
from layershuffle.study.sections import Section
from layershuffle.study.statistics import mean, welch_interval
from layershuffle.study.summary import Summary

Verdict = Literal["holds", "holds partly", "does not hold", "not measured"]
_PART = ("sources", "the model's own prediction part")  # see `analysis/position.py`
_PROBE = ("sources", "probe on the block's output")
_SLIGHT = 2.0  # points that count as a slight difference
_DIGITS = "{:+.2f} points ({:+.2f} to {:+.2f})"


@dataclass(frozen=True, kw_only=True)
class Claim:
    """One claim: what the paper says and where, our criterion, verdict, and numbers."""

    says: str
    where: str
    criterion: str
    verdict: Verdict
    evidence: str


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


def judge(summary: Summary, pieces: Sequence[Piece]) -> list[Claim]:
    """All claims with their verdicts."""
    evidence = Evidence(summary, tuple(pieces))
    return [make(evidence) for make in CLAIMS]


_Decide = Callable[[Evidence], tuple[Verdict, str] | None]
_Make = Callable[[Evidence], Claim]


def _claim(*, says: str, where: str, criterion: str) -> Callable[[_Decide], _Make]:
    def decorate(decide: _Decide) -> _Make:
        def make(evidence: Evidence) -> Claim:
            verdict, words = decide(evidence) or ("not measured", "-")
            return Claim(
                says=says, where=where, criterion=criterion, verdict=verdict, evidence=words
            )

        return make

    return decorate


def _difference(one: Sequence[float], two: Sequence[float]) -> tuple[float, str]:
    """Mean of `one` minus mean of `two`, and the same in words with its interval."""
    by = mean(one) - mean(two)
    if min(len(one), len(two)) < 2:
        return by, f"{by:+.2f} points (one model, no interval)"
    return by, _DIGITS.format(by, *welch_interval(one, two))


@_claim(
    says="With arbitrary order the ordinary model fails, LayerShuffle works",
    where="Table 1",
    criterion=(
        "baseline keeps at most a tenth, LayerShuffle at least half of the baseline's "
        "sequential top-1"
    ),
)
def _works_in_any_order(e: Evidence) -> tuple[Verdict, str] | None:
    base, fails = e.means("baseline", "sequential"), e.means("baseline", "arbitrary")
    ours = e.means("layershuffle", "arbitrary")
    if not (base and fails and ours):
        return None
    top, low, kept = mean(base), mean(fails), mean(ours)
    words = f"baseline {top:.1f} -> {low:.1f}, LayerShuffle {kept:.1f} in arbitrary order"
    both = (low <= top / 10, kept >= top / 2)
    return _graded(both), words


@_claim(
    says="The price of arbitrary order is about 20 % of accuracy (19.84 points)",
    where="abstract, Table 1",
    criterion=(
        "baseline sequential minus LayerShuffle arbitrary within 5 points of 19.84; partly if less"
    ),
)
def _price_of_arbitrary_order(e: Evidence) -> tuple[Verdict, str] | None:
    base, ours = e.means("baseline", "sequential"), e.means("layershuffle", "arbitrary")
    if not (base and ours):
        return None
    loss, words = _difference(base, ours)
    share = 100 * loss / mean(base)
    verdict: Verdict = "does not hold"
    if loss < 19.84 + 5:
        verdict = "holds" if loss > 19.84 - 5 else "holds partly"
    return verdict, f"{words}, {share:.1f} % of the baseline's accuracy"


@_claim(
    says="Telling a block its position helps only slightly",
    where="Table 1 (+0.84 points)",
    criterion=(
        f"a difference above 0 and below {_SLIGHT:g} points; partly if within {_SLIGHT:g} "
        "either way"
    ),
)
def _position_helps_slightly(e: Evidence) -> tuple[Verdict, str] | None:
    one, two = e.means("layershuffle-position", "arbitrary"), e.means("layershuffle", "arbitrary")
    if not (one and two):
        return None
    by, words = _difference(one, two)
    verdict: Verdict = "holds" if 0 < by < _SLIGHT else "does not hold"
    return ("holds partly" if -_SLIGHT < by <= 0 else verdict), words


@_claim(
    says="Predicting the position costs a little",
    where="Table 1 (-1.59 points)",
    criterion=(
        f"a difference below 0 and above -{_SLIGHT:g} points; partly if within {_SLIGHT:g} "
        "either way"
    ),
)
def _predicting_costs_a_little(e: Evidence) -> tuple[Verdict, str] | None:
    one, two = e.means("layershuffle-predict", "arbitrary"), e.means("layershuffle", "arbitrary")
    if not (one and two):
        return None
    by, words = _difference(one, two)
    verdict: Verdict = "holds" if -_SLIGHT < by < 0 else "does not hold"
    return ("holds partly" if 0 <= by < _SLIGHT else verdict), words


@_claim(
    says="Blocks know their position: it is predicted right in 99.99 % of cases",
    where="section 4.1",
    criterion="at least 99 % on test images; partly from 90 %",
)
def _position_is_predicted(e: Evidence) -> tuple[Verdict, str] | None:
    predict, plain = "layershuffle-predict", "layershuffle"
    share = e.fact("position", predict, path=(*_PART, "accuracy"))
    if share is None:
        return None
    words = f"{share:.2f} % by the trained heads"
    for arm in (predict, plain):
        probe = e.fact("position", arm, path=(*_PROBE, "accuracy"))
        if probe is not None:
            words += f"; {probe:.2f} % by a linear probe of {arm}'s frozen outputs"
    verdict: Verdict = "holds partly" if share >= 90 else "does not hold"
    return ("holds" if share >= 99 else verdict), words


@_claim(
    says=(
        "In sequential order LayerDrop and LayerShuffle prune alike; with 3 blocks LayerShuffle is "
        "better"
    ),
    where="Figure 1b",
    criterion="within 10 points at 9 and 6 blocks, LayerShuffle ahead at 3",
)
def _prunes_like_layerdrop(e: Evidence) -> tuple[Verdict, str] | None:
    gaps = {}
    for kept in (9, 6, 3):
        one = e.means("layershuffle", "sequential", kept=kept)
        two = e.means("layerdrop", "sequential", kept=kept)
        if not (one and two):
            return None
        gaps[kept] = mean(one) - mean(two)
    words = ", ".join(f"{gap:+.1f} points with {kept}" for kept, gap in gaps.items())
    both = (abs(gaps[9]) <= 10 and abs(gaps[6]) <= 10, gaps[3] > 0)
    return _graded(both), f"LayerShuffle minus LayerDrop: {words}"


@_claim(
    says="In arbitrary order LayerShuffle alone survives pruning, and degrades gracefully",
    where="Figure 1c",
    criterion=(
        "best of the paper's arms at 9, 6 and 3 blocks, and at least half of its top-1 left at 9"
    ),
)
def _alone_in_arbitrary_order(e: Evidence) -> tuple[Verdict, str] | None:
    full = e.means("layershuffle", "arbitrary")
    if not full:
        return None
    words, best = [], True
    for kept in (9, 6, 3):
        one = e.means("layershuffle", "arbitrary", kept=kept)
        others = [e.means(arm, "arbitrary", kept=kept) for arm in ("layerdrop", "truncated")]
        if not one or not any(others):
            return None
        highest = max(mean(values) for values in others if values)
        best = best and mean(one) > highest
        words.append(f"with {kept} {mean(one):.1f} against {highest:.1f}")
    graceful = mean(e.means("layershuffle", "arbitrary", kept=9)) >= mean(full) / 2
    said = f"LayerShuffle {mean(full):.1f} with all, {', '.join(words)} of the next best"
    return _graded((best, graceful)), said


@_claim(
    says="Models refined at 3 and 6 blocks are significantly better there than a pruned one",
    where="Figure 1b",
    criterion="above LayerShuffle and LayerDrop in sequential order at both, intervals apart",
)
def _refined_at_depth_is_better(e: Evidence) -> tuple[Verdict, str] | None:
    words, apart = [], []
    for kept in (3, 6):
        one = e.means("truncated", "sequential", kept=kept)
        others = [e.means(arm, "sequential", kept=kept) for arm in ("layershuffle", "layerdrop")]
        if len(one) < 2 or not all(len(values) > 1 for values in others):
            return None
        two = max(others, key=mean)
        _, said = _difference(one, two)
        apart.append(welch_interval(one, two)[0] > 0)
        words.append(f"with {kept} {said} above the better of the two")
    return _graded((apart[0], apart[1])), "; ".join(words)


@_claim(
    says="The 3-block model did well in arbitrary order because one of 5 draws was the identity",
    where="section 4.2",
    criterion=(
        "on draws other than the identity its top-1 falls to at most a third of the identity's"
    ),
)
def _identity_draw(e: Evidence) -> tuple[Verdict, str] | None:
    straight, others = e.by_identity("truncated", 3)
    if not (straight and others):
        return None
    one, two = mean(straight), mean(others)
    words = (
        f"identity {one:.1f} ({len(straight)} draws), others {two:.1f} ({len(others)} draws); "
        "5 draws of 6 orders hit the identity with probability 0.60"
    )
    verdict: Verdict = "holds partly" if two < one else "does not hold"
    return ("holds" if two <= one / 3 else verdict), words


@_claim(
    says="Merged LayerShuffle models lose nothing (abstract; the paper's own Table 2: 3.09 points)",
    where="abstract, section 4.4",
    criterion=f"merges within {_SLIGHT:g} points of single models; partly within 5",
)
def _merges_lose_little(e: Evidence) -> tuple[Verdict, str] | None:
    found = e.merging("layershuffle")
    if "merge" not in found:
        return None
    by = found["merge"].mean - found["donor"].mean
    words = f"single {found['donor'].mean:.2f}, merged {found['merge'].mean:.2f}: {by:+.2f} points"
    verdict: Verdict = "holds partly" if by >= -5 else "does not hold"
    return ("holds" if by >= -_SLIGHT else verdict), words


@_claim(
    says="Merges of ordinary models are unusable",
    where="Table 2 (82.61 to 1.87)",
    criterion=(
        "merged baselines keep at most a tenth of the single models' top-1; partly up to a half"
    ),
)
def _merged_baselines_fail(e: Evidence) -> tuple[Verdict, str] | None:
    found = e.merging("baseline")
    if "merge" not in found:
        return None
    one, two = found["donor"].mean, found["merge"].mean
    verdict: Verdict = "holds partly" if two <= one / 2 else "does not hold"
    return ("holds" if two <= one / 10 else verdict), f"single {one:.2f}, merged {two:.2f}"


@_claim(
    says="Merged LayerShuffle models vary more than single ones",
    where="section 4.4 (1.15 against 0.41)",
    criterion="standard deviation over merges above that over single models",
)
def _merges_vary_more(e: Evidence) -> tuple[Verdict, str] | None:
    found = e.merging("layershuffle")
    one, two = (found[kind].sd_models if kind in found else None for kind in ("donor", "merge"))
    if one is None or two is None:
        return None
    words = f"single {one:.2f} (over models, orders averaged), merged {two:.2f} (one order each)"
    return ("holds" if two > one else "does not hold"), words


@_claim(
    says="An ensemble of the 12 models is clearly better than one",
    where="Table 2 (+6.43 points)",
    criterion=f"more than {_SLIGHT:g} points above the single models; partly if above at all",
)
def _ensemble_is_better(e: Evidence) -> tuple[Verdict, str] | None:
    found = e.merging("layershuffle")
    if "ensemble" not in found:
        return None
    by = found["ensemble"].mean - found["donor"].mean
    words = f"ensemble {found['ensemble'].mean:.2f}, {by:+.2f} points"
    verdict: Verdict = "holds partly" if by > 0 else "does not hold"
    return ("holds" if by > _SLIGHT else verdict), words


@_claim(
    says="A block's output depends on its position",
    where="Figure 4",
    criterion=(
        "neighbours of an output share its position (+-1) at least 1.5 times as often as by chance"
    ),
)
def _outputs_depend_on_position(e: Evidence) -> tuple[Verdict, str] | None:
    share = e.fact("umap", "layershuffle", path=("tokens", "mean", "purity"))
    chance = e.fact("umap", "layershuffle", path=("tokens", "mean", "chance"))
    if share is None or chance is None:
        return None
    words = f"{100 * share:.0f} % of neighbours (mean token), {100 * chance:.0f} % by chance"
    verdict: Verdict = "holds partly" if share > chance else "does not hold"
    return ("holds" if share >= 1.5 * chance else verdict), words


@_claim(
    says="Outputs at the first positions lie apart from the rest",
    where="Figure 4, section 4.3",
    criterion="positions 0 and 1 detached (`analysis/umap.py`) in at least half of the blocks, "
    "class or mean token",
)
def _early_positions_lie_apart(e: Evidence) -> tuple[Verdict, str] | None:
    blocks = e.fact("umap", "layershuffle", path=("blocks",))
    found = {
        token: e.fact("umap", "layershuffle", path=("tokens", token, "detached_blocks"))
        for token in ("class", "mean")
    }
    known = {token: count for token, count in found.items() if count is not None}
    if blocks is None or not known:
        return None
    said = [f"{count:.0f} of {blocks:.0f} blocks ({token})" for token, count in known.items()]
    most = max(known.values())
    verdict: Verdict = "holds partly" if most > 0 else "does not hold"
    return ("holds" if most >= blocks / 2 else verdict), f"detached in {', '.join(said)}"


def _graded(parts: tuple[bool, bool]) -> Verdict:
    if all(parts):
        return "holds"
    return "holds partly" if any(parts) else "does not hold"


CLAIMS = (
    _works_in_any_order,
    _price_of_arbitrary_order,
    _position_helps_slightly,
    _predicting_costs_a_little,
    _position_is_predicted,
    _prunes_like_layerdrop,
    _alone_in_arbitrary_order,
    _refined_at_depth_is_better,
    _identity_draw,
    _merges_lose_little,
    _merged_baselines_fail,
    _merges_vary_more,
    _ensemble_is_better,
    _outputs_depend_on_position,
    _early_positions_lie_apart,
)
