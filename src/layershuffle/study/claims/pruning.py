"""Claims on Figures 1b and 1c."""

from __future__ import annotations

from layershuffle.stats import mean, welch_interval
from layershuffle.study.claims.base import (
    PAR,
    SLIGHT,
    Judgement,
    Verdict,
    claim,
    difference,
    graded,
)
from layershuffle.study.evidence import Evidence


@claim(
    says="In sequential order LayerShuffle prunes like LayerDrop at 6 blocks, slightly worse at 9, "
    "better at 3",
    where="Figure 1b",
    criterion="LayerShuffle minus LayerDrop: within 5 points of 0 at 6, between -10 and 0 at 9, "
    "above 0 with its interval at 3; partly if one or two of the three",
)
def prunes_like_layerdrop(e: Evidence) -> Judgement:
    found = {
        kept: [e.means(arm, "sequential", kept=kept) for arm in ("layershuffle", "layerdrop")]
        for kept in (9, 6, 3)
    }
    if any(len(values) < 2 for pair in found.values() for values in pair):
        return None
    gaps = {kept: mean(one) - mean(two) for kept, (one, two) in found.items()}
    words = ", ".join(f"{difference(*pair)[1]} with {kept}" for kept, pair in found.items())
    apart = welch_interval(*found[3])[0] > 0
    parts = (abs(gaps[6]) <= PAR, -2 * PAR <= gaps[9] <= 0, apart)
    return graded(parts), f"LayerShuffle minus LayerDrop: {words}"


@claim(
    says="LayerDrop comes close to the ordinary model's accuracy with all blocks",
    where="Figure 1b",
    criterion=f"within {SLIGHT:g} points below the baseline in sequential order; partly within 5",
)
def layerdrop_is_whole(e: Evidence) -> Judgement:
    one, two = e.means("layerdrop", "sequential"), e.means("baseline", "sequential")
    if not (one and two):
        return None
    by, words = difference(one, two)
    verdict: Verdict = "holds partly" if by >= -PAR else "does not hold"
    return ("holds" if by >= -SLIGHT else verdict), words


@claim(
    says="Models refined at 9 blocks are like LayerDrop pruned to 9",
    where="Figure 1b",
    criterion=f"within {SLIGHT:g} points in sequential order; partly within 5",
)
def refined_at_nine(e: Evidence) -> Judgement:
    one, two = (e.means(arm, "sequential", kept=9) for arm in ("truncated", "layerdrop"))
    if not (one and two):
        return None
    by, words = difference(one, two)
    verdict: Verdict = "holds partly" if abs(by) <= PAR else "does not hold"
    return ("holds" if abs(by) <= SLIGHT else verdict), words


@claim(
    says="In arbitrary order LayerShuffle alone survives pruning, and degrades gracefully",
    where="Figure 1c",
    criterion="at 9 and 6 blocks LayerDrop and the models refined there keep at most a tenth of "
    "LayerShuffle's top-1 (at 3 the paper has an exception); LayerShuffle keeps half of its top-1 "
    "at 9",
)
def alone_in_arbitrary_order(e: Evidence) -> Judgement:
    full, nine = (e.means("layershuffle", "arbitrary", kept=kept) for kept in (None, 9))
    if not (full and nine):
        return None
    words, alone = [], True
    for kept in (9, 6, 3):
        one = e.means("layershuffle", "arbitrary", kept=kept)
        others = {arm: e.means(arm, "arbitrary", kept=kept) for arm in ("layerdrop", "truncated")}
        known = {arm: mean(values) for arm, values in others.items() if values}
        if not (one and known):
            return None
        alone = alone and (kept == 3 or max(known.values()) <= mean(one) / 10)
        rest = ", ".join(f"{arm} {value:.1f}" for arm, value in known.items())
        words.append(f"with {kept} {mean(one):.1f} against {rest}")
    said = f"LayerShuffle {mean(full):.1f} with all, {'; '.join(words)}"
    return graded((alone, mean(nine) >= mean(full) / 2)), said


@claim(
    says="Models refined at 3 and 6 blocks are significantly better there than a pruned one",
    where="Figure 1b",
    criterion="above LayerShuffle and LayerDrop in sequential order at both, intervals apart",
)
def refined_at_depth_is_better(e: Evidence) -> Judgement:
    words, apart = [], []
    for kept in (3, 6):
        one = e.means("truncated", "sequential", kept=kept)
        others = [e.means(arm, "sequential", kept=kept) for arm in ("layershuffle", "layerdrop")]
        if len(one) < 2 or not all(len(values) > 1 for values in others):
            return None
        two = max(others, key=mean)
        _, said = difference(one, two)
        apart.append(welch_interval(one, two)[0] > 0)
        words.append(f"with {kept} {said} above the better of the two")
    return graded((apart[0], apart[1])), "; ".join(words)


@claim(
    says="The 3-block model did well in arbitrary order because one of 5 draws was the identity",
    where="section 4.2",
    criterion=(
        "on draws other than the identity its top-1 falls to at most a third of the identity's"
    ),
)
def identity_draw(e: Evidence) -> Judgement:
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
