"""Claims on Table 2 and Figure 5."""

from __future__ import annotations

from layershuffle.stats import mean, welch_interval
from layershuffle.study.claims.base import PAR, SLIGHT, Judgement, Verdict, claim, difference
from layershuffle.study.evidence import Evidence


@claim(
    says="Merged LayerShuffle models lose nothing (abstract; the paper's own Table 2: 3.09 points)",
    where="abstract, section 4.4",
    criterion="the interval of merges minus single models reaches 0 or lies above; partly if they "
    "lose at most 5 points",
)
def merges_lose_little(e: Evidence) -> Judgement:
    one, two = e.merging_means("layershuffle", "merge"), e.merging_means("layershuffle", "donor")
    if min(len(one), len(two)) < 2:
        return None
    by, said = difference(one, two)
    words = f"single {mean(two):.2f}, merged {mean(one):.2f}: {said}"
    verdict: Verdict = "holds partly" if by >= -PAR else "does not hold"
    return ("holds" if welch_interval(one, two)[1] >= 0 else verdict), words


@claim(
    says="Merges of ordinary models are unusable",
    where="Table 2 (82.61 to 1.87)",
    criterion=(
        "merged baselines keep at most a tenth of the single models' top-1; partly up to a half"
    ),
)
def merged_baselines_fail(e: Evidence) -> Judgement:
    found = e.merging("baseline")
    if "merge" not in found:
        return None
    one, two = found["donor"].mean, found["merge"].mean
    verdict: Verdict = "holds partly" if two <= one / 2 else "does not hold"
    return ("holds" if two <= one / 10 else verdict), f"single {one:.2f}, merged {two:.2f}"


@claim(
    says="Merged LayerShuffle models vary more than single ones",
    where="section 4.4 (1.15 against 0.41)",
    criterion="standard deviation over merges, each in one order, above that over (single model, "
    "order) scores",
)
def merges_vary_more(e: Evidence) -> Judgement:
    one = e.spread_of_single_orders("layershuffle", "donor")
    two = e.spread_of_single_orders("layershuffle", "merge")
    if one is None or two is None:
        return None
    words = f"single models {one:.2f}, merged {two:.2f}, both over single orders"
    return ("holds" if two > one else "does not hold"), words


@claim(
    says="An ensemble of the 12 models is clearly better than one",
    where="Table 2 (+6.43 points)",
    criterion=f"more than {SLIGHT:g} points above the single models; partly if above at all",
)
def ensemble_is_better(e: Evidence) -> Judgement:
    found = e.merging("layershuffle")
    if "ensemble" not in found:
        return None
    by = found["ensemble"].mean - found["donor"].mean
    words = f"ensemble {found['ensemble'].mean:.2f}, {by:+.2f} points"
    verdict: Verdict = "holds partly" if by > 0 else "does not hold"
    return ("holds" if by > SLIGHT else verdict), words
