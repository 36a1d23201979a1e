"""Claims on Table 1."""

from __future__ import annotations

from layershuffle.stats import deviation, mean, welch_interval
from layershuffle.study.claims.base import (
    SLIGHT,
    Judgement,
    Verdict,
    claim,
    difference,
    graded,
    within,
)
from layershuffle.study.evidence import Evidence


@claim(
    says="With arbitrary order the ordinary model fails, LayerShuffle works",
    where="Table 1",
    criterion=(
        "baseline keeps at most a tenth, LayerShuffle at least half of the baseline's "
        "sequential top-1"
    ),
)
def works_in_any_order(e: Evidence) -> Judgement:
    base, fails = e.means("baseline", "sequential"), e.means("baseline", "arbitrary")
    ours = e.means("layershuffle", "arbitrary")
    if not (base and fails and ours):
        return None
    top, low, kept = mean(base), mean(fails), mean(ours)
    words = f"baseline {top:.1f} -> {low:.1f}, LayerShuffle {kept:.1f} in arbitrary order"
    both = (low <= top / 10, kept >= top / 2)
    return graded(both), words


@claim(
    says="The price of arbitrary order is about 20 % of accuracy (19.84 points)",
    where="abstract, Table 1",
    criterion=(
        "baseline sequential minus LayerShuffle arbitrary within 5 points of 19.84; partly if less"
    ),
)
def price_of_arbitrary_order(e: Evidence) -> Judgement:
    base, ours = e.means("baseline", "sequential"), e.means("layershuffle", "arbitrary")
    if not (base and ours):
        return None
    loss, words = difference(base, ours)
    share = 100 * loss / mean(base)
    verdict: Verdict = "does not hold"
    if loss < 19.84 + 5:
        verdict = "holds" if loss > 19.84 - 5 else "holds partly"
    return verdict, f"{words}, {share:.1f} % of the baseline's accuracy"


@claim(
    says="Telling a block its position helps only slightly",
    where="Table 1 (+0.84 points)",
    criterion=f"the interval of the difference lies above 0 and below {SLIGHT:g} points; partly "
    "if it reaches beyond either, with the difference itself inside",
)
def position_helps_slightly(e: Evidence) -> Judgement:
    one, two = e.means("layershuffle-position", "arbitrary"), e.means("layershuffle", "arbitrary")
    return within(one, two, low=0.0, high=SLIGHT)


@claim(
    says="Predicting the position costs a little",
    where="Table 1 (-1.59 points)",
    criterion=f"the interval of the difference lies below 0 and above -{SLIGHT:g} points; partly "
    "if it reaches beyond either, with the difference itself inside",
)
def predicting_costs_a_little(e: Evidence) -> Judgement:
    one, two = e.means("layershuffle-predict", "arbitrary"), e.means("layershuffle", "arbitrary")
    return within(one, two, low=-SLIGHT, high=0.0)


@claim(
    says="LayerShuffle-predict varies most between models",
    where="Table 1 (1.06 against 0.41 and 0.23)",
    criterion="largest standard deviation over models in arbitrary order of the three variants",
)
def predict_varies_most(e: Evidence) -> Judgement:
    arms = ("layershuffle", "layershuffle-position", "layershuffle-predict")
    spreads = {arm: deviation(e.means(arm, "arbitrary")) for arm in arms}
    known = {arm: spread for arm, spread in spreads.items() if spread is not None}
    if len(known) < len(arms):
        return None
    words = ", ".join(f"{arm} {spread:.2f}" for arm, spread in known.items())
    most = max(known, key=lambda arm: known[arm])
    return ("holds" if most == "layershuffle-predict" else "does not hold"), words


@claim(
    says="LayerShuffle models are better in sequential than in arbitrary order, and below the "
    "ordinary model",
    where="section 4.1, Table 1",
    criterion="sequential above arbitrary, and below the sequential baseline, both intervals apart "
    "from 0",
)
def sequential_in_between(e: Evidence) -> Judgement:
    ours, shuffled = (e.means("layershuffle", mode) for mode in ("sequential", "arbitrary"))
    base = e.means("baseline", "sequential")
    if min(len(ours), len(shuffled), len(base)) < 2:
        return None
    above, below = welch_interval(ours, shuffled), welch_interval(ours, base)
    words = (
        f"sequential minus arbitrary {difference(ours, shuffled)[1]}; "
        f"minus the baseline {difference(ours, base)[1]}"
    )
    return graded((above[0] > 0, below[1] < 0)), words
