"""The paper's claims, judged by this study's numbers.

Every claim has a criterion, written down before the study was scored but with smaller studies
known. The criteria of claims 4, 6, 7, 16 and 17 were rewritten when the reasons for their failures
had been measured, and those of 1, 12 and 17 when a study had ten classes: there
no accuracy falls to a tenth, so they are shares of what is above chance. Differences are between
means over models, paired over the seeds that both arms have; if they share none, as merges and
single models, the 95 % interval is Welch's (1947).
"""

from __future__ import annotations

from collections.abc import Callable, Sized
from dataclasses import dataclass
from math import inf, nan
from typing import Literal

from layershuffle.stats import Difference, compare, deviation, equal_spreads, mean
from layershuffle.study.paper.summary import Summary

Verdict = Literal["holds", "holds partly", "does not hold", "undecided", "not measured"]
Judgement = tuple[Verdict, str]
"""The verdict and the numbers behind it."""
Judge = Callable[[Summary], Judgement]
SLIGHT = 2.0  # points that count as a slight difference
PAR = 5.0  # points that still count as on a par
# Merges share their donors, so they are no independent sample of merges of other models.
_OVER_MERGES = " (over merges of these models)"


@dataclass(frozen=True, kw_only=True)
class PaperClaim:
    """A claim of the paper and its place, our criterion, and the function that judges it."""

    says: str
    where: str
    criterion: str
    judge: Judge


CLAIMS: list[PaperClaim] = []
"""Filled by `claim`, in the order of this file, which the report keeps."""


def claim(where: str, criterion: str) -> Callable[[Judge], None]:
    """Add a claim that the decorated function judges, and that its docstring states."""

    def add(judge: Judge) -> None:
        says = " ".join((judge.__doc__ or "").split()).removesuffix(".")
        CLAIMS.append(PaperClaim(says=says, where=where, criterion=criterion, judge=judge))

    return add


def fact_of(s: Summary, analysis: str, *, path: tuple[str, ...]) -> float:
    """A number of an analysis of LayerShuffle. Raises `NotMeasured`."""
    fact = s.fact(analysis, "layershuffle", path=path)
    if fact is None:
        raise NotMeasured
    return fact


def grade(holds: bool, partly: bool = False) -> Verdict:
    """The verdict of a criterion that was measured."""
    if holds:
        return "holds"
    return "holds partly" if partly else "does not hold"


class NotMeasured(Exception):
    """The study lacks the scores that a claim is about."""


def need(*scores: Sized, models: int = 1) -> None:
    """Raises `NotMeasured` if one of them has fewer than so many models."""
    if min(map(len, scores), default=0) < models:
        raise NotMeasured


def share(value: float, of: float, *, s: Summary) -> float:
    """What `value` is of another accuracy, both above chance; NaN if that was at chance itself."""
    return (value - s.chance) / (of - s.chance) if of > s.chance else nan


def gap_of(
    s: Summary, arms: tuple[str, str], *, mode: str, kept: int | None = None, models: int = 1
) -> Difference:
    """The difference of two arms. Raises `NotMeasured`."""
    pair = [s.means(arm, mode, kept=kept) for arm in arms]
    need(*pair, models=models)
    return compare(*pair)


@claim(
    "Table 1",
    "of the baseline's sequential top-1 above chance, baseline keeps at most a tenth, LayerShuffle "
    "at least half",
)
def _works_in_any_order(s: Summary) -> Judgement:
    """With arbitrary order the ordinary model fails, LayerShuffle works."""
    base, shuffled = s.means("baseline", "sequential"), s.means("baseline", "arbitrary")
    ours = s.means("layershuffle", "arbitrary")
    need(base if base and mean(base) > s.chance else (), shuffled, ours)
    top, low, high = mean(base), mean(shuffled), mean(ours)
    # Shares of the baseline, not points, because the level depends on the data.
    parts = (share(low, top, s=s) <= 1 / 10, share(high, top, s=s) >= 1 / 2)
    text = f"baseline {top:.1f} -> {low:.1f}, LayerShuffle {high:.1f} in arbitrary order"
    return grade(all(parts), any(parts)), text


@claim(
    "abstract, Table 1",
    "baseline sequential minus LayerShuffle arbitrary within 5 points of 19.84; partly if less",
)
def _price_of_arbitrary_order(s: Summary) -> Judgement:
    """The price of arbitrary order is about 20 % of accuracy (19.84 points)."""
    base, ours = s.means("baseline", "sequential"), s.means("layershuffle", "arbitrary")
    # Without a correct answer of the baseline there is no loss, and no share of its accuracy.
    need(base if base and mean(base) else (), ours)
    loss = compare(base, ours)
    # A smaller loss than the paper's is no failure, but not the paper's claim either.
    verdict = grade(abs(loss.points - 19.84) < PAR, loss.points < 19.84)
    return verdict, f"{loss}, {100 * loss.points / mean(base):.1f} % of the baseline's accuracy"


@claim(
    "section 4.1, Table 1",
    "sequential above arbitrary, and below the sequential baseline, both intervals apart from 0",
)
def _sequential_in_between(s: Summary) -> Judgement:
    """LayerShuffle models are better in sequential than in arbitrary order, and below the
    ordinary model."""
    ours, shuffled = (s.means("layershuffle", mode) for mode in ("sequential", "arbitrary"))
    base = s.means("baseline", "sequential")
    need(ours, shuffled, base, models=2)
    # Both intervals must exclude 0: the differences are small against the spread over seeds.
    gain, loss = compare(ours, shuffled), compare(ours, base)
    parts = (gain.low > 0, loss.high < 0)
    return grade(all(parts), any(parts)), (
        f"sequential minus arbitrary {gain}; minus the baseline {loss}"
    )


@claim(
    "Table 1 (+0.84 points)",
    "of the starts of the encoding that the study tried, the one with the lowest "
    "cross-entropy on held-out images: the interval of the difference lies above 0 and below "
    f"{SLIGHT:g} points; partly if it reaches beyond either, with the difference itself inside",
)
def _position_helps_slightly(s: Summary) -> Judgement:
    """Telling a block its position helps only slightly."""
    starts = s.held_out("layershuffle-position")
    ours = s.means("layershuffle", "arbitrary")
    scores = {arm: s.means(arm, "arbitrary") for arm in sorted(starts, key=starts.__getitem__)}
    need(scores)
    need(ours, *scores.values(), models=2)
    gaps = {arm: compare(values, ours) for arm, values in scores.items()}
    best = next(iter(gaps.values()))
    texts = (f"{arm} {gap}" for arm, gap in gaps.items())
    inside = best.low > 0 and best.high < SLIGHT
    return grade(inside, 0 < best.points < SLIGHT), "; ".join(texts)


@claim(
    "Table 1 (-1.59 points)",
    f"the interval of the difference lies below 0 and above -{SLIGHT:g} points; "
    "partly if it reaches beyond either, with the difference itself inside",
)
def _predict_costs_a_little(s: Summary) -> Judgement:
    """Predicting the position costs a little."""
    gap = gap_of(s, ("layershuffle-predict", "layershuffle"), mode="arbitrary", models=2)
    return grade(gap.low > -SLIGHT and gap.high < 0, -SLIGHT < gap.points < 0), str(gap)


@claim(
    "Table 1 (1.06 against 0.41 and 0.23)",
    "largest standard deviation over models in arbitrary order of the three variants; "
    "undecided unless the spreads differ (Brown and Forsythe's test, 5 %)",
)
def _predict_varies_most(s: Summary) -> Judgement:
    """LayerShuffle-predict varies most between models."""
    arms = ("layershuffle", "layershuffle-position", "layershuffle-predict")
    samples = [list(s.means(arm, "arbitrary").values()) for arm in arms]
    need(*samples, models=2)
    spreads = {arm: deviation(sample) or 0.0 for arm, sample in zip(arms, samples, strict=True)}
    most = max(spreads, key=lambda arm: spreads[arm])
    text = ", ".join(f"{arm} {spread:.2f}" for arm, spread in spreads.items())
    if min(map(len, samples)) < 3:
        return "undecided", text
    # The spread of five models is known only to a factor of two to three.
    p = equal_spreads(samples)
    verdict = grade(most == "layershuffle-predict") if p < 0.05 else "undecided"
    return verdict, f"{text}; equal spreads have p = {p:.2f}"


@claim(
    "section 4.1",
    "at least 99 % on test images by the heads of the longest training; partly from 90 %",
)
def _position_is_predicted(s: Summary) -> Judgement:
    """Blocks know their position: it is predicted right in 99.99 % of cases."""
    # The names of the sources in `analysis/position.py`.
    heads = ("sources", "the model's own prediction part", "accuracy")
    probes = ("sources", "probe on the block's output", "accuracy")
    lengths = sorted(s.lengths("layershuffle-predict").items())
    shares = {n: s.fact("position", arm, path=heads) for n, arm in lengths}
    shown = {steps: share for steps, share in shares.items() if share is not None}
    need(shown)
    # The paper trained 20 times as long as most of our arms; the longest is the most similar.
    share = shown[max(shown)]
    curve = ", ".join(f"{value:.2f} % after {steps:,}" for steps, value in shown.items())
    text = f"the trained heads: {curve} steps"
    for arm in ("layershuffle-predict", "layershuffle"):
        probe = s.fact("position", arm, path=probes)
        if probe is not None:
            text += f"; {probe:.2f} % by a linear probe of {arm}'s frozen outputs"
    return grade(share >= 99, share >= 90), text


@claim(
    "Figure 1b",
    "LayerShuffle minus LayerDrop: within 5 points of 0 at 6, between -10 and 0 at 9, "
    "above 0 with its interval at 3; partly if one or two of the three",
)
def _prunes_like_layerdrop(s: Summary) -> Judgement:
    """In sequential order LayerShuffle prunes like LayerDrop at 6 blocks, slightly worse at
    9, better at 3."""
    gaps = {
        kept: gap_of(s, ("layershuffle", "layerdrop"), mode="sequential", kept=kept, models=2)
        for kept in (9, 6, 3)
    }
    parts = (abs(gaps[6].points) <= PAR, -2 * PAR <= gaps[9].points <= 0, gaps[3].low > 0)
    text = ", ".join(f"{gap} with {kept}" for kept, gap in gaps.items())
    return grade(all(parts), any(parts)), f"LayerShuffle minus LayerDrop: {text}"


@claim(
    "Figure 1b", f"within {SLIGHT:g} points below the baseline in sequential order; partly within 5"
)
def _layerdrop_keeps_accuracy(s: Summary) -> Judgement:
    """LayerDrop comes close to the ordinary model's accuracy with all blocks."""
    gap = gap_of(s, ("layerdrop", "baseline"), mode="sequential")
    return grade(gap.points >= -SLIGHT, gap.points >= -PAR), str(gap)


@claim("Figure 1b", f"within {SLIGHT:g} points in sequential order; partly within 5")
def _refined_at_nine(s: Summary) -> Judgement:
    """Models refined at 9 blocks are like LayerDrop pruned to 9."""
    gap = gap_of(s, ("truncated", "layerdrop"), mode="sequential", kept=9)
    return grade(abs(gap.points) <= SLIGHT, abs(gap.points) <= PAR), str(gap)


@claim("Figure 1b", "above LayerShuffle and LayerDrop in sequential order at both, intervals apart")
def _refined_at_depth_is_better(s: Summary) -> Judgement:
    """Models refined at 3 and 6 blocks are significantly better there than a pruned one."""
    texts, apart = [], []
    for kept in (3, 6):
        refined = s.means("truncated", "sequential", kept=kept)
        others = [s.means(arm, "sequential", kept=kept) for arm in ("layershuffle", "layerdrop")]
        need(refined, *others, models=2)
        # A model above the better of the two is above both.
        gap = compare(refined, max(others, key=mean))
        apart.append(gap.low > 0)
        texts.append(f"with {kept} {gap} above the better of the two")
    return grade(all(apart), any(apart)), "; ".join(texts)


@claim(
    "Figure 1c",
    "at 9 and 6 blocks LayerDrop and the models refined there keep at most a tenth of "
    "LayerShuffle's top-1 (at 3 the paper has an exception); LayerShuffle keeps half of its "
    "top-1 at 9; both above chance",
)
def _alone_in_arbitrary_order(s: Summary) -> Judgement:
    """In arbitrary order LayerShuffle alone survives pruning, and degrades gracefully."""
    full, nine = (s.means("layershuffle", "arbitrary", kept=kept) for kept in (None, 9))
    need(full, nine)
    texts, alone = [f"LayerShuffle {mean(full):.1f} with all"], True
    for kept in (9, 6, 3):
        ours = s.means("layershuffle", "arbitrary", kept=kept)
        others = {
            arm: mean(means)
            for arm in ("layerdrop", "truncated")
            if (means := s.means(arm, "arbitrary", kept=kept))
        }
        need(ours, others)
        # At 3 blocks the paper has an exception, the identity draw, which is a separate claim.
        alone = alone and (kept == 3 or share(max(others.values()), mean(ours), s=s) <= 1 / 10)
        scores = ", ".join(f"{arm} {value:.1f}" for arm, value in others.items())
        texts.append(f"with {kept} {mean(ours):.1f} against {scores}")
    parts = (alone, share(mean(nine), mean(full), s=s) >= 1 / 2)
    return grade(all(parts), any(parts)), f"{texts[0]}, {'; '.join(texts[1:])}"


@claim(
    "section 4.2",
    "on draws other than the identity its top-1 falls to at most a third of the identity's",
)
def _identity_draw(s: Summary) -> Judgement:
    """The 3-block model did well in arbitrary order because one of 5 draws was the identity."""
    cell = s.cell("truncated", "arbitrary", kept=3)
    # Scores with a new order for every batch have no order.
    rows = [] if cell is None else [row for row in cell.rows if row.order]
    straight = [row.top1 for row in rows if row.order == "0,1,2"]
    others = [row.top1 for row in rows if row.order != "0,1,2"]
    need(straight, others)
    identity, other = mean(straight), mean(others)
    return grade(other <= identity / 3, other < identity), (
        f"identity {identity:.1f} ({len(straight)} draws), others {other:.1f} ({len(others)} "
        "draws); 5 draws of 6 orders hit the identity with probability 0.60"
    )


@claim(
    "Figure 4",
    "neighbours of an output share its position (+-1) at least 1.5 times as often as by chance",
)
def _outputs_depend_on_position(s: Summary) -> Judgement:
    """A block's output depends on its position."""
    # The mean token shows more than the class token: on digit pairs 58 % of its neighbours are at
    # most one position away, against 33 %.
    share, chance = (
        fact_of(s, "umap", path=("tokens", "mean", name)) for name in ("purity", "chance")
    )
    text = f"{100 * share:.0f} % of neighbours (mean token), {100 * chance:.0f} % by chance"
    return grade(share >= 1.5 * chance, share > chance), text


@claim(
    "Figure 4, section 4.3",
    "outputs at position 0, or at 0 and 1, detached (`analysis/umap.py`) in at least "
    "half of the blocks, by class or mean token; partly if in any block",
)
def _early_positions_lie_apart(s: Summary) -> Judgement:
    """Outputs at the first positions lie apart from the rest."""
    blocks = fact_of(s, "umap", path=("blocks",))
    detached = {
        token: count
        for token in ("class", "mean")
        if (count := s.fact("umap", "layershuffle", path=("tokens", token, "detached_blocks")))
        is not None
    }
    need(detached)
    texts = (f"{count:.0f} of {blocks:.0f} blocks ({token})" for token, count in detached.items())
    most = max(detached.values())
    return grade(most >= blocks / 2, most > 0), f"detached in {', '.join(texts)}"


@claim(
    "abstract, section 4.4",
    "of the arms that were merged, the one that loses least: the interval of merges "
    "minus single models reaches 0 or lies above; partly if they lose at most 5 points",
)
def _merges_lose_little(s: Summary) -> Judgement:
    """Merged LayerShuffle models lose nothing (abstract; the paper's own Table 2: 3.09
    points)."""
    pairs = {
        arm: (s.merging(arm, "merge"), s.merging(arm, "donor"))
        for arm in s.merged_arms("layershuffle")
    }
    need(*(scores for pair in pairs.values() for scores in pair), models=2)
    # The loss of a merge depends on the learning rate, so the arm that loses least is judged.
    gaps = {arm: compare(*pair) for arm, pair in pairs.items()}
    best = max(gaps.values(), key=lambda gap: gap.points)
    texts = (
        f"{arm} single {mean(single):.2f}, merged {mean(merged):.2f}: {gaps[arm]}"
        for arm, (merged, single) in pairs.items()
    )
    # The upper end of the interval: if it reaches 0, "no loss" is not refuted. Without an interval
    # it is not shown either.
    return grade(0 <= best.high < inf, best.points >= -PAR), f"{'; '.join(texts)}{_OVER_MERGES}"


@claim(
    "Table 2 (82.61 to 1.87)",
    "merged baselines keep at most a tenth of the single models' top-1 above chance; partly if "
    "only those do whose places take blocks of other places (random slots), or if up to a half "
    "is left",
)
def _merged_baselines_fail(s: Summary) -> Judgement:
    """Merges of ordinary models are unusable."""
    merged, single = (s.merging("baseline", kind) for kind in ("merge", "donor"))
    random = s.merging("baseline", "merge", name="random slots")
    need(merged, single if single and mean(single) > s.chance else ())
    single_top1, merged_top1 = mean(single), mean(merged)
    text = f"single {single_top1:.2f}, merged {merged_top1:.2f}"
    if random:
        # The paper's 1.87 +-6.51 has the spread of such merges.
        text += f"; with random slots {mean(random):.2f} +-{deviation(random) or 0:.2f}"
    left = share(merged_top1, single_top1, s=s)
    partly = left <= 1 / 2 or (bool(random) and share(mean(random), single_top1, s=s) <= 1 / 10)
    return grade(left <= 1 / 10, partly), f"{text}{_OVER_MERGES}"


@claim(
    "section 4.4 (1.15 against 0.41)",
    "standard deviation over merges, each in one order, above that over (single "
    "model, order) scores",
)
def _merges_vary_more(s: Summary) -> Judgement:
    """Merged LayerShuffle models vary more than single ones."""
    # Over single orders on both sides, because a merge is scored in one order, a model in several.
    rows = s.merging_rows("layershuffle")
    scores = [[row.top1 for row in rows if row.kind == kind] for kind in ("donor", "merge")]
    need(*scores, models=2)
    single, merged = (deviation(values) or 0.0 for values in scores)
    text = f"single models {single:.2f}, merged {merged:.2f}, both over single orders"
    return grade(merged > single), f"{text}{_OVER_MERGES}"


@claim(
    "Table 2 (+6.43 points)",
    f"more than {SLIGHT:g} points above the single models; partly if above at all",
)
def _ensemble_is_better(s: Summary) -> Judgement:
    """An ensemble of the 12 models is clearly better than one."""
    ensemble, single = (s.merging("layershuffle", kind) for kind in ("ensemble", "donor"))
    need(ensemble, single)
    # No interval, because one ensemble shows no spread over ensembles of other models.
    points = mean(ensemble) - mean(single)
    text = f"ensemble {mean(ensemble):.2f}, {points:+.2f} points"
    return grade(points > SLIGHT, points > 0), text


def judge(summary: Summary) -> list[tuple[PaperClaim, Verdict, str]]:
    """All claims with their verdicts and the numbers behind them."""
    judgements: list[tuple[PaperClaim, Verdict, str]] = []
    for entry in CLAIMS:
        try:
            judgements.append((entry, *entry.judge(summary)))
        except NotMeasured:
            judgements.append((entry, "not measured", "-"))
    return judgements
